"""Keys and values of sequences of any lengths side by side, and the attention that fills and reads them.

A model's own attention function is replaced while it runs here. Each layer hands over the keys and values of its new
tokens, after whatever quantizes a KV cache has rounded them, so that each is rounded once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from halfbyte.eval.layout import additive

NAME = "halfbyte_slots"  # not among transformers' mask functions either, so that its models build no mask

Layers = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [rows, heads, tokens, size] of each layer."""


class Pass(Protocol):
    """One forward pass."""

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """What attention gives for new tokens [rows, heads, new, size] -> [rows, new, heads, size]."""


_running: list[Pass] = []


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    if attention_mask is not None or options.get("position_bias") is not None:
        raise NotImplementedError("an attention with a mask or a bias of its own")
    return _running[-1].attend(module, query, key, value, options), None


AttentionInterface.register(NAME, _attention)


class _Unchanged(Cache):
    """A cache that hands new keys and values on to the attention function."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values."""
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        """Positions are given with each call."""
        return 0


@contextmanager
def running(model: Any, current: Pass) -> Iterator[Cache]:
    """While this lasts, the model's attention is `current`'s; gives the cache to call the model with."""
    config = model.config.get_text_config()
    own = config._attn_implementation
    config._attn_implementation = NAME
    _running.append(current)
    try:
        yield _Unchanged()
    finally:
        _running.pop()
        config._attn_implementation = own


def own_attention(model: Any) -> str:
    """sdpa or eager: what computes the model's attention.

    Raises:
        NotImplementedError: for another one.
    """
    name = str(model.config.get_text_config()._attn_implementation)
    if name not in ("sdpa", "eager"):
        raise NotImplementedError(f"attention implementation {name}")
    return name


def _function(module: Any, name: str) -> Any:
    if name == "sdpa":
        return ALL_ATTENTION_FUNCTIONS["sdpa"]
    for kind in type(module).__mro__:  # a quantized module's class is made on the fly, its base has the function
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise NotImplementedError(f"{type(module).__name__} has no attention function")


def _window(module: Any, options: dict[str, Any]) -> int | None:
    """How many tokens a layer sees, its own included; None for all."""
    found = options.get("sliding_window", getattr(module, "sliding_window", None))
    return int(found) if found else None


class Prefill:
    """A pass over the beginnings of sequences, padded on the right, behind a prefix that they share.

    Args:
        name: See own_attention.
        prefix: Keys and values of the prefix, one row.
    """

    def __init__(self, name: str, prefix: Layers | None = None) -> None:
        self.name = name
        self.prefix = prefix or {}
        self.layers: Layers = {}
        """Of the new tokens, when it has run."""
        self._masks: dict[tuple[int | None, int, int], Tensor] = {}

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """See Pass."""
        self.layers[module.layer_idx] = key, value
        if self.prefix:
            keys, values = self.prefix[module.layer_idx]
            key = torch.cat([keys.expand(len(key), -1, -1, -1), key], dim=2)
            value = torch.cat([values.expand(len(value), -1, -1, -1), value], dim=2)
        window = _window(module, options)
        mask = None
        if self.name == "eager" or self.prefix or (window is not None and key.shape[2] > window):
            mask = self._mask(window, query, key.shape[2])
        output: Tensor = _function(module, self.name)(module, query, key, value, mask, **options)[0]
        return output

    def _mask(self, window: int | None, query: Tensor, length: int) -> Tensor:
        new = query.shape[2]
        known = window, new, length
        if known not in self._masks:
            at = torch.arange(length - new, length, device=query.device)[:, None]
            before = torch.arange(length, device=query.device)[None]
            seen = before <= at
            if window is not None:
                seen &= before > at - window
            self._masks[known] = additive(seen, query.dtype)[None, None]
        return self._masks[known]


class Shape(NamedTuple):
    """Of a layer's keys and values."""

    heads: int
    key: int
    value: int
    dtype: torch.dtype


def shapes_of(layers: Layers) -> dict[int, Shape]:
    """The shapes of all layers."""
    return {
        layer: Shape(key.shape[1], key.shape[3], value.shape[3], key.dtype) for layer, (key, value) in layers.items()
    }


def bytes_a_token(shapes: dict[int, Shape]) -> int:
    """Of the keys and values of all layers."""
    return sum(shape.heads * (shape.key + shape.value) * shape.dtype.itemsize for shape in shapes.values())


class Slots:
    """Keys and values of sequences that are being generated, one a slot, all with room for the longest.

    Args:
        name: See own_attention.
        shapes: Of all layers.
        device: Where they are.
    """

    def __init__(self, name: str, shapes: dict[int, Shape], device: torch.device) -> None:
        self.name = name
        self.shapes = shapes
        self.device = device
        self.count = 0
        self.capacity = 0
        """Tokens a slot."""
        self._layers: Layers = {}
        self._rows = torch.zeros(0, dtype=torch.long)
        self._positions = self._rows
        self._length = 0
        self._masks: dict[int | None, Tensor] = {}

    def resize(self, count: int, capacity: int, *, used: int) -> None:
        """Makes room; the first `used` slots keep what fits into the new capacity."""
        length = min(capacity, self.capacity)
        for layer, shape in self.shapes.items():
            new = tuple(
                torch.zeros(count, shape.heads, capacity, size, dtype=shape.dtype, device=self.device)
                for size in (shape.key, shape.value)
            )
            if used:
                for to, of in zip(new, self._layers[layer], strict=True):
                    to[:used, :, :length] = of[:used, :, :length]
            self._layers[layer] = new[0], new[1]  # layer by layer: the old one is freed before the next is made
        self.count, self.capacity = count, capacity

    def clear(self) -> None:
        """Gives the memory back."""
        self._layers = {}
        self._masks = {}
        self.count = self.capacity = 0

    def put(self, slots: Sequence[int], parts: Sequence[tuple[int, Layers, Sequence[int]]]) -> None:
        """Copies into slots: from which position on, keys and values, and the row of them for each slot."""
        where = torch.tensor(slots, device=self.device)
        for start, layers, rows in parts:
            of = torch.tensor(rows, device=self.device)
            for layer, sources in layers.items():
                for to, source in zip(self._layers[layer], sources, strict=True):
                    end = min(self.capacity, start + source.shape[2])  # beyond it is padding
                    to[where, :, start:end] = source[of, :, : end - start]

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copies the first `length` tokens from slots to other slots."""
        of, to = torch.tensor(sources, device=self.device), torch.tensor(targets, device=self.device)
        for layer in self._layers.values():
            for part in layer:
                part[to, :, :length] = part[of, :, :length]

    def begin(self, positions: Tensor, length: int) -> None:
        """Before a pass that adds a token to each of the first slots.

        Args:
            positions: Where each goes, int64 [rows].
            length: Tokens that are looked at, the new ones among them.
        """
        self._rows = torch.arange(len(positions), device=self.device)
        self._positions = positions
        self._length = length
        self._masks = {}

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """See Pass; one new token a row."""
        keys, values = self._layers[module.layer_idx]
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        rows = len(query)
        keys, values = keys[:rows, :, : self._length], values[:rows, :, : self._length]
        mask = self._mask(_window(module, options), query.dtype)
        if self.name == "eager":
            output: Tensor = _function(module, self.name)(module, query, keys, values, mask, **options)[0]
            return output
        # The query heads that read the same keys stand where other queries would: no key is copied for each of them.
        grouped = query.reshape(rows, keys.shape[1], -1, query.shape[-1])
        output = torch.nn.functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=options.get("scaling")
        )
        return output.reshape(rows, 1, query.shape[1], -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            before = torch.arange(self._length, device=self.device)[None]
            at = self._positions[:, None]
            seen = before <= at
            if window is not None:
                seen &= before > at - window
            self._masks[window] = additive(seen, dtype)[:, None, None]
        return self._masks[window]
