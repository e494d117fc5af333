"""What a training step sees: the order of the rows by seed alone, and rows made one batch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from halfbyte.quant.training_rows import IGNORED, Row


@dataclass(frozen=True)
class Numbered:
    """A row and its index among the examples, by which offline teacher logits are found."""

    row: Row
    index: int
    counts: bool = True
    """False for what only fills a batch: its labels are all ignored."""


class InOrder(Dataset[Numbered]):
    """The rows of a whole training in their order: one shuffle an epoch, decided by the seed and by nothing else.

    A batch of the trainer is the next `batch` of them, whatever was done before, so that a training that goes on from a
    checkpoint, or is divided among more processes with as many rows a step, sees the same rows at the same step.

    Args:
        rows: The examples.
        steps: Optimizer steps of the training.
        per_step: Rows of a step, on all processes together.
        seed: Of the shuffles.
    """

    def __init__(self, rows: Sequence[Row], *, steps: int, per_step: int, seed: int) -> None:
        self.rows, self.per_step = rows, per_step
        generator = torch.Generator().manual_seed(seed)
        total = steps * per_step
        order = np.empty(total, dtype=np.int32)
        for first in range(0, total, len(rows)):
            epoch = torch.randperm(len(rows), generator=generator).numpy()
            order[first : first + len(rows)] = epoch[: total - first]
        self.order = array("i", order.tobytes())
        """The row at each place."""
        sizes = np.array([len(rows[index].input_ids) for index in range(len(rows))], dtype=np.int64)
        self._tokens = np.cumsum(np.add.reduceat(sizes[order], np.arange(0, total, per_step)))

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> Numbered:
        index = self.order[place]
        return Numbered(self.rows[index], index)

    def tokens(self, step: int) -> int:
        """Tokens seen after so many steps, padding left out."""
        return int(self._tokens[step - 1]) if step else 0


class Held(Dataset[Numbered]):
    """The validation rows, filled up to whole batches on all processes with rows that count nothing.

    Args:
        rows: The examples held out.
        per_batch: Rows of a batch on all processes together.
        first: Index of the first among all examples: they come after those that are trained on.
    """

    def __init__(self, rows: Sequence[Row], *, per_batch: int, first: int) -> None:
        self.rows, self.first = rows, first
        self.length = math.ceil(len(rows) / per_batch) * per_batch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> Numbered:
        if place < len(self.rows):
            return Numbered(self.rows[place], self.first + place)
        return Numbered(self.rows[0], self.first, counts=False)


def collate(rows: Sequence[Numbered]) -> dict[str, Tensor]:
    """Rows as one batch: input_ids, labels and position_ids [rows, longest], and their index [rows].

    Shorter rows are filled at the end, where a causal model sees nothing of it, with tokens that count in no loss. The
    first token of each text is nobody's prediction: in a packed row the one before it is of another text.
    """
    longest = max(len(one.row.input_ids) for one in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    positions = torch.zeros_like(ids)
    for number, one in enumerate(rows):
        length = len(one.row.input_ids)
        ids[number, :length] = torch.tensor(one.row.input_ids)
        places = one.row.position_ids
        positions[number, :length] = torch.arange(length) if places is None else torch.tensor(places)
        positions[number, length:] = positions[number, length - 1] + 1 + torch.arange(longest - length)
        if one.counts:
            labels[number, :length] = torch.tensor(one.row.labels)
    labels[positions == 0] = IGNORED
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions,
        "index": torch.tensor([one.index for one in rows]),
    }
