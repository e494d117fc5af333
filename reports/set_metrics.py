"""Set metrics: figures of a whole set of questions, such as FID or corpus BLEU, that no question has a value of.

They are shown beside each other and never decide: without a value a question there is no interval, and nothing that
could prove a difference larger than chance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

from halfbyte.records.errors import UserError
from halfbyte.records.record import EvaluationRecord, Metric
from halfbyte.records.samples import Line, whole_line
from halfbyte.reports.comparison import SetMetric
from halfbyte.reports.metrics import SHARE, definition


def has_values(lines: Collection[Line], metric: str, *, higher_is_better: bool) -> bool:
    """Whether questions have values of their own, or should have by the metric's definition.

    lm-eval keeps a list for a question where only all of them together give a figure: the text and its reference for
    BLEU, the log-likelihood and the words for word_perplexity.
    """
    values = [line.value for line in lines]
    if any(not isinstance(value, (list, tuple, type(None))) for value in values):
        return True
    if values and all(isinstance(value, (list, tuple)) for value in values):
        return False
    return definition(metric, higher_is_better).bounds == SHARE


def is_mean(record: EvaluationRecord, means: Mapping[str, float], tolerance: float) -> bool:
    """Whether the primary metric's figure of each subtask is the mean of its questions.

    Args:
        record: The record.
        means: Of the values of each subtask's questions.
        tolerance: Of rounding, relative to the larger of the mean and 1.
    """
    return all(
        abs(means[one.subtask] - one.value) <= tolerance * max(1.0, abs(means[one.subtask]))
        for one in record.metrics
        if [one.metric, one.filter] == record.primary and one.subtask in means
    )


def set_metrics(
    first: EvaluationRecord,
    second: EvaluationRecord,
    baseline: Path,
    candidate: Path,
    lines: tuple[Collection[Line], Collection[Line]],
    *,
    primary: str | None,
) -> list[SetMetric]:
    """The figures of the whole set that two records of one task have beside each other.

    Args:
        first: The baseline's record.
        second: The candidate's.
        baseline: Its folder.
        candidate: The other's.
        lines: Both sides' questions, from which it is told which metrics have values of their own.
        primary: The metric that the task is looked at by where that is one of the whole set; else None.

    Raises:
        UserError: when a figure is no number, or one side has none.
    """
    ours, theirs = (
        {
            (one.subtask, one.metric, one.filter): one
            for one in _of_the_task(record)
            if one.metric == primary or _has_none(one, questions)
        }
        for record, questions in zip((first, second), lines, strict=True)
    )
    for folder, lacking in ((candidate, ours.keys() - theirs.keys()), (baseline, theirs.keys() - ours.keys())):
        for subtask, metric, _ in sorted(lacking):
            raise UserError(f"the record in {folder} has no {metric} of {subtask}", "evaluate again")
    found = []
    for key, one in ours.items():
        other = theirs[key]
        for folder, figure in ((baseline, one), (candidate, other)):
            if not math.isfinite(figure.value):
                raise UserError(f"{one.metric} of {one.subtask} in {folder} is {figure.value}", "evaluate again")
        higher = definition(one.metric, one.higher_is_better).higher_is_better
        found.append(
            SetMetric(
                task=first.task,
                subtask=one.subtask,
                metric=one.metric,
                filter=one.filter,
                higher_is_better=higher,
                questions=one.questions,
                baseline=one.value,
                candidate=other.value,
                loss=(one.value - other.value) * (1 if higher else -1),
                main=one.metric == primary,
            )
        )
    return found


def _of_the_task(record: EvaluationRecord) -> list[Metric]:
    """A group's own figures where it has any of a metric, else those of its subtasks."""
    whole = {(one.metric, one.filter) for one in record.metrics if one.subtask == record.task}
    return [
        one
        for one in record.metrics
        if one.subtask == record.task
        or (one.subtask in record.fingerprint.subtasks and (one.metric, one.filter) not in whole)
    ]


def _has_none(figure: Metric, lines: Collection[Line]) -> bool:
    """Whether the questions have no value of a metric that is not the one they were read for."""
    if definition(figure.metric, figure.higher_is_better).bounds == SHARE:
        return False
    first = next((line for line in lines if line.filter == figure.filter), None)
    if first is None:
        return False
    return isinstance(whole_line(first).get(figure.metric), (list, tuple, type(None)))
