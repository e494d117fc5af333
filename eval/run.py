"""A loaded model on all tasks of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfbyte.eval.evaluate import evaluate_task
from halfbyte.recipes.schema import EvaluateSpec
from halfbyte.records.errors import UserError
from halfbyte.records.record import EvaluationRecord, ModelSummary


def require_tasks(settings: EvaluateSpec) -> None:
    """Refuses, before hours are spent on the first task, a later one that is unknown or named twice.

    Raises:
        UserError: naming it.
    """
    from halfbyte.eval.resolve import find_manager  # lm-eval takes seconds

    names = [spec.task for spec in settings.tasks]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f"task '{min(twice)}' is named twice", "a record holds one evaluation of a task")
    for name in names:
        find_manager(name)


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
        UserError: see require_tasks and evaluate_task.
    """
    require_tasks(settings)
    return [
        evaluate_task(
            model, tokenizer, spec, settings, summary, output / spec.task, data_root=data_root, replace=replace
        )
        for spec in settings.tasks
    ]
