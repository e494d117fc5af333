"""FP4 and FP8 number formats as plain torch: how tensors lie in checkpoints, and how they get there and back.

What quantizes here follows the checkpoints that NVIDIA ModelOpt writes. The elements (E2M1, E4M3, E8M0) are in
halfbyte.quant.elements, and what fake-quantizes like ModelOpt's CUDA kernels in halfbyte.quant.fake_quantize; both can
be had from here. Arithmetic is in float32 whatever the input's type.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.quant.elements import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    E4M3_TINY,
    FP8_BLOCK,
    MX_BLOCK,
    NVFP4_BLOCK,
    e2m1_codes,
    e2m1_decode,
    e2m1_round,
    e2m1_unpacked,
    e4m3_decode,
    e4m3_round,
    e8m0_decode,
    e8m0_encode,
    pack_e2m1,
    unpack_e2m1,
)
from halfbyte.quant.fake_quantize import (
    fp8_fake_quantize,
    mxfp4_fake_quantize,
    mxfp8_fake_quantize,
    nvfp4_fake_quantize,
    nvfp4_static_fake_quantize,
    straight_through,
)

__all__ = [
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "E4M3_TINY",
    "FP8",
    "FP8_BLOCK",
    "MXFP4",
    "MXFP8",
    "MX_BLOCK",
    "NVFP4",
    "NVFP4_BLOCK",
    "amax_of_scale",
    "e2m1_codes",
    "e2m1_decode",
    "e2m1_round",
    "e2m1_unpacked",
    "e4m3_decode",
    "e4m3_round",
    "e8m0_decode",
    "e8m0_encode",
    "fp8_block_dequantize",
    "fp8_block_quantize",
    "fp8_dequantize",
    "fp8_fake_quantize",
    "fp8_quantize",
    "fp8_scale",
    "mxfp4_dequantize",
    "mxfp4_fake_quantize",
    "mxfp4_quantize",
    "mxfp8_dequantize",
    "mxfp8_fake_quantize",
    "mxfp8_quantize",
    "nvfp4_dequantize",
    "nvfp4_fake_quantize",
    "nvfp4_quantize",
    "nvfp4_scale_2",
    "nvfp4_static_fake_quantize",
    "pack_e2m1",
    "scale_of_amax",
    "straight_through",
    "unpack_e2m1",
]


def _blocks(x: Tensor, size: int) -> Tensor:
    if x.shape[-1] % size:
        raise ValueError(f"the last dimension of {tuple(x.shape)} is not a multiple of the block size {size}")
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


# NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference" (2025): blocks of 16 E2M1 values
# share one E4M3 scale, and a tensor has one float32 scale.


def _decoded(dtype: torch.dtype) -> torch.dtype:
    """The type to decode codes to: `dtype` where it has 16 bits, which are half the bytes to move on a GPU."""
    return dtype if dtype.itemsize == 2 else torch.float32


def _scaled(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """values (changed in place) x scale in `dtype`, multiplied in float32 and rounded once."""
    # torch multiplies in the wider of two types, and rounds to that of `values` at the end; a scalar is no such type.
    return values.mul_(scale.reshape(1) if scale.dim() == 0 else scale).to(dtype)


class NVFP4(NamedTuple):
    """A tensor in NVFP4, as it lies in a checkpoint."""

    codes: Tensor
    """uint8 [..., n / 2]: two E2M1 codes a byte, the even element in the low half."""
    scale: Tensor
    """float8_e4m3fn [..., n / 16]: one scale a block."""
    scale_2: Tensor
    """float32 scalar: the tensor's scale; a value is E2M1 x scale x scale_2."""


def nvfp4_scale_2(amax: Tensor) -> Tensor:
    """The tensor's float32 scale for its largest magnitude: the largest block scale lands on 448."""
    return amax.float() / (E2M1_MAX * E4M3_MAX)


def nvfp4_quantize(x: Tensor, scale_2: Tensor) -> NVFP4:
    """Weights [..., n] to NVFP4 as ModelOpt exports them; n must be a multiple of 16.

    A block of zeros gets scale 1; a scale below the smallest E4M3 value is raised to it, so that no scale is zero.
    Infinities saturate. A block with a NaN gets the scale NaN, so that it reads back as NaN. In a tensor of zeros,
    whose scale_2 is zero, all codes are zero.
    """
    blocks = _blocks(x.float(), NVFP4_BLOCK)
    largest = blocks.abs().amax(dim=-1)
    scale = torch.where(largest == 0, 0.0, largest / (E2M1_MAX * scale_2))
    scale = torch.where(scale == 0, 1.0, scale).clamp(E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
    divisor = scale.float() * scale_2
    codes = e2m1_codes(blocks / torch.where(divisor == 0, 1.0, divisor).unsqueeze(-1)).flatten(-2)
    return NVFP4(pack_e2m1(codes), scale, scale_2)


def nvfp4_dequantize(q: NVFP4, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of an NVFP4 tensor: computed in float32, rounded once to `dtype`."""
    scale = (q.scale.float() * q.scale_2).unsqueeze(-1)
    return _scaled(_blocks(e2m1_unpacked(q.codes, _decoded(dtype)), NVFP4_BLOCK), scale, dtype).flatten(-2)


# MXFP4 and MXFP8: OCP MX specification v1.0, section 5.2: blocks of 32 E2M1 or E4M3 values share one E8M0 scale.
# ModelOpt's scale is the power of two at or above amax / largest. The specification's own conversion (section 6.3)
# takes half of it where the significand of amax is above that of the largest element, and saturates.


class MXFP4(NamedTuple):
    """A tensor in MXFP4, as it lies in a checkpoint."""

    codes: Tensor
    """uint8 [..., n / 2]: two E2M1 codes a byte, the even element in the low half."""
    scale: Tensor
    """uint8 [..., n / 32]: E8M0, one scale a block; a value is E2M1 x scale."""


class MXFP8(NamedTuple):
    """A tensor in MXFP8, as it lies in a checkpoint."""

    codes: Tensor
    """float8_e4m3fn [..., n]."""
    scale: Tensor
    """uint8 [..., n / 32]: E8M0, one scale a block; a value is code x scale."""


def _mx_scale(blocks: Tensor, largest: float) -> Tensor:
    """E8M0 scales as ModelOpt exports them: 2^-127 for zeros, NaN for a block with a NaN."""
    exponent = torch.log2(blocks.abs().amax(dim=-1) / largest).ceil().clamp(-127, 127)
    return torch.where(exponent.isnan(), 255, exponent + 127).to(torch.uint8)


def mxfp4_quantize(x: Tensor) -> MXFP4:
    """x [..., n] to MXFP4 with the scales that ModelOpt exports; n must be a multiple of 32.

    Ties go to even, as the specification and ModelOpt's kernel have it; ModelOpt's export rounds them towards zero. A
    block with a NaN gets the scale NaN; infinities saturate.
    """
    blocks = _blocks(x.float(), MX_BLOCK)
    scale = _mx_scale(blocks, E2M1_MAX)
    return MXFP4(pack_e2m1(e2m1_codes(blocks / e8m0_decode(scale).unsqueeze(-1)).flatten(-2)), scale)


def mxfp4_dequantize(q: MXFP4, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of an MXFP4 tensor: computed in float32, rounded once to `dtype`."""
    values = _blocks(e2m1_unpacked(q.codes, _decoded(dtype)), MX_BLOCK)
    return _scaled(values, e8m0_decode(q.scale).unsqueeze(-1), dtype).flatten(-2)


def mxfp8_quantize(x: Tensor) -> MXFP8:
    """x [..., n] to MXFP8 as ModelOpt exports it; n must be a multiple of 32.

    A block with a NaN gets the scale NaN; infinities saturate.
    """
    blocks = _blocks(x.float(), MX_BLOCK)
    scale = _mx_scale(blocks, E4M3_MAX)
    inverse = e8m0_decode(torch.where(scale == 255, scale, 254 - scale))
    return MXFP8(e4m3_round(blocks * inverse.unsqueeze(-1)).flatten(-2), scale)


def mxfp8_dequantize(q: MXFP8, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of an MXFP8 tensor: computed in float32, rounded once to `dtype`."""
    values = _blocks(e4m3_decode(q.codes, _decoded(dtype)), MX_BLOCK)
    return _scaled(values, e8m0_decode(q.scale).unsqueeze(-1), dtype).flatten(-2)


# FP8: E4M3 with float32 scales: one a tensor, one a row (channel or token), or one for each square of 128 x 128
# (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2).


class FP8(NamedTuple):
    """A tensor in FP8, as it lies in a checkpoint."""

    codes: Tensor
    """float8_e4m3fn, the tensor's own shape."""
    scale: Tensor
    """float32: a scalar, one a row ([rows] or [rows, 1]), or one a square; a value is code x scale."""


def fp8_scale(amax: Tensor) -> Tensor:
    """The float32 scale that puts a magnitude of `amax` on 448; an amax of zero counts as 1."""
    amax = amax.float()
    return torch.where(amax == 0, 1.0, amax) / E4M3_MAX


def _per_row(scale: Tensor) -> Tensor:
    return scale.float().unsqueeze(-1) if scale.dim() == 1 else scale.float()


def fp8_quantize(x: Tensor, scale: Tensor) -> FP8:
    """x to FP8 with one scale, or one a row: divided in float32, rounded once; infinities saturate, NaN stays NaN."""
    return FP8(e4m3_round(x.float() / _per_row(scale)), scale)


def fp8_dequantize(q: FP8, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of an FP8 tensor with one scale, or one a row: computed in float32, rounded once to `dtype`."""
    return _scaled(e4m3_decode(q.codes, _decoded(dtype)), _per_row(q.scale), dtype)


def _squares(x: Tensor, block: int) -> Tensor:
    """x [..., rows, columns] as [..., ceil(rows / block), block, ceil(columns / block), block], filled with zeros."""
    *_, rows, columns = x.shape
    if rows % block or columns % block:
        x = torch.nn.functional.pad(x, (0, -columns % block, 0, -rows % block))
    *batch, rows, columns = x.shape
    return x.reshape(*batch, rows // block, block, columns // block, block)


def _of_squares(squares: Tensor, shape: torch.Size) -> Tensor:
    return squares.flatten(-2).flatten(-3, -2)[..., : shape[-2], : shape[-1]]


def fp8_block_quantize(x: Tensor, block: int = FP8_BLOCK) -> FP8:
    """x [..., rows, columns] to FP8 with a float32 scale for each square of block x block values.

    The scale is [..., ceil(rows / block), ceil(columns / block)]: the last squares of a side that does not divide are
    smaller. In a square of zeros the amax counts as 1.
    """
    squares = _squares(x.float(), block)
    scale = fp8_scale(squares.abs().amax(dim=(-3, -1)))
    codes = e4m3_round(_of_squares(squares / scale[..., :, None, :, None], x.shape))
    return FP8(codes.contiguous(), scale)


def fp8_block_dequantize(
    codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, block: int = FP8_BLOCK
) -> Tensor:
    """The values of an FP8 tensor with a scale a square: computed in float32, rounded once to `dtype`.

    Args:
        codes: float8_e4m3fn [..., rows, columns].
        scale: float32 [..., ceil(rows / block), ceil(columns / block)].
        dtype: Of the result.
        block: The side of a square.
    """
    squares = _scaled(_squares(e4m3_decode(codes, _decoded(dtype)), block), scale.float()[..., :, None, :, None], dtype)
    return _of_squares(squares, codes.shape).contiguous()


def scale_of_amax(amax: Tensor, largest: float) -> Tensor:
    """amax / largest, float32, correctly rounded on every device: CUDA would multiply by the reciprocal of a number."""
    amax = amax.float()
    return amax / torch.full_like(amax, largest)


def amax_of_scale(scale: Tensor, largest: float) -> Tensor:
    """The float32 amax whose scale_of_amax is exactly `scale`.

    A checkpoint stores scales; ModelOpt's kernels take amax and divide. scale x largest can be some units in the last
    place off, hence the look at its neighbours; of several that fit, the one with most trailing zero bits is taken,
    since amax usually was a bfloat16 value. A scale that ModelOpt has exported on CUDA is amax times a reciprocal, and
    may be no quotient at all; the nearest amax is taken then.

    Args:
        scale: float32 scalar, positive and finite.
        largest: 448 for FP8, 6 x 448 for NVFP4.
    """
    start = (scale.double() * largest).float()
    infinity = torch.tensor(float("inf"), device=scale.device)
    below, above = torch.nextafter(start, -infinity), torch.nextafter(start, infinity)
    near = [start, below, above, torch.nextafter(below, -infinity), torch.nextafter(above, infinity)]
    fits = [amax for amax in near if torch.equal(scale_of_amax(amax, largest), scale.float())]
    return max(fits or [start], key=lambda amax: _trailing_zeros(int(amax.view(torch.int32).item())))


def _trailing_zeros(bits: int) -> int:
    return (bits & -bits).bit_length()
