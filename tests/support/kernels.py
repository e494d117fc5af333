"""ModelOpt's CUDA kernels step by step, as their sources have them, without the shortcuts of fake_quantize."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.quant.reciprocal import reciprocal

TINY = 2.0**-126
BOUNDS = [(0.25, 0.0), (0.75, 0.5), (1.25, 1.0), (1.75, 1.5), (2.5, 2.0), (3.5, 3.0), (5.0, 4.0)]
"""Up to where a magnitude is rounded to which E2M1 value; every second bound, a tie to even, is still below."""


def divide(a: Tensor, b: Tensor) -> Tensor:
    """Triton's float32 `a / b` (div.full.f32): a x reciprocal(b), both scaled first where b is very small or large."""
    magnitude = b.abs()
    factor = torch.where(magnitude > 2.0**126, 0.25, torch.where(magnitude < 2.0**-126, 2.0**24, 1.0))
    return (a * factor) * reciprocal(b * factor)


def _e2m1(magnitude: Tensor) -> Tensor:
    result = torch.full_like(magnitude, 6.0)
    for index, (bound, value) in reversed(list(enumerate(BOUNDS))):
        result = torch.where(magnitude < bound if index % 2 else magnitude <= bound, value, result)
    return result


def _maximum(blocks: Tensor) -> Tensor:
    """The kernels' maximum, one value after another: of a number and NaN it is the number."""
    largest = blocks[:, :1]
    for column in range(1, blocks.shape[1]):
        largest = torch.fmax(largest, blocks[:, column : column + 1])
    return largest


def nvfp4_dynamic(x: Tensor, amax: Tensor) -> Tensor:
    """fp4_kernel_hopper.fp4_fake_quant_kernel for x [..., multiple of 16]."""
    scale_2 = amax.float() / (6.0 * 448.0)
    scale_2 = torch.where(scale_2 > 0, scale_2, 1e-12)
    blocks = x.float().reshape(-1, 16)
    scale = torch.fmin(divide(_maximum(blocks.abs()), 6.0 * scale_2), torch.tensor(448.0))
    scale = scale.to(torch.float8_e4m3fn).float() * scale_2
    scale = torch.where(scale >= 1e-5, scale, 1.0)
    rounded = _e2m1(divide(blocks.abs(), scale)) * scale
    return torch.where(blocks >= 0, rounded, 0.0 - rounded).reshape(x.shape).to(x.dtype)


def nvfp4_static(x: Tensor, amax: Tensor, global_amax: Tensor, largest_scale: float) -> Tensor:
    """fp4_kernel.static_blockwise_fp4_fake_quant."""
    scale = fp8(amax.float() / 6.0, global_amax.float() * (448.0 / largest_scale) / 6.0).reshape(-1, 1)
    blocks = x.float().reshape(amax.numel(), -1)
    safe = torch.where((scale == 0) | scale.isnan() | scale.isinf(), 1.0, scale)
    rounded = _e2m1(divide(blocks.abs(), safe)) * safe
    signed = torch.where(blocks >= 0, rounded, 0.0 - rounded)
    return torch.where(scale == 0, 0.0, signed).reshape(x.shape).to(x.dtype)


def fp8(x: Tensor, amax: Tensor) -> Tensor:
    """tensor_quant_gpu_fp8.cu; for an amax of several dimensions tensor_quant._fp8_eager."""
    safe = torch.where(amax <= 2.0**-24, 1.0, amax.float())
    scale = 448.0 / safe if amax.squeeze().ndim > 1 else torch.tensor(448.0).expand_as(safe) / safe
    codes = (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * (1.0 / scale)).to(x.dtype)


def _flush(x: Tensor) -> Tensor:
    return torch.where(x.abs() < TINY, 0.0, x)


def mx(x: Tensor, largest: float) -> Tensor:
    """tensor_quant_mx.cu for x [..., multiple of 32], as --use_fast_math compiles it.

    `largest` is 6 for E2M1 and 448 for E4M3. The sign of zeros, subnormals and NaN is of an uninitialized variable.
    """
    huge = torch.finfo(torch.float32).max
    blocks = _flush(x.float().reshape(-1, 32))
    amax = _maximum(torch.where(blocks.abs() > huge, huge, blocks.abs()))
    quotient = amax.double() * reciprocal(torch.tensor(largest)).double()
    # Rounded to 24 bits whatever its exponent, and flushed then.
    bits = torch.where((quotient * 2.0**24).float() < TINY * 2.0**24, 0.0, quotient).float().view(torch.int32)
    exponent = torch.where((bits & 0x7FFFFF) > 0, (bits >> 23) - 126, (bits >> 23) - 127)
    exponent = torch.where((amax == 0) | amax.isnan(), 0, exponent).double()
    scale, unscale = (2.0**-exponent).float(), _flush((2.0**exponent).float())
    scaled = _flush(blocks.abs() * scale)
    rounded = _e2m1(scaled) if largest == 6.0 else scaled.clamp(max=448).to(torch.float8_e4m3fn).float()
    result = _flush(rounded * unscale)
    return torch.where(blocks > 0, result, -result).reshape(x.shape).to(x.dtype)
