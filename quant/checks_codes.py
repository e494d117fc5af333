"""Checks of a checkpoint's codes: do they use the range their scales give them, or are they clipped or dead."""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.quant.checks import Checkpoint, Rule
from halfbyte.quant.layouts import StoredLayer

# A group's largest value reaches half the maximum by the way its scale is chosen; a scale that was searched for
# (MSE, local Hessian) misses that in some blocks: up to 6 % of a layer's in every preset of ModelOpt 0.47. Codes under
# wrong scales miss it in most.
_MOST_WEAK = 0.2
# Rows of zeros pad vocabularies and pruned layers; half of a layer is damage.
_MOST_DEAD = 0.5
# The largest value of each group lies on the maximum by design, and some beside it.
_MOST_SATURATED = {"nvfp4": 0.25, "mxfp4": 0.25}
_MOST_SATURATED_FP8 = 0.05


def _codes(at: Checkpoint) -> Iterator[str]:
    fused = {layer.codes: group for group in at.groups() for layer in group}
    for layer in at.layers:
        codes = at.seen.codes[layer.codes]
        if codes.weak > _MOST_WEAK * codes.groups and not _shares_scale(at, layer, fused.get(layer.codes, [])):
            yield (
                f"{layer.codes}: {codes.weak} of {codes.groups} groups of values that share a scale "
                "stay below half of what it allows"
            )


def _shares_scale(at: Checkpoint, layer: StoredLayer, group: list[StoredLayer]) -> bool:
    """Whether the scale is that of another linear, fused with this one, whose values are larger."""
    return layer.storage == "fp8" and any(
        other is not layer and at.scalar(other.scale) == at.scalar(layer.scale) and not at.seen.codes[other.codes].weak
        for other in group
    )


def _dead(at: Checkpoint) -> Iterator[str]:
    for layer in at.layers:
        codes = at.seen.codes[layer.codes]
        if codes.groups and codes.empty > _MOST_DEAD * codes.groups:
            yield f"{layer.codes}: {codes.empty / codes.groups:.0%} of the blocks are zero"
        elif codes.unmarked:
            yield f"{layer.codes}: {codes.unmarked} blocks are zero, and their scales are those of other values"
    for name, numbers in at.seen.kept.items():
        if numbers.values and numbers.zeros == numbers.values and len(at.shards.shape(name)) > 1 and "bias" not in name:
            yield f"{name} is zero everywhere"


def _saturated(at: Checkpoint) -> Iterator[str]:
    for layer in at.layers:
        codes = at.seen.codes[layer.codes]
        by_design = 2 * codes.groups / max(codes.values, 1)
        if codes.saturated > _MOST_SATURATED.get(layer.storage, _MOST_SATURATED_FP8) + by_design:
            yield f"{layer.codes}: {codes.saturated:.0%} of the values lie at the format's maximum"


RULES = (
    Rule("codes", "codes use the range their scales give them", _codes),
    Rule("dead blocks", "few blocks are zero, and those are marked as such", _dead),
    Rule("saturation", "few values lie at the format's maximum", _saturated),
)
