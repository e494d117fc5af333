"""Pairing: two records of one task, question by question, or everything that makes them incomparable."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halfbyte.records.errors import UserError
from halfbyte.records.record import METRIC_WEIGHTS, UNKNOWN, EvaluationRecord, is_of_images, load_record, refuse_edited
from halfbyte.records.samples import Line, scan_lines, whole_line
from halfbyte.reports.answers import Answer, read_answer
from halfbyte.reports.comparison import SetMetric
from halfbyte.reports.differences import (
    SAME,
    Difference,
    Incomparable,
    differences,
    incomparable,
    other_question,
    short,
)
from halfbyte.reports.metrics import Bounds, definition, judged_metrics
from halfbyte.reports.set_metrics import has_values, is_mean, set_metrics
from halfbyte.reports.statistics import Array

Key = tuple[str, str, int]
_MEAN_TOLERANCE = 1e-6
# A setting that changes what is asked changes the prompts' digests as well.
_CHANGES_PROMPTS = {"chat_template", "system_prompt", "num_fewshot", "prompts", "seeds"}


@dataclass(frozen=True, slots=True)
class Matched:
    """Two comparable records: what they were asked is the same."""

    baseline: EvaluationRecord
    candidate: EvaluationRecord
    metric: str
    filter: str
    higher_is_better: bool
    allowed: list[Difference]
    """What the sides differ in with the policy's permission."""
    set_metrics: list[SetMetric]
    """Figures of the whole set, for which no question has a value."""

    @property
    def row(self) -> str:
        """What the comparison is called: the task, and of images the metric as well, of which a record has several."""
        return f"{self.baseline.task}/{self.metric}" if is_of_images(self.baseline) else self.baseline.task

    @property
    def same_model(self) -> bool:
        """Whether both records are of one model, which measures the noise floor and no loss."""
        return self.baseline.model.digest == self.candidate.model.digest


@dataclass(frozen=True, slots=True)
class Pairs(Matched):
    """The same with the primary metric's value of each question; all rows are in one order."""

    bounds: Bounds | None
    """Of one question's value, by the metric's definition or as declared."""
    keys: list[Key]
    """(subtask, filter, doc_id) of each question, sorted."""
    baseline_values: Array
    candidate_values: Array
    lengths: tuple[float | None, float | None]
    """Mean tokens of a generated text on both sides; None where nothing is generated or nothing is known."""
    lines: dict[Key, tuple[Line, Line]]
    """Where both sides' answers to the questions are whose values differ."""

    def answers(self, key: Key) -> tuple[Answer, Answer]:
        """What both sides answered to a question whose values differ, cut to what a reader needs."""
        ours, theirs = (read_answer(whole_line(line), self.metric) for line in self.lines[key])
        return ours, theirs


def pair_all(
    baseline: Path,
    candidate: Path,
    allow: Collection[str] = (),
    allow_unknown: Collection[str] = (),
    *,
    bounds: Mapping[str, Bounds] | None = None,
) -> list[Matched]:
    """`pair` for each metric that is judged: the primary one of a text task, and of images all that need no reference.

    Raises:
        UserError: as `pair` does.
    """
    first, second = load_record(baseline), load_record(candidate)
    names = judged_metrics(first) if is_of_images(first) else []
    names = [name for name in names if name in judged_metrics(second)]
    if not names:
        return [pair(baseline, candidate, allow, allow_unknown, bounds=bounds)]
    return [pair(baseline, candidate, allow, allow_unknown, metric=name, bounds=bounds) for name in names]


def pair(
    baseline: Path,
    candidate: Path,
    allow: Collection[str] = (),
    allow_unknown: Collection[str] = (),
    *,
    metric: str | None = None,
    bounds: Mapping[str, Bounds] | None = None,
) -> Matched:
    """Pairs the questions of two record folders of one task.

    What is returned are Pairs, unless the metric is one of the whole set, of which no question has a value.

    Args:
        baseline: A record's folder.
        candidate: Another one's.
        allow: Settings in which the two may differ.
        allow_unknown: Settings that a server need not tell.
        metric: The metric to compare; by default the records' primary one.
        bounds: Those that a policy declares, by metric.

    Raises:
        Incomparable: a UserError with every setting side by side, or with the first differing question as a diff.
        UserError: when questions are missing, extra or there twice, and when a value is missing, NaN, infinite or out
            of bounds.
    """
    first, second = load_record(baseline), load_record(candidate)
    for folder in (baseline, candidate):
        refuse_edited(folder)
    if metric is not None:
        asked = {"primary": [metric, *first.primary[1:]]}
        first, second = first.model_copy(update=asked), second.model_copy(update=asked)
    first, second = _of_common_weights(first, second), _of_common_weights(second, first)
    metric, filter_name, higher = _primary(first, baseline)
    if first.primary != second.primary or higher != _primary(second, candidate)[2]:
        raise UserError(
            f"the records of task '{first.task}' look at different metrics: {short(first.primary)} in the baseline "
            f"and {short(second.primary)} in the candidate",
            SAME,
        )
    found = list(differences(first.fingerprint, second.fingerprint))
    allowed = [one for one in found if one.field in allow and not one.content]
    allowed += _unknown(first, second, allow_unknown)
    settings = [one for one in found if not one.content and one not in allowed]
    if settings:
        raise incomparable(first, second, settings[0], len(found) - len(allowed))
    other_prompts = "prompts" in allow or any(one.field in _CHANGES_PROMPTS for one in allowed)
    ours, theirs = _lines(baseline, first), _lines(candidate, second)
    _refuse_unpaired(first.task, ours, theirs)
    keys = sorted(ours)
    for key in keys:
        one, other = ours[key], theirs[key]
        if one.doc_hash != other.doc_hash or one.target_hash != other.target_hash:
            raise other_question(first.task, one, other)
        if one.prompt_hash != other.prompt_hash and not other_prompts:
            raise other_question(first.task, one, other)
    left = [one for one in found if one.content and not (other_prompts and one.field == "prompts")]
    if left:
        raise incomparable(first, second, left[0], len(left))
    keys = [key for key in keys if key[1] == filter_name]
    sides = [(first, baseline, [ours[key] for key in keys]), (second, candidate, [theirs[key] for key in keys])]
    values = _values(sides, metric, higher)

    def whole(primary: str | None) -> list[SetMetric]:
        return set_metrics(first, second, baseline, candidate, (ours.values(), theirs.values()), primary=primary)

    if values is None:
        return Matched(first, second, metric, filter_name, higher, allowed, whole(metric))
    return Pairs(
        baseline=first,
        candidate=second,
        metric=metric,
        filter=filter_name,
        higher_is_better=higher,
        allowed=allowed,
        set_metrics=whole(None),
        bounds=_bounds(sides, metric, higher, values, bounds),
        keys=keys,
        baseline_values=values[0],
        candidate_values=values[1],
        lengths=(_length(ours, keys), _length(theirs, keys)),
        lines={key: (ours[key], theirs[key]) for i, key in enumerate(keys) if values[0][i] != values[1][i]},
    )


def _of_common_weights(record: EvaluationRecord, other: EvaluationRecord) -> EvaluationRecord:
    """The record without the weights of metrics that the other was not measured by: no reason not to pair the rest."""
    parts = dict(record.fingerprint.subtasks)
    for name, part in parts.items():
        twin = other.fingerprint.subtasks.get(name)
        if (
            twin is None
            or METRIC_WEIGHTS not in (part.generation or {})
            or METRIC_WEIGHTS not in (twin.generation or {})
        ):
            continue
        ours, theirs = (dict((one.generation or {})[METRIC_WEIGHTS]) for one in (part, twin))
        common = {metric: digest for metric, digest in ours.items() if metric in theirs}
        parts[name] = part.model_copy(update={"generation": {**(part.generation or {}), METRIC_WEIGHTS: common}})
    fingerprint = record.fingerprint.model_copy(update={"subtasks": parts})
    return record.model_copy(update={"fingerprint": fingerprint})


def _values(
    sides: list[tuple[EvaluationRecord, Path, list[Line]]], metric: str, higher: bool
) -> tuple[Array, Array] | None:
    """The values of both sides' questions; None where the metric is one of the whole set.

    Raises:
        UserError: when a question's value is missing, NaN or infinite, or the figures are no means of them.
    """
    if not any(has_values(lines, metric, higher_is_better=higher) for _, _, lines in sides):
        return None
    rows, means = [], True
    for record, folder, lines in sides:
        for line in lines:
            _refuse_no_number(line, metric, folder)
        row = np.array([line.value for line in lines], dtype=np.float64)
        rows.append(row)
        if definition(metric, higher).of_set and not is_mean(record, _means(lines, row), _MEAN_TOLERANCE):
            means = False
    if not means:
        return None
    for (record, folder, lines), row in zip(sides, rows, strict=True):
        _refuse_other_mean(record, folder, [line.key for line in lines], row)
    return rows[0], rows[1]


def _means(lines: list[Line], values: Array) -> dict[str, float]:
    subtasks = np.array([line.subtask for line in lines])
    return {name: float(values[subtasks == name].mean()) for name in dict.fromkeys(subtasks.tolist())}


def _unknown(first: EvaluationRecord, second: EvaluationRecord, allowed: Collection[str]) -> list[Difference]:
    """Settings that a side's server does not tell; what is unknown agrees with nothing, not even with itself."""
    ours, theirs = first.fingerprint.model_dump(mode="json"), second.fingerprint.model_dump(mode="json")
    found = [
        Difference(name, name, short(value), short(theirs[name]))
        for name, value in ours.items()
        if UNKNOWN in (value, theirs[name])
    ]
    for one in found:
        if one.field not in allowed:
            raise Incomparable(
                f"the records of task '{first.task}' are not comparable: {one}: the server did not say which it "
                "applied",
                "serve it with an endpoint that tells (a tokenize endpoint), send rendered prompts (api: completions), "
                f"or set allow_unknown: [{one.field}] in the policy",
            )
    return found


def _primary(record: EvaluationRecord, folder: Path) -> tuple[str, str, bool]:
    if len(record.primary) != 2:
        raise UserError(f"the record in {folder} names no primary metric and filter", "evaluate again")
    metric, filter_name = record.primary
    directions = {m.higher_is_better for m in record.metrics if m.metric == metric and m.filter == filter_name}
    if len(directions) != 1:
        what = "both directions" if directions else "no figure"
        raise UserError(f"the record in {folder} holds {what} for its metric {metric},{filter_name}", "evaluate again")
    return metric, filter_name, directions.pop()


def _bounds(
    sides: list[tuple[EvaluationRecord, Path, list[Line]]],
    metric: str,
    higher: bool,
    values: tuple[Array, Array],
    declared: Mapping[str, Bounds] | None,
) -> Bounds | None:
    known = definition(metric, higher, declared)
    for (_, folder, lines), row in zip(sides, values, strict=True):
        for place in (int(row.argmin()), int(row.argmax())):
            if (limits := known.refuse(float(row[place]))) is None:
                continue
            where = f"{metric} of {_name(lines[place].key)} in {folder}"
            if known.declared:
                raise UserError(
                    f"{where} is {row[place]:g}, and the policy says that it is {limits}",
                    f"correct the metric and evaluate again, or correct `bounds: {{{metric}: ...}}` in the policy",
                )
            raise UserError(
                f"{where} is {row[place]:g}, and by its definition it is {limits}",
                "correct the task's metric and evaluate again",
            )
    return known.bounds


def _lines(folder: Path, record: EvaluationRecord) -> dict[Key, Line]:
    metric, filter_name, _ = _primary(record, folder)
    found: dict[Key, Line] = {}
    held: dict[str, int] = dict.fromkeys(record.fingerprint.subtasks, 0)
    for line in scan_lines(folder, record, metric):
        key = line.key
        if key in found:
            raise UserError(f"{_name(key)} is there twice in {folder}", "evaluate again")
        if line.filter == filter_name:
            _refuse_other_samples(line, record, folder)
            held[line.subtask] = held.get(line.subtask, 0) + 1
        found[key] = line
    for subtask, print_ in record.fingerprint.subtasks.items():
        if not held[subtask]:
            raise UserError(
                f"the record in {folder} holds no answers to {subtask} under the filter '{filter_name}'",
                "evaluate again",
            )
        if held[subtask] != print_.questions:
            raise UserError(
                f"{folder} holds {held[subtask]} of the {print_.questions} questions of {subtask} its record speaks of",
                "questions were lost or added after the evaluation: evaluate again",
            )
    if not found:
        raise UserError(f"the record in {folder} holds no questions", "evaluate again")
    return found


def _refuse_no_number(line: Line, metric: str, folder: Path) -> None:
    value = line.value
    if not isinstance(value, (bool, int, float)):
        if value in ("NaN", "inf", "-inf"):  # as our writer puts what JSON has no word for
            raise UserError(f"{metric} of {_name(line.key)} in {folder} is {value}", "evaluate again")
        known = ", ".join(sorted(line.metrics)) or "none"
        raise UserError(
            f"{_name(line.key)} in {folder} has no number for the metric {metric} (it has: {known})",
            "choose a metric that has one number a question",
        )
    if not abs(value) <= sys.float_info.max:  # NaN, infinite, or an integer that no float can hold
        raise UserError(f"{metric} of {_name(line.key)} in {folder} is {short(value)}", "evaluate again")


def _refuse_other_samples(line: Line, record: EvaluationRecord, folder: Path) -> None:
    """A question of which some samples are lost has a mean of others than its twin's."""
    print_ = record.fingerprint.subtasks.get(line.subtask)
    if print_ is not None and line.samples and line.samples != print_.repeats:
        raise UserError(
            f"{_name(line.key)} in {folder} has {line.samples} samples, and its record speaks of {print_.repeats}",
            "samples were lost or added: evaluate again",
        )


def _refuse_unpaired(task: str, ours: dict[Key, Line], theirs: dict[Key, Line]) -> None:
    missing, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    if missing or extra:
        where = f"the first is {_name((missing or extra)[0])}"
        raise UserError(
            f"the records of task '{task}' hold different questions: of {len(ours)} in the baseline the candidate "
            f"lacks {len(missing)}, and it has {len(extra)} others; {where}",
            "evaluate both sides on the same questions; answers that are left out are not answers",
        )


def _length(lines: dict[Key, Line], keys: list[Key]) -> float | None:
    counts = [lines[key].tokens for key in keys]
    if None in counts:
        return None
    return sum(count for count in counts if count is not None) / sum(lines[key].samples for key in keys)


def _refuse_other_mean(record: EvaluationRecord, folder: Path, keys: list[Key], values: Array) -> None:
    """A figure that is not the mean of its questions (corpus BLEU, F1) must not be compared as if it were."""
    metric, filter_name = record.primary
    places: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key[0], []).append(place)
    for figure in record.metrics:
        if (figure.metric, figure.filter) != (metric, filter_name) or figure.subtask not in record.fingerprint.subtasks:
            continue
        mean = float(values[places[figure.subtask]].mean())
        if not abs(mean - figure.value) <= _MEAN_TOLERANCE * max(1.0, abs(mean)):  # also when it is NaN
            raise UserError(
                f"{metric} of {figure.subtask} in {folder} is reported as {figure.value}, but the mean of its "
                f"questions is {mean:.6g}",
                "compare a metric that is the mean of its questions, or evaluate again",
            )


def _name(key: Key) -> str:
    return f"question {key[2]} of {key[0]}" + ("" if key[1] == "none" else f" (filter {key[1]})")
