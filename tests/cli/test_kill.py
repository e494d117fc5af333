"""kill -9 in the middle of each stage: the next call finishes, and finds what an undisturbed run finds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from line import (
    in_baseline_evaluation,
    in_calibration,
    in_canary,
    in_candidate_evaluation,
    in_export,
    in_fidelity,
    in_report,
    interrupted,
    result,
    run_child,
    write_recipe,
)

KILLS = [in_baseline_evaluation, in_calibration, in_export, in_canary, in_candidate_evaluation, in_fidelity, in_report]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Any, tiny_tokenizer: Any) -> dict[str, Any]:
    """A run from start to end, its recipe, and the model both kinds of run use."""
    folder = tmp_path_factory.mktemp("undisturbed")
    model = folder / "model"
    tiny_llama.save_pretrained(model)
    tiny_tokenizer.save_pretrained(model)
    recipe = write_recipe(folder, model)
    code = run_child(["run", str(recipe)], folder, folder / "cache")
    assert code in (0, 1, 3)
    return {"recipe": recipe, "code": code, "result": result(folder / "runs" / "tiny-nvfp4")}


@pytest.mark.parametrize("stage", KILLS, ids=lambda stage: stage.__name__)
def test_a_run_killed_in_any_stage_goes_on_to_the_same_result(
    stage: Callable[[], None], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    command = ["run", str(undisturbed["recipe"])]
    assert run_child(command, tmp_path, tmp_path / "cache", stage) == -9
    assert not (tmp_path / "runs" / "tiny-nvfp4" / "verdict.json").exists()
    assert run_child(command, tmp_path, tmp_path / "cache") == undisturbed["code"]
    assert result(tmp_path / "runs" / "tiny-nvfp4") == undisturbed["result"]


@pytest.mark.parametrize("stage", [in_baseline_evaluation, in_export], ids=lambda stage: stage.__name__)
def test_ctrl_c_exits_130_and_the_same_command_goes_on_to_the_same_result(
    stage: Callable[[], None], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    command = ["run", str(undisturbed["recipe"])]
    assert run_child(command, tmp_path, tmp_path / "cache", partial(interrupted, stage)) == 130
    assert not list((tmp_path / "runs").rglob("checkpoint*"))
    assert run_child(command, tmp_path, tmp_path / "cache") == undisturbed["code"]
    assert result(tmp_path / "runs" / "tiny-nvfp4") == undisturbed["result"]


def test_a_second_call_computes_nothing(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    command = ["run", str(undisturbed["recipe"])]
    assert run_child(command, tmp_path, tmp_path / "cache") == undisturbed["code"]
    for hook in (in_baseline_evaluation, in_calibration, in_export, in_canary, in_candidate_evaluation, in_fidelity):
        assert run_child(command, tmp_path, tmp_path / "cache", hook) == undisturbed["code"]
