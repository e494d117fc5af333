"""Scores planned batches: prefixes from a KV cache, answers beside each other in one row, logits only where needed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from halfbyte.eval.sharing import Batch, Request, Row, plan

logger = logging.getLogger(__name__)

BUDGETS = {"cuda": 16384, "cpu": 2048}
"""Tokens a forward pass. More of them make a GPU no faster, and a CPU's caches are small."""
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
        self.shares = _shares_exactly(model)
        self._window = _sliding_window(model.config)
        self._prefix: tuple[tuple[int, ...], Any] | None = None

    def plan(self, requests: list[Request]) -> list[Batch]:
        """Fixed batches of the requests; each is one call of `score`.

        Where a row would be longer than a sliding window, its branches cannot be masked and get rows of their own.
        """
        share = self.shares
        batches = plan(requests, self.budget, share=share)
        if share and self._window is not None and any(_too_long(batch, self._window) for batch in batches):
            batches = plan(requests, self.budget, share=True, branch=False)
        return batches

    @torch.inference_mode()
    def score(self, requests: list[Request], batch: Batch) -> list[tuple[float, bool]]:
        """For each member of a batch: the continuation's log-likelihood in nats, and whether greedy decoding gives it.

        Out of memory, the rows are computed in halves; the batch stays one.
        """
        waiting = [batch.rows]
        answers: dict[int, tuple[float, bool]] = {}
        while waiting:
            rows = waiting.pop()
            try:
                answers.update(self._forward(requests, batch.prefix, rows))
            except torch.OutOfMemoryError:
                if len(rows) == 1:
                    raise
                waiting += [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
                logger.info("out of memory with %d rows; computing them in halves", len(rows))
                self._prefix = None
                torch.cuda.empty_cache()
        return [answers[at] for at in batch.members]

    def _forward(
        self, requests: list[Request], prefix: int, rows: list[Row]
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        width = max(row.length for row in rows) - prefix
        ids = torch.zeros(len(rows), width, dtype=torch.long)  # the padding is on the right, where nothing sees it
        for at, row in enumerate(rows):
            tokens = [*row.context[prefix:], *(token for branch in row.branches for token in branch)]
            ids[at, : len(tokens)] = torch.tensor(tokens)
        options: dict[str, Any] = {"use_cache": False}
        if prefix:
            options = {"use_cache": True, "past_key_values": self._cache(rows[0].context[:prefix], len(rows))}
        if any(len(row.branches) > 1 for row in rows):
            options |= self._branched(rows, prefix, width)
        spots = [(at, spot - prefix) for at, row in enumerate(rows) for spots in row.spots for spot in spots]
        targets = [token for row in rows for member in row.members for token in requests[member].continuation]
        log_probs, greedy = self._at(ids, options, spots, targets)
        done = 0
        for row in rows:
            for member in row.members:
                part = slice(done, done + len(requests[member].continuation))
                done = part.stop
                yield member, (float(log_probs[part].sum()), bool(greedy[part].all()))

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

    def _cache(self, prefix: tuple[int, ...], rows: int) -> Any:
        """The prefix's keys and values for each row: views of one copy, which a forward pass does not change."""
        from transformers import DynamicCache

        if self._prefix is None or self._prefix[0] != prefix:
            self._prefix = None  # freed before the next one is made
            cache: Any = DynamicCache(config=self.model.config)
            ids = torch.tensor([prefix], device=self.model.device)
            self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            self._prefix = prefix, cache
        cache = copy.copy(self._prefix[1])
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in cache.layers:
            layer.keys = layer.keys.expand(rows, -1, -1, -1)
            layer.values = layer.values.expand(rows, -1, -1, -1)
        return cache

    def _branched(self, rows: list[Row], prefix: int, width: int) -> dict[str, Tensor]:
        """Positions and mask under which each branch follows the context and sees no other branch."""
        device, dtype = self.model.device, self.model.dtype
        positions = torch.arange(prefix, prefix + width).repeat(len(rows), 1)
        owner = torch.zeros(len(rows), width, dtype=torch.long)  # 0: the context; else the number of the branch
        for at, row in enumerate(rows):
            start = len(row.context) - prefix
            for number, branch in enumerate(row.branches, start=1):
                span = slice(start, start + len(branch))
                owner[at, span] = number
                positions[at, span] = len(row.context) + torch.arange(len(branch))
                start = span.stop
        owner = owner.to(device)
        seen = (owner[:, None, :] == 0) | (owner[:, None, :] == owner[:, :, None])
        seen &= torch.ones(width, width, dtype=torch.bool, device=device).tril()
        seen = torch.nn.functional.pad(seen, (prefix, 0), value=True)
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
        return {"position_ids": positions.to(device), "attention_mask": mask[:, None]}


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


def _sliding_window(config: Any) -> int | None:
    """The length of a model's shortest attention window; None where every layer sees everything."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    if window is None or not getattr(text, "use_sliding_window", True):
        return None
    return int(window) if kinds is None or any("sliding" in kind or "chunked" in kind for kind in kinds) else None


def _too_long(batch: Batch, window: int) -> bool:
    return any(len(row.branches) > 1 and row.length >= window for row in batch.rows)


@torch.inference_mode()
def _shares_exactly(model: Any) -> bool:
    """Whether the model reads a prefix from a cache and keeps branches apart, tried on a few tokens.

    Models with recurrent layers, or with an attention that knows no mask of its own, do not.
    """
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    context, branches = [7 % vocabulary, 11 % vocabulary, 5 % vocabulary], [(3, 2), (1,)]
    row = Row(tuple(context), [tuple(token % vocabulary for token in branch) for branch in branches])
    scorer = PrefixScorer.__new__(PrefixScorer)
    scorer.model, scorer._prefix = model, None
    try:
        alone = [
            model(torch.tensor([[*context, *branch]], device=model.device), use_cache=False).logits[0, -1].float()
            for branch in row.branches
        ]
        options = {"past_key_values": scorer._cache(tuple(context[:2]), 1), "use_cache": True}
        options |= scorer._branched([row], 2, row.length - 2)
        ids = torch.tensor([[context[2], *row.branches[0], *row.branches[1]]], device=model.device)
        logits = model(ids, **options).logits[0].float()
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        logger.info("prompts are scored one by one, since a shared prefix fails: %s", error)
        return False
    spread = float(alone[0].std()) + 1e-6
    worst = max(float((logits[2] - alone[0]).abs().max()), float((logits[3] - alone[1]).abs().max()))
    if worst > 0.1 * spread:
        logger.info("prompts are scored one by one, since %s does not read them from a cache", type(model).__name__)
        return False
    return True
