"""A loaded model on all tasks of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfbyte.eval.evaluate import evaluate_task
from halfbyte.recipes.schema import EvaluateSpec
from halfbyte.records.errors import UserError
from halfbyte.records.record import EvaluationRecord, ModelSummary


def evaluate_model(
    model: Any,
    tokenizer: Any,
    summary: ModelSummary,
    settings: EvaluateSpec,
    output: Path,
    data_root: Path | None = None,
    *,
    replace: bool = False,
) -> list[EvaluationRecord]:
    """Evaluates on each task of `settings` into `output`/<task>; tasks that are done are skipped.

    Raises:
        UserError: when a task is named twice, and see evaluate_task.
    """
    names = [spec.task for spec in settings.tasks]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f"task '{min(twice)}' is named twice", "a record holds one evaluation of a task")
    return [
        evaluate_task(
            model, tokenizer, spec, settings, summary, output / spec.task, data_root=data_root, replace=replace
        )
        for spec in settings.tasks
    ]
