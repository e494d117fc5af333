"""Attention of packed rows on a GPU in parts that need no mask: what all rows share, and what each has of its own.

The parts are put together by their normalizers (Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared
Prefixes", 2024, section 3.1). A mask would take the place of the quick kernels, and for each new shape cuDNN would look
for a plan of its own, which takes a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.eval.sharing import Row
from halfbyte.eval.slots import Layers

_LARGEST_HEAD = 256
"""Values of a head that the kernel takes."""


def takes(model: Any) -> bool:
    """Whether the kernel runs where a model of transformers is, in its type."""
    return model.device.type == "cuda" and model.dtype in (torch.bfloat16, torch.float16)


class _Pieces(NamedTuple):
    """Consecutive pieces of the queries, each with its piece of the keys."""

    queries: Tensor
    """int32 [pieces + 1]: where each begins."""
    keys: Tensor
    longest_query: int
    longest_key: int


def _pieces(queries: Sequence[int], keys: Sequence[int], device: torch.device) -> _Pieces:
    def ends(lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    return _Pieces(ends(queries), ends(keys), max(queries), max(keys))


def flash(
    query: Tensor, key: Tensor, value: Tensor, pieces: _Pieces, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of each piece of the queries to its piece of the keys.

    Args:
        query: [queries, heads, size], of 16 bits, on CUDA.
        key: [keys, heads or a divisor of them, size].
        value: As key.
        pieces: Which belong together.
        scale: Of the scores.
        causal: Whether a query sees no later key; queries and keys are then the same tokens.

    Returns:
        The output [queries, heads, size], and the logarithm of the sum of the exponentials [heads, queries], float32.
    """
    # What torch.nn.attention.varlen calls, whose own arguments change from version to version.
    output, normalizer, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, pieces.queries, pieces.keys, pieces.longest_query, pieces.longest_key, 0.0, causal, False,
        scale=scale,
    )  # fmt: skip
    return output, normalizer


def merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, which have none in common; see flash for what is given and returned."""
    share = torch.sigmoid(one[1] - other[1]).mT.unsqueeze(-1)
    output = torch.lerp(other[0].float(), one[0].float(), share).to(one[0].dtype)
    return output, torch.logaddexp(one[1], other[1])


class PackedRows:
    """A forward pass over rows that lie one after another in a sequence, behind a prefix; see slots.Pass.

    Args:
        rows: Each with its context and branches.
        prefix: Keys and values of what all contexts begin with, one row a layer; empty for none.
        length: Tokens of it.
        device: Where the model is.
    """

    def __init__(self, rows: Sequence[Row], prefix: Layers, length: int, device: torch.device) -> None:
        self._prefix = prefix
        contexts = [len(row.context) - length for row in rows]
        branches = [sum(map(len, row.branches)) for row in rows]
        own = [size for context, row in zip(contexts, rows, strict=True) for size in (context, *map(len, row.branches))]
        own = [size for size in own if size]
        self._own = _pieces(own, own, device)
        self._shared = _pieces([sum(own)], [length], device)
        sizes = [size for pair in zip(contexts, branches, strict=True) for size in pair]
        places = torch.split(torch.arange(sum(own)), sizes)
        self._branches: Tensor | None = None
        if any(branches):
            has = [at for at, size in enumerate(branches) if size]
            self._branches = torch.cat([places[2 * at + 1] for at in has]).to(device)
            self._contexts = torch.cat([places[2 * at] for at in has]).to(device)
            self._to_contexts = _pieces([branches[at] for at in has], [contexts[at] for at in has], device)

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """See slots.Pass.

        Raises:
            NotImplementedError: for an attention that is more than a product, a softmax and a product.
        """
        more = sorted(
            name
            for name, found in options.items()
            if found is not None and name not in _OTHERS and not name.startswith("output_")
        )
        if more or options.get("sliding_window") or query.shape[-1] % 8 or query.shape[-1] > _LARGEST_HEAD:
            raise NotImplementedError(f"attention with {', '.join(more) or 'a window, or heads of an odd size'}")
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
        found = flash(query, key, value, self._own, scale, causal=True)
        if self._branches is not None:
            of = self._contexts
            extra = flash(query[self._branches], key[of], value[of], self._to_contexts, scale, causal=False)
            seen = found[0][self._branches], found[1][:, self._branches]
            output, normalizer = merged(extra, seen)
            found = found[0].index_copy(0, self._branches, output), found[1].index_copy(1, self._branches, normalizer)
        if self._prefix:
            keys, values = (part[0].transpose(0, 1) for part in self._prefix[module.layer_idx])
            found = merged(flash(query, keys, values, self._shared, scale, causal=False), found)
        return found[0][None]


_OTHERS = {
    "cache_position", "dropout", "is_causal", "logits_to_keep", "position_ids", "scaling", "sliding_window",
    "use_cache",
}  # fmt: skip
"""Options that models hand to their attention and that change nothing here; scaling and windows are seen to."""


@contextmanager
def without_plans(device: torch.device) -> Iterator[None]:
    """On CUDA, keeps attention from cuDNN, which looks for a plan of its own for each new shape."""
    if device.type != "cuda":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield
