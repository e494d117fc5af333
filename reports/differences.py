"""What makes two records incomparable, for people: all settings side by side, the first other question as a diff."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from halfbyte.records.errors import UserError
from halfbyte.records.record import EvaluationRecord, Fingerprint
from halfbyte.records.samples import Line, whole_line

SAME = "evaluate both sides with the same tasks and settings"
_CONTENT = ("questions", "documents", "prompts", "targets")
_EXCERPT = 160
_DIFF_LINES = 40
_COMPARED_LINES = 2000  # the time that a diff takes grows with the square of the lines


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting in which two records differ."""

    field: str
    """The fingerprint's field, as a policy's `allow` names it."""
    setting: str
    """The same for people, with its subtask."""
    baseline: str
    candidate: str
    content: bool = False
    """Whether the questions themselves differ; then the first differing question says more than this digest."""

    def __str__(self) -> str:
        return f"{self.setting} is {self.baseline} in the baseline and {self.candidate} in the candidate"


class Incomparable(UserError):
    """Two records that must not be compared; `details` are several lines that show why."""

    def __init__(self, message: str, hint: str | None = None, details: str | None = None) -> None:
        super().__init__(message, hint)
        self.details = details


def differences(baseline: Fingerprint, candidate: Fingerprint) -> Iterator[Difference]:
    """What two fingerprints disagree on, the settings a person chose first and digests of questions last."""
    ours, theirs = baseline.model_dump(mode="json"), candidate.model_dump(mode="json")
    subtasks, other = ours.pop("subtasks"), theirs.pop("subtasks")
    for name, value in ours.items():
        if value != theirs[name]:
            yield Difference(name, name, short(value), short(theirs[name]))
    if subtasks.keys() != other.keys():
        yield Difference("subtasks", "the list of subtasks", short(sorted(subtasks)), short(sorted(other)))
    for content in (False, True):
        for subtask in sorted(subtasks.keys() & other.keys()):
            for name, value in subtasks[subtask].items():
                if (name in _CONTENT) == content and value != other[subtask][name]:
                    yield Difference(name, f"{name} of {subtask}", short(value), short(other[subtask][name]), content)


def incomparable(
    baseline: EvaluationRecord, candidate: EvaluationRecord, difference: Difference, count: int
) -> Incomparable:
    """The error for records whose settings differ."""
    more = f" ({count - 1} more {'difference' if count == 2 else 'differences'})" if count > 1 else ""
    return Incomparable(
        f"the records of task '{baseline.task}' are not comparable: {difference}{more}",
        SAME,
        side_by_side(baseline.fingerprint, candidate.fingerprint),
    )


def side_by_side(baseline: Fingerprint, candidate: Fingerprint) -> str:
    """All settings of both sides in three columns, those that differ marked; subtasks only where they differ."""
    ours, theirs = baseline.model_dump(mode="json"), candidate.model_dump(mode="json")
    del ours["subtasks"], theirs["subtasks"]
    rows = [("", "setting", "baseline", "candidate")]
    rows += [
        ("*" if value != theirs[name] else "", name, short(value), short(theirs[name])) for name, value in ours.items()
    ]
    known = {row[1] for row in rows}
    rows += [
        ("*", one.setting, one.baseline, one.candidate)
        for one in differences(baseline, candidate)
        if one.setting not in known
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def other_question(task: str, baseline: Line, candidate: Line) -> Incomparable:
    """The error for a question that is another one on the other side, with the difference as a diff."""
    part = next(
        part
        for what, part in (("doc_hash", "document"), ("prompt_hash", "prompt"), ("target_hash", "target"))
        if getattr(baseline, what) != getattr(candidate, what)
    )
    ours, theirs = (_part(whole_line(line), part) for line in (baseline, candidate))
    left, right = _around_difference(ours, theirs)
    name = f"question {baseline.doc_id} of {baseline.subtask}"
    return Incomparable(
        f"the records of task '{task}' are not comparable: the {part} of {name} is {left} in the baseline and {right} "
        "in the candidate",
        SAME,
        diff(ours, theirs, f"{part} of {name}"),
    )


def diff(baseline: str, candidate: str, what: str) -> str:
    """A unified diff of two texts, with at most _DIFF_LINES lines of at most _EXCERPT characters."""
    lines = list(
        difflib.unified_diff(
            _printable(baseline),
            _printable(candidate),
            f"baseline: {what}",
            f"candidate: {what}",
            n=2,
            lineterm="",
        )
    )
    if not lines:
        return "The texts are the same as far as they were kept; their hashes are not."
    cut = [line if len(line) <= _EXCERPT else f"{line[:_EXCERPT]}..." for line in lines[:_DIFF_LINES]]
    left_out = len(lines) - len(cut)
    return "\n".join([*cut, *([f"... and {left_out} lines more"] if left_out else [])])


def _printable(text: str) -> list[str]:
    """The first lines, without what a terminal would obey."""
    lines = text.splitlines()[:_COMPARED_LINES]
    return ["".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in line) for line in lines]


def _part(raw: dict[str, Any], part: str) -> str:
    value = {"document": raw["doc"], "prompt": raw["arguments"], "target": raw["target"]}[part]
    if part == "prompt" and isinstance(value, dict) and value:
        first = next(iter(value.values()))
        texts = list(first.values()) if isinstance(first, dict) else [first]
        return "\n".join(text if isinstance(text, str) else repr(text) for text in texts)
    return value if isinstance(value, str) else repr(value)


def short(value: Any) -> str:
    """A value as Python writes it, cut."""
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
