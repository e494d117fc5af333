"""Our numerics as ModelOpt's CPU kernels: its quantizers run unchanged on a CPU, and on CUDA with its own kernels.

ModelOpt's formats go through two torch operators. On a CPU the one for blocks asserts that it is on CUDA, and the one
for FP8 computes in another order than the CUDA kernel. Both are replaced here, for the CPU's dispatch key alone. One
kernel (static NVFP4 blocks) is behind no operator; it is in halfbyte.quant.patches.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from halfbyte.quant.elements import E2M1_BITS, E4M3_BITS, E8M0_BITS
from halfbyte.quant.fake_quantize import (
    fp8_fake_quantize,
    mxfp4_fake_quantize,
    mxfp8_fake_quantize,
    nvfp4_fake_quantize,
)
from halfbyte.quant.patches import patch_static_nvfp4

_library: Any = None


def dynamic_block_quantize(
    inputs: Tensor,
    block_size: int,  # noqa: ARG001
    amax: Tensor | None,
    num_bits: int,
    exponent_bits: int,
    scale_num_bits: int,
    scale_exponent_bits: int,
) -> Tensor:
    """The operator's implementation for a CPU: inputs through a block format and back.

    As in ModelOpt's kernels, a format has blocks of one size, 16 for NVFP4 and 32 for MX, whatever is asked for.

    Args:
        inputs: Weights or activations; blocks run along the last dimension.
        block_size: Not looked at.
        amax: The calibrated largest magnitude of NVFP4; several are reduced to the largest. None for MX.
        num_bits: Of a value, its sign among them.
        exponent_bits: Of these.
        scale_num_bits: Of a block's scale, its sign among them.
        scale_exponent_bits: Of these.

    Raises:
        NotImplementedError: for another format.
    """
    value = (exponent_bits, num_bits - exponent_bits - 1)
    scale = (scale_exponent_bits, scale_num_bits - scale_exponent_bits - 1)
    if (value, scale) == (E2M1_BITS, E4M3_BITS) and amax is not None:
        return nvfp4_fake_quantize(inputs, amax.float().amax())
    if (value, scale) == (E2M1_BITS, E8M0_BITS):
        return mxfp4_fake_quantize(inputs)
    if (value, scale) == (E4M3_BITS, E8M0_BITS):
        return mxfp8_fake_quantize(inputs)
    raise NotImplementedError(f"values of {value} bits with scales of {scale} bits have no implementation on a CPU")


def register() -> None:
    """Makes ModelOpt's quantizers work on a CPU as on CUDA; calling it again changes nothing."""
    global _library
    from modelopt.torch.quantization import tensor_quant  # defines the operators

    if _library is not None:
        return

    def quantize(
        inputs: Tensor, amax: Tensor, num_bits: int, exponent_bits: int, *whole_numbers: Any, **more: Any
    ) -> Tensor:
        if (num_bits, exponent_bits) == (8, 4):
            return fp8_fake_quantize(inputs, amax)
        return tensor_quant._quantize_impl(  # type: ignore[no-any-return]
            inputs, amax, num_bits, exponent_bits, *whole_numbers, **more
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells of the replacement, which is meant
        library: Any = torch.library.Library  # its methods are untyped
        _library = library("tensorrt", "IMPL")
        _library.impl("dynamic_block_quantize_op", dynamic_block_quantize, "CPU", allow_override=True)
        _library.impl("quantize_op", quantize, "CPU", allow_override=True)
    patch_static_nvfp4()
