"""The largest passes of an evaluation: their shapes, and the passes themselves, over a model with values or without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.eval.decoding import STEP, rounded
from halfbyte.eval.generation import Generator, Sample
from halfbyte.eval.scorer import PrefixScorer
from halfbyte.eval.sharing import Batch, Request, Row
from halfbyte.eval.slots import bytes_a_token


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the memory of one forward pass over prompts."""

    sequences: int
    tokens: int
    """Of each sequence, padding included and the prefix not."""
    prefix: int
    """Tokens that all begin with, read from a cache."""
    scored: int = 0
    """Positions whose logits are computed; 0 for the prompts of texts that are generated."""
    masked: bool = False
    """Whether it has a mask of its own, since answers lie beside each other."""


def shape_of(batch: Batch, requests: Sequence[Request]) -> Shape:
    """The shape of a planned batch that is scored."""
    scored = sum(len(requests[at].continuation) for at in batch.members)
    masked = batch.packed or any(len(row.branches) > 1 for row in batch.rows)
    if batch.packed:
        return Shape(1, batch.tokens, batch.prefix, scored, masked)
    return Shape(len(batch.rows), batch.width, batch.prefix, scored, masked)


def largest(shapes: Iterable[Shape]) -> list[Shape]:
    """Those of which one has the highest peak: by tokens computed, by tokens and their prefix, and by logits."""
    found = list(shapes)
    if not found:
        return []
    computed = max(found, key=lambda one: (one.sequences * one.tokens, one.scored))
    seen = max(found, key=lambda one: (one.sequences * one.tokens + one.prefix, one.scored))
    scored = max(found, key=lambda one: (one.scored, one.sequences * one.tokens))
    return list(dict.fromkeys([computed, seen, scored]))


def score(model: Any, shape: Shape, scorer: PrefixScorer | None = None) -> None:
    """Scores a batch of a shape as eval.scorer does, but for reading the answers.

    Args:
        model: With values or without.
        shape: Of the batch.
        scorer: Keeps the prefix from one call to the next; None for a new one.
    """
    answer = max(1, -(-shape.scored // shape.sequences))
    behind = [answer // 2, answer - answer // 2] if shape.masked and answer > 1 else [answer]
    context = max(1, shape.prefix + shape.tokens - sum(size - 1 for size in behind))
    requests = [Request((0,) * context, (at,) * size) for at, size in enumerate(behind)]
    rows = []
    for _ in range(shape.sequences):
        branches, spots, start = [], [], context
        for request in requests:
            branches.append(request.continuation[:-1])
            spots.append([context - 1, *range(start, start + len(branches[-1]))])
            start += len(branches[-1])
        rows.append(Row((0,) * context, branches, list(range(len(requests))), spots))
    scorer = PrefixScorer(model) if scorer is None else scorer
    scorer.compute(requests, shape.prefix, rows, packed=shape.masked and shape.sequences == 1)


def begin(model: Any, shape: Shape) -> int:
    """Computes the beginnings of texts as eval.generation does.

    Returns:
        Bytes of keys and values of a token in all layers.
    """
    generator = Generator(model)
    shared = generator._compute(torch.zeros(1, shape.prefix, dtype=torch.long), {}, 0) if shape.prefix else {}
    kept = generator._compute(torch.zeros(shape.sequences, shape.tokens, dtype=torch.long), shared, shape.prefix)
    assert kept
    return bytes_a_token(generator.decoder.slots.shapes)


def capacity(length: int, device: str) -> int:
    """Tokens that a slot has room for when its text is as long as this, its prompt included."""
    return rounded(length + STEP[device] // 4, STEP[device])


@torch.inference_mode()
def seconds_of_score(model: Any, shape: Shape, *, passes: int = 3) -> float:
    """Seconds of a pass of a shape whose prefix is kept already: the median, after one that is not looked at."""
    scorer = PrefixScorer(model)
    found = []
    for _ in range(passes + 1):
        start = time.perf_counter()
        score(model, shape, scorer)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def seconds_of_step(model: Any, sequences: int, prompt: int, *, steps: int = 16) -> float:
    """Seconds of one more token in each of so many texts at once: what `steps` more of them take.

    Args:
        model: With values, on its device.
        sequences: Texts at once.
        prompt: Tokens of each prompt.
        steps: How many are measured.
    """
    generator = Generator(model, slots=sequences)

    def seconds(count: int) -> float:
        samples = [Sample((at % 2, *[0] * (prompt - 1))) for at in range(sequences)]
        start = time.perf_counter()
        generator.generate(
            samples,
            lambda logits, _: logits.argmax(-1),
            lambda tokens: "length" if len(tokens) >= count else None,
        )
        return time.perf_counter() - start

    seconds(4)  # what is compiled or captured is so only once
    return max(1e-9, seconds(4 + steps) - seconds(4)) / steps
