"""Fake quantization with the bits of ModelOpt's CUDA kernels, on any device: NVFP4, MXFP4, MXFP8 and FP8.

The order of operations, the approximate reciprocals, and what becomes of zeros, infinities and NaN are the kernels', of
nvidia-modelopt 0.47: kernels/quantization/gemm/ and common/. Arithmetic is in float32 whatever the input's type.

Amax becomes a scale on the device where amax lies, as in ModelOpt. Where a CPU divides by a number, torch on CUDA
multiplies by its reciprocal, so that one amax may give scales one unit in the last place apart on the two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from halfbyte.quant.elements import (
    E2M1_MAX,
    E4M3_MAX,
    MX_BLOCK,
    NVFP4_BLOCK,
    e4m3_round,
    e4m3_table,
    e8m0_decode,
    e8m0_encode,
    look_up,
    round_to_e2m1_,
    round_to_e4m3_,
)
from halfbyte.quant.reciprocal import reciprocal

NVFP4_TINY_SCALE = 1e-5
"""NVFP4's dynamic kernel takes 1 for a block scale below this, which makes most such blocks zero."""
_FP8_TINY_AMAX = 2.0**-24
"""The FP8 kernels take 1 for an amax up to this."""
_TINY = torch.finfo(torch.float32).tiny
_HUGE = torch.finfo(torch.float32).max
CHUNK = 2**19
"""Values worked on at once on a CPU: few enough for temporary tensors to be small, enough for all cores."""


class StraightThrough(torch.autograd.Function):
    """A function whose gradient is taken to be the identity, or zero where the magnitude of x is above a limit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], limit: Tensor | None) -> Tensor:
        """function(x); the limit has to broadcast to x."""
        if limit is not None:
            ctx.save_for_backward(x, limit)
        return function(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of x."""
        (gradient,) = gradients
        if ctx.saved_tensors:
            x, limit = ctx.saved_tensors
            gradient = torch.where(x.abs() <= limit, gradient, 0)
        return gradient, None, None


def straight_through(function: Callable[[Tensor], Tensor], x: Tensor, limit: Tensor | None = None) -> Tensor:
    """function(x) with a gradient that passes straight through, as ModelOpt trains with quantizers.

    Args:
        function: A fake quantization.
        x: What it is applied to.
        limit: The amax beyond which the gradient is zero; None where ModelOpt passes all, as for dynamic blocks.
    """
    return cast(Tensor, StraightThrough.apply(x, function, limit))  # type: ignore[no-untyped-call]


def _pass_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return straight_through(function, x) if x.requires_grad and torch.is_grad_enabled() else function(x)


def _in_chunks(function: Callable[..., Tensor], x: Tensor, *more: Tensor) -> Tensor:
    """`function` of x and more, some of their rows at a time on a CPU; it keeps x's shape and type."""
    step = max(1, CHUNK * len(x) // max(1, x.numel()))
    if x.device.type != "cpu" or step >= len(x):
        return function(x, *more)
    result = torch.empty_like(x)
    for target, *parts in zip(*(torch.split(tensor, step) for tensor in (result, x, *more)), strict=True):
        target.copy_(function(*parts))
    return result


def _by_block(function: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    """`function` of the blocks [count, size] along x's last dimension; a last block that is not full ends in zeros."""
    if x.numel() == 0:
        return x.clone()
    length = x.shape[-1]

    def padded(x: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(x, (0, -length % size)) if length % size else x
        done = _in_chunks(function, rows.reshape(-1, size)).view(rows.shape)
        return done[..., :length].contiguous() if length % size else done

    return _pass_gradient(padded, x)


def _largest(magnitude: Tensor) -> tuple[Tensor, bool]:
    """The largest magnitude of each block [count, 1], and whether infinities or NaN are about.

    As in the kernels, NaN is looked past unless a block has nothing else. As integers the bits of magnitudes are in the
    order of the magnitudes with NaN above all, and torch finds the maximum of integers faster.
    """
    bits = magnitude.view(torch.int32).amax(dim=-1, keepdim=True)
    special = int(bits.max()) >= 0x7F800000
    if special:
        known = torch.where(magnitude.isnan(), -1.0, magnitude).amax(dim=-1, keepdim=True)
        return torch.where(known < 0, torch.nan, known), special
    return bits.view(torch.float32), special


def _e2m1_special_(magnitude: Tensor, x: Tensor) -> Tensor:
    """Makes infinities and NaN of scaled magnitudes 6; returns x with NaN negative, as the kernels take it."""
    magnitude.nan_to_num_(nan=E2M1_MAX, posinf=E2M1_MAX)
    return torch.where(x.isnan(), -1.0, x)


def nvfp4_to_e4m3(amax: Tensor) -> tuple[Tensor, Tensor]:
    """float32 scalars, where amax is: what takes a block's amax to its E4M3 scale, and what that then scales by."""
    scale_2 = amax.amax().float() / (E2M1_MAX * E4M3_MAX)
    scale_2 = torch.where(scale_2 > 0, scale_2, 1e-12)
    return reciprocal(scale_2 * E2M1_MAX), scale_2


@lru_cache(maxsize=4096)
def _nvfp4_scales(scale_2: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the E4M3 codes scale by, and the reciprocals of that."""
    scales = e4m3_table(device) * scale_2
    scales = torch.where(scales >= NVFP4_TINY_SCALE, scales, 1.0)
    return scales, reciprocal(scales)


def _nvfp4_fake_(magnitude: Tensor, x: Tensor, special: bool, scale: Tensor, scales: Tensor, inverse: Tensor) -> Tensor:
    """The kernels' common part: magnitudes of blocks (changed in place) and their E4M3 scales, by tables of these."""
    codes = scale.view(torch.uint8).flatten().int()
    magnitude.mul_(inverse.index_select(0, codes).unsqueeze(-1))
    sign = _e2m1_special_(magnitude, x) if special else x
    rounded = round_to_e2m1_(magnitude).mul_(scales.index_select(0, codes).unsqueeze(-1))
    # The kernels negate by 0 - x, which makes no -0.0; one can still come of a small value in float16.
    return rounded.copysign_(sign).add_(0.0).to(x.dtype)


def nvfp4_fake_quantize(x: Tensor, amax: Tensor) -> Tensor:
    """x [..., n] through NVFP4 and back in x's type, with block scales taken from x: ModelOpt's dynamic kernel.

    That is the kernel for compute capability 8.9 and above. It divides by multiplying with an approximate reciprocal,
    and takes 1 for a block scale under 1e-5. Zeros come out positive, infinities saturate, and NaN becomes the most
    negative value of its block. The gradient passes straight through.

    Args:
        x: Activations or weights; a last block that is not full is filled with zeros.
        amax: float32, the calibrated largest magnitude; blocks above it saturate.
    """
    to_e4m3, scale_2 = map(float, nvfp4_to_e4m3(amax))
    scales, inverse = _nvfp4_scales(scale_2, x.device)

    def blocks(x: Tensor) -> Tensor:
        magnitude = x.abs().float()
        largest, special = _largest(magnitude)
        # fmin, since the kernel's minimum of NaN and 448 is 448.
        scale = torch.fmin(largest * to_e4m3, torch.tensor(E4M3_MAX, device=x.device)).to(torch.float8_e4m3fn)
        return _nvfp4_fake_(magnitude, x, special, scale, scales, inverse)

    return _by_block(blocks, x, NVFP4_BLOCK)


def nvfp4_static_fake_quantize(
    x: Tensor, amax: Tensor, global_amax: Tensor | None = None, largest_scale: float = E4M3_MAX
) -> Tensor:
    """x through NVFP4 and back in x's type, with an amax given for each block: ModelOpt's static kernel.

    A block whose scale rounds to zero becomes zero; one whose scale is not finite gets scale 1. Infinities, NaN and
    zeros as in nvfp4_fake_quantize. The gradient passes straight through.

    Args:
        x: Weights; blocks of x.numel() / amax.numel() values lie one after another.
        amax: float32, one a block.
        global_amax: float32 scalar, the tensor's; the largest of amax when None.
        largest_scale: The E4M3 scale that global_amax stands for: 448, or 256 for four-over-six.
    """
    if x.numel() == 0:
        return x.clone()
    whole = amax.float().amax() if global_amax is None else global_amax.float().reshape(())
    before, after = fp8_kernel_scales(whole * (E4M3_MAX / largest_scale) / E2M1_MAX)
    scale = e4m3_round(amax.float().reshape(-1, 1) / E2M1_MAX * before).to(x.device)
    scales = e4m3_table(x.device) * after.to(x.device)
    usable = torch.where(scales.isfinite() & (scales != 0), scales, 1.0)
    inverse = reciprocal(usable)

    def blocks(x: Tensor, scale: Tensor) -> Tensor:
        magnitude = x.abs().float()
        done = _nvfp4_fake_(magnitude, x, not bool(magnitude.isfinite().all()), scale, usable, inverse)
        zero = look_up(scales, scale.view(torch.uint8)) == 0
        return done.masked_fill_(zero, 0.0) if bool(zero.any()) else done

    return _pass_gradient(lambda x: _in_chunks(blocks, x.reshape(len(scale), -1), scale).view(x.shape), x)


def _mx_fake_blocks(x: Tensor, largest: float) -> Tensor:
    """Blocks as ModelOpt's extension converts them; it is built with --use_fast_math and takes subnormals for zeros."""
    magnitude = x.abs().float()
    amax, special = _largest(magnitude)
    # The approximate reciprocals of 6 and 448 are the nearest float32. The quotient is rounded to 24 bits whatever its
    # exponent and flushed to zero if then below 2^-126, and so is the scale of 2^-127 that zero leads to.
    codes = e8m0_encode(amax.clamp(max=_HUGE) * (1 / largest))
    codes = torch.where(amax * (2**24 / largest) < 2**24 * _TINY, 0, codes)
    codes = torch.where((amax < _TINY) | amax.isnan(), 127, codes)
    if int(codes.min()) < 27:  # beside larger values subnormals round to zero anyway
        magnitude = torch.where(magnitude < _TINY, 0.0, magnitude)
    magnitude.mul_(e8m0_decode(254 - codes))
    if largest == E4M3_MAX:
        round_to_e4m3_(magnitude)
    else:
        x = _e2m1_special_(magnitude, x) if special else x
        round_to_e2m1_(magnitude)
    magnitude.mul_(torch.where(codes == 0, 0.0, e8m0_decode(codes)))
    return torch.copysign(magnitude.to(x.dtype), x)


def mxfp4_fake_quantize(x: Tensor) -> Tensor:
    """x [..., n] through MXFP4 and back in x's type: ModelOpt's CUDA extension.

    A last block that is not full is filled with zeros. Infinities saturate, NaN becomes the most negative value of its
    block. Zeros keep their sign, which the extension leaves undefined. The gradient passes straight through.
    """
    return _by_block(lambda blocks: _mx_fake_blocks(blocks, E2M1_MAX), x, MX_BLOCK)


def mxfp8_fake_quantize(x: Tensor) -> Tensor:
    """x [..., n] through MXFP8 and back in x's type: as mxfp4_fake_quantize, but NaN stays NaN."""
    return _by_block(lambda blocks: _mx_fake_blocks(blocks, E4M3_MAX), x, MX_BLOCK)


def fp8_kernel_scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """What ModelOpt's FP8 kernels multiply with before and after rounding, float32."""
    amax = torch.where(amax <= _FP8_TINY_AMAX, 1.0, amax.float())
    # An amax of several dimensions goes to no kernel but to torch operations, which take the reciprocal first.
    several = amax.squeeze().dim() > 1
    scale = amax.reciprocal() * E4M3_MAX if several else torch.full_like(amax, E4M3_MAX) / amax
    return scale, scale.reciprocal()


def fp8_fake_quantize(x: Tensor, amax: Tensor) -> Tensor:
    """x through FP8 and back in x's type: ModelOpt's kernels per tensor and per axis, and its formula for blocks.

    Infinities saturate, NaN stays NaN, zeros keep their sign. The gradient passes straight through.

    Args:
        x: Activations or weights.
        amax: A scalar, or what broadcasts to x, or one value for each index of x's first dimension. An amax up to
            2^-24 counts as 1.
    """
    if amax.dim() == 1 and amax.numel() > 1:
        amax = amax.reshape(-1, *[1] * (x.dim() - 1))
    before, after = (scale.to(x.device) for scale in fp8_kernel_scales(amax))

    def values(x: Tensor) -> Tensor:
        return torch.copysign(round_to_e4m3_(x.abs().float().mul_(before)).mul_(after).to(x.dtype), x)

    if amax.numel() > 1:
        return _pass_gradient(values, x)
    return _pass_gradient(lambda x: _in_chunks(values, x.reshape(-1)).view(x.shape), x)
