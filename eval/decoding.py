"""One decoding step for many sequences: the next token's logits, replayed as a CUDA graph once a shape has come up."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte.eval.slots import Shape, Slots, running

logger = logging.getLogger(__name__)

STEP = {"cuda": 256, "cpu": 64}
"""Slots grow by so many tokens, and on CUDA lengths are rounded up to them, so that graphs can be used again."""
_BEFORE_CAPTURE = 3
"""Steps of one shape before a graph of it is made, which takes as long as several of them."""


def rounded(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


class Decoder:
    """Slots and the model that reads them.

    Args:
        model: On its device.
        name: See slots.own_attention.
        shapes: See slots.shapes_of.
    """

    def __init__(self, model: Any, name: str, shapes: dict[int, Shape]) -> None:
        self.model = model
        self.slots = Slots(name, shapes, model.device)
        self.step = STEP[model.device.type]
        self.graphs = model.device.type == "cuda"
        """Whether steps are replayed."""
        self._inputs = torch.zeros(2, 0, 1, dtype=torch.long)
        self._seen: dict[tuple[int, int], int] = {}
        self._captured: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        self._pool: Any = None

    def width(self, rows: int) -> int:
        """Rows a step really computes for so many sequences; there must be as many slots."""
        if self.model.device.type == "cpu":
            return rows
        return max(8, rounded(rows, 8 if rows <= 64 else 32))

    def resize(self, count: int, capacity: int, *, used: int) -> None:
        """See Slots.resize; `count` is the sequences, and there will be as many slots as steps for them need."""
        self._forget()
        count = self.width(count)
        self.slots.resize(count, capacity, used=used)
        self._inputs = torch.zeros(2, count, 1, dtype=torch.long, device=self.model.device)

    def clear(self) -> None:
        """Gives the memory of slots and graphs back."""
        self._forget()
        self.slots.clear()

    def logits(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits for what follows a token in each of the first slots, float32 [rows, vocabulary].

        Args:
            tokens: One a row; its keys and values are stored.
            positions: Where they stand in their sequences.
        """
        rows = len(tokens)
        width = self.width(rows)
        length = min(self.slots.capacity, rounded(max(positions) + 1, self.step if self.graphs else 1))
        given = torch.tensor([[*tokens, *[0] * (width - rows)], [*positions, *[0] * (width - rows)]])
        self._inputs[:, :width, 0] = given.to(self._inputs.device)
        return self._run(width, length)[:rows].float()

    def _run(self, width: int, length: int) -> Tensor:
        key = width, length
        if key not in self._captured and self.graphs:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] > _BEFORE_CAPTURE:
                self._capture(key)
        if key in self._captured:
            graph, output = self._captured[key]
            graph.replay()
            return output
        return self._forward(width, length)

    def _forward(self, width: int, length: int) -> Tensor:
        tokens, positions = self._inputs[0, :width], self._inputs[1, :width]
        self.slots.begin(positions[:, 0], length)
        with running(self.model, self.slots) as cache:
            logits: Tensor = self.model(tokens, position_ids=positions, past_key_values=cache, use_cache=True).logits
        return logits[:, -1]

    def _capture(self, key: tuple[int, int]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                output = self._forward(*key)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what waits for the GPU or allocates behind torch's back cannot be replayed
            logger.info("decoding without CUDA graphs: %s", str(error).splitlines()[0])
            self._forget()
            self.graphs = False
            return
        self._pool = graph.pool()
        self._captured[key] = graph, output

    def _forget(self) -> None:
        """Graphs hold the addresses of the slots they were made for."""
        self._captured = {}
        self._seen = {}
        self._pool = None
