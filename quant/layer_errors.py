"""Layer errors: how far each quantized weight of a checkpoint is from the original's, layer by layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from halfbyte.quant.checks import Checkpoint, open_checkpoint
from halfbyte.quant.checks_source import source_name
from halfbyte.quant.layouts import NVFP4_AWQ, StoredLayer
from halfbyte.quant.weight_error import Misfit, distance
from halfbyte.records.errors import UserError


@dataclass(frozen=True)
class LayerError:
    """One quantized weight beside its original; both errors are relative, as the root of the sum of squares."""

    layer: str
    """Its module, such as model.layers.3.mlp.down_proj; of experts in one tensor that tensor."""
    format: str
    """As declared: NVFP4, FP8, ..."""
    weights: int
    bits_per_weight: float
    """Codes and scales."""
    error: float
    """Of the dequantized weight; with AWQ, after what the folded scales alone change is taken out."""
    expected: float
    """Of rounding the original to that format by its largest value alone."""


def layer_errors(checkpoint: Path, source: Path) -> list[LayerError]:
    """Compares every quantized weight of a checkpoint with the original's, in the order of their names.

    Nothing is loaded as a model, and no text is needed: see weight_error. What an error does to the answers is another
    question, which eval.layer_sensitivity measures.

    Args:
        checkpoint: The exported folder.
        source: The folder of the original model.

    Raises:
        UserError: when it is no checkpoint, or not one of that model.
    """
    at = open_checkpoint(checkpoint, source)
    if not at.layers:
        raise UserError(f"{checkpoint} holds no quantized weight", "give the exported folder")
    return [_error_of(at, layer) for layer in at.layers]


def _error_of(at: Checkpoint, layer: StoredLayer) -> LayerError:
    assert at.source is not None
    name = source_name(at, layer)
    if name is None:
        raise UserError(f"{layer.codes} has no counterpart in the source", "give the model it was made from")
    declared = at.format_of(layer) or layer.format
    try:
        found = distance(at.shards, at.source, layer, name, folded=declared == NVFP4_AWQ, blocks=False)
    except Misfit as misfit:
        raise UserError(f"{layer.codes} {misfit}", "give the model it was made from") from None
    weights = math.prod(at.source.shape(name))
    stored = sum(at.shards.entries[part].end - at.shards.entries[part].begin for part in layer.tensors)
    own = layer.module if layer.parameter == "weight" else f"{layer.module}.{layer.parameter}"
    return LayerError(own, declared, weights, 8 * stored / weights, found.error, found.expected)
