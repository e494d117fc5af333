"""Pairing: two records of one task, question by question, or the first thing that makes them incomparable."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.records.errors import UserError
from halfbyte.records.record import EvaluationRecord, Fingerprint, Sample, load_record, read_samples
from halfbyte.reports.answers import Answer, read_answer
from halfbyte.reports.statistics import Array

Key = tuple[str, str, int]
_SAME = "evaluate both sides with the same tasks and settings"
_CONTENT = ("questions", "documents", "prompts", "targets")
_EXCERPT = 160
_MEAN_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting in which two records differ."""

    setting: str
    baseline: str
    candidate: str
    content: bool = False
    """Whether the questions themselves differ; then the first differing question says more than this digest."""

    def __str__(self) -> str:
        return f"{self.setting} is {self.baseline} in the baseline and {self.candidate} in the candidate"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Two comparable records, with the primary metric's value of each question; all rows are in one order."""

    baseline: EvaluationRecord
    candidate: EvaluationRecord
    metric: str
    filter: str
    higher_is_better: bool
    keys: list[Key]
    """(subtask, filter, doc_id) of each question, sorted."""
    baseline_values: Array
    candidate_values: Array
    answers: dict[Key, tuple[Answer, Answer]]
    """What both sides answered, cut to what a reader needs; only for questions whose values differ."""

    @property
    def same_model(self) -> bool:
        """Whether both records are of one model, which measures the noise floor and no loss."""
        return self.baseline.model.digest == self.candidate.model.digest


@dataclass(frozen=True, slots=True)
class _Question:
    doc_hash: str
    prompt_hash: str
    target_hash: str
    value: float | None
    """None for a filter that is not the primary one."""
    answer: Answer | None


def differences(baseline: Fingerprint, candidate: Fingerprint) -> Iterator[Difference]:
    """What two fingerprints disagree on, the settings a person chose first and digests of questions last."""
    ours, theirs = baseline.model_dump(mode="json"), candidate.model_dump(mode="json")
    subtasks, other = ours.pop("subtasks"), theirs.pop("subtasks")
    for name, value in ours.items():
        if value != theirs[name]:
            yield Difference(name, _short(value), _short(theirs[name]))
    if subtasks.keys() != other.keys():
        yield Difference("the list of subtasks", _short(sorted(subtasks)), _short(sorted(other)))
    for content in (False, True):
        for subtask in sorted(subtasks.keys() & other.keys()):
            for name, value in subtasks[subtask].items():
                if (name in _CONTENT) == content and value != other[subtask][name]:
                    yield Difference(f"{name} of {subtask}", _short(value), _short(other[subtask][name]), content)


def pair(baseline: Path, candidate: Path) -> Pairs:
    """Pairs the questions of two record folders of one task.

    Raises:
        UserError: when they are not comparable (names the first difference), when questions are missing, extra or
            there twice, and when a value is missing, NaN or infinite.
    """
    first, second = load_record(baseline), load_record(candidate)
    metric, filter_name, higher = _primary(first, baseline)
    if first.primary != second.primary or higher != _primary(second, candidate)[2]:
        raise UserError(
            f"the records of task '{first.task}' look at different metrics: {_short(first.primary)} in the baseline "
            f"and {_short(second.primary)} in the candidate",
            _SAME,
        )
    found = list(differences(first.fingerprint, second.fingerprint))
    settings = [one for one in found if not one.content]
    if settings:
        raise _incomparable(first.task, settings[0], len(found))
    ours, theirs = _questions(baseline, first), _questions(candidate, second)
    _refuse_unpaired(first.task, ours, theirs)
    keys = sorted(ours)
    for key in keys:
        _refuse_other_question(first, baseline, second, candidate, key, ours[key], theirs[key])
    if found:
        raise _incomparable(first.task, found[0], len(found))
    keys = [key for key in keys if key[1] == filter_name]
    values = [np.array([side[key].value for key in keys], dtype=np.float64) for side in (ours, theirs)]
    for record, folder, row in ((first, baseline, values[0]), (second, candidate, values[1])):
        _refuse_other_mean(record, folder, keys, row)
    answers = {}
    for key, one, other in zip(keys, *values, strict=True):
        left, right = ours[key].answer, theirs[key].answer
        if one != other and left is not None and right is not None:
            answers[key] = (left, right)
    return Pairs(first, second, metric, filter_name, higher, keys, values[0], values[1], answers)


def _primary(record: EvaluationRecord, folder: Path) -> tuple[str, str, bool]:
    if len(record.primary) != 2:
        raise UserError(f"the record in {folder} names no primary metric and filter", "evaluate again")
    metric, filter_name = record.primary
    directions = {m.higher_is_better for m in record.metrics if m.metric == metric and m.filter == filter_name}
    if len(directions) != 1:
        what = "both directions" if directions else "no figure"
        raise UserError(f"the record in {folder} holds {what} for its metric {metric},{filter_name}", "evaluate again")
    return metric, filter_name, directions.pop()


def _questions(folder: Path, record: EvaluationRecord) -> dict[Key, _Question]:
    metric, filter_name, _ = _primary(record, folder)
    found: dict[Key, _Question] = {}
    for sample in read_samples(folder, record):
        if sample.key in found:
            raise UserError(f"{_name(sample.key)} is there twice in {folder}", "evaluate again")
        value = _value(sample, metric, folder) if sample.filter == filter_name else None
        answer = None if value is None else read_answer(sample.raw, metric)
        found[sample.key] = _Question(sample.doc_hash, sample.prompt_hash, sample.target_hash, value, answer)
    for subtask, print_ in record.fingerprint.subtasks.items():
        held = sum(1 for key in found if key[0] == subtask and key[1] == filter_name)
        if not held:
            raise UserError(
                f"the record in {folder} holds no answers to {subtask} under the filter '{filter_name}'",
                "evaluate again",
            )
        if held != print_.questions:
            raise UserError(
                f"{folder} holds {held} of the {print_.questions} questions of {subtask} its record speaks of",
                "questions were lost or added after the evaluation: evaluate again",
            )
    if not found:
        raise UserError(f"the record in {folder} holds no questions", "evaluate again")
    return found


def _value(sample: Sample, metric: str, folder: Path) -> float:
    value = sample.metrics.get(metric)
    if value is None:
        known = ", ".join(sorted(sample.metrics)) or "none"
        raise UserError(
            f"{_name(sample.key)} in {folder} has no number for the metric {metric} (it has: {known})",
            "choose a metric that has one number a question",
        )
    if not math.isfinite(value):
        raise UserError(f"{metric} of {_name(sample.key)} in {folder} is {value}", "evaluate again")
    return value


def _refuse_unpaired(task: str, ours: dict[Key, _Question], theirs: dict[Key, _Question]) -> None:
    missing, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    if missing or extra:
        where = f"the first is {_name((missing or extra)[0])}"
        raise UserError(
            f"the records of task '{task}' hold different questions: of {len(ours)} in the baseline the candidate "
            f"lacks {len(missing)}, and it has {len(extra)} others; {where}",
            "evaluate both sides on the same questions; answers that are left out are not answers",
        )


def _refuse_other_question(
    first: EvaluationRecord,
    baseline: Path,
    second: EvaluationRecord,
    candidate: Path,
    key: Key,
    ours: _Question,
    theirs: _Question,
) -> None:
    for what, part in (("doc_hash", "document"), ("prompt_hash", "prompt"), ("target_hash", "target")):
        if getattr(ours, what) == getattr(theirs, what):
            continue
        texts = [_part(folder, record, key, part) for folder, record in ((baseline, first), (candidate, second))]
        left, right = _around_difference(*texts)
        raise UserError(
            f"the records of task '{first.task}' are not comparable: the {part} of {_name(key)} is {left} in the "
            f"baseline and {right} in the candidate",
            _SAME,
        )


def _part(folder: Path, record: EvaluationRecord, key: Key, part: str) -> str:
    raw: dict[str, Any] = next(sample.raw for sample in read_samples(folder, record) if sample.key == key)
    return _text({"document": raw["doc"], "prompt": raw["arguments"], "target": raw["target"]}[part])


def _refuse_other_mean(record: EvaluationRecord, folder: Path, keys: list[Key], values: Array) -> None:
    """A figure that is not the mean of its questions (corpus BLEU, F1) must not be compared as if it were."""
    metric, filter_name = record.primary
    subtasks = np.array([key[0] for key in keys])
    for figure in record.metrics:
        if (figure.metric, figure.filter) != (metric, filter_name) or figure.subtask not in record.fingerprint.subtasks:
            continue
        mean = float(values[subtasks == figure.subtask].mean())
        if not abs(mean - figure.value) <= _MEAN_TOLERANCE * max(1.0, abs(mean)):  # also when it is NaN
            raise UserError(
                f"{metric} of {figure.subtask} in {folder} is reported as {figure.value}, but the mean of its "
                f"questions is {mean:.6g}",
                "compare a metric that is the mean of its questions, or evaluate again",
            )


def _incomparable(task: str, difference: Difference, count: int) -> UserError:
    more = f" ({count - 1} more differences)" if count > 1 else ""
    return UserError(f"the records of task '{task}' are not comparable: {difference}{more}", _SAME)


def _name(key: Key) -> str:
    return f"question {key[2]} of {key[0]}" + ("" if key[1] == "none" else f" (filter {key[1]})")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."


def _around_difference(left: str, right: str) -> tuple[str, str]:
    """Both texts cut to a window that starts shortly before their first difference."""
    pairs = zip(left, right, strict=False)
    where = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))
    start = max(0, where - _EXCERPT // 4)

    def cut(text: str) -> str:
        piece = text[start : start + _EXCERPT]
        return repr(("..." if start else "") + piece + ("..." if start + _EXCERPT < len(text) else ""))

    return cut(left), cut(right)
