"""Checks of a checkpoint against the original model: is each weight that layer's, is what was kept the same.

The error of a layer is that of its dequantized weight, relative to the original's size (both as the root of the sum of
squares). It is compared with the error of rounding the original to the same format, so that no bound is guessed; see
halfbyte.quant.weight_error.
Shards or layers that were swapped, transposed weights, codes in another order and scales of another layer are far off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch

from halfbyte.quant.checkpoint import plain_dtype
from halfbyte.quant.checks import Checkpoint, Rule
from halfbyte.quant.layouts import NVFP4_AWQ, NVFP4_SVD, StoredLayer, is_kv
from halfbyte.quant.shards import Shards
from halfbyte.quant.weight_error import BLOCK_ERROR, Misfit, distance

_NUMBER = re.compile(r"\.layers\.(\d+)\.")
_CODE_BITS = {"fp8": 8.0, "fp8_channel": 8.0, "fp8_block": 8.0, "nvfp4": 4.0, "mxfp4": 4.0, "mxfp8": 8.0}
_SIZE_SLACK = 0.01
BITS_OF_DTYPE = {"bfloat16": 16, "float16": 16, "float32": 32}
_PIECE = 2**20
"""Values of a kept weight compared at once."""
# ModelOpt writes the names of transformers' Mixtral where it cannot turn them back into those of the files.
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def source_name(at: Checkpoint, layer: StoredLayer) -> str | None:
    """The original's tensor of a quantized weight; None where it has none."""
    projection = layer.module.rpartition(".")[2]
    renamed = f"{layer.module.removesuffix(projection)}{_MIXTRAL.get(projection, projection)}.weight"
    return _first_in_source(at, f"{layer.module}.{layer.parameter}", renamed, _mixtral_block(renamed))


def _kept_source_name(at: Checkpoint, name: str) -> str | None:
    return _first_in_source(at, name, _mixtral_block(name))


def _mixtral_block(name: str) -> str:
    return name.replace(".mlp.", ".block_sparse_moe.")


def _first_in_source(at: Checkpoint, *candidates: str) -> str | None:
    assert at.source is not None
    inside = [f"{at.source_prefix}{name}" for name in candidates]
    return next((name for name in inside if name in at.source), None)


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
        folded = at.format_of(layer) == NVFP4_AWQ
        whole = folded or at.format_of(layer) == NVFP4_SVD
        try:
            found = distance(at.shards, at.source, layer, name, folded=folded, blocks=not whole)
        except Misfit as error:
            yield f"{layer.codes} {error}"
        except (ValueError, RuntimeError) as error:
            yield f"{layer.codes} cannot be dequantized: {str(error).splitlines()[0]}"
        else:
            if found.size == 0 and found.error:
                yield f"{layer.codes} is not zero, and the source is"
            elif not found.close:
                off = f"{found.error:.1%} off the source's weight"
                yield f"{layer.codes} is {off}, rounding alone {found.expected:.1%}"
            elif found.wrong_blocks:
                off = f"more than {BLOCK_ERROR:.0%} off the source's weight"
                yield f"{layer.codes}: {found.wrong_blocks} blocks are {off}"


def _is_further(at: Checkpoint, name: str) -> bool:
    """Whether a tensor belongs to a layer behind the last, which predicts further tokens."""
    number, last = _NUMBER.search(name), at.text_config.get("num_hidden_layers")
    return number is not None and isinstance(last, int) and int(number[1]) >= last


def _kept_weights(at: Checkpoint) -> Iterator[str]:
    if at.source is None:
        return
    folds = NVFP4_AWQ in (at.declared.algorithm, *at.declared.layers.values())
    found = {name: _kept_source_name(at, name) for name in at.seen.kept}
    for name, original in found.items():
        if original is None or (folds and ("norm" in name or name.endswith("bias"))):
            continue
        ours, theirs = at.shards.shape(name), at.source.shape(original)
        if ours != theirs:
            yield f"{name} has shape {list(ours)}, in the source {list(theirs)}"
        elif not _same(at.shards, name, at.source, original):
            yield f"{name} is kept and differs from the source's"
    there = {*found.values(), *(source_name(at, layer) for layer in at.layers)}
    for name in at.source:
        tied = at.tied and name.endswith("lm_head.weight")
        if (
            name not in at.shards
            and name not in there
            and name.startswith(at.source_prefix)  # what sees is left out
            and not (_is_further(at, name) or tied or name.endswith("inv_freq"))
        ):
            yield f"{name} is in the source and not in the checkpoint"


def _same(checkpoint: Shards, name: str, source: Shards, original: str) -> bool:
    """Whether a tensor is the source's, rounded to its own type."""
    values = math.prod(source.shape(original))
    for first in range(0, values, _PIECE):
        last = min(first + _PIECE, values)
        ours, theirs = checkpoint.part(name, first, last), source.part(original, first, last)
        if not torch.equal(ours, theirs.to(ours.dtype)):
            return False
    return True


def _predicted_size(at: Checkpoint) -> Iterator[str]:
    """What the original's weights weigh in the formats they are declared in, and the rest in the model's own type."""
    if at.source is None:
        return
    own = BITS_OF_DTYPE.get(plain_dtype(at.folder), 32) / 8
    predicted = 0.0
    for name, entry in at.shards.entries.items():
        if name in at.seen.kept:
            plain = _kept_source_name(at, name) is not None and len(entry.shape) > 1
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
