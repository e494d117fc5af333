"""Every notebook runs from its first cell to its last, and what is committed is a real run that says of what."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
LARGEST = 300_000
# What makes each small. `model` and `runs` are set for all of them.
SMALL: dict[str, dict[str, Any]] = {
    "1_quantize.ipynb": {"limit": 8},
    "2_power.ipynb": {"few": 4, "many": 16},
    "3_layers.ipynb": {"tokens": 128},
    "4_qat_and_qad.ipynb": {
        "steps": 2,
        "length": 64,
        "batch": 2,
        "source": "{dataset: ../recipes/llm/demo-calibration.txt}",
    },
    "5_flux.ipynb": {"limit": 2, "steps": 2, "shown": 2},
    "6_your_own.ipynb": {},
}
ABSOLUTE = re.compile(r"(?<![\w.<])/(?:home|root|tmp|work|usr|opt|mnt|var|Users|private|data)/|[A-Z]:\\\\")


def read(name: str) -> Any:
    return nbformat.read(FOLDER / name, as_version=4)


def code_cells(notebook: Any) -> Iterator[Any]:
    return (cell for cell in notebook.cells if cell.cell_type == "code")


def with_parameters(notebook: Any, parameters: dict[str, Any]) -> Any:
    """The notebook with a cell behind its parameters that sets them anew, as papermill does."""
    found = copy.deepcopy(notebook)
    (at,) = [i for i, cell in enumerate(found.cells) if "parameters" in cell.metadata.get("tags", [])]
    lines = [f"{name} = {value!r}" for name, value in parameters.items()]
    found.cells.insert(at + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    return found


def test_each_notebook_has_its_small_parameters_and_these_are_its_own() -> None:
    assert set(NOTEBOOKS) == set(SMALL)
    for name in NOTEBOOKS:
        (cell,) = [one for one in code_cells(read(name)) if "parameters" in one.metadata.get("tags", [])]
        for parameter in SMALL[name]:
            assert re.search(rf"^(.*, )?{parameter}\b.*=", cell.source, re.MULTILINE), (name, parameter)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs_to_its_end(
    name: str, tmp_path: Path, tiny_model_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    parameters = SMALL[name] | {"runs": str(tmp_path / "runs")}
    if name == "5_flux.ipynb":
        parameters["pipeline"] = str(tmp_path / "absent")  # a random pipeline is made in its place
    else:
        parameters["model"] = str(tiny_model_folder)
    if name == "6_your_own.ipynb":
        shutil.copytree(FOLDER / "own", tmp_path / "own")
        parameters["folder"] = str(tmp_path / "own")
    notebook = with_parameters(read(name), parameters)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()  # raises what a cell raises
    assert all(cell.execution_count for cell in code_cells(notebook) if cell.source)
    assert cache.is_dir()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_committed_is_a_whole_run_with_its_stamp(name: str) -> None:
    notebook = read(name)
    cells = list(code_cells(notebook))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    stamp = json.loads("".join(output.text for output in cells[-1].outputs))
    assert stamp["command"] == f"jupyter execute --inplace notebooks/{name}"
    assert re.fullmatch(r"[0-9a-f]{40}", stamp["commit"])
    assert stamp["hardware"]["processor"]
    for package in ("python", "halfbyte", "torch", "nvidia-modelopt", "transformers", "lm-eval"):
        assert stamp["packages"][package], package


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_committed_is_small_and_of_no_machine(name: str) -> None:
    assert (FOLDER / name).stat().st_size < LARGEST
    notebook = read(name)
    for cell in code_cells(notebook):
        assert not ABSOLUTE.search(cell.source)
        for output in cell.outputs:
            data = (output.get("data") or {}).items()
            texts = [output.get("text", ""), *(str(text) for kind, text in data if not kind.startswith("image/"))]
            assert not [found for text in texts if (found := ABSOLUTE.search(text))]


def test_the_readme_names_every_notebook_once() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((\w+\.ipynb)\)", text) == NOTEBOOKS
