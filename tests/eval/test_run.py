"""All tasks of a recipe are evaluated, each into its own folder, and those done are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfbyte.eval.lm import Scorer
from halfbyte.eval.run import evaluate_model
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.errors import UserError
from halfbyte.records.record import ModelSummary, find_records

CHOICE, GENERATE = TaskSpec(task="tiny_choice"), TaskSpec(task="tiny_generate", limit=4)


def test_each_task_has_its_record(
    tiny_llama: Any,
    tiny_tokenizer: Any,
    summary: ModelSummary,
    tiny_tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tiny_tasks.is_dir()
    settings = EvaluateSpec(tasks=[CHOICE, GENERATE])
    records = evaluate_model(tiny_llama, tiny_tokenizer, summary, settings, tmp_path / "out")
    assert [record.task for record in records] == ["tiny_choice", "tiny_generate"]
    assert set(find_records(tmp_path / "out")) == {"tiny_choice", "tiny_generate"}
    monkeypatch.setattr(Scorer, "_model_call", None)
    monkeypatch.setattr(Scorer, "_model_generate", None)
    assert evaluate_model(tiny_llama, tiny_tokenizer, summary, settings, tmp_path / "out") == records


def test_a_task_named_twice_is_an_error(
    tiny_llama: Any, tiny_tokenizer: Any, summary: ModelSummary, tmp_path: Path
) -> None:
    settings = EvaluateSpec(tasks=[CHOICE, CHOICE])
    with pytest.raises(UserError, match="task 'tiny_choice' is named twice"):
        evaluate_model(tiny_llama, tiny_tokenizer, summary, settings, tmp_path / "out")
