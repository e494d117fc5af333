"""The fast way through a record's sample lines: what a comparison counts, without taking prompts and texts apart.

A line of a five-shot task holds its prompt once a choice, ten kilobytes of which a comparison needs two hundred bytes.
lm-eval and this project write the filter, the metrics and the hashes behind the texts, so that the end of a line is
read alone; any other line is parsed as a whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.records.errors import UserError
from halfbyte.records.record import EvaluationRecord, SampleIdentity

_HEAD = re.compile(rb'\{"doc_id": (\d+), ')
_NEEDED = {"filter", "metrics", "doc_hash", "prompt_hash", "target_hash"}
_TAIL = b', "filter": '  # inside a text the quotes would have backslashes


@dataclass(frozen=True, slots=True)
class Line(SampleIdentity):
    """What a comparison needs of one sample line, and where the whole of it is."""

    value: Any
    """The metric asked for, as written; None where the line has none."""
    metrics: list[str]
    tokens: int | None
    """Generated, all samples together; None where nothing was generated or nothing is known."""
    samples: int
    """Texts that `tokens` counts."""
    path: Path
    start: int
    end: int


def scan_lines(folder: Path, record: EvaluationRecord, metric: str) -> Iterator[Line]:
    """The sample lines of a record in the order of its files, each file read once and checked against its digest.

    Raises:
        UserError: when a samples file is missing, has changed since it was written, or a line is not what lm-eval
            writes.
    """
    for subtask, name in sorted(record.samples_files.items()):
        path = folder / name
        if Path(name).name != name:
            raise UserError(
                f"the record in {folder} names a samples file outside of its folder: {name}", "evaluate again"
            )
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise UserError(f"{path} is missing from the record", "evaluate again") from None
        written = record.files.get(name)
        if written is not None and hashlib.sha256(content).hexdigest() != written:
            raise UserError(f"{path} has changed since it was written", "evaluate again")
        start = number = 0
        while start < len(content):
            number += 1
            end = content.find(b"\n", start)
            end = len(content) if end < 0 else end
            try:
                yield _line(content[start:end], subtask, metric, path, start)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UserError(f"{path}:{number} is not a sample line: {error}", "evaluate again") from None
            start = end + 1


def whole_line(line: Line) -> dict[str, Any]:
    """All that was written of a question."""
    with line.path.open("rb") as file:
        file.seek(line.start)
        found: dict[str, Any] = json.loads(file.read(line.end - line.start))
    return found


def _line(content: bytes, subtask: str, metric: str, path: Path, start: int) -> Line:
    found = _end_of(content)
    if found is None:
        found = json.loads(content)
    rows = found.get("generated")
    counts = [row["tokens"] for row in rows or []]
    if any(count is not None and (type(count) is not int or count < 0) for count in counts):
        raise ValueError(f"a text of {counts} tokens")
    if type(found["doc_id"]) is not int or type(found["filter"]) is not str:
        raise ValueError(f"doc_id {found['doc_id']!r}, filter {found['filter']!r}")
    return Line(
        subtask=subtask,
        filter=found["filter"],
        doc_id=found["doc_id"],
        doc_hash=found["doc_hash"],
        prompt_hash=found["prompt_hash"],
        target_hash=found["target_hash"],
        value=found[metric] if metric in found["metrics"] else None,
        metrics=found["metrics"],
        tokens=None if not counts or None in counts else sum(counts),
        samples=len(counts),
        path=path,
        start=start,
        end=start + len(content),
    )


def _end_of(content: bytes) -> dict[str, Any] | None:
    """The line without its texts; None where they cannot be told from the rest."""
    head, cut = _HEAD.match(content), content.rfind(_TAIL)
    if head is None or cut < 0:
        return None
    try:
        found = json.loads("{" + content[cut + 2 :].decode("utf-8"))  # json.loads guesses the encoding of bytes
    except ValueError:
        return None
    if not isinstance(found, dict) or not found.keys() >= _NEEDED:
        return None
    found["doc_id"] = int(head[1])
    return found
