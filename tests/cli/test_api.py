"""The Python API is light to import, does what the commands do, and keeps its names from those of modules."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from line import write_recipe

import halfbyte
from halfbyte.recipes.find import load_recipe
from halfbyte.records.errors import UserError
from halfbyte.records.record import load_record
from halfbyte.reports.text import render_text

NAMES = ["compare", "evaluate", "gate", "load", "quantize"]


def test_its_names_are_these_and_importing_them_imports_no_torch() -> None:
    assert halfbyte.__all__ == NAMES
    code = "import sys, halfbyte; [getattr(halfbyte, name) for name in halfbyte.__all__]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        halfbyte.quantise  # noqa: B018


def test_no_module_takes_the_place_of_a_function_once_it_is_imported() -> None:
    for path in Path(halfbyte.__file__).parent.glob("*.py"):
        assert path.stem not in NAMES
    for name in ("quantize", "compare", "gate", "evaluate"):
        importlib.import_module(f"halfbyte.{name}_command")
        assert callable(getattr(halfbyte, name))


def test_a_recipe_becomes_a_checkpoint_records_a_comparison_and_a_verdict(
    tmp_path: Path, tiny_model_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.parent == tmp_path
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: results.update(lm_eval_version="test"))
    recipe = load_recipe(str(write_recipe(tmp_path / "recipes", tiny_model_folder)))
    checkpoint = halfbyte.quantize(recipe, output=tmp_path / "run", device="cpu")
    assert checkpoint == tmp_path / "run" / "checkpoint"
    asked: dict[str, Any] = {"tasks": ["smoke"], "limit": 8}
    baseline = halfbyte.evaluate(tiny_model_folder, output=tmp_path / "baseline", device="cpu", **asked)
    model = halfbyte.load(checkpoint, device="cpu")
    candidate = halfbyte.evaluate(model, output=tmp_path / "candidate", **asked)
    assert candidate == load_record(tmp_path / "candidate" / "smoke")
    assert candidate.model.format == "NVFP4"
    of_path = halfbyte.evaluate(checkpoint, output=tmp_path / "candidate", device="cpu", **asked)
    assert of_path == candidate  # the same answers: it was found, and not computed again

    comparison = halfbyte.compare(baseline, candidate)
    assert "smoke" in render_text([comparison])
    (listed,) = halfbyte.compare(tmp_path / "baseline", [tmp_path / "candidate"])
    assert listed.tasks[0].result == comparison.tasks[0].result
    verdict = halfbyte.gate(baseline, candidate, policy="smoke")
    assert verdict.verdict in ("pass", "fail", "inconclusive", "anomaly")
    assert verdict.sentence


def test_what_is_not_on_disk_is_refused(tmp_path: Path, llama_factory: Any) -> None:
    with pytest.raises(UserError, match=r"not from halfbyte\.load"):
        halfbyte.evaluate(llama_factory(), tasks=["smoke"], output=tmp_path)
    with pytest.raises(UserError, match="no candidate to compare"):
        halfbyte.compare(tmp_path, [])
    with pytest.raises(UserError, match="unknown recipe 'demo-nvfp5'"):
        halfbyte.quantize("demo-nvfp5", output=tmp_path)
