"""Requests to score, and their answers: batch by batch, and each by a forward pass of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from halfbyte.eval.scorer import PrefixScorer
from halfbyte.eval.sharing import Request


def few_shot(subjects: int = 2, questions: int = 6, shots: int = 120) -> list[Request]:
    """Questions with a common beginning, each among four answers of one to five tokens, one of them cut short."""
    draw = random.Random(1)
    tokens = lambda count: tuple(draw.randrange(5, 380) for _ in range(count))  # noqa: E731
    found = []
    for _ in range(subjects):
        head = tokens(shots)
        for _ in range(questions):
            context = head + tokens(draw.randrange(5, 20))
            found += [Request(context, tokens(draw.randrange(1, 6))) for _ in range(4)]
            found.append(Request(context, found[-1].continuation[:1]))
    return found


@torch.inference_mode()
def alone(model: Any, request: Request) -> tuple[float, bool]:
    """The answer of a forward pass over this request and nothing else."""
    ids = torch.tensor([[*request.context, *request.continuation]])
    logits = model(ids[:, :-1], use_cache=False).logits[0, len(request.context) - 1 :].float()
    target = torch.tensor(request.continuation)
    picked = logits.log_softmax(-1).gather(-1, target[:, None])
    return float(picked.double().sum()), bool((logits.argmax(-1) == target).all())


def scored(scorer: PrefixScorer, requests: list[Request]) -> list[tuple[float, bool]]:
    answers: dict[int, tuple[float, bool]] = {}
    for batch in scorer.plan(requests):
        answers |= dict(zip(batch.members, scorer.score(requests, batch), strict=True))
    return [answers[at] for at in range(len(requests))]


def assert_same(found: list[tuple[float, bool]], model: Any, requests: list[Request]) -> None:
    for (value, greedy), request in zip(found, requests, strict=True):
        expected, same = alone(model, request)
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy == same
