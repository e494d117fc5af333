"""The element formats E2M1, E4M3 and E8M0: rounding, codes, packing. What ends in _ changes its argument.

Sources: OCP Microscaling Formats (MX) specification v1.0, sections 5.3.3 (E2M1), 5.3.1 (E4M3) and 5.4.1 (E8M0).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

E2M1_BITS, E4M3_BITS, E8M0_BITS = (2, 1), (4, 3), (8, 0)
"""Bits of the exponent and of the mantissa, as ModelOpt's num_bits and scale_bits give them."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9
"""The smallest positive E4M3 value."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1 by code; bit 3 of a code is the sign."""
E8M0_NAN = 255
"""The code of NaN."""
NVFP4_BLOCK = 16
MX_BLOCK = 32
FP8_BLOCK = 128
"""The side of a square of weights, and the length of a group of inputs, that share an FP8 scale."""


def _round_(x: Tensor, mantissa: int, least: float, largest: float) -> Tensor:
    """Magnitudes (float32) rounded half to even to a small format, saturating; NaN stays NaN.

    The format's step is 2^-mantissa of the power of two at or below x, and no less than at `least`. Adding 1.5 x 2^23
    steps pushes all finer bits out of a float32, which rounds them half to even; subtracting it again leaves the
    rounded value.
    """
    x.clamp_(max=largest)
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=least, max=largest)
    push = power.mul_(2.0**-mantissa * 1.5 * 2**23)
    return x.add_(push).sub_(push)


def round_to_e2m1_(magnitude: Tensor) -> Tensor:
    """float32 magnitudes rounded to E2M1, half to even, saturating at 6; NaN stays NaN."""
    return _round_(magnitude, mantissa=1, least=1.0, largest=E2M1_MAX)


def round_to_e4m3_(magnitude: Tensor) -> Tensor:
    """float32 magnitudes rounded to E4M3, half to even, saturating at 448; NaN stays NaN."""
    return _round_(magnitude, mantissa=3, least=2.0**-6, largest=E4M3_MAX)


def e2m1_round(x: Tensor) -> Tensor:
    """x rounded to the E2M1 grid, half to even, saturating at 6, in float32; NaN stays NaN, zeros keep their sign."""
    return torch.copysign(round_to_e2m1_(x.abs().float()), x)


def e2m1_codes(x: Tensor) -> Tensor:
    """Rounds to E2M1, half to even, saturating at 6: uint8 codes of x's shape.

    The sign bit is set for x < 0, also where x rounds to zero, as ModelOpt packs it. NaN has no E2M1 code and becomes
    the largest magnitude.
    """
    magnitude = round_to_e2m1_(x.abs().float().nan_to_num_(nan=E2M1_MAX))
    # Two codes for each whole number up to 2, one for each up to 4, and half a one for each from there to 6.
    codes = magnitude.clamp(max=2).mul_(2).add_(magnitude.sub_(2).clamp_(min=0))
    codes.sub_(magnitude.sub_(2).clamp_(min=0), alpha=0.5)
    return codes.to(torch.uint8) | ((x < 0).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """The float32 values of E2M1 codes (uint8, 0 to 15)."""
    return look_up(_e2m1_table(codes.device), codes)


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


def e2m1_unpacked(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., n] of packed E2M1 codes (uint8 [..., n / 2]); every floating type holds them exactly."""
    return look_up(_e2m1_pairs(packed.device, dtype), packed).view(dtype)


def e4m3_round(x: Tensor) -> Tensor:
    """float8_e4m3fn nearest to x, half to even, saturating at 448 (a bare cast would give NaN above 464)."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e4m3_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of float8_e4m3fn codes, which every wider floating type holds exactly.

    On a CPU by a table, which is faster than torch's conversion.
    """
    if codes.device.type != "cpu":
        return codes.to(dtype)
    return look_up(e4m3_table(codes.device, dtype), codes.view(torch.uint8))


def e8m0_decode(codes: Tensor) -> Tensor:
    """float32 values 2^(code - 127) of E8M0 codes (uint8); 255 is NaN."""
    bits = codes.int() << 23
    bits = torch.where(codes == 0, 0x00400000, torch.where(codes == E8M0_NAN, 0x7FC00000, bits))
    return bits.int().view(torch.float32)


def e8m0_encode(scale: Tensor) -> Tensor:
    """uint8 E8M0 codes of the least powers of two that are not below `scale`; NaN is 255.

    E8M0 has no sign, zero or infinity: anything up to 2^-127 becomes 2^-127, and anything above 2^127 becomes 2^127.
    """
    bits = scale.float().contiguous().view(torch.int32)
    codes = ((bits + 0x007FFFFF) >> 23).clamp_(0, 254)
    codes = torch.where(bits <= 0x00400000, 0, codes)
    return torch.where(scale.isnan(), E8M0_NAN, codes).to(torch.uint8)


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """The elements of a table [256] at the uint8 codes, in the codes' shape."""
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


@lru_cache(maxsize=8)
def e4m3_table(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of all 256 E4M3 codes."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(dtype)


@lru_cache(maxsize=8)
def _e2m1_table(device: torch.device) -> Tensor:
    values = torch.tensor(E2M1_VALUES, device=device)
    return torch.cat([values, -values])


@lru_cache(maxsize=8)
def _e2m1_pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Both values of every byte as one integer of twice the size: one look-up then gives two values."""
    codes = unpack_e2m1(torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(-1))
    return e2m1_decode(codes).to(dtype).view(torch.int32 if dtype.itemsize == 2 else torch.int64).squeeze(-1)
