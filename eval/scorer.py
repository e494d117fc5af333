"""Scores planned batches: prefixes from a KV cache, answers beside each other in one row, logits only where needed."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from halfbyte.eval.layout import lay_out, masked
from halfbyte.eval.sharing import Batch, Request, Row, plan

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
        self._prefix: tuple[tuple[int, ...], Any] | None = None
        self._most: int | None = None
        """Tokens, cached ones included, that have fitted into memory since it was too little once."""

    @cached_property
    def shares(self) -> bool:
        """Whether prompts may be shared, tried at the first plan: what only generates never asks."""
        return _shares_exactly(self.model)

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
        layout = lay_out(rows, prefix, packed=packed)
        options: dict[str, Any] = {"use_cache": False}
        if prefix:
            cache = self._cache(rows[0].context[:prefix], len(layout.ids))
            options = {"use_cache": True, "past_key_values": cache}
        if packed or any(len(row.branches) > 1 for row in rows):
            options |= masked(self.model, rows, prefix, layout)
        spots = [
            (sequence, start + spot - prefix)
            for row, (sequence, start) in zip(rows, layout.starts, strict=True)
            for spots in row.spots
            for spot in spots
        ]
        targets = [token for row in rows for member in row.members for token in requests[member].continuation]
        log_probs, greedy = self._at(layout.ids, options, spots, targets)
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
        """The prefix's keys and values for each row: views, which a forward pass copies and does not change."""
        if self._prefix is None or self._prefix[0] != prefix:
            self._prefix = None  # freed before the next one is made
            self._prefix = prefix, _cached(self.model, prefix)
        return _for_rows(self._prefix[1], rows)


def _cached(model: Any, prefix: tuple[int, ...]) -> Any:
    """The keys and values of a prefix."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    ids = torch.tensor([prefix], device=model.device)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def _for_rows(cache: Any, rows: int) -> Any:
    """A cache of one row as one of several: views, which a forward pass copies and does not change."""
    cache = copy.copy(cache)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in cache.layers:
        layer.keys = layer.keys.expand(rows, -1, -1, -1)
        layer.values = layer.values.expand(rows, -1, -1, -1)
    return cache


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


_WINDOWS = ("sliding_window", "window_size", "attention_window", "local_attention")


def attention_window(config: Any) -> int | None:
    """The length of a model's shortest attention window; None where every layer sees everything."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and all(kind == "full_attention" for kind in kinds):
        return None
    if not getattr(text, "use_sliding_window", True):
        return None
    found = [getattr(text, name, None) for name in _WINDOWS]
    return min((int(window) for window in found if isinstance(window, int) and window > 0), default=None)


def _too_long(batch: Batch, window: int) -> bool:
    """Whether a batch needs a mask of its own, which knows no window, for rows that are longer than one."""
    has_mask = batch.packed or any(len(row.branches) > 1 for row in batch.rows)
    return has_mask and any(row.length >= window for row in batch.rows)


def depends_on_length(config: Any) -> str | None:
    """What makes a model's answer for a token depend on the rest of its batch or on how the text is cut; else None."""
    text = config.get_text_config()
    if getattr(text, "attention_chunk_size", None):
        return "chunked attention"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    found = {str(kind.get("rope_type", kind.get("type", ""))) for kind in kinds}
    return next((f"{name} rotary positions" for name in ("longrope", "dynamic") if name in found), None)


def _shares_exactly(model: Any) -> bool:
    """Whether the model reads a prefix from a cache and keeps branches apart.

    What is known not to is refused; the rest is tried on a few tokens. Models with recurrent layers, or with an
    attention that takes no mask of its own, do not.
    """
    reason = depends_on_length(model.config)
    if reason is None and "position_ids" not in inspect.signature(model.forward).parameters:
        reason = f"{type(model).__name__} takes no position_ids"  # as with ALiBi, which counts places in the row
    # Rounded activations at the edge of two codes may differ on one text, and hardly on three.
    reasons = [reason] if reason else [_try_sharing(model, seed) for seed in range(3)]
    if None in reasons:
        return True
    logger.info("prompts are scored one by one: %s", reasons[0])
    return False


def alike(logits: Tensor, alone: Tensor) -> bool:
    """Whether logits [vocabulary] are those of a pass alone, up to rounding.

    By the mean of the differences: in bfloat16 the largest of 150,000 is far off in any model.
    """
    return float((logits - alone).square().mean().sqrt()) <= 0.2 * float(alone.std()) + 1e-6


@torch.inference_mode()
def _try_sharing(model: Any, seed: int) -> str | None:
    """Why two rows with a cached prefix and two branches each differ from single forward passes; None: they do not."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    window = attention_window(model.config)
    size = 12 if window is None or window > 5 * 12 else 1  # a row below is four times as long, and stays in a window
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (8, size), generator=draw).tolist()
    prefix = tuple(tokens[0])
    rows = [
        Row((*prefix, *tokens[1]), [tuple(tokens[2]), tuple(tokens[3])]),
        Row((*prefix, *tokens[4], *tokens[5]), [tuple(tokens[6][: size // 2 + 1]), tuple(tokens[7][: size // 2])]),
    ]
    try:
        cache = _cached(model, prefix)
        if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
            return f"{type(model).__name__} caches more than keys and values"
        alone = [
            [model(torch.tensor([[*row.context, *branch]], device=model.device), use_cache=False).logits[0, -1].float()
             for branch in row.branches]
            for row in rows
        ]  # fmt: skip
        for packed in (False, True):
            layout = lay_out(rows, size, packed=packed)
            options = {"past_key_values": _for_rows(cache, len(layout.ids)), **masked(model, rows, size, layout)}
            together = model(layout.ids.to(model.device), use_cache=True, **options).logits.float()
            for row, logits, (sequence, start) in zip(rows, alone, layout.starts, strict=True):
                end = start + len(row.context) - size - 1
                for branch, expected in zip(row.branches, logits, strict=True):
                    end += len(branch)
                    if branch and not alike(together[sequence, end], expected):
                        return f"{type(model).__name__} does not read them from a cache"
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        return f"a shared prefix fails: {error}"
    return None
