"""One pass over all bytes of a checkpoint, in the order they lie on disk: what the checks need to know of each tensor.

Nothing is dequantized. Codes are looked at 8 bytes at a time: adding a constant to every magnitude carries into the
sign bit of those that reach a threshold, so that three operations tell which blocks hold a large value. How many values
are at the maximum is counted in each eighth MiB and the first of every tensor; all else takes every byte. It is numpy
that computes: torch would spread these short operations over threads, which wait for each other on a busy machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from halfbyte.quant.elements import E8M0_NAN, FP8_BLOCK, e4m3_table
from halfbyte.quant.layouts import StoredLayer
from halfbyte.quant.shards import Shards

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]

_SAMPLED = 8
_E4M3 = e4m3_table(torch.device("cpu")).numpy()
_E4M3_NORMAL = 8
"""The code of the smallest E4M3 value with full precision."""
_E4M3_MINUS_ZERO = 0x80
_ZERO_BLOCK = (0x38, 0x7E)
"""The scales, as bytes, that ModelOpt gives a block of zeros: 1, and 448 where a search chose the scales."""
E4M3_448, E4M3_NAN = 0x7E, 0x7F
# Magnitudes that the largest value of a block, row or tensor must reach; 3 of 6 and 224 of 448.
_HALF_E2M1, _HALF_E4M3 = 5, 0x76


@dataclass
class Codes:
    """A quantized weight's codes."""

    values: int = 0
    saturated: float = 0.0
    """Share of values at the format's maximum, of those sampled."""
    not_a_number: int = 0
    """FP8 codes that stand for NaN."""
    groups: int = 0
    """Groups of values that share a scale: blocks, rows, squares, or the tensor itself."""
    empty: int = 0
    """Groups whose values are all zero."""
    weak: int = 0
    """Other groups whose largest value is under half the format's maximum, though their scale has full precision."""
    unmarked: int = 0
    """NVFP4 blocks of zeros with another scale than ModelOpt gives those."""
    _sampled: int = 0
    _at_maximum: int = 0


@dataclass
class Numbers:
    """A tensor of scales, or one that is kept as it is."""

    values: int = 0
    smallest: float = float("inf")
    largest: float = float("-inf")
    zeros: int = 0
    not_finite: bool = False
    ones: bool = False
    """Whether every value is 1."""


@dataclass
class Survey:
    """What one pass found, by tensor name."""

    codes: dict[str, Codes] = field(default_factory=dict)
    scales: dict[str, Numbers] = field(default_factory=dict)
    kept: dict[str, Numbers] = field(default_factory=dict)


def survey(shards: Shards, layers: list[StoredLayer], scales: set[str]) -> Survey:
    """Reads every tensor once.

    Args:
        shards: The files.
        layers: The quantized weights.
        scales: The names of the tensors that are scales.

    Raises:
        UserError: when a file ends while it is read.
    """
    found = Survey()
    by_codes = {layer.codes: layer for layer in layers}
    for name in shards:
        if name in by_codes:
            found.codes[name] = _codes(shards, by_codes[name])
        elif name in scales:
            found.scales[name] = _scale(shards, name)
        else:
            found.kept[name] = _kept(shards, name)
    return found


def _repeated(byte: int) -> np.uint64:
    return np.uint64(int.from_bytes(bytes([byte]) * 8, "little"))


def _reach(words: Words, threshold: int, bits: int) -> Words:
    """For each word, nonzero where one of its magnitudes is at least `threshold`; 4-bit codes or 8-bit ones."""
    if bits == 4:
        sign, carry = _repeated(0x88), _repeated((8 - threshold) * 0x11)
    else:
        sign, carry = _repeated(0x80), _repeated(0x80 - threshold)
    out = words & ~sign
    out += carry
    out &= sign
    return out


def _any(words: Words, per_group: int) -> NDArray[np.bool_]:
    """Whether any word of each group of `per_group` is nonzero."""
    out = words[0::per_group]
    for offset in range(1, per_group):
        out = out | words[offset::per_group]
    return np.not_equal(out, 0)


def _sample(found: Codes, index: int, part: Bytes, bits: int) -> None:
    if index % _SAMPLED:
        return
    found._sampled += len(part) * 8 // bits
    if bits == 4:
        signs = _reach(part.view(np.uint64), 7, 4).view(np.uint8)
        found._at_maximum += sum(int(np.count_nonzero(signs & np.uint8(half))) for half in (0x08, 0x80))
    else:
        found._at_maximum += int(np.count_nonzero((part & np.uint8(0x7F)) == E4M3_448))


def _codes(shards: Shards, layer: StoredLayer) -> Codes:
    entry = shards.entries[layer.codes]
    found = Codes()
    if layer.storage in ("nvfp4", "mxfp4"):
        found.values = 2 * (entry.end - entry.begin)
        if _lies_across(entry.shape, shards.shape(layer.scale)):
            _stacked_fp4(shards, layer, found)
        else:
            _fp4(shards, layer, found)
    else:
        found.values = entry.end - entry.begin
        _fp8(shards, layer, found)
    found.saturated = found._at_maximum / max(found._sampled, 1)
    return found


def _lies_across(codes: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    """Whether blocks run along the second of three dimensions."""
    both = len(codes) == 3 == len(scale) and codes[2] == scale[2] and codes[2] % 8 == 0
    return both and scale[1] > 0 and codes[1] in (8 * scale[1], 16 * scale[1])


def _fp4(shards: Shards, layer: StoredLayer, found: Codes) -> None:
    codes, scale = shards.entries[layer.codes], shards.entries[layer.scale]
    blocks = scale.end - scale.begin
    size = (codes.end - codes.begin) // blocks if blocks else 0
    if size * blocks != codes.end - codes.begin or size not in (8, 16):
        return  # the check of shapes tells
    scales = None
    done = 0
    for index, part in enumerate(shards.chunks(layer.codes, size)):
        _sample(found, index, part, 4)
        words = part.view(np.uint64)
        count = len(part) // size
        high = _any(_reach(words, _HALF_E2M1, 4), size // 8)
        if not high.all():
            if scales is None:
                scales = shards[layer.scale].view(torch.uint8).flatten().numpy()
            _look_closer(words, ~high, scales[done : done + count], layer, found)
        done += count
        found.groups += count


def _look_closer(words: Words, low: NDArray[np.bool_], scales: Bytes, layer: StoredLayer, found: Codes) -> None:
    """Tells blocks of zeros from those that are weak.

    Args:
        words: The blocks' codes.
        low: Which blocks have no large value.
        scales: The blocks' scales, as bytes.
        layer: Whose they are.
        found: Where they are counted.
    """
    empty = ~_any(words & ~_repeated(0x88), len(words) // len(low))
    if layer.storage == "nvfp4":
        full = (scales >= _E4M3_NORMAL) & (scales < E4M3_NAN)
    else:
        full = (scales > 0) & (scales < E8M0_NAN)
    found.empty += int(empty.sum())
    if layer.storage == "nvfp4":
        marked = np.isin(scales, _ZERO_BLOCK)
        found.unmarked += int((empty & full & ~marked).sum())
    found.weak += int((low & full & ~empty).sum())


def _stacked_fp4(shards: Shards, layer: StoredLayer, found: Codes) -> None:
    """A stack [experts, in / 2, out], whose blocks do not lie in a row: each expert is turned around in memory."""
    codes, scale = shards[layer.codes], shards[layer.scale]
    size = codes.shape[1] // scale.shape[1]
    for expert in range(len(codes)):
        turned = codes[expert].T.contiguous().flatten().numpy()
        _sample(found, expert, turned, 4)
        scales = scale[expert].view(torch.uint8).T.contiguous().flatten().numpy()
        words = turned.view(np.uint64)
        _look_closer(words, ~_any(_reach(words, _HALF_E2M1, 4), size // 8), scales, layer, found)
        found.groups += len(scales)


def _fp8(shards: Shards, layer: StoredLayer, found: Codes) -> None:
    shape = shards.shape(layer.codes)
    row = shape[-1] if shape else 1
    scales = shards[layer.scale].flatten() if layer.storage == "mxfp8" else None
    rows = FP8_BLOCK if layer.storage == "fp8_block" else 1
    largest = 0
    done = 0
    for index, part in enumerate(shards.chunks(layer.codes, row * rows)):
        _sample(found, index, part, 8)
        magnitudes = part & np.uint8(0x7F)
        top = int(magnitudes.max(initial=0))
        largest = max(largest, min(top, E4M3_448))
        if top == E4M3_NAN:
            found.not_a_number += int((magnitudes == E4M3_NAN).sum())
        if scales is not None:
            done = _mx_rows(part, scales.numpy(), done, found)
        elif layer.storage == "fp8_channel":
            _groups(magnitudes.reshape(-1, row).max(axis=1), found)
        elif layer.storage == "fp8_block":
            _squares(magnitudes.reshape(-1, row), found)
    if layer.storage == "fp8":
        _groups(np.array([largest]), found)


def _groups(largest: NDArray[np.integer[np.typing.NBitBase]], found: Codes) -> None:
    found.groups += len(largest)
    found.empty += int((largest == 0).sum())
    found.weak += int(((largest > 0) & (largest < _HALF_E4M3)).sum())


def _squares(rows: Bytes, found: Codes) -> None:
    starts = np.arange(0, rows.shape[1], FP8_BLOCK)
    for top in range(0, len(rows), FP8_BLOCK):
        _groups(np.maximum.reduceat(rows[top : top + FP8_BLOCK].max(axis=0), starts), found)


def _mx_rows(part: Bytes, scales: Bytes, done: int, found: Codes) -> int:
    """Blocks of 32 bytes, which are four words."""
    if len(part) % 32 or done + len(part) // 32 > len(scales):
        return done  # the check of shapes tells
    words = part.view(np.uint64)
    count = len(words) // 4
    high = _any(_reach(words, _HALF_E4M3, 8), 4)
    if not high.all():
        empty = ~_any(words & ~_repeated(0x80), 4)
        full = scales[done : done + count] > 0
        found.empty += int(empty.sum())
        found.weak += int((full & ~empty & ~high).sum())
    found.groups += count
    return done + count


def _scale(shards: Shards, name: str) -> Numbers:
    dtype = shards.dtype(name)
    if dtype not in ("F8_E4M3", "U8", "F8_E8M0"):
        return _numbers(shards[name].float().numpy())
    e4m3 = dtype == "F8_E4M3"
    special = E4M3_NAN if e4m3 else E8M0_NAN
    seen: set[int] = set()
    count = zeros = 0
    for part in shards.chunks(name):
        low, high = int(part.min()), int(part.max())
        # Codes below NaN are ordered as their values, so that the ends tell enough.
        seen |= {low, high} if high < special else {int(code) for code in np.unique(part)}
        count += len(part)
        if e4m3 and (low == 0 or high >= _E4M3_MINUS_ZERO):
            zeros += int(np.count_nonzero((part & np.uint8(0x7F)) == 0))
    codes = np.array(sorted(seen))
    values = _E4M3[codes] if e4m3 else np.where(codes == E8M0_NAN, np.nan, np.exp2(np.minimum(codes, 254) - 127.0))
    found = _numbers(values)
    found.values, found.zeros = count, zeros
    return found


def _numbers(values: NDArray[np.floating[np.typing.NBitBase]]) -> Numbers:
    finite = values[np.isfinite(values)]
    return Numbers(
        values=values.size,
        smallest=float(finite.min(initial=np.inf)),
        largest=float(finite.max(initial=-np.inf)),
        zeros=int((values == 0).sum()),
        not_finite=finite.size < values.size,
        ones=bool((values == 1).all()),
    )


_BITS_OF = {
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "F32": (np.uint32, 2**31 - 1, 255 << 23),
}


def _kept(shards: Shards, name: str) -> Numbers:
    """Whether all is finite, and whether all is zero; the bits of a float without its sign are ordered as its size."""
    kind, magnitude, infinity = _BITS_OF.get(shards.dtype(name), (np.uint8, 0xFF, 0x100))
    top = 0
    values = 0
    for part in shards.chunks(name):
        bits = part.view(kind)
        values += len(bits)
        top = max(top, int((bits & kind(magnitude)).max()))
    return Numbers(values=values, zeros=values if top == 0 else 0, not_finite=top >= infinity)
