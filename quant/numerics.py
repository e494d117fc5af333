"""FP4 and FP8 number formats as plain torch: rounding, packing, NVFP4 blocks and FP8 tensors.

Everything here follows the order of operations of the checkpoints that NVIDIA ModelOpt writes and of its kernels, so
that a value quantized here has the same bits. Arithmetic is in float32 whatever the input's type.

Sources: OCP Microscaling Formats (MX) specification v1.0, section 5.3 (E2M1) and 5.1 (E4M3); NVIDIA, "Introducing NVFP4
for Efficient and Accurate Low-Precision Inference" (2025): blocks of 16 E2M1 values share one E4M3 scale, and a tensor
has one float32 scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9
"""The smallest positive E4M3 value."""
NVFP4_BLOCK = 16
MX_BLOCK = 32

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1 by code; bit 3 of a code is the sign."""
_KERNEL_TINY_SCALE = 1e-5
"""ModelOpt's NVFP4 kernels treat a block whose scale is below this as zero."""


class NVFP4(NamedTuple):
    """A tensor in NVFP4, as it lies in a checkpoint."""

    codes: Tensor
    """uint8 [..., n / 2]: two E2M1 codes a byte, the even element in the low half."""
    scale: Tensor
    """float8_e4m3fn [..., n / 16]: one scale a block."""
    scale_2: Tensor
    """float32 scalar: the tensor's scale; a value is E2M1 x scale x scale_2."""


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


class FP8(NamedTuple):
    """A tensor in FP8 with one scale, or one a row, as it lies in a checkpoint."""

    codes: Tensor
    """float8_e4m3fn, the tensor's own shape."""
    scale: Tensor
    """float32 scalar, or one a row: [rows] or [rows, 1]; a value is code x scale."""


def _e2m1_magnitudes_(x: Tensor) -> Tensor:
    """Magnitudes (float32, changed in place) rounded to E2M1, half to even, saturating at 6.

    The grid's step is half the power of two at or below x, and at least 0.5. Adding 1.5 x 2^23 steps pushes all finer
    bits out of a float32, which rounds them half to even; subtracting it again leaves the rounded value.
    """
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=1.0, max=4.0)
    push = power.mul_(0.5 * 1.5 * 2**23)
    return x.add_(push).sub_(push).clamp_(max=E2M1_MAX)


def _signed(magnitude: Tensor, like: Tensor) -> Tensor:
    """The magnitude with the sign of another tensor; -0.0 counts as positive, as in ModelOpt's kernels."""
    return torch.where(like >= 0, magnitude, -magnitude)


def e2m1_round(x: Tensor) -> Tensor:
    """x rounded to the E2M1 grid, in float32; NaN stays NaN."""
    return _signed(_e2m1_magnitudes_(x.float().abs()), x)


def e2m1_codes(x: Tensor) -> Tensor:
    """Rounds to E2M1, half to even, saturating at 6: uint8 codes of x's shape.

    The sign bit is set for x < 0, also where x rounds to zero, as ModelOpt packs it. NaN has no E2M1 code and becomes
    the largest magnitude.
    """
    magnitude = _e2m1_magnitudes_(x.float().abs()).nan_to_num_(nan=E2M1_MAX)
    # 0, 0.5, 1, 1.5, 2 are codes 0 to 4; 3 and 4 are 5 and 6; 6 is 7.
    codes = torch.where(magnitude <= 2, magnitude * 2, torch.where(magnitude <= 4, magnitude + 2, 7.0))
    return (codes + (x < 0) * 8.0).to(torch.uint8)


def e2m1_decode(codes: Tensor) -> Tensor:
    """The float32 values of E2M1 codes (uint8, 0 to 15)."""
    values = torch.tensor(E2M1_VALUES, device=codes.device, dtype=torch.float32)
    return torch.cat([values, -values])[codes.long()]


def pack_e2m1(codes: Tensor) -> Tensor:
    """Two codes a byte, the even element in the low half: uint8 [..., n] to uint8 [..., n / 2].

    Raises:
        ValueError: when the last dimension is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"E2M1 packs pairs; the last dimension of {tuple(codes.shape)} is odd")
    return (codes[..., 1::2] << 4) | codes[..., 0::2]


def unpack_e2m1(packed: Tensor) -> Tensor:
    """The reverse of pack_e2m1: uint8 [..., n / 2] to uint8 [..., n]."""
    return torch.stack([packed & 0x0F, packed >> 4], dim=-1).flatten(-2)


def e4m3_round(x: Tensor) -> Tensor:
    """float8_e4m3fn nearest to x, half to even, saturating at 448 (a bare cast would give NaN above 464)."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _blocks(x: Tensor, size: int) -> Tensor:
    if x.shape[-1] % size:
        raise ValueError(f"the last dimension of {tuple(x.shape)} is not a multiple of the block size {size}")
    return x.reshape(*x.shape[:-1], -1, size)


def nvfp4_scale_2(amax: Tensor) -> Tensor:
    """The tensor's float32 scale for its largest magnitude: the largest block scale lands on 448."""
    return amax.float() / (E2M1_MAX * E4M3_MAX)


def nvfp4_quantize(x: Tensor, scale_2: Tensor) -> NVFP4:
    """Weights [..., n] to NVFP4 as ModelOpt exports them; n must be a multiple of 16.

    A block of zeros gets scale 1; a scale below the smallest E4M3 value is raised to it, so that no scale is zero.
    """
    blocks = _blocks(x.float(), NVFP4_BLOCK)
    scale = blocks.abs().amax(dim=-1) / (E2M1_MAX * scale_2)
    scale = torch.where(scale == 0, 1.0, scale).clamp(E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = e2m1_codes(blocks / (scale.float() * scale_2).unsqueeze(-1)).flatten(-2)
    return NVFP4(pack_e2m1(codes), scale, scale_2)


def nvfp4_dequantize(q: NVFP4, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of an NVFP4 tensor: computed in float32, rounded once to `dtype`."""
    scale = (q.scale.float() * q.scale_2).unsqueeze(-1)
    # A table of both values of every byte takes half the look-ups that unpacking first would.
    pairs = e2m1_decode(unpack_e2m1(torch.arange(256, dtype=torch.uint8, device=q.codes.device).unsqueeze(-1)))
    values = pairs[q.codes.int()].flatten(-2)
    return (_blocks(values, NVFP4_BLOCK) * scale).flatten(-2).to(dtype)


def nvfp4_fake_quantize(x: Tensor, amax: Tensor) -> Tensor:
    """x [..., n] through NVFP4 and back in x's type, with block scales taken from x: ModelOpt's dynamic kernel.

    Unlike weights at export, a block whose scale is under 1e-5 becomes zero here, as in the kernel. A last block that
    is not full is filled with zeros, which do not change its largest magnitude.

    Args:
        x: Activations or weights.
        amax: float32 scalar, the calibrated largest magnitude; blocks above it saturate.
    """
    if x.numel() == 0:
        return x.clone()
    length = x.shape[-1]
    missing = -length % NVFP4_BLOCK
    blocks = _blocks(torch.nn.functional.pad(x, (0, missing)) if missing else x, NVFP4_BLOCK).float()
    scale_2 = nvfp4_scale_2(amax)
    scale_2 = torch.where(scale_2 > 0, scale_2, 1e-12)
    magnitude = blocks.abs()
    block_max = magnitude.amax(dim=-1, keepdim=True)
    scale = (block_max / (E2M1_MAX * scale_2)).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn).float() * scale_2
    scale = torch.where(scale >= _KERNEL_TINY_SCALE, scale, 1.0)
    rounded = _e2m1_magnitudes_(magnitude.div_(scale)).mul_(scale)
    return _signed(rounded, blocks).flatten(-2)[..., :length].to(x.dtype)


def e8m0_decode(codes: Tensor) -> Tensor:
    """float32 values 2^(code - 127) of E8M0 codes (uint8); 255 is NaN. (OCP MX specification v1.0, section 5.4.1.)"""
    bits = codes.int() << 23
    bits = torch.where(codes == 0, 0x00400000, torch.where(codes == 255, 0x7FC00000, bits))
    return bits.int().view(torch.float32)


def e8m0_encode(scale: Tensor) -> Tensor:
    """uint8 E8M0 codes of the powers of two at or above `scale`, at least 2^-127 and at most 2^127; NaN is 255."""
    bits = scale.float().view(torch.int32)
    # Above a power of two the exponent grows by one; 2^-127 is the subnormal 0x400000.
    codes = ((bits + 0x007FFFFF) >> 23).clamp(0, 254)
    codes = torch.where(bits <= 0x00400000, 0, codes)
    return torch.where(scale.isnan(), 255, codes).to(torch.uint8)


def _mx_scale(blocks: Tensor, largest: float) -> Tensor:
    amax = blocks.abs().amax(dim=-1)
    return torch.where(amax == 0, 127, e8m0_encode(amax / largest)).to(torch.uint8)


def mxfp4_quantize(x: Tensor) -> MXFP4:
    """x [..., n] to MXFP4; n must be a multiple of 32."""
    blocks = _blocks(x.float(), MX_BLOCK)
    scale = _mx_scale(blocks, E2M1_MAX)
    return MXFP4(pack_e2m1(e2m1_codes(blocks / e8m0_decode(scale).unsqueeze(-1)).flatten(-2)), scale)


def mxfp4_dequantize(q: MXFP4, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of an MXFP4 tensor: computed in float32, rounded once to `dtype`."""
    blocks = _blocks(e2m1_decode(unpack_e2m1(q.codes)), MX_BLOCK)
    return (blocks * e8m0_decode(q.scale).unsqueeze(-1)).flatten(-2).to(dtype)


def mxfp4_fake_quantize(x: Tensor) -> Tensor:
    """x [..., n] through MXFP4 and back in x's type; a last block that is not full is filled with zeros."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % MX_BLOCK))
    return mxfp4_dequantize(mxfp4_quantize(padded), x.dtype)[..., : x.shape[-1]]


def mxfp8_quantize(x: Tensor) -> MXFP8:
    """x [..., n] to MXFP8; n must be a multiple of 32."""
    blocks = _blocks(x.float(), MX_BLOCK)
    scale = _mx_scale(blocks, E4M3_MAX)
    return MXFP8(e4m3_round(blocks / e8m0_decode(scale).unsqueeze(-1)).flatten(-2), scale)


def mxfp8_dequantize(q: MXFP8, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of an MXFP8 tensor: computed in float32, rounded once to `dtype`."""
    return (_blocks(q.codes.float(), MX_BLOCK) * e8m0_decode(q.scale).unsqueeze(-1)).flatten(-2).to(dtype)


def mxfp8_fake_quantize(x: Tensor) -> Tensor:
    """x [..., n] through MXFP8 and back in x's type; a last block that is not full is filled with zeros."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % MX_BLOCK))
    return mxfp8_dequantize(mxfp8_quantize(padded), x.dtype)[..., : x.shape[-1]]


def fp8_scale(amax: Tensor) -> Tensor:
    """The float32 scale that puts a magnitude of `amax` on 448."""
    return amax.float() / E4M3_MAX


def _per_row(scale: Tensor) -> Tensor:
    return scale.unsqueeze(-1) if scale.dim() == 1 else scale


def fp8_quantize(x: Tensor, scale: Tensor) -> FP8:
    """x to FP8 E4M3 with one scale, or one a row ([rows] or [rows, 1]): divided in float32, rounded once."""
    return FP8(e4m3_round(x.float() / _per_row(scale)), scale)


def fp8_dequantize(q: FP8, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of an FP8 tensor: computed in float32, rounded once to `dtype`."""
    return (q.codes.float() * _per_row(q.scale)).to(dtype)


def _block_scales(scale: Tensor, shape: torch.Size, block: int) -> Tensor:
    rows = scale.repeat_interleave(block, dim=-2)[..., : shape[-2], :]
    return rows.repeat_interleave(block, dim=-1)[..., : shape[-1]]


def fp8_block_quantize(x: Tensor, block: int = 128) -> FP8:
    """x [..., rows, columns] to FP8 E4M3 with a float32 scale for each square of `block` x `block` values.

    The last squares of a side that does not divide are smaller. A square of zeros gets scale 1.
    """
    *_, rows, columns = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -columns % block, 0, -rows % block))
    squares = padded.unflatten(-1, (-1, block)).unflatten(-3, (-1, block))
    scale = fp8_scale(squares.abs().amax(dim=(-3, -1)))
    scale = torch.where(scale == 0, 1.0, scale)
    return FP8(e4m3_round(x.float() / _block_scales(scale, x.shape, block)), scale)


def fp8_block_dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, block: int = 128) -> Tensor:
    """The values of an FP8 tensor with a scale a square: computed in float32, rounded once to `dtype`.

    Args:
        codes: float8_e4m3fn [..., rows, columns].
        scale: float32 [..., ceil(rows / block), ceil(columns / block)].
        dtype: Of the result.
        block: The side of a square.
    """
    return (codes.float() * _block_scales(scale, codes.shape, block)).to(dtype)


def amax_of_scale(scale: Tensor, largest: float) -> Tensor:
    """The float32 amax that a kernel must be given so that it computes exactly `scale` = amax / `largest`.

    A checkpoint stores scales; ModelOpt's kernels take amax and divide. scale x largest can be some units in the last
    place off, hence the look at its neighbours; of several that fit, the one with most trailing zero bits is taken,
    since amax usually was a bfloat16 value. The division runs on the scale's own device, since CUDA multiplies by the
    reciprocal instead; a scale made on another device may then have no exact amax, and the nearest is returned.

    Args:
        scale: float32 scalar, positive and finite.
        largest: 448 for FP8, 6 x 448 for NVFP4.
    """
    start = (scale.double() * largest).float()
    infinity = torch.tensor(float("inf"), device=scale.device)
    below, above = torch.nextafter(start, -infinity), torch.nextafter(start, infinity)
    near = [start, below, above, torch.nextafter(below, -infinity), torch.nextafter(above, infinity)]
    fits = [amax for amax in near if torch.equal(amax / largest, scale.float())]
    return max(fits or [start], key=lambda amax: _trailing_zeros(int(amax.view(torch.int32).item())))


def _trailing_zeros(bits: int) -> int:
    return (bits & -bits).bit_length()
