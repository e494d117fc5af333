"""What a model was asked and what it answered, question by question, for a person to read in a terminal."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from halfbyte.records.files import read_json
from halfbyte.records.record import EvaluationRecord, Sample, read_samples

OPEN, CLOSE = "\u27e6", "\u27e7"
"""Around what is no text: special tokens, and remarks of ours."""
_REVERSE, _DIM, _BOLD, _OFF = "\x1b[7m", "\x1b[2m", "\x1b[1m", "\x1b[0m"


class Painter:
    """Marks special tokens and cut text, with colours where the output is a terminal.

    Args:
        tokenizer: The model's; None where there is none at hand.
        colours: Whether to use them.
    """

    def __init__(self, tokenizer: Any | None, *, colours: bool | None = None) -> None:
        self.tokenizer = tokenizer
        self.colours = sys.stdout.isatty() if colours is None else colours
        special = {str(token) for token in tokenizer.all_special_tokens} if tokenizer is not None else set()
        if tokenizer is not None:
            special |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if special else None

    def mark(self, text: str) -> str:
        """A special token or a remark."""
        return f"{_REVERSE}{text}{_OFF}" if self.colours else f"{OPEN}{text}{CLOSE}"

    def bold(self, text: str) -> str:
        """A headline."""
        return f"{_BOLD}{text}{_OFF}" if self.colours else text

    def dim(self, text: str) -> str:
        """What the model did not see."""
        return f"{_DIM}{text}{_OFF}" if self.colours else text

    def text(self, text: str) -> str:
        """A text with its special tokens marked, as the tokenizer would read it."""
        return self._special.sub(lambda found: self.mark(found.group()), text) if self._special else text

    def prompt(self, text: str, sample: Sample) -> str:
        """A prompt as the model was fed with it: what was added at its head, and what was cut off."""
        asked = sample.asked
        if asked is None or self.tokenizer is None:
            return self.text(text)
        if asked.cut:
            ids = self.tokenizer(text)["input_ids"]
            lost, kept = self.tokenizer.decode(ids[: asked.cut]), self.tokenizer.decode(ids[asked.cut :])
            remark = self.mark(f"{asked.cut} tokens before this were cut off")
            return f"{self.dim(lost)}{remark}{self.text(kept)}"
        bos = str(self.tokenizer.bos_token or "")
        written = 0
        while bos and text.startswith(bos * (written + 1)):
            written += 1
        added = max(asked.bos, default=0) - written
        return self.mark(bos) * added + self.text(text)


def show(folder: Path, record: EvaluationRecord, count: int, painter: Painter) -> Iterator[str]:
    """The first `count` questions of each subtask of a record, as lines."""
    samples = read_samples(folder, record)
    every = read_json(folder / record.results_file).get("n-samples", {})
    for subtask, rows in groupby(samples, key=lambda sample: sample.subtask):
        total = every.get(subtask, {}).get("original", record.fingerprint.subtasks[subtask].questions)
        for question in islice(_questions(rows), count):
            yield from _question(f"{subtask}, question {question[0].doc_id} (of {total})", question, painter)


def _questions(rows: Iterable[Sample]) -> list[list[Sample]]:
    """The rows of each question, one a filter, in the order of doc_id."""
    found: dict[int, list[Sample]] = {}
    for row in rows:
        found.setdefault(row.doc_id, []).append(row)
    return [found[doc_id] for doc_id in sorted(found)]


def _question(title: str, rows: Sequence[Sample], painter: Painter) -> Iterator[str]:
    first = rows[0]
    yield painter.bold(f"== {title} ".ljust(100, "="))
    yield _facts(first)
    requests = list(first.raw["arguments"].values())
    yield painter.prompt(_text(requests[0], 0), first)
    answers = _generated if first.generated is not None else _scored
    yield from answers(rows, requests, painter)
    yield painter.bold(f"-- target: {first.raw['target']}")
    for row in rows:
        values = ", ".join(f"{name} {value:g}" for name, value in row.metrics.items())
        yield f"   {row.filter}: {values}"
    yield ""


def _facts(sample: Sample) -> str:
    asked = sample.asked
    if asked is None:
        return f"-- prompt {sample.prompt_hash[:12]}"
    bos = "/".join(map(str, asked.bos)) or "unknown"
    tokens = "unknown" if asked.tokens is None else asked.tokens
    text = f"-- prompt {sample.prompt_hash[:12]}: {tokens} tokens, BOS at its head: {bos}"
    if asked.doubled:
        text += f", DOUBLED special tokens: {asked.doubled}"
    return f"{text}, CUT: {asked.cut} tokens" if asked.cut else text


def _text(request: dict[str, Any], part: int) -> str:
    return str(request.get(f"arg_{part}", ""))


def _generated(rows: Sequence[Sample], _requests: Sequence[dict[str, Any]], painter: Painter) -> Iterator[str]:
    texts = [text for request in rows[0].raw["resps"] for text in request]
    for number, (text, how) in enumerate(zip(texts, rows[0].generated or (), strict=True)):
        facts = [f"{how.tokens} tokens", f"ended by: {how.stop or 'unknown'}"]
        facts += [] if how.seed is None else [f"seed {how.seed}"]
        yield painter.bold(f"-- answer {number}: {', '.join(facts)}")
        yield painter.text(text) if text else painter.mark("nothing")
        for row in rows:
            given = _flat(row.raw["filtered_resps"])
            found = given[number] if number < len(given) else given[0]
            lost = row.answered is not None and not row.answered[min(number, len(row.answered) - 1)]
            shown = painter.mark("no answer found") if lost else repr(found)
            yield f"   {row.filter} extracts: {textwrap.shorten(shown, 200, placeholder=' ...')}"


def _scored(rows: Sequence[Sample], requests: Sequence[dict[str, Any]], painter: Painter) -> Iterator[str]:
    yield painter.bold("-- answers, with their log-likelihoods in nats:")
    values = [
        float(response[0][0] if isinstance(response[0], list) else response[0]) for response in rows[0].raw["resps"]
    ]
    best = max(values)
    contexts = {_text(request, 0) for request in requests}
    for request, value in zip(requests, values, strict=True):
        where = _text(request, 1) if len(contexts) == 1 else f"{_text(request, 0)}{_text(request, 1)}"
        yield f"   {'*' if value == best and len(values) > 1 else ' '} {value:12.4f}  {painter.text(repr(where))}"


def _flat(value: Any) -> list[Any]:
    return [leaf for entry in value for leaf in _flat(entry)] if isinstance(value, list) else [value]
