"""Packing: full rows, and texts that do not see each other there."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.quant.packing import pack, packs_rows


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=40))
def test_every_text_is_in_one_row_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = pack(lengths, 20)
    assert sorted(text for row in rows for text in row) == list(range(len(lengths)))
    assert all(sum(lengths[text] for text in row) <= 20 for row in rows)
    assert all(row == sorted(row) for row in rows)


def test_a_hundred_thousand_texts_fill_their_rows() -> None:
    draw = random.Random(0)
    lengths = [min(1024, max(2, int(draw.gammavariate(2, 90)))) for _ in range(100_000)]
    rows = pack(lengths, 1024)
    assert sum(lengths) / (1024 * len(rows)) > 0.99


def _loss_and_gradients(model: Any, rows: list[list[list[int]]]) -> tuple[float, list[torch.Tensor]]:
    """Of a batch of packed rows, filled up at their ends."""
    width = max(sum(map(len, row)) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    positions = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        flat = [token for text in row for token in text]
        ids[number, : len(flat)] = torch.tensor(flat)
        labels[number, : len(flat)] = torch.tensor([n for text in row for n in (-100, *text[1:])])
        places = [place for text in row for place in range(len(text))]
        positions[number] = torch.tensor([*places, *range(len(row[-1]), len(row[-1]) + width - len(flat))])
    model.zero_grad()
    # As transformers' Trainer calls it: no attention mask, and use_cache of the configuration.
    loss = model(input_ids=ids, labels=labels, position_ids=positions, num_items_in_batch=1).loss
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_texts_train_as_they_do_alone(llama_factory: Any, attention: str, checkpointing: bool) -> None:
    model = llama_factory().train()
    model.set_attn_implementation(attention)
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable()
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 384, (size,), generator=generator).tolist() for size in (5, 9, 1, 7, 4)]
    together = _loss_and_gradients(model, [texts[:3], texts[3:]])
    alone = [_loss_and_gradients(model, [[text]]) for text in texts if len(text) > 1]
    assert together[0] == pytest.approx(sum(loss for loss, _ in alone), rel=1e-5)
    for number, gradient in enumerate(together[1]):
        parts = sum(gradients[number] for _, gradients in alone)
        torch.testing.assert_close(gradient, parts, rtol=1e-3, atol=1e-4)


def test_a_cache_lets_packed_texts_see_each_other(llama_factory: Any) -> None:
    """Which is why whoever trains on packed rows, teacher included, sets use_cache to false."""
    model = llama_factory().train()
    texts = [[5, 9, 200, 31], [7, 80, 41, 300, 12]]
    model.config.use_cache = False
    right = _loss_and_gradients(model, [texts])[0]
    model.config.use_cache = True
    assert abs(_loss_and_gradients(model, [texts])[0] - right) > 0.01


def test_a_model_that_looks_at_positions_packs_and_one_that_does_not_does_not(llama_factory: Any) -> None:
    model = llama_factory().train()
    assert packs_rows(model)
    assert model.training
    forward = model.forward
    model.forward = lambda **inputs: forward(**{**inputs, "position_ids": None})
    assert not packs_rows(model)


def test_a_model_that_looks_at_a_batch_of_one_row_alone_does_not_pack(llama_factory: Any) -> None:
    model = llama_factory()
    forward = model.forward

    def only_alone(*, input_ids: Any, position_ids: Any = None, **inputs: Any) -> Any:
        return forward(input_ids=input_ids, position_ids=position_ids if len(input_ids) == 1 else None, **inputs)

    model.forward = only_alone
    assert not packs_rows(model)


def test_a_model_without_positions_does_not_pack(llama_factory: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = llama_factory()
    forward = model.forward
    model.forward = lambda input_ids, use_cache: forward(input_ids=input_ids, use_cache=use_cache)
    assert not packs_rows(model)
    assert "one by one" in caplog.text
