"""Sharing changes no answer: for several families, sliding windows, quantized KV caches and little memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CPU, make_model, sequences, spec

from halfbyte.eval import sharing
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


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_answers_are_those_of_single_forward_passes(family: str) -> None:
    model, requests = make_model(family).float(), few_shot()
    scorer = PrefixScorer(model, budget=256)
    assert scorer.shares
    assert any(batch.prefix for batch in scorer.plan(requests))
    assert_same(scored(scorer, requests), model, requests)


def test_branches_longer_than_a_sliding_window_get_rows_of_their_own() -> None:
    scorer = PrefixScorer(make_model("gemma3").float(), budget=256)
    assert all(len(row.branches) <= 1 for batch in scorer.plan(few_shot()) for row in batch.rows)
    short = [Request((5, 6), (7, 8)), Request((5, 6), (9, 10))]
    assert any(len(row.branches) == 2 for batch in scorer.plan(short) for row in batch.rows)
    assert_same(scored(scorer, short), scorer.model, short)


@pytest.mark.parametrize("kv_cache", ["fp8", "nvfp4"])
def test_a_quantized_kv_cache_changes_nothing(kv_cache: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    from tiny import quantize_both

    make_model("llama").save_pretrained(tmp_path / "model")
    both, _, _ = quantize_both(
        tmp_path / "model", tiny_tokenizer, tmp_path / "checkpoint", spec("nvfp4", kv_cache), torch.float32,
        torch.tensor([sequences()[1]]), weights_settled=False,
    )  # fmt: skip
    requests = few_shot(questions=4)
    found = scored(PrefixScorer(both.read_back, budget=256), requests)
    # An input at the edge of two codes may round to the other one where sums are taken in another order.
    close = [
        abs(value - alone(both.read_back, request)[0]) < 1e-3
        for (value, _), request in zip(found, requests, strict=True)
    ]
    assert sum(close) >= 0.9 * len(close)
    assert (
        max(abs(value - alone(both.read_back, request)[0]) for (value, _), request in zip(found, requests, strict=True))
        < 2
    )


def test_a_model_without_a_cache_is_scored_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama").float()
    forward = model.forward

    def without_cache(input_ids: Any, past_key_values: Any = None, **options: Any) -> Any:
        if past_key_values is not None:
            raise TypeError("unexpected keyword argument 'past_key_values'")
        return forward(input_ids, **options)

    monkeypatch.setattr(model, "forward", without_cache)
    scorer, requests = PrefixScorer(model, budget=512), few_shot(questions=2)
    assert not scorer.shares
    assert_same(scored(scorer, requests), model, requests)


def test_a_cache_that_is_read_wrongly_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama").float()
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **_: forward(ids, use_cache=False))  # forgets the prefix
    assert not PrefixScorer(model, budget=512).shares


def test_out_of_memory_halves_the_rows_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = make_model("llama").float(), few_shot()
    scorer = PrefixScorer(model, budget=100_000)
    expected = scored(scorer, requests)
    forward, sizes = model.forward, []

    def small(ids: torch.Tensor, **options: Any) -> Any:
        if ids.shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(ids.shape[0])
        return forward(ids, **options)

    monkeypatch.setattr(model, "forward", small)
    found = scored(scorer, requests)
    assert max(sizes) == 2
    for (value, greedy), (wanted, same) in zip(found, expected, strict=True):
        assert value == pytest.approx(wanted, abs=1e-4)
        assert greedy == same


def test_one_row_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama").float()
    scorer = PrefixScorer(model, budget=512)

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        scored(scorer, [Request((1, 2), (3,))])


def test_logits_are_computed_where_they_are_read_alone() -> None:
    model, requests = make_model("llama").float(), few_shot()
    scorer = PrefixScorer(model, budget=4096)
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, out: rows.append(out[..., 0].numel()))
    scored(scorer, requests)
    # One position a prefix besides, which transformers computes for nothing.
    assert sum(rows) == sum(len(request.continuation) for request in requests) + 2
    assert sharing.MIN_SAVED <= 6 * 120
    assert model.device == CPU
