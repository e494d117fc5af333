"""Texts laid end to end in rows of one length, and whether a model keeps them apart there."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of at most `capacity` tokens: the longest text first, each into the fullest row that has room for it.

    That is best fit decreasing, which fills rows to 97 to 99 %, where laying them down in their order leaves
    half a text free in each. What follows which text in training is decided by a shuffle of the rows.

    Args:
        lengths: Tokens of each text, none above capacity.
        capacity: Tokens of a row.

    Returns:
        The indices of each row's texts, ascending; the rows in the order of their first text.
    """
    rows: list[list[int]] = []
    room: dict[int, list[int]] = {}
    """Rows by their free tokens."""
    sizes: list[int] = []
    """The keys of room, ascending."""
    for text in sorted(range(len(lengths)), key=lambda text: (-lengths[text], text)):
        at = bisect_left(sizes, lengths[text])
        if at == len(sizes):
            row, left = len(rows), capacity
            rows.append([])
        else:
            left = sizes[at]
            row = room[left].pop()
            if not room[left]:
                del room[left], sizes[at]
        rows[row].append(text)
        left -= lengths[text]
        if left not in room:
            room[left] = []
            insort(sizes, left)
        room[left].append(row)
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])


@torch.no_grad()
def packs_rows(model: PreTrainedModel) -> bool:
    """Whether the model keeps the texts of packed rows apart, tried on a batch of two rows.

    transformers finds out from position_ids that start anew where a text begins, but only where there is no attention
    mask and no cache; models with recurrent layers, or with an attention of their own, do not look, and flash attention
    looks at a batch of one row alone. What is left of a difference is rounding.
    """
    vocabulary = int(cast("nn.Embedding", model.get_input_embeddings()).num_embeddings)
    texts = [[(start + 7 * i) % vocabulary for i in range(6)] for start in (3, 11, 23, 31)]
    ids = torch.tensor([texts[0] + texts[1], texts[2] + texts[3]], device=model.device)
    positions = torch.arange(6, device=model.device).repeat(2, 2)
    was_training = model.training
    cast(nn.Module, model).eval()  # dropout would be taken for a difference
    try:
        alone = model(input_ids=torch.tensor(texts[1::2], device=model.device), use_cache=False).logits
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 6:]
    except (TypeError, ValueError, RuntimeError) as error:
        logger.warning("texts are trained on one by one, since a packed row fails: %s", error)
        return False
    finally:
        model.train(was_training)
    exact = float((packed.float() - alone.float()).square().mean().sqrt()) < 0.2 * float(alone.float().std()) + 1e-6
    if not exact:
        logger.warning(
            "texts are trained on one by one, since %s lets packed texts see each other", type(model).__name__
        )
    return exact
