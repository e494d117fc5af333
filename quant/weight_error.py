"""How far a stored weight is from the original: both are read and compared in pieces that fit a core's cache.

Every value is compared; for AWQ's folded weights in two passes. The error of rounding the original, which takes several
times as long, is that of a sample of its rows. A sample never condemns: where the weight is farther off than the sample
allows, or the sample's error is unusual, every row is rounded. In memory are the pieces, the scales, and of a stack of
experts one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.quant.layouts import StoredLayer
from halfbyte.quant.numerics import (
    FP8_BLOCK,
    fp8_block_dequantize,
    fp8_block_quantize,
    fp8_dequantize,
    fp8_quantize,
    fp8_scale,
    mxfp4_dequantize,
    mxfp4_quantize,
    mxfp8_dequantize,
    mxfp8_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
    nvfp4_scale_2,
)
from halfbyte.quant.packed import dequantize
from halfbyte.quant.shards import Shards

# GPTQ and clipped weights are up to 1.5 times as far from the original as rounded ones; damage starts at twice.
_FACTOR, _SLACK = 1.7, 0.01
BLOCK_ERROR = 0.75
"""The relative error of a block whose scale is twice as large, or whose signs or order are wrong, is above it."""
# A scale that was searched for (local Hessian) may round most of a block to zero, for up to 0.5 % of a layer's blocks;
# none makes a block larger than it was.
_MOST_SHRUNK = 0.02
_PIECE = 2**18
"""Values compared at once."""
_SAMPLE = 2**17
"""Values whose rounding is looked at first: 8192 blocks of NVFP4, whose mean error is known within 1 %."""
_USUAL = 0.15
"""The relative error of rounding ordinary weights is below it in every format: 3 % in FP8, 10 to 13 % in 4 bits."""
_IN_BLOCKS = ("nvfp4", "mxfp4", "mxfp8")

_Rows = Callable[[int, int], Tensor]
"""Rows of a matrix, from the first to before the second."""


class Misfit(Exception):
    """The original has another shape than the stored weight."""


@dataclass(frozen=True)
class Distance:
    """How far a weight is from the original; both errors are relative to the original's size."""

    size: float
    """The root of the sum of the original's squares."""
    error: float
    expected: float
    """Of rounding the original: of a sample of its rows where that was enough to tell."""
    wrong_blocks: int
    """Blocks that are far off and larger than the original's, and those that are smaller where they are many.

    0 where blocks were not looked at.
    """

    @property
    def close(self) -> bool:
        """Whether the weight is as close as its format allows; one with a NaN is not."""
        return self.error <= _FACTOR * self.expected + _SLACK


class _Matrix(NamedTuple):
    """A linear's weight, stored and original, or one expert's of a stack."""

    codes: _Rows
    scale: Tensor
    scale_2: Tensor | None
    original: _Rows


@dataclass
class _Sums:
    size: float = 0.0
    error: float = 0.0
    largest: float = 0.0
    stray: bool = False
    """Whether the stored weight is not zero in a piece where the original is."""
    far: list[Tensor] = field(default_factory=list)
    """The squared errors of blocks that are far off relative to their own size, and larger than the original's."""
    shrunk: list[Tensor] = field(default_factory=list)
    """Likewise of those that are smaller."""
    sample: list[Tensor] = field(default_factory=list)


class _Pair:
    """A stored weight and the tensor of the source that it stands for.

    Raises:
        Misfit: when these differ in shape.
    """

    def __init__(self, checkpoint: Shards, source: Shards, layer: StoredLayer, name: str) -> None:
        self.checkpoint, self.source, self.layer, self.name = checkpoint, source, layer, name
        *stack, rows, width = checkpoint.shape(layer.codes)
        if layer.codes.endswith("_blocks"):
            *stack, rows, width = *stack[:-1], stack[-1], rows * width
        self.stack, self.stored = stack, (rows, width)
        self.scale = checkpoint[layer.scale]
        self.scale_2 = None if layer.scale_2 is None else checkpoint[layer.scale_2].float()
        packed = 2 if layer.storage in ("nvfp4", "mxfp4") else 1
        # A stack may lie across, with blocks along its second dimension; it is turned around, as the original may be.
        self.across = bool(stack) and packed == 2 and self.scale.dim() == 3 and self.scale.shape[2] == width
        self.shape = (width, rows * packed) if self.across else (rows, width * packed)
        straight, turned = (*stack, *self.shape), (*stack, *reversed(self.shape))
        theirs = source.shape(name)
        self.turned = bool(stack) and theirs == turned and (self.across or theirs != straight)
        if theirs != straight and not self.turned:
            raise Misfit(f"stands for a weight of {list(straight)}, the source has {list(theirs)}")
        self.rows = math.prod(stack) * self.shape[0]

    def matrices(self) -> Iterator[_Matrix]:
        """The one of a linear, read row by row, or those of a stack, read one by one."""
        ours, theirs = (self.checkpoint, self.layer.codes), (self.source, self.name)
        rows, width = self.stored
        width_of_source = self.source.shape(self.name)[-1]
        if not self.stack:
            codes, original = partial(_rows, *ours, width), partial(_rows, *theirs, width_of_source)
            yield _Matrix(codes, self.scale, self.scale_2, original)
            return
        rows_of_source = self.source.shape(self.name)[-2]
        for expert in range(self.stack[0]):
            stored = _rows(*ours, width, expert * rows, (expert + 1) * rows)
            plain = _rows(*theirs, width_of_source, expert * rows_of_source, (expert + 1) * rows_of_source)
            yield _Matrix(
                partial(_slice, stored.mT.contiguous() if self.across else stored),
                self._scale_of(expert),
                self.scale_2 if self.scale_2 is None or self.scale_2.numel() == 1 else self.scale_2[expert],
                partial(_slice, plain.mT.contiguous() if self.turned else plain),
            )

    def _scale_of(self, expert: int) -> Tensor:
        scale, storage = self.scale, self.layer.storage
        if storage == "fp8" and scale.numel() == self.stack[0]:
            return scale.flatten()[expert]
        own = scale[expert] if scale.dim() >= 3 or (storage == "fp8_channel" and scale.dim() == 2) else scale
        return own.mT.contiguous() if self.across else own

    def steps(self) -> Iterator[tuple[int, int]]:
        """The rows of each piece of a matrix."""
        rows, columns = self.shape
        unit = FP8_BLOCK if self.layer.storage == "fp8_block" else 1
        step = max(_PIECE // columns // unit, 1) * unit
        yield from ((first, min(first + step, rows)) for first in range(0, rows, step))

    def pieces(self, matrix: _Matrix) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of the stored weight and of the original, both in float32."""
        layer, (rows, columns) = self.layer, self.shape
        low_rank = [self.checkpoint[name].float() for name in (layer.lora_b, layer.lora_a) if name is not None]
        smooth = None if layer.pre_quant_scale is None else self.checkpoint[layer.pre_quant_scale].float()
        scale = matrix.scale
        if layer.storage == "fp8_channel":
            scale = scale.reshape(-1)
        elif layer.storage == "fp8_block" and scale.numel() > 1:
            scale = scale.reshape(-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        by_column = layer.storage == "fp8_channel" and bool(self.stack) and scale.numel() == columns != rows
        for first, last in self.steps():
            codes = matrix.codes(first, last)
            if by_column:
                weight = codes.float().mul_(scale.float())
            else:
                part = _of_rows(layer, scale, first, last)
                weight = dequantize(layer.storage, codes, part, matrix.scale_2, torch.float32)
            if len(low_rank) == 2:
                weight += low_rank[0][first:last] @ low_rank[1]
            if smooth is not None:
                weight *= smooth
            yield weight, matrix.original(first, last).float()


def _rows(shards: Shards, name: str, width: int, first: int, last: int) -> Tensor:
    return shards.part(name, first * width, last * width).view(-1, width)


def _slice(matrix: Tensor, first: int, last: int) -> Tensor:
    return matrix[first:last]


def _of_rows(layer: StoredLayer, scale: Tensor, first: int, last: int) -> Tensor:
    """The scales of some rows."""
    if layer.storage == "fp8" or scale.numel() == 1:
        return scale
    if layer.storage == "fp8_block":
        return scale[first // FP8_BLOCK : -(-last // FP8_BLOCK)]
    return scale[first:last]


def distance(
    checkpoint: Shards, source: Shards, layer: StoredLayer, name: str, *, folded: bool, blocks: bool
) -> Distance:
    """Compares a stored weight with a tensor of the source.

    Args:
        checkpoint: Where the layer is stored.
        source: The original model.
        layer: The stored weight.
        name: The source's tensor.
        folded: Whether AWQ may have multiplied scales into it, one for each row and one for each column.
        blocks: Whether to look at each block of 4-bit and MX formats too.

    Raises:
        Misfit: when the original has another shape.
        ValueError: when codes and scales do not fit each other.
        RuntimeError: likewise.
        UserError: when a file ends too early.
    """
    pair = _Pair(checkpoint, source, layer, name)
    looks = blocks and layer.storage in _IN_BLOCKS
    block = 0
    stride = -(-pair.rows * pair.shape[1] // _SAMPLE)
    sums, row = _Sums(), 0
    for matrix in pair.matrices():
        columns = _column_factors(pair, matrix) if folded else None
        if looks:  # NVFP4 has blocks of 16, or of 32 for FP8 inputs
            block = pair.shape[1] // max(matrix.scale.shape[-1], 1) if matrix.scale.dim() else pair.shape[1]
        for weight, original in pair.pieces(matrix):
            if columns is not None:
                weight *= columns
                weight *= _ratio((weight * original).sum(1, keepdim=True), weight.square().sum(1, keepdim=True))
            sums.sample.append(original[-row % stride :: stride].clone())
            _add(sums, weight, original, block)
            row += len(original)
    size = math.sqrt(sums.size)
    if size == 0:
        return Distance(0.0, math.inf if sums.stray else 0.0, 0.0, 0)
    error, expected = math.sqrt(sums.error) / size, _expected(layer, sums)
    wrong = _wrong_blocks(sums, block, pair.rows * pair.shape[1])
    found = Distance(size, error, expected, wrong)
    if stride > 1 and not (found.close and expected < _USUAL):
        return Distance(size, error, _expected_of_all(pair, sums.largest) / size, wrong)
    return found


def _wrong_blocks(sums: _Sums, block: int, values: int) -> int:
    """How many blocks are wrong; those so small that no answer depends on them are left out."""
    limit = (0.1 * BLOCK_ERROR) ** 2 * sums.size * block / values
    grown, shrunk = (sum(int((errors > limit).sum()) for errors in part) for part in (sums.far, sums.shrunk))
    return grown + (shrunk if shrunk * block > _MOST_SHRUNK * values else 0)


def _add(sums: _Sums, weight: Tensor, original: Tensor, block: int) -> None:
    """Adds one piece, in whose place the differences are left."""
    largest = max(float(original.amax()), -float(original.amin()))
    sums.largest = max(sums.largest, largest)
    sums.stray |= largest == 0 and bool(weight.any())
    difference, original = weight.sub_(original).view(-1), original.view(-1)
    if block:
        errors, sizes = (x.square().view(-1, block).sum(1) for x in (difference, original))
        far = errors > BLOCK_ERROR**2 * sizes
        if bool(far.any()):
            stored = difference.view(-1, block)[far] + original.view(-1, block)[far]
            grown = stored.square().sum(1) > sizes[far]
            sums.far.append(errors[far][grown])
            sums.shrunk.append(errors[far][~grown])
        sums.error += float(errors.sum())
        sums.size += float(sizes.sum())
    else:
        sums.error += float(difference.dot(difference))
        sums.size += float(original.dot(original))


def _expected(layer: StoredLayer, sums: _Sums) -> float:
    """The relative error of rounding the sampled rows; infinite where these are zero, so that all are looked at."""
    rows = torch.cat(sums.sample)
    size = float(rows.norm())
    return float((_rounded(layer, rows, sums.largest) - rows).norm()) / size if size else math.inf


def _expected_of_all(pair: _Pair, largest: float) -> float:
    squares = 0.0
    for matrix in pair.matrices():
        for first, last in pair.steps():
            original = matrix.original(first, last).float()
            squares += float((_rounded(pair.layer, original, largest) - original).square().sum())
    return math.sqrt(squares)


def _rounded(layer: StoredLayer, original: Tensor, largest: float) -> Tensor:
    """Rows of an original whose largest magnitude is `largest`, through the layer's format and back."""
    if layer.storage == "nvfp4":
        return nvfp4_dequantize(nvfp4_quantize(original, nvfp4_scale_2(torch.tensor(largest))))
    if layer.storage == "mxfp4":
        return mxfp4_dequantize(mxfp4_quantize(original))
    if layer.storage == "mxfp8":
        return mxfp8_dequantize(mxfp8_quantize(original))
    if layer.storage == "fp8_block" and layer.parameter == "weight":
        quantized = fp8_block_quantize(original)
        return fp8_block_dequantize(quantized.codes, quantized.scale)
    return fp8_dequantize(fp8_quantize(original, fp8_scale(torch.tensor(largest))))


def _column_factors(pair: _Pair, matrix: _Matrix) -> Tensor:
    """For each column, what brings the stored weight closest to the original, as AWQ may have folded its inverse."""
    product, squares = torch.zeros(2, pair.shape[1], dtype=torch.float64)
    for weight, original in pair.pieces(matrix):
        product += (weight * original).sum(0)
        squares += weight.square_().sum(0)
    return _ratio(product, squares).float()


def _ratio(product: Tensor, squares: Tensor) -> Tensor:
    return (product / squares).nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)
