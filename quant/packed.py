"""Linears and stacks of experts whose weights stay in 4 or 8 bits and are dequantized while they run, or once.

Both ways run the same code on the same values, so that their answers are equal bit for bit: `packed` calls dequantize()
in every forward, `folded` keeps what one call gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfbyte.quant.compiled import dequantize_fp8, dequantize_nvfp4
from halfbyte.quant.fake_quantize import CHUNK
from halfbyte.quant.layouts import Storage
from halfbyte.quant.numerics import (
    FP8,
    FP8_BLOCK,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_BLOCK,
    fp8_block_dequantize,
    fp8_dequantize,
    mxfp4_dequantize,
    mxfp8_dequantize,
    nvfp4_dequantize,
)


def dequantize(
    storage: Storage | None, codes: Tensor, scale: Tensor | None, scale_2: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The values of a stored weight, computed in float32 and rounded once to `dtype`.

    Args:
        storage: How it is stored; None for a weight that is not quantized.
        codes: As stored, [out, in], or [out, in / 2] in 4 bits.
        scale: As stored; a block's size follows from its shape.
        scale_2: NVFP4's float32 scale.
        dtype: Of the result.
    """
    if storage is None or scale is None:
        return codes.to(dtype)
    if storage == "fp8_block" and scale.numel() > 1:
        scale = scale.reshape([-(-size // FP8_BLOCK) for size in codes.shape])
    elif storage in ("fp8", "fp8_block", "fp8_channel"):
        scale = scale.reshape(-1, 1)
    rows, width = codes.shape[0], codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
    step = max(CHUNK // max(width, 1) // FP8_BLOCK, 1) * FP8_BLOCK
    if codes.device.type != "cpu" or rows <= step:
        return _values(storage, codes, scale, scale_2, dtype)
    values = torch.empty(rows, width, dtype=dtype)
    per_row = rows // scale.shape[0] if storage != "fp8_block" else FP8_BLOCK
    for first in range(0, rows, step):
        part = scale if scale.shape[0] == 1 else scale[first // per_row : -(-(first + step) // per_row)]
        values[first : first + step] = _values(storage, codes[first : first + step], part, scale_2, dtype)
    return values


def _values(storage: Storage, codes: Tensor, scale: Tensor, scale_2: Tensor | None, dtype: torch.dtype) -> Tensor:
    if storage == "nvfp4" and scale_2 is not None:
        wide = 2 * codes.shape[-1] // scale.shape[-1] // NVFP4_BLOCK
        scale = scale if wide == 1 else scale.view(torch.uint8).repeat_interleave(wide, dim=-1).view(scale.dtype)
        weight = NVFP4(codes, scale, scale_2.reshape(()))
        return dequantize_nvfp4(lambda: nvfp4_dequantize(weight, dtype), *weight, dtype)
    if storage == "mxfp4":
        return mxfp4_dequantize(MXFP4(codes, scale.view(torch.uint8)), dtype)
    if storage == "mxfp8":
        return mxfp8_dequantize(MXFP8(codes, scale.view(torch.uint8)), dtype)
    if storage == "fp8_block" and scale.numel() > 1:
        return fp8_block_dequantize(codes, scale.float(), dtype)
    rows = FP8(codes, scale.float())
    return dequantize_fp8(lambda: fp8_dequantize(rows, dtype), *rows, dtype)


class Packed(nn.Module):
    """One weight as it lies in the checkpoint; its tensors may be views of the mapped file."""

    codes: Tensor
    scale: Tensor | None
    scale_2: Tensor | None

    def __init__(
        self,
        storage: Storage | None,
        codes: Tensor,
        scale: Tensor | None = None,
        scale_2: Tensor | None = None,
        *,
        transposed: bool = False,
        blocks_first: bool = False,
    ) -> None:
        super().__init__()
        self.storage: Storage | None = storage
        self.transposed = transposed
        """Whether the codes lie as [in, out]; the values are given as [out, in] either way."""
        self.blocks_first = blocks_first
        """Whether blocks lie along the first dimension."""
        for name, value in (("codes", codes), ("scale", scale), ("scale_2", scale_2)):
            self.register_buffer(name, value, persistent=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Of its values, [out, in]."""
        sides = list(self.codes.shape)
        if self.storage in ("nvfp4", "mxfp4"):
            sides[0 if self.blocks_first else 1] *= 2
        rows, columns = reversed(sides) if self.transposed else sides
        return rows, columns

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Packed:  # noqa: ARG002
        """Moves the tensors with the model, and keeps their types when the model's change."""
        for name, value in self._buffers.items():
            if value is not None:
                moved = fn(value)
                self._buffers[name] = moved if moved.dtype == value.dtype else value.to(moved.device)
        return self

    def forward(self, dtype: torch.dtype) -> Tensor:
        """The weight's values, [out, in]."""
        codes, scale = self.codes, self.scale
        turned = self.transposed and (self.blocks_first or self.storage in ("fp8", "fp8_channel"))
        if turned:  # a transposed copy of the codes costs less than one of the values
            codes = codes.mT.contiguous()
            scale = scale if scale is None or scale.dim() < 2 else scale.mT.contiguous()
        values = dequantize(self.storage, codes, scale, self.scale_2, dtype)
        return values.mT if self.transposed and not turned else values


class QuantizedLinear(nn.Module):
    """A linear layer read from a checkpoint: rounds its input, and dequantizes its weight now or has done so before."""

    weight: Tensor | None
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None

    def __init__(
        self,
        packed: Packed,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        input_quantizer: nn.Module | None = None,
        low_rank: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.packed: Packed | None = packed
        self.dtype = dtype
        self.register_parameter("weight", None)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self.input_quantizer = input_quantizer
        """ModelOpt's TensorQuantizer with the checkpoint's input scale and AWQ's pre_quant_scale, or None."""
        for name, factor in zip(("lora_a", "lora_b"), low_rank or (None, None), strict=True):
            self.register_buffer(name, None if factor is None else factor.to(dtype), persistent=False)

    def fold(self) -> None:
        """Dequantizes the weight for good and lets go of its codes."""
        if self.packed is not None:
            self.weight = nn.Parameter(self.packed(self.dtype), requires_grad=False)
            self.packed = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out].

        SVDQuant's branch takes the smoothed input before it is rounded: modelopt SVDQuantLinear.
        """
        weight = self.weight if self.packed is None else self.packed(self.dtype)
        quantizer: Any = self.input_quantizer
        if self.lora_a is None or self.lora_b is None:
            return F.linear(x if quantizer is None else quantizer(x), weight, self.bias)  # type: ignore[arg-type]
        smooth = None if quantizer is None else quantizer.pre_quant_scale
        x = x if smooth is None else x * smooth
        branch = F.linear(F.linear(x, self.lora_a), self.lora_b)
        if quantizer is not None:
            with quantizer.disable_pre_quant_scale():
                x = quantizer(x)
        return F.linear(x, weight, self.bias) + branch  # type: ignore[arg-type]


class ExpertStack(nn.Module):
    """One projection of all experts, in the place of transformers' parameter [experts, out, in] or [experts, in, out].

    `stack[i]` is the i-th expert's weight: F.linear and @ with it round the input first, as the checkpoint declares.
    So does torch.bmm with the stack, expert by expert.
    """

    weight: Tensor | None
    shape: torch.Size
    """As the model has it: [experts, out, in] or [experts, in, out]."""

    def __init__(
        self,
        experts: Sequence[Sequence[Packed]],
        dtype: torch.dtype,
        *,
        transposed: bool,
        input_quantizers: Sequence[nn.Module] = (),
    ) -> None:
        """Makes a stack.

        Args:
            experts: For each expert the parts of its weight, laid below each other: gate and up.
            dtype: To compute in.
            transposed: Whether the model multiplies by [in, out].
            input_quantizers: One for all experts, one for each, or none.
        """
        super().__init__()
        self.experts: nn.ModuleList | None = nn.ModuleList(nn.ModuleList(parts) for parts in experts)
        self.dtype = dtype
        self.transposed = transposed
        self.register_parameter("weight", None)
        self.input_quantizers = nn.ModuleList(input_quantizers)
        rows, columns = sum(part.shape[0] for part in experts[0]), experts[0][0].shape[1]
        self.shape = torch.Size((len(experts), columns, rows) if transposed else (len(experts), rows, columns))

    def __getitem__(self, index: int | Tensor) -> ExpertWeight:
        return ExpertWeight(self, int(index))

    def fold(self) -> None:
        """Dequantizes all weights for good and lets go of their codes, expert by expert."""
        if self.experts is None:
            return
        stack: Tensor | None = None
        for index in range(len(self.experts)):
            values = self._dequantized(index)
            if stack is None:
                stack = values.new_empty((len(self.experts), *values.shape))
            stack[index] = values
            self.experts[index] = nn.Module()
        if stack is not None:
            self.weight = nn.Parameter(stack, requires_grad=False)
        self.experts = None

    def _dequantized(self, index: int) -> Tensor:
        experts: Any = self.experts
        parts = [part(self.dtype) for part in experts[index]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def values(self, index: int) -> Tensor:
        """The weight of one expert, as the model multiplies by it."""
        values = self._dequantized(index) if self.weight is None else self.weight[index]
        return values.mT if self.transposed else values

    def all_values(self) -> Tensor:
        """The weights of all experts, [experts, ...]; folds them."""
        self.fold()
        assert self.weight is not None
        return self.weight.data.mT if self.transposed else self.weight.data

    def rounded(self, x: Tensor, index: int) -> Tensor:
        """The input of one expert as its format has it."""
        count = len(self.input_quantizers)
        return x if count == 0 else self.input_quantizers[index if count > 1 else 0](x)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """torch.bmm of inputs [experts, n, in] with a stack that is multiplied by as [in, out]."""
        if func is not torch.bmm or len(args) != 2 or kwargs or not isinstance(args[1], cls):
            return NotImplemented
        x, stack = args
        if len(stack.input_quantizers) > 1:
            rounded = [stack.rounded(part, index) for index, part in enumerate(x.split(1))]
        else:
            rounded = stack.rounded(x, 0).split(1)
        found = x.new_empty(*x.shape[:-1], stack.shape[-1])
        for index, part in enumerate(rounded):
            found[index : index + 1] = torch.bmm(part, stack.values(index).unsqueeze(0))
        return found


class ExpertWeight:
    """One expert's weight as an operand of F.linear and @, by torch's override protocol."""

    def __init__(self, stack: ExpertStack, index: int) -> None:
        self.stack = stack
        self.index = index

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Rounds the first operand and multiplies it by the values; other functions are not offered."""
        x, weight, *rest = args
        known = (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
        if not isinstance(weight, cls) or func not in known:
            return NotImplemented
        return func(weight.stack.rounded(x, weight.index), weight.stack.values(weight.index), *rest, **(kwargs or {}))
