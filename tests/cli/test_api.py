"""The Python API is light to import, does what the commands do, and keeps its names from those of modules."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from line import write_recipe

import halfbyte
from halfbyte import api
from halfbyte.main import main
from halfbyte.recipes.find import load_recipe
from halfbyte.recipes.schema import TaskSpec
from halfbyte.records.errors import UserError
from halfbyte.records.record import load_record
from halfbyte.reports.text import render_text

NAMES = ["compare", "evaluate", "gate", "load", "quantize"]


@pytest.fixture(autouse=True)
def quick(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's look at the machine takes seconds."""
    assert not cache.exists()
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: results.update(lm_eval_version="test"))


def test_its_names_are_these_and_importing_them_imports_no_torch() -> None:
    assert halfbyte.__all__ == NAMES
    assert set(NAMES) <= set(dir(halfbyte))
    code = "import sys, halfbyte; [getattr(halfbyte, name) for name in halfbyte.__all__]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        halfbyte.quantise  # noqa: B018


def test_import_halfbyte_alone_imports_nothing_else_of_it() -> None:
    code = "import sys, halfbyte; print([name for name in sys.modules if name.startswith(('halfbyte.', 'pydantic'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", NAMES)
def test_each_is_typed_and_has_an_example_and_its_errors(name: str) -> None:
    function = getattr(halfbyte, name)
    signature = inspect.signature(function)
    assert all(one.annotation is not one.empty for one in [*signature.parameters.values()])
    assert signature.return_annotation is not signature.empty
    text = inspect.getdoc(function) or ""
    assert f"halfbyte.{name}(" in text
    assert "Raises:\n    UserError:" in text
    described = text.partition("Args:")[2].partition("Raises:")[0]
    assert [one for one in signature.parameters if f"{one}:" not in described] == []


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(typing.cast("str", halfbyte.__file__)).parent / "py.typed").is_file()


def test_no_module_takes_the_place_of_a_function_once_it_is_imported() -> None:
    for path in Path(typing.cast("str", halfbyte.__file__)).parent.glob("*.py"):
        assert path.stem not in NAMES
    for name in ("quantize", "compare", "gate", "evaluate"):
        importlib.import_module(f"halfbyte.{name}_command")
        assert callable(getattr(halfbyte, name))


def test_a_recipe_becomes_a_checkpoint_records_a_comparison_and_a_verdict(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(str(write_recipe(tmp_path / "recipes", tiny_model_folder)))
    checkpoint = halfbyte.quantize(recipe, output=tmp_path / "run", device="cpu")
    assert checkpoint == tmp_path / "run" / "checkpoint"
    asked: dict[str, Any] = {"tasks": ["smoke"], "limit": 8}
    baseline = halfbyte.evaluate(tiny_model_folder, output=tmp_path / "baseline", device="cpu", **asked)
    model = halfbyte.load(checkpoint, device="cpu")
    candidate = halfbyte.evaluate(model, output=tmp_path / "candidate", **asked)
    assert candidate.model_dump() == load_record(tmp_path / "candidate" / "smoke").model_dump()
    assert candidate.model.format == "NVFP4"
    of_path = halfbyte.evaluate(checkpoint, output=tmp_path / "candidate", device="cpu", **asked)
    assert of_path == candidate  # the same answers: it was found, and not computed again
    command = ["eval", str(tmp_path / "run"), "--tasks", "smoke", "--limit", "8", "--device", "cpu", "--json"]
    created = candidate.created
    assert main([*command, "--output", str(tmp_path / "candidate")]) == 0
    assert created in capsys.readouterr().out  # nor by the command

    comparison = halfbyte.compare(baseline, candidate)
    assert "smoke" in render_text([comparison])
    assert comparison.verdict is None
    listed = halfbyte.compare(str(tmp_path / "baseline"), [tmp_path / "candidate"])
    assert listed.tasks[0].result == comparison.tasks[0].result
    verdict = halfbyte.gate(baseline, pickle.loads(pickle.dumps(candidate)), policy="smoke")
    assert verdict.sentence
    code = main(["gate", str(tmp_path / "baseline"), str(tmp_path / "candidate"), "--policy", "smoke"])
    assert verdict.exit_code == code


def test_several_tasks_give_several_records_and_a_verdict_on_all_of_them(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    own = tmp_path / "tasks"
    own.mkdir()
    (own / "mine.jsonl").write_text('{"q": "the cat is", "a": "big"}\n{"q": "the sun is", "a": "hot"}\n')
    (own / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {own / 'mine.jsonl'}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: [big, hot]\ndoc_to_target: a\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    model = halfbyte.load(tiny_model_folder, device="cpu")
    tasks = ["mine", TaskSpec(task="smoke", limit=4)]
    record = halfbyte.evaluate(model, tasks, tmp_path / "one", include_path=own)
    assert record.task == "mine"
    assert list(record.records) == ["mine", "smoke"]
    assert record.records["smoke"].fingerprint.limit == 4
    assert (tmp_path / "cache" / "evaluations").is_dir()  # an original's are kept, however it was opened
    other = halfbyte.load(tiny_model_folder, device="cpu", dtype="bfloat16")
    again = halfbyte.evaluate(other, tasks, tmp_path / "two", include_path=own)
    with pytest.raises(UserError, match="dtype"):
        halfbyte.compare(record, again)
    with pytest.raises(UserError, match=r"no record of smoke"):
        halfbyte.compare(record, record.folders[0])
    alone = [halfbyte.evaluate(model, one, tmp_path / one, include_path=own, limit=2) for one in ("mine", "smoke")]
    pairs = halfbyte.compare(alone, alone)
    assert [row.task for row in pairs.tasks] == ["mine", "smoke"]
    assert pairs.same_model


def test_a_model_that_was_changed_in_memory_is_refused(tmp_path: Path, tiny_model_folder: Path) -> None:
    import torch

    model = halfbyte.load(tiny_model_folder, device="cpu")
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(2)
    with pytest.raises(UserError, match="was changed since it was loaded"):
        halfbyte.evaluate(model, "smoke", tmp_path / "out", limit=2)
    half = halfbyte.load(tiny_model_folder, device="cpu").half()
    with pytest.raises(UserError, match="was changed since it was loaded"):
        halfbyte.evaluate(half, "smoke", tmp_path / "out", limit=2)
    with torch.inference_mode():
        fresh = halfbyte.load(tiny_model_folder, device="cpu")
    with pytest.raises(UserError, match="has its device"):
        halfbyte.evaluate(fresh, "smoke", tmp_path / "out", limit=2, device="cpu")
    assert halfbyte.evaluate(fresh, "smoke", tmp_path / "out", limit=2).metrics[0].questions == 2


def test_a_mistake_is_a_user_error(tmp_path: Path, tiny_model_folder: Path, llama_factory: Any) -> None:
    for model in (llama_factory(), None, 7):
        with pytest.raises(UserError, match=r"not from halfbyte\.load"):
            halfbyte.evaluate(model, tasks=["smoke"], output=tmp_path)
    with pytest.raises(UserError, match=r"does not exist|no such|not found|neither"):
        halfbyte.load(tmp_path / "nothing")
    with pytest.raises(UserError, match="unknown way to hold weights 'fold'"):
        halfbyte.load(tiny_model_folder, weights="fold")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="unknown recipe 'demo-nvfp5'"):
        halfbyte.quantize("demo-nvfp5", output=tmp_path)
    with pytest.raises(UserError, match="no task"):
        halfbyte.evaluate(tiny_model_folder, [], tmp_path / "out")
    with pytest.raises(UserError, match="named twice"):
        halfbyte.evaluate(tiny_model_folder, ["smoke", "smoke"], tmp_path / "out")
    with pytest.raises(UserError, match="limit"):
        halfbyte.evaluate(tiny_model_folder, "smoke", tmp_path / "out", limit=0)
    with pytest.raises(UserError, match="nonsense"):
        halfbyte.evaluate(tiny_model_folder, "smoke", tmp_path / "out", settings={"nonsense": 1})
    with pytest.raises(UserError, match="no folder to compare"):
        halfbyte.compare([], [])
    with pytest.raises(UserError, match="is not a folder"):
        halfbyte.gate(tmp_path / "nothing", tmp_path / "nothing")
    with pytest.raises(UserError, match="unknown policy 'relaese'"):
        halfbyte.gate(tmp_path / "nothing", tmp_path / "nothing", policy="relaese")
    strange: Any = [None, 7]
    with pytest.raises(UserError, match="None is no task"):
        halfbyte.evaluate(tiny_model_folder, strange, tmp_path / "out")
    with pytest.raises(UserError, match="settings has tasks"):
        halfbyte.evaluate(tiny_model_folder, "smoke", tmp_path / "out", settings={"tasks": [{"task": "gsm8k"}]})
    with pytest.raises(UserError, match="7 is no recipe"):
        halfbyte.quantize(strange[1], tmp_path / "out")
    with pytest.raises(UserError, match="overrides is the text"):
        halfbyte.quantize("demo-fp8", tmp_path / "out", overrides="model.id=x")
    with pytest.raises(UserError, match="a verdict needs a policy"):
        halfbyte.gate(tmp_path, tmp_path, policy=strange[0])
    recipe = load_recipe(str(write_recipe(tmp_path / "recipes", tiny_model_folder)))
    with pytest.raises(UserError, match="overrides"):
        halfbyte.quantize(recipe, tmp_path / "out", overrides=["name=x"])


def test_a_record_read_from_a_file_says_that_its_folder_is_wanted(tmp_path: Path, tiny_model_folder: Path) -> None:
    halfbyte.evaluate(tiny_model_folder, "smoke", tmp_path / "out", limit=2)
    record: Any = load_record(tmp_path / "out" / "smoke")
    with pytest.raises(UserError, match="does not know its folder"):
        halfbyte.compare(record, tmp_path / "out")
    assert isinstance(halfbyte.evaluate(tiny_model_folder, "smoke", tmp_path / "out", limit=2), api.Evaluation)
