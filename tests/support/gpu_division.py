"""The GPU's own reciprocal and Triton's division, to compare halfbyte.quant.reciprocal with. Needs Triton and CUDA."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _reciprocal(x_ptr, y_ptr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i)
    y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y_ptr + i, y)


@triton.jit
def _divide(a_ptr, b_ptr, y_ptr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y_ptr + i, tl.load(a_ptr + i) / tl.load(b_ptr + i))


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """rcp.approx.ftz.f32 of a flat float32 tensor whose size is a multiple of 1024."""
    y = torch.empty_like(x)
    _reciprocal[(x.numel() // BLOCK,)](x, y, B=BLOCK)
    return y


def divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a / b in Triton, flat float32 tensors whose size is a multiple of 1024."""
    y = torch.empty_like(a)
    _divide[(a.numel() // BLOCK,)](a, b, y, B=BLOCK)
    return y
