"""Checks of shapes and types: do a layer's tensors have those of its format, and does the layer fit the model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from halfbyte.quant.checks import Checkpoint, Rule
from halfbyte.quant.layouts import MIXED_PRECISION, StoredLayer
from halfbyte.quant.numerics import FP8_BLOCK, MX_BLOCK, NVFP4_BLOCK

_FLOATS = ("F32", "BF16", "F16")
_SCALE_TYPES = {"nvfp4": ("F8_E4M3",), "mxfp4": ("U8", "F8_E8M0"), "mxfp8": ("U8", "F8_E8M0")}
_NOT_TEXT = re.compile(r"(visual|vision|audio|encoder|mtp|draft)")
_READS_HIDDEN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "q_a_proj", "kv_a_proj_with_mqa")
_WRITES_HIDDEN = ("o_proj", "down_proj", "w2")
Shape = tuple[int, ...]


def _shapes(at: Checkpoint) -> Iterator[str]:
    yield from at.misfits
    for layer in at.layers:
        yield from _block_scales(at, layer)
        yield from _single_scales(at, layer)
        yield from _channels(at, layer)
        yield from _width(at, layer)


def _block(at: Checkpoint, layer: StoredLayer) -> int:
    if layer.storage == "mxfp4":
        return MX_BLOCK
    declared: Any = at.declaration.get("group_size")
    if at.declared.algorithm == MIXED_PRECISION:
        by_layer = at.declaration.get("quantized_layers") or {}
        declared = (by_layer.get(layer.module) or {}).get("group_size")
    return declared if isinstance(declared, int) and declared > 0 else NVFP4_BLOCK


def _allowed(at: Checkpoint, layer: StoredLayer) -> list[Shape]:
    """The shapes a layer's weight_scale may have, the usual one first."""
    codes = at.shards.shape(layer.codes)
    *stack, rows, columns = codes
    if layer.codes.endswith("_blocks"):
        return [codes[:-1]]
    if layer.storage in ("nvfp4", "mxfp4", "mxfp8"):
        per_scale = MX_BLOCK if layer.storage == "mxfp8" else _block(at, layer) // 2
        along: list[Shape] = [(*stack, rows, columns // per_scale)]
        return [*along, (*stack, rows // per_scale, columns)] if layer.transposed else along
    if layer.storage == "fp8_block":
        high, wide = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
        squares: list[Shape] = [(*stack, high, wide), (*stack, high, 1, wide, 1)]
        return [*squares, (*stack, wide, 1, high, 1)] if stack else squares  # ModelOpt cuts a stack's transpose
    if layer.storage == "fp8_channel":
        channels: list[Shape] = [(*stack, rows), (*stack, rows, 1)]
        return [*channels, (*stack, columns), (*stack, 1, columns)] if stack else channels
    ones: list[Shape] = [(1,) * count for count in range(5)]
    return [*ones, *((*stack, *one) for one in ones)] if stack else ones


def _block_scales(at: Checkpoint, layer: StoredLayer) -> Iterator[str]:
    codes, scale = at.shards.shape(layer.codes), at.shards.shape(layer.scale)
    if len(codes) < 2:
        yield f"{layer.codes} has shape {list(codes)}"
        return
    allowed = _allowed(at, layer)
    if scale not in allowed:
        yield f"{layer.scale} has shape {list(scale)}, expected {list(allowed[0])}"
    kinds = _SCALE_TYPES.get(layer.storage, _FLOATS)
    if at.shards.dtype(layer.scale) not in kinds:
        yield f"{layer.scale} is {at.shards.dtype(layer.scale)}, expected {kinds[0]}"


def _single_scales(at: Checkpoint, layer: StoredLayer) -> Iterator[str]:
    codes = at.shards.shape(layer.codes)
    for name in (layer.scale_2, layer.input_scale):
        if name is not None:
            shape = at.shards.shape(name)
            if math.prod(shape) not in (1, codes[0] if len(codes) == 3 else 1):
                yield f"{name} has shape {list(shape)}, expected one value"
            if at.shards.dtype(name) not in _FLOATS:
                yield f"{name} is {at.shards.dtype(name)}, expected F32"


def _channels(at: Checkpoint, layer: StoredLayer) -> Iterator[str]:
    codes = at.shards.shape(layer.codes)
    if len(codes) != 2:
        return
    rows, columns = codes[0], _inputs(at, layer)
    if layer.pre_quant_scale is not None and at.shards.shape(layer.pre_quant_scale) != (columns,):
        yield f"{layer.pre_quant_scale} has shape {list(at.shards.shape(layer.pre_quant_scale))}, expected [{columns}]"
    if layer.lora_a is not None and layer.lora_b is not None:
        a, b = at.shards.shape(layer.lora_a), at.shards.shape(layer.lora_b)
        if len(a) != 2 or b != (rows, a[0]) or a[1] != columns:
            yield f"{layer.lora_a} {list(a)} and {layer.lora_b} {list(b)} do not make a weight of [{rows}, {columns}]"
    elif layer.lora_a is not None or layer.lora_b is not None:
        yield f"{layer.lora_a or layer.lora_b} is one factor of a low-rank branch without the other"


def _inputs(at: Checkpoint, layer: StoredLayer) -> int:
    return at.shards.shape(layer.codes)[-1] * (2 if layer.storage in ("nvfp4", "mxfp4") else 1)


def _width(at: Checkpoint, layer: StoredLayer) -> Iterator[str]:
    """A weight that was transposed, or of another model, has the model's width on the wrong side."""
    hidden, shape = at.text_config.get("hidden_size"), at.shards.shape(layer.codes)
    if not isinstance(hidden, int) or len(shape) != 2 or ".layers." not in layer.module:
        return
    last = layer.module.rpartition(".")[2]
    if _NOT_TEXT.search(layer.module):
        return  # the other parts of a model have a width of their own
    if last in _READS_HIDDEN and _inputs(at, layer) != hidden:
        yield f"{layer.codes} has {_inputs(at, layer)} inputs, hidden_size is {hidden}"
    if last in _WRITES_HIDDEN and shape[0] != hidden:
        yield f"{layer.codes} has {shape[0]} outputs, hidden_size is {hidden}"


RULES = (Rule("shapes", "tensors have the shape and type of their format and fit the model", _shapes),)
