"""The work of read-back on a GPU, rounding inputs and dequantizing weights, as single kernels that torch compiles.

ModelOpt's kernels and plain torch operations give the same values and move several times the memory. A compiled formula
is trusted for a shape only after it has given their bits there; where torch cannot compile, they do all the work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from halfbyte.quant.elements import E2M1_BITS, E2M1_MAX, E4M3_BITS, E4M3_MAX, NVFP4_BLOCK
from halfbyte.quant.fake_quantize import NVFP4_TINY_SCALE, fp8_kernel_scales, nvfp4_to_e4m3

logger = logging.getLogger(__name__)

BACKEND = "halfbyte_compiled"
"""The name under which ModelOpt's quantizers find quantize()."""
LEAST = 2**20
"""Values of the smallest tensor that a compiled kernel is worth its compilation for."""
_MOST_SHAPES = 64
"""For more shapes a formula is not compiled: each takes some seconds."""
_OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True}


def fp8_rounded(x: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """x through FP8 and back: fake_quantize.fp8_fake_quantize for one amax, as a formula without steps in place."""
    codes = (x.float() * before).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * after).to(x.dtype)


def nvfp4_rounded(
    x: Tensor, to_e4m3: Tensor, scale_2: Tensor, inverse: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """x [rows, n] through NVFP4 and back: fake_quantize.nvfp4_fake_quantize as a formula without steps in place.

    Args:
        x: n must be a multiple of 16; or [rows, blocks, 16], so that no size but the number of rows is left open: on an
            H200 rows whose number was open took two to three times as long as a fixed number.
        to_e4m3: float32 scalar; takes a block's amax to its E4M3 scale.
        scale_2: float32 scalar, above zero.
        inverse: The reciprocal; None for the hardware's approximate one, which compiled code divides with on a GPU.
    """
    blocks = x if x.shape[-1] == NVFP4_BLOCK else x.reshape(-1, NVFP4_BLOCK)
    magnitude = blocks.abs().float()
    largest = torch.where(magnitude.isnan(), -1.0, magnitude).amax(-1, keepdim=True)
    scale = torch.where(largest < 0, E4M3_MAX, largest * to_e4m3).clamp(max=E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn).float() * scale_2
    scale = torch.where(scale >= NVFP4_TINY_SCALE, scale, 1.0)
    magnitude = magnitude * (1.0 / scale if inverse is None else inverse(scale))
    magnitude = torch.where(magnitude.isnan(), E2M1_MAX, magnitude).clamp(max=E2M1_MAX)
    # Half to even on E2M1's grid, whose steps are 0.5, 1 and 2; not by bits, which would cut the kernel in two.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = torch.round(magnitude / step) * step * scale
    return (torch.where((blocks < 0) | blocks.isnan(), -rounded, rounded) + 0.0).to(x.dtype).reshape(x.shape)


def nvfp4_values(codes: Tensor, scale: Tensor, scale_2: Tensor, dtype: torch.dtype) -> Tensor:
    """numerics.nvfp4_dequantize for a weight [rows, n], as one formula."""
    pairs = codes.reshape(codes.shape[0], -1, NVFP4_BLOCK // 2)
    code = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2).int()
    exponent, mantissa = (code & 7) >> 1, code & 1
    # The bits of the float32: 0 and 0.5 are E2M1's subnormals.
    bits = torch.where(exponent == 0, mantissa * 0x3F000000, ((126 + exponent) << 23) | (mantissa << 22))
    values = (bits | ((code & 8) << 28)).view(torch.float32)
    return (values * (scale.float() * scale_2).unsqueeze(-1)).to(dtype).flatten(-2)


def fp8_values(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """numerics.fp8_dequantize for a weight [rows, n] with one scale, or one a row [rows, 1], as one formula."""
    return (codes.float() * scale).to(dtype)


class Compiled:
    """A formula compiled for each shape it meets, in the place of another way to the same bits.

    Args:
        formula: What is compiled; its first argument's number of rows may differ from call to call.
        rows_differ: Whether that number is left open, as for activations.
    """

    def __init__(self, formula: FunctionType, *, rows_differ: bool = False) -> None:
        self._formula = formula
        self._rows_differ = rows_differ
        self._compiled: dict[Any, Callable[..., Tensor] | None] = {}
        """By shape; None where the reference does the work."""

    def __call__(self, reference: Callable[[], Tensor], *arguments: Any) -> Tensor:
        """The formula's value, or the reference's where it was not found equal."""
        key = tuple(self._key(argument, at == 0) for at, argument in enumerate(arguments))
        key = (*key, torch.is_inference_mode_enabled(), torch.is_grad_enabled())
        if key not in self._compiled:
            if len(self._compiled) >= _MOST_SHAPES:
                return reference()
            expected = reference()
            self._compiled[key] = self._try(expected, arguments)
            return expected
        compiled = self._compiled[key]
        return reference() if compiled is None else self._run(compiled, arguments)

    def _key(self, argument: Any, first: bool) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        shape = argument.shape[1:] if first and self._rows_differ else argument.shape
        return tuple(shape), argument.dtype, argument.device, argument.is_inference()

    def _run(self, compiled: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
        if self._rows_differ:
            torch._dynamo.mark_dynamic(arguments[0], 0)
        return compiled(*arguments)

    def _try(self, expected: Tensor, arguments: tuple[Any, ...]) -> Callable[..., Tensor] | None:
        name = self._formula.__name__
        # A function of its own for each shape: torch would take the second width for one that changes, and what it then
        # compiles is up to eight times slower.
        code = self._formula.__code__.replace(co_name=f"{name}_{len(self._compiled)}")
        own = FunctionType(code, self._formula.__globals__, name, self._formula.__defaults__)
        try:
            compiled = torch.compile(own, fullgraph=True, dynamic=False, options=_OPTIONS)
            found = self._run(compiled, arguments)
        except RuntimeError as error:  # what torch raises for want of a C compiler, of Triton, or of a newer GPU
            logger.info("torch does not compile %s: %s", name, str(error).partition("\n")[0])
            return None
        if torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)):
            return compiled
        logger.warning("the compiled %s is not used: it gives other bits", name)
        return None


_fp8, _nvfp4, _nvfp4_values, _fp8_values = (
    Compiled(cast(FunctionType, formula), rows_differ=formula in (fp8_rounded, nvfp4_rounded))
    for formula in (fp8_rounded, nvfp4_rounded, nvfp4_values, fp8_values)
)


def usable(x: Tensor) -> bool:
    """Whether a compiled kernel may do the work on x."""
    return x.is_cuda and x.dim() >= 2 and x.numel() >= LEAST and not x.requires_grad


def quantize(inputs: Tensor, quantizer: Any) -> Tensor:
    """ModelOpt's entry point of a quantization backend: inputs [..., n] through the quantizer's format and back."""

    def reference() -> Tensor:
        quantizer.backend = None
        try:
            found: Tensor = quantizer._fake_quantize(inputs)
        finally:
            quantizer.backend = BACKEND
        return found

    kind, amax = quantizer.num_bits, quantizer.amax
    if not usable(inputs) or amax is None or amax.numel() != 1:
        return reference()
    rows = inputs.reshape(-1, inputs.shape[-1])
    if kind == E4M3_BITS and not quantizer.block_sizes:
        found = _fp8(lambda: reference().reshape(rows.shape), rows, *_constants(quantizer, fp8_kernel_scales))
    elif kind == E2M1_BITS and inputs.shape[-1] % NVFP4_BLOCK == 0:
        blocks = rows.reshape(len(rows), -1, NVFP4_BLOCK)
        found = _nvfp4(lambda: reference().reshape(blocks.shape), blocks, *_constants(quantizer, nvfp4_to_e4m3))
    else:
        return reference()
    return found.reshape(inputs.shape)


def _constants(quantizer: Any, of: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Scalars that follow from the quantizer's amax, computed once for each amax it has."""
    amax = quantizer._amax
    kept: tuple[Tensor, Tensor, Tensor] | None = getattr(quantizer, "_halfbyte_constants", None)
    if kept is None or kept[0] is not amax:
        first, second = of(amax)
        kept = quantizer._halfbyte_constants = (amax, first.reshape(()), second.reshape(()))
    return kept[1], kept[2]


def register() -> None:
    """Makes quantize() known to ModelOpt; calling it again changes nothing."""
    from modelopt.torch.quantization.nn.modules.tensor_quantizer import (
        is_registered_quant_backend,
        register_quant_backend,
    )

    if not is_registered_quant_backend(BACKEND):
        register_quant_backend(BACKEND, quantize)


def dequantize_nvfp4(
    reference: Callable[[], Tensor], codes: Tensor, scale: Tensor, scale_2: Tensor, dtype: torch.dtype
) -> Tensor:
    """The values of a weight; `reference` gives them where they cannot be had in one kernel. See nvfp4_values."""
    return _nvfp4_values(reference, codes, scale, scale_2, dtype) if usable(codes) else reference()


def dequantize_fp8(reference: Callable[[], Tensor], codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a weight; `reference` gives them where they cannot be had in one kernel. See fp8_values."""
    return _fp8_values(reference, codes, scale, dtype) if usable(codes) else reference()
