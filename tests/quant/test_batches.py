"""The order of the rows is decided by the seed alone, and batches let no text see another or learn from padding."""

from __future__ import annotations

import pytest
import torch

from halfbyte.quant.batches import Held, InOrder, Numbered, collate
from halfbyte.quant.training_rows import IGNORED, Row


def row(length: int, start: int = 1, places: list[int] | None = None) -> Row:
    ids = list(range(start, start + length))
    return Row(ids, ids, places)


ROWS = [row(3), row(5), row(2), row(4), row(6)]


def test_each_epoch_sees_every_row_once_in_another_order() -> None:
    order = InOrder(ROWS, steps=6, per_step=5, seed=1)
    epochs = [order.order[first : first + 5] for first in range(0, 30, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert order.order == InOrder(ROWS, steps=6, per_step=5, seed=1).order
    assert order.order != InOrder(ROWS, steps=6, per_step=5, seed=2).order


@pytest.mark.parametrize("steps", [1, 7])
def test_a_longer_training_begins_like_a_shorter_one(steps: int) -> None:
    long, short = (InOrder(ROWS, steps=count, per_step=3, seed=3) for count in (20, steps))
    assert long.order[: len(short)] == short.order


def test_tokens_are_those_of_the_rows_seen() -> None:
    order = InOrder(ROWS, steps=4, per_step=2, seed=0)
    sizes = [len(ROWS[index].input_ids) for index in order.order]
    assert [order.tokens(step) for step in range(5)] == [sum(sizes[: 2 * step]) for step in range(5)]


def test_validation_rows_that_fill_a_batch_count_nothing() -> None:
    held = Held(ROWS[:3], per_batch=4, first=10)
    batch = collate([held[place] for place in range(len(held))])
    assert len(held) == 4
    assert (batch["labels"][3] == IGNORED).all()
    assert batch["index"].tolist() == [10, 11, 12, 10]


def test_padding_counts_in_no_loss_and_its_places_go_on() -> None:
    batch = collate([Numbered(row(2), 0), Numbered(row(4), 1)])
    assert batch["labels"].tolist() == [[IGNORED, 2, IGNORED, IGNORED], [IGNORED, 2, 3, 4]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert batch["input_ids"].dtype == torch.int64


def test_the_first_token_of_a_packed_text_is_nobodys_prediction() -> None:
    batch = collate([Numbered(row(5, places=[0, 1, 0, 1, 2]), 0)])
    assert batch["labels"].tolist() == [[IGNORED, 2, IGNORED, 4, 5]]
