"""Scores planned batches: prefixes from a KV cache, answers beside each other in one row, logits only where needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from halfbyte.eval import cascade
from halfbyte.eval.cascade import PackedRows, without_plans
from halfbyte.eval.layout import Layout, lay_out, masked, positions_of
from halfbyte.eval.prefix import cached, for_rows, layers_of
from halfbyte.eval.sharing import Batch, Request, Row, plan
from halfbyte.eval.slots import running
from halfbyte.eval.trial import attention_window, cascades_exactly, shares_exactly

logger = logging.getLogger(__name__)

BUDGETS = {"cuda": 16384, "cpu": 2048}
"""Tokens a forward pass. More of them make a GPU no faster, and a CPU's caches are small."""
PACKED = {"cuda": 4096, "cpu": 384}
"""Tokens of a sequence of rows with a common beginning, which are packed. On CUDA matrix products are at their fastest
with 4,096, and attention, which grows with the square, takes a sixth of their time at the size of Llama 3 8B; a CPU
needs no more than a few hundred."""
SLICE = 512
"""Positions whose distributions are in memory at once, in float32: 512 x 150,000 tokens x 4 bytes = 307 MB."""


class PrefixScorer:
    """Log-likelihoods of continuations under a causal LM of transformers.

    Each answer is the one that a forward pass over context and continuation alone would give, up to the order of
    summation in floating point.

    Args:
        model: On its device, in the type to compute in.
        budget: Tokens a forward pass; None for the device's own.
    """

    def __init__(self, model: Any, *, budget: int | None = None) -> None:
        self.model = model
        self.budget = budget or BUDGETS[model.device.type]
        self._window = attention_window(model.config)
        self._prefix: tuple[tuple[int, ...], Any, Any] | None = None
        """The last prefix, what was made of it, and that: its cache or, for a cascade, its layers' keys and values."""
        self._most: int | None = None
        """Tokens, cached ones included, that have fitted into memory since it was too little once."""

    @cached_property
    def shares(self) -> bool:
        """Whether prompts may be shared, tried at the first plan: what only generates never asks."""
        return shares_exactly(self.model)

    @cached_property
    def cascades(self) -> bool:
        """Whether packed rows need no mask, tried at the first of them."""
        return self._window is None and cascade.takes(self.model) and cascades_exactly(self.model)

    def plan(self, requests: list[Request]) -> list[Batch]:
        """Fixed batches of the requests; each is one call of `score`.

        Where a row would be longer than a sliding window, it cannot be masked: rows are not packed then, and where that
        is not enough, branches get rows of their own.
        """
        share, pack = self.shares, PACKED[self.model.device.type]
        batches = plan(requests, self.budget, share=share, pack=pack)
        for branch in (True, False):
            if share and self._window is not None and any(_too_long(batch, self._window) for batch in batches):
                batches = plan(requests, self.budget, share=True, branch=branch)
        return batches

    @torch.inference_mode()
    def score(self, requests: list[Request], batch: Batch) -> list[tuple[float, bool]]:
        """For each member of a batch: the continuation's log-likelihood in nats, and whether greedy decoding gives it.

        Out of memory, the rows are computed in halves; the batch stays one.
        """
        waiting = self._parts(batch)
        answers: dict[int, tuple[float, bool]] = {}
        while waiting:
            rows = waiting.pop()
            try:
                with without_plans(self.model.device):
                    answers.update(self._forward(requests, batch.prefix, rows, packed=batch.packed))
                continue
            except torch.OutOfMemoryError:
                if len(rows) == 1:
                    raise
            # Not in the except block, whose traceback holds the tensors that are to be freed.
            self._most = len(rows) // 2 * max(row.length for row in rows)
            logger.info("out of memory with %d rows; from now on at most %d tokens at once", len(rows), self._most)
            self._prefix = None
            torch.cuda.empty_cache()
            waiting += [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
        return [answers[at] for at in batch.members]

    def _parts(self, batch: Batch) -> list[list[Row]]:
        """The rows of a batch in parts that fit into memory, as far as is known."""
        rows, longest = batch.rows, max(row.length for row in batch.rows)
        count = len(rows) if self._most is None else max(1, self._most // longest)
        return [rows[first : first + count] for first in range(0, len(rows), count)][::-1]

    def _forward(
        self, requests: list[Request], prefix: int, rows: list[Row], *, packed: bool
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        log_probs, greedy = self.compute(requests, prefix, rows, packed=packed)
        done = 0
        for row in rows:
            for member in row.members:
                part = slice(done, done + len(requests[member].continuation))
                done = part.stop
                yield member, (float(log_probs[part].sum()), bool(greedy[part].all()))

    def compute(self, requests: list[Request], prefix: int, rows: list[Row], *, packed: bool) -> tuple[Tensor, Tensor]:
        """One forward pass; see _at for what it gives, in the order of the rows, their members and their tokens."""
        layout = lay_out(rows, prefix, packed=packed)
        spots = [
            (sequence, start + spot - prefix)
            for row, (sequence, start) in zip(rows, layout.starts, strict=True)
            for spots in row.spots
            for spot in spots
        ]
        targets = [token for row in rows for member in row.members for token in requests[member].continuation]
        with self._options(rows, prefix, layout, packed=packed) as options:
            return self._at(layout.ids, options, spots, targets)

    @contextmanager
    def _options(self, rows: list[Row], prefix: int, layout: Layout, *, packed: bool) -> Iterator[dict[str, Any]]:
        """What the model is called with beside the tokens."""
        context, device = rows[0].context[:prefix], self.model.device
        if packed and self.cascades:
            layers = self._kept(context, layers_of) if prefix else {}
            with running(self.model, PackedRows(rows, layers, prefix, device)) as cache:
                positions = positions_of(rows, prefix, layout).to(device)
                yield {"position_ids": positions, "past_key_values": cache, "use_cache": True}
            return
        options: dict[str, Any] = {"use_cache": False}
        if prefix:
            cache = for_rows(self._kept(context, cached), len(layout.ids))
            options = {"use_cache": True, "past_key_values": cache}
        if packed or any(len(row.branches) > 1 for row in rows):
            options |= masked(self.model, rows, prefix, layout)
        yield options

    def _at(
        self, ids: Tensor, options: dict[str, Any], spots: list[tuple[int, int]], targets: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Natural logarithm of each target's probability at its (row, position), float64, and whether it is the top."""
        device = self.model.device
        where, target = torch.tensor(spots, device=device), torch.tensor(targets, device=device)
        with _hidden_states_at(self.model, where[:, 0], where[:, 1]) as narrowed:
            logits = self.model(ids.to(device), **options).logits
        logits = logits[0] if narrowed else logits[where[:, 0], where[:, 1]]
        log_probs, greedy = [], []
        for first in range(0, len(spots), SLICE):
            part = slice(first, first + SLICE)
            rows = logits[part].float()
            wanted = target[part].unsqueeze(-1)
            # On a CPU torch's float32 log_softmax is off by 1e-5 a token; lm-eval's answers are off by the same.
            log_probs.append(rows.log_softmax(-1).gather(-1, wanted).squeeze(-1))
            greedy.append(rows.argmax(-1) == target[part])
        return torch.cat(log_probs).double().cpu(), torch.cat(greedy).cpu()

    def _kept(self, prefix: tuple[int, ...], of: Callable[[Any, tuple[int, ...]], Any]) -> Any:
        """What `of` gives for the model and a prefix, computed once for batches that follow each other."""
        if self._prefix is None or self._prefix[:2] != (prefix, of):
            self._prefix = None  # freed before the next one is made
            self._prefix = prefix, of, of(self.model, prefix)
        return self._prefix[2]


@contextmanager
def _hidden_states_at(model: Any, rows: Tensor, positions: Tensor) -> Iterator[list[bool]]:
    """Within it, the output embedding is given hidden states [1, n, hidden] of n positions instead of all.

    Yields:
        A list that is not empty once that has happened; the logits then are [1, n, vocabulary].
    """
    narrowed: list[bool] = []

    def narrow(_module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = arguments
        narrowed.append(True)
        return (hidden[rows, positions].unsqueeze(0), *others)

    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(narrow) if head is not None else None
    try:
        yield narrowed
    finally:
        if handle is not None:
            handle.remove()


def _too_long(batch: Batch, window: int) -> bool:
    """Whether a batch needs a mask of its own, which knows no window, for rows that are longer than one."""
    has_mask = batch.packed or any(len(row.branches) > 1 for row in batch.rows)
    return has_mask and any(row.length >= window for row in batch.rows)
