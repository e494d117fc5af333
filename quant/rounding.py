"""Rounding weights to the values their codes in the checkpoint stand for, with the scales that ModelOpt exports."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfbyte.quant.fake_quantize import CHUNK, fp8_kernel_scales
from halfbyte.quant.numerics import (
    E4M3_MAX,
    FP8,
    FP8_BLOCK,
    e2m1_round,
    e4m3_round,
    fp8_dequantize,
    mxfp4_dequantize,
    mxfp4_quantize,
    mxfp8_dequantize,
    mxfp8_quantize,
    scale_of_amax,
)


class Weight(NamedTuple):
    """One quantized weight of a model: a linear's, or one expert's part of a tensor that holds all of them."""

    name: str
    values: Tensor
    """[out, in]; changing it changes the model."""
    quantizer: Any
    """Its ModelOpt TensorQuantizer."""
    input_quantizer: Any
    stack: Tensor | None = None
    """[experts, out, in] where one quantizer is for all experts of a tensor."""
    expert: int = 0
    """Which of the stack it is."""

    @property
    def measured(self) -> Tensor:
        """All values that the quantizer's amax is of."""
        return self.values if self.stack is None else self.stack


def fused_experts(module: nn.Module) -> tuple[str, ...]:
    """The tensors [experts, out, in] of a module that holds all experts of a layer with a quantizer for each.

    Empty for any other module.
    """
    first = getattr(module, "_first_proj_attr", "gate_up_proj")
    return (first, "down_proj") if hasattr(module, f"{first}_weight_quantizers") else ()


def stacked_experts(module: nn.Module) -> tuple[str, ...]:
    """The tensors [experts, in, out] of a module that holds all experts of a layer with one quantizer for each tensor.

    ModelOpt quantizes so those of Llama 4 and gpt-oss, whose forward passes multiply by [in, out]; it turns each
    tensor around to do it. Empty for any other module.
    """
    names = ("gate_up_proj", "down_proj")
    return names if all(hasattr(module, f"{name}_weight_quantizer") for name in names) else ()


def quantized_weights(model: nn.Module) -> Iterator[Weight]:
    """All weights whose quantizer is enabled."""
    for name, module in model.named_modules():
        for tensor in fused_experts(module):
            quantizers = getattr(module, f"{tensor}_weight_quantizers")
            inputs = getattr(module, f"{tensor}_input_quantizer")
            for index, quantizer in enumerate(quantizers):
                if quantizer.is_enabled:
                    yield Weight(f"{name}.{tensor}.{index}", getattr(module, tensor)[index], quantizer, inputs)
        for tensor in stacked_experts(module):
            quantizer = getattr(module, f"{tensor}_weight_quantizer")
            if quantizer.is_enabled:
                stack, inputs = getattr(module, tensor).mT, getattr(module, f"{tensor}_input_quantizer")
                for index in range(len(stack)):
                    yield Weight(f"{name}.{tensor}.{index}", stack[index], quantizer, inputs, stack, index)
        quantizer = getattr(module, "weight_quantizer", None)
        weight = getattr(module, "weight", None)
        if quantizer is not None and quantizer.is_enabled and isinstance(weight, nn.Parameter):
            yield Weight(f"{name}.weight", weight, quantizer, getattr(module, "input_quantizer", None))


def kept_buffers(model: nn.Module, dtype: torch.dtype) -> dict[str, tuple[Tensor, torch.dtype]]:
    """The model's own buffers that a checkpoint holds, by name, each with the type it is stored in.

    That is `dtype` for those with a fraction, but for the few that the model's class wants in float32 in any case.
    """
    from modelopt.torch.quantization.nn import TensorQuantizer

    wide = [
        *(getattr(model, "_keep_in_fp32_modules", None) or ()),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
    ]
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            continue
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                kind = torch.float32 if any(part in name for part in wide) else dtype
                found[name] = (buffer, kind if buffer.is_floating_point() else buffer.dtype)
    return found


def as_layer(weight: Weight) -> nn.Module:
    """A bare module with the weight and its quantizers, as the functions of ModelOpt's export take it."""
    layer = nn.Module()
    layer.weight = nn.Parameter(weight.values.detach(), requires_grad=False)
    layer.weight_quantizer = weight.quantizer
    if weight.input_quantizer is not None:
        layer.input_quantizer = weight.input_quantizer
    return layer


def _with_own_blocks(weight: Weight) -> Weight:
    """One of a stack whose blocks have an amax each, with a quantizer that has those of its blocks alone."""
    own = copy.copy(weight.quantizer)
    amax = own._amax.reshape(len(weight.measured), -1)[weight.expert]
    own._buffers = {**own._buffers, "_amax": amax}
    return weight._replace(quantizer=own)


def _squares(scale: Tensor, shape: torch.Size) -> Tensor:
    """A scale for each value of rows [n, in]: scales [ceil(n / 128), ceil(in / 128)] of squares, expanded."""
    expanded = scale.repeat_interleave(FP8_BLOCK, dim=0).repeat_interleave(FP8_BLOCK, dim=1)
    return expanded[: shape[0], : shape[1]]


def _fp8_rounded(x: Tensor, in_memory: Tensor, scale: Tensor) -> Tensor:
    """x [n, in] with the codes that fake quantization gives it, as the values they stand for in the checkpoint.

    Fake quantization multiplies by 448 / amax; dividing by the stored scale divides by amax / 448. Where amax has few
    bits, as a weight's often has, one value in a hundred lies halfway between two codes, and the two ways take it to
    different sides: enough to change one answer in twenty of a small model.

    Args:
        x: Weights.
        in_memory: What fake quantization multiplies them with; broadcasts to x.
        scale: What the checkpoint stores; broadcasts to x.
    """
    return fp8_dequantize(FP8(e4m3_round(x.float() * in_memory), scale), x.dtype)


AT_ONCE = {"cuda": 2**24, "cpu": CHUNK}
"""Values of a weight that are rounded together."""
_NORMAL_SCALE = 2.0**-6
"""The smallest E4M3 value with all its bits: a block scale from here on is within a sixteenth of what it stands for."""
_NORMAL_STEP = 2.0**-100
"""Multiples of a step from here on are far from the smallest bfloat16 and float32."""


def _rounding(weight: Weight) -> Callable[[Tensor, slice], tuple[Tensor, bool]]:
    """What rounds some rows of a weight, given their values [n, in] and which rows of the weight they are.

    It also says whether the result, in bfloat16 or float32, is known to be exported as the codes it came from; without
    that, it must be looked at. What it needs of the whole weight, it takes from the quantizer now; the first of the
    rows is a multiple of 128.
    """
    from modelopt.torch.export.quant_utils import (
        get_quantization_format,
        get_weight_scaling_factor,
        get_weight_scaling_factor_2,
    )
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    layer = as_layer(weight)
    kind = get_quantization_format(layer)
    if kind == "mxfp8":
        return lambda x, rows: (mxfp8_dequantize(mxfp8_quantize(x), x.dtype), False)  # noqa: ARG005
    if kind in ("mxfp4", "w4a8_mxfp4_fp8"):
        return lambda x, rows: (mxfp4_dequantize(mxfp4_quantize(x), x.dtype), False)  # noqa: ARG005
    if kind in ("fp8", "fp8_pc_pt", "fp8_pb_wo"):
        in_memory = fp8_kernel_scales(weight.quantizer._amax)[0].to(weight.values.device)
    if kind == "fp8":
        tensors = scale_of_amax(weight.quantizer._amax, E4M3_MAX).to(weight.values.device)
        certain = bool(tensors >= _NORMAL_STEP)
        return lambda x, rows: (_fp8_rounded(x, in_memory, tensors), certain)  # noqa: ARG005
    if kind == "fp8_pc_pt":
        channels, in_memory = get_weight_scaling_factor(layer).reshape(-1, 1), in_memory.reshape(-1, 1)
        if weight.stack is not None:  # whose channels are its experts
            rows_of = len(weight.values), 1
            channels, in_memory = (scales[weight.expert].expand(rows_of) for scales in (channels, in_memory))
        return lambda x, rows: (_fp8_rounded(x, in_memory[rows], channels[rows]), False)
    if kind == "fp8_pb_wo":
        sides = [-(-side // FP8_BLOCK) for side in weight.values.shape]
        squares, in_memory = get_weight_scaling_factor(layer).reshape(sides), in_memory.reshape(sides)

        def by_squares(x: Tensor, rows: slice) -> tuple[Tensor, bool]:
            found = slice(rows.start // FP8_BLOCK, -(-rows.stop // FP8_BLOCK))
            return _fp8_rounded(x, _squares(in_memory[found], x.shape), _squares(squares[found], x.shape)), False

        return by_squares
    scale_2 = get_weight_scaling_factor_2(layer)
    if scale_2 is None:
        raise NotImplementedError(f"{weight.name} is quantized as {kind}")
    static = None
    if NVFP4QTensor._is_static_quantizer(weight.quantizer):
        static = get_weight_scaling_factor(layer if weight.stack is None else as_layer(_with_own_blocks(weight)))

    def nvfp4(x: Tensor, rows: slice) -> tuple[Tensor, bool]:
        # Blocks without a scale of their own get it from their values: the largest becomes 6 where the scale is normal,
        # of which the same scale follows.
        scale = get_weight_scaling_factor(as_layer(weight._replace(values=x))) if static is None else static[rows]
        scale = scale.float()
        step = (scale * scale_2).unsqueeze(-1)
        certain = (step >= _NORMAL_STEP).all() & (scale >= _NORMAL_SCALE).all()
        blocks = x.float().reshape(*scale.shape, -1)
        values: Tensor = (e2m1_round(blocks / step) * step).flatten(-2).to(x.dtype)
        return values, bool(certain)

    return nvfp4


def rounded(weight: Weight) -> Tensor:
    """The weight's values as a reader of the checkpoint will have them, in the weight's own type.

    Scales are those of ModelOpt's export. FP8's codes are those of the model in memory; the others are nearest, half to
    even, rounded once. ModelOpt's own export divides bfloat16 weights by an FP8 scale in bfloat16 and rounds the
    quotient again, which moves about 3 % of the codes, and rounds MXFP4's ties towards zero.

    Raises:
        NotImplementedError: for a format that ModelOpt does not export.
    """
    return _rounding(weight)(weight.values.detach(), slice(0, len(weight.values)))[0]


class Unstable(NamedTuple):
    """Values of a weight whose rounded form would be exported as other codes than they."""

    name: str
    """The weight's; no view of it, which would keep it in memory while it is packed."""
    where: tuple[Tensor, ...]
    """int64, an index for each dimension of the weight."""
    original: Tensor
    """What gives the right codes at export."""


def _chunks(values: Tensor) -> Iterator[slice]:
    """Rows of a weight, some millions of values at a time on CUDA, and as many as a CPU's cache holds there."""
    rows = len(values)
    width = values.numel() // max(rows, 1)
    step = max(AT_ONCE["cuda" if values.is_cuda else "cpu"] // max(width, 1) // FP8_BLOCK, 1) * FP8_BLOCK
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


@torch.no_grad()
def round_in_place(weight: Weight, dtype: torch.dtype) -> Unstable | None:
    """Rounds a weight in place, some rows at a time; what must be put back before export, if anything.

    NVFP4's block scales are exported from the largest value of a block. Where such a scale is near the smallest E4M3
    value, the rounded block can have another: no more than 4e-5 of the tensor's magnitude.

    Args:
        weight: A quantized weight.
        dtype: The type it will be exported from.
    """
    values, round_rows = weight.values.detach(), _rounding(weight)
    wide = {dtype, values.dtype} <= {torch.bfloat16, torch.float32}
    size = int((weight.quantizer.block_sizes or {}).get(-1) or values.shape[-1])
    places: list[tuple[Tensor, ...]] = []
    originals = []
    for rows in _chunks(values):
        part = values[rows]
        once, certain = round_rows(part, rows)
        moved = None if certain and wide else round_rows(once.to(dtype).to(once.dtype), rows)[0] != once
        if moved is not None and bool(moved.any()):
            block = moved.reshape(*moved.shape[:-1], -1, size).any(dim=-1)
            first, *others = block.repeat_interleave(size, dim=-1).nonzero(as_tuple=True)
            originals.append(part[(first, *others)])
            places.append((first + rows.start, *others))
        part.copy_(once)
    if not places:
        return None
    return Unstable(weight.name, tuple(map(torch.cat, zip(*places, strict=True))), torch.cat(originals))


@torch.no_grad()
def put_back(model: nn.Module, unstable: Iterable[Unstable]) -> None:
    """Gives a settled model the values that its export needs; those who hold them must settle again to round them."""
    found = {entry.name: entry for entry in unstable}
    for weight in quantized_weights(model):
        if weight.name in found:
            _, where, original = found[weight.name]
            weight.values[where] = original
