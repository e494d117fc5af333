"""How the rows of a batch lie in a forward pass, and what each of their tokens sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.eval.sharing import Row


class Layout(NamedTuple):
    """The tokens of rows behind the prefix that they share."""

    ids: Tensor
    """int64 [sequences, width]; padding is on the right, where nothing sees it."""
    starts: list[tuple[int, int]]
    """The sequence and the place in it where each row begins."""


def lay_out(rows: Sequence[Row], prefix: int, *, packed: bool) -> Layout:
    """Rows in sequences of their own, padded to the longest, or packed: one after another in a single sequence."""
    behind = [[*row.context[prefix:], *(token for branch in row.branches for token in branch)] for row in rows]
    if packed:
        starts, at = [], 0
        for tokens in behind:
            starts.append((0, at))
            at += len(tokens)
        return Layout(torch.tensor([[token for tokens in behind for token in tokens]]), starts)
    width = max(map(len, behind))
    ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in behind])
    return Layout(ids, [(at, 0) for at in range(len(rows))])


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to be added to attention's scores, of what is seen (bool)."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def positions_of(rows: Sequence[Row], prefix: int, layout: Layout) -> Tensor:
    """Of each token in the text it belongs to, int64 in the shape of the layout; branches all begin behind the context.

    Padding is at 0, which every model has.
    """
    positions = torch.zeros(layout.ids.shape, dtype=torch.long)
    for row, (sequence, start) in zip(rows, layout.starts, strict=True):
        parts = [range(prefix, len(row.context))]
        parts += [range(len(row.context), len(row.context) + len(branch)) for branch in row.branches]
        found = [at for part in parts for at in part]
        positions[sequence, start : start + len(found)] = torch.tensor(found)
    return positions


def masked(model: Any, rows: Sequence[Row], prefix: int, layout: Layout) -> dict[str, Tensor]:
    """Positions and mask under which a token sees the prefix, the context of its row, and its own branch up to itself.

    Needed where a row has several branches or a sequence several rows.
    """
    shape, device = layout.ids.shape, model.device
    number = torch.zeros(shape, dtype=torch.long)  # of the row
    owner = torch.zeros(shape, dtype=torch.long)  # 0: the context; else the number of the branch
    for at, (row, (sequence, start)) in enumerate(zip(rows, layout.starts, strict=True)):
        end = start + len(row.context) - prefix
        number[sequence, start : end + sum(map(len, row.branches))] = at
        for branch_number, branch in enumerate(row.branches, start=1):
            owner[sequence, end : end + len(branch)] = branch_number
            end += len(branch)
    number, owner = number.to(device), owner.to(device)
    seen = (owner[:, None, :] == 0) | (owner[:, None, :] == owner[:, :, None])
    seen &= number[:, None, :] == number[:, :, None]
    seen &= torch.ones(shape[1], shape[1], dtype=torch.bool, device=device).tril()
    seen = torch.nn.functional.pad(seen, (prefix, 0), value=True)
    positions = positions_of(rows, prefix, layout).to(device)
    return {"position_ids": positions, "attention_mask": additive(seen, model.dtype)[:, None]}
