"""Checks of a checkpoint against the original model: is each weight that layer's, is what was kept the same.

The error of a layer is that of its dequantized weight, relative to the original's size (both as the root of the sum of
squares). It is compared with the error of rounding the original to the same format, so that no bound is guessed.
Shards or layers that were swapped, transposed weights, codes in another order and scales of another layer are far off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from halfbyte.quant.checkpoint import plain_dtype
from halfbyte.quant.checks import Checkpoint, Rule
from halfbyte.quant.layouts import NVFP4_AWQ, NVFP4_SVD, Layer, is_kv
from halfbyte.quant.numerics import (
    MX_BLOCK,
    NVFP4_BLOCK,
    fp8_block_dequantize,
    fp8_block_quantize,
    fp8_dequantize,
    fp8_quantize,
    fp8_scale,
    mxfp4_dequantize,
    mxfp4_quantize,
    mxfp8_dequantize,
    mxfp8_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
    nvfp4_scale_2,
)
from halfbyte.quant.packed import dequantize

# GPTQ and clipped weights are up to 1.5 times as far from the original as rounded ones; damage starts at twice.
_FACTOR, _SLACK = 1.7, 0.01
# A block whose scale was changed by a factor of 2 or more.
_BLOCK_ERROR = 0.75
_ROWS = 1024  # a multiple of FP8's squares
_SQUARE = 128
_NUMBER = re.compile(r"\.layers\.(\d+)\.")
_CODE_BITS = {"fp8": 8.0, "fp8_channel": 8.0, "fp8_block": 8.0, "nvfp4": 4.0, "mxfp4": 4.0, "mxfp8": 8.0}
_SIZE_SLACK = 0.01
BITS_OF_DTYPE = {"bfloat16": 16, "float16": 16, "float32": 32}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def source_name(at: Checkpoint, layer: Layer) -> str | None:
    """The original's tensor of a quantized weight; None where it has none."""
    assert at.source is not None
    name = f"{layer.module}.{layer.parameter}"
    projection = layer.module.rpartition(".")[2]
    renamed = f"{layer.module.removesuffix(projection)}{_MIXTRAL.get(projection, projection)}.weight"
    for candidate in (name, renamed, renamed.replace(".mlp.", ".block_sparse_moe.")):
        if candidate in at.source:
            return candidate
    return None


def _weight_error(at: Checkpoint) -> Iterator[str]:
    if at.source is None:
        return
    for layer in at.layers:
        name = source_name(at, layer)
        if name is None:
            # The original of blocks has no other weights, and transformers saves none that predict further tokens.
            if not (layer.codes.endswith("_blocks") or _is_further(at, layer.codes)):
                yield f"{layer.codes} has no counterpart in the source"
            continue
        original = at.source[name].float()
        try:
            weight = _values(at, layer)
        except (ValueError, RuntimeError) as error:
            yield f"{layer.codes} cannot be dequantized: {str(error).splitlines()[0]}"
            continue
        if weight.shape == original.mT.shape and weight.shape != original.shape and weight.dim() == 3:
            original = original.mT
        if weight.shape != original.shape:
            yield f"{layer.codes} stands for a weight of {list(weight.shape)}, the source has {list(original.shape)}"
            continue
        yield from _compare(at, layer, weight, original)


def _is_further(at: Checkpoint, name: str) -> bool:
    """Whether a tensor belongs to a layer behind the last, which predicts further tokens."""
    number, last = _NUMBER.search(name), at.text_config.get("num_hidden_layers")
    return number is not None and isinstance(last, int) and int(number[1]) >= last


def _compare(at: Checkpoint, layer: Layer, weight: Tensor, original: Tensor) -> Iterator[str]:
    size = float(original.norm())
    if size == 0:
        if bool(weight.any()):
            yield f"{layer.codes} is not zero, and the source is"
        return
    expected = float((_rounded(layer, original) - original).norm()) / size
    folded = at.format_of(layer) == NVFP4_AWQ
    if folded:
        _fit_(weight, original)
    error = float((weight - original).norm()) / size
    if not error <= _FACTOR * expected + _SLACK:
        yield f"{layer.codes} is {error:.1%} off the source's weight, rounding alone {expected:.1%}"
    elif layer.storage in ("nvfp4", "mxfp4", "mxfp8") and not folded and at.format_of(layer) != NVFP4_SVD:
        block = NVFP4_BLOCK if layer.storage == "nvfp4" else MX_BLOCK
        sizes = original.reshape(-1, block).norm(dim=-1)
        errors = (weight - original).reshape(-1, block).norm(dim=-1)
        typical = size / math.sqrt(original.numel()) * math.sqrt(block)
        wrong = int(((errors > _BLOCK_ERROR * sizes) & (errors > _BLOCK_ERROR * 0.1 * typical)).sum())
        if wrong:
            yield f"{layer.codes}: {wrong} blocks are more than {_BLOCK_ERROR:.0%} off the source's weight"


def _values(at: Checkpoint, layer: Layer) -> Tensor:
    """The weight that a layer's tensors stand for, in float32, in the original's layout."""
    codes, scale = at.shards[layer.codes], at.shards[layer.scale]
    scale_2 = None if layer.scale_2 is None else at.shards[layer.scale_2].float()
    if layer.codes.endswith("_blocks"):
        codes = codes.flatten(-2)
    if codes.dim() == 3:
        return _stack(layer, codes, scale, scale_2)
    parts = []
    for start in range(0, len(codes), _ROWS):
        own = scale
        if layer.storage in ("nvfp4", "mxfp4", "mxfp8", "fp8_channel"):
            own = scale[start : start + _ROWS]
        elif layer.storage == "fp8_block" and scale.numel() > 1:
            squares = scale.reshape([-(-size // _SQUARE) for size in codes.shape])
            own = squares[start // _SQUARE : (start + _ROWS) // _SQUARE]
        parts.append(dequantize(layer.storage, codes[start : start + _ROWS], own, scale_2, torch.float32))
    weight = torch.cat(parts)
    if layer.lora_a is not None and layer.lora_b is not None:
        weight += at.shards[layer.lora_b].float() @ at.shards[layer.lora_a].float()
    if layer.pre_quant_scale is not None:
        weight *= at.shards[layer.pre_quant_scale].float()
    return weight


def _stack(layer: Layer, codes: Tensor, scale: Tensor, scale_2: Tensor | None) -> Tensor:
    """Experts one by one; a stack that lies across is turned around."""
    across = layer.storage in ("nvfp4", "mxfp4") and scale.dim() == 3 and scale.shape[2] == codes.shape[2]
    parts = []
    for index, one in enumerate(codes):
        own = scale[index] if scale.dim() == 3 or (layer.storage == "fp8_channel" and scale.dim() == 2) else scale
        second = scale_2 if scale_2 is None or scale_2.numel() == 1 else scale_2[index]
        if layer.storage == "fp8_channel" and own.numel() == one.shape[-1] != one.shape[0]:
            parts.append(one.float() * own.float().reshape(1, -1))
            continue
        if across:
            one, own = one.mT.contiguous(), own.mT.contiguous()
        parts.append(dequantize(layer.storage, one, own, second, torch.float32))
    return torch.stack(parts)


def _rounded(layer: Layer, original: Tensor) -> Tensor:
    """The original through the layer's format and back."""
    if layer.storage == "nvfp4":
        scale_2 = nvfp4_scale_2(original.abs().amax())
        return nvfp4_dequantize(nvfp4_quantize(original, scale_2))
    if layer.storage == "mxfp4":
        return mxfp4_dequantize(mxfp4_quantize(original))
    if layer.storage == "mxfp8":
        return mxfp8_dequantize(mxfp8_quantize(original))
    if layer.storage == "fp8_block" and original.dim() == 2:
        quantized = fp8_block_quantize(original, _SQUARE)
        return fp8_block_dequantize(quantized.codes, quantized.scale, torch.float32, _SQUARE)
    return fp8_dequantize(fp8_quantize(original, fp8_scale(original.abs().amax())))


def _fit_(weight: Tensor, original: Tensor) -> None:
    """Undoes AWQ's scales, in place, where they were folded into the layer before or after: one a column, one a row."""
    for dim in (0, 1):
        scale = (weight * original).sum(dim=dim, keepdim=True) / weight.square().sum(dim=dim, keepdim=True)
        weight *= scale.nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)


def _kept_weights(at: Checkpoint) -> Iterator[str]:
    if at.source is None:
        return
    folds = NVFP4_AWQ in (at.declared.algorithm, *at.declared.layers.values())
    for name in at.seen.kept:
        if name not in at.source or (folds and ("norm" in name or name.endswith("bias"))):
            continue
        ours, theirs = at.shards[name], at.source[name]
        if ours.shape != theirs.shape:
            yield f"{name} has shape {list(ours.shape)}, in the source {list(theirs.shape)}"
        elif not torch.equal(ours, theirs.to(ours.dtype)):
            yield f"{name} is kept and differs from the source's"
    quantized = {source_name(at, layer) for layer in at.layers}
    for name in at.source:
        tied = at.tied and name.endswith("lm_head.weight")
        if (
            name not in at.shards
            and name not in quantized
            and not (_is_further(at, name) or tied or name.endswith("inv_freq"))
        ):
            yield f"{name} is in the source and not in the checkpoint"


def _predicted_size(at: Checkpoint) -> Iterator[str]:
    """What the original's weights weigh in the formats they are declared in, and the rest in the model's own type."""
    if at.source is None:
        return
    own = BITS_OF_DTYPE.get(plain_dtype(at.folder), 32) / 8
    predicted = 0.0
    for name, entry in at.shards.entries.items():
        if name in at.seen.kept:
            plain = name in at.source and len(entry.shape) > 1
            predicted += math.prod(entry.shape) * own if plain else entry.end - entry.begin
    for layer in at.layers:
        original = source_name(at, layer)
        shape = at.shards.shape(layer.codes) if original is None else at.source.shape(original)
        packed = 2 if original is None and _CODE_BITS[layer.storage] == 4 else 1
        predicted += packed * math.prod(shape) * _CODE_BITS[layer.storage] / 8
        for part in layer.tensors[1:]:
            predicted += at.shards.entries[part].end - at.shards.entries[part].begin
    stored = sum(entry.end - entry.begin for name, entry in at.shards.entries.items() if not is_kv(name))
    if abs(stored - predicted) > _SIZE_SLACK * predicted:
        yield f"the tensors have {stored} bytes, the source's weights in their formats and types {predicted:.0f}"


RULES = (
    Rule("weight error", "each quantized weight is as close to the source's as its format allows", _weight_error),
    Rule("kept weights", "each weight that is kept is the source's, and none is missing", _kept_weights),
    Rule("predicted size", "the checkpoint is as large as its formats make the source", _predicted_size),
)
