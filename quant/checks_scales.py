"""Checks of a checkpoint's scales: can they be right, were they calibrated, do those agree that loaders take for one.

What loaders do with scales that differ within a fused group, read in their sources in November 2026: vLLM takes the
largest weight_scale_2 and input_scale of q/k/v, and w1's weight_scale_2 for w3; TensorRT-LLM asserts that they are
equal. FP8 weights are scaled again by vLLM, so that their weight_scale may differ. A missing expert's input_scale
becomes 0 and then infinity in vLLM.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch

from halfbyte.quant.checks import Checkpoint, Rule
from halfbyte.quant.layouts import FORMATS, KV_SUFFIXES, StoredLayer, is_kv
from halfbyte.quant.numerics import E2M1_MAX, E4M3_MAX
from halfbyte.recipes.find import load_recipe
from halfbyte.recipes.schema import QuantizeSpec
from halfbyte.records.run import RunFolder

# Largest magnitudes of weights, and of activations, that a trained model can have; far beyond any seen.
_WEIGHTS = (1e-7, 1e4)
_ACTIVATIONS = (1e-6, 1e7)
# A calibrated tensor's largest block scale is 448, or 256 with four-over-six, and less where a clipped or swept scale
# was better; inputs in FP8 leave room for a sixth of that.
_LARGEST_SCALE = (112.0, 448.0)
_LARGEST_SCALE_W4A8 = (16.0, 80.0)


def _finite(at: Checkpoint) -> Iterator[str]:
    for name, numbers in at.seen.scales.items():
        if numbers.not_finite:
            yield f"{name} is not finite"
        elif "scale" not in name.rpartition(".")[2]:
            continue  # an offset or a factor, which may have any sign
        elif numbers.zeros:
            yield f"{name} has {numbers.zeros} of {numbers.values} values that are zero"
        elif numbers.smallest < 0:
            yield f"{name} has negative values"
    for name, numbers in at.seen.kept.items():
        if numbers.not_finite:
            yield f"{name} is not finite"
    for name, codes in at.seen.codes.items():
        if codes.not_a_number:
            yield f"{name} has {codes.not_a_number} codes that stand for NaN"


def _largest_weight(at: Checkpoint, layer: StoredLayer) -> float:
    scale = at.seen.scales[layer.scale].largest
    if layer.storage == "nvfp4":
        return E2M1_MAX * scale * (at.scalar(layer.scale_2) or 0.0)
    return (E2M1_MAX if layer.storage == "mxfp4" else E4M3_MAX) * scale


def _range(at: Checkpoint) -> Iterator[str]:
    for layer in at.layers:
        largest = _largest_weight(at, layer)
        if not _WEIGHTS[0] < largest < _WEIGHTS[1]:
            yield f"{layer.scale} gives weights up to {largest:.3g}"
        expected = at.format_of(layer)
        value = at.scalar(layer.input_scale)
        if value is not None and expected is not None:
            amax = value * E4M3_MAX * (E2M1_MAX if FORMATS[expected].activations == "nvfp4" else 1.0)
            if not _ACTIVATIONS[0] < amax < _ACTIVATIONS[1]:
                yield f"{layer.input_scale} gives inputs up to {amax:.3g}"
    yield from _block_scales(at)


def _block_scales(at: Checkpoint) -> Iterator[str]:
    """The block with a tensor's largest magnitude has the largest scale that weight_scale_2 leaves room for."""
    sharing = {layer.codes: [layer] for layer in at.layers}
    for group in at.groups():
        for layer in group:
            sharing[layer.codes] = group
    for layer in at.layers:
        expected = at.format_of(layer)
        if layer.storage != "nvfp4" or expected is None:
            continue
        low, high = _LARGEST_SCALE_W4A8 if FORMATS[expected].activations == "fp8" else _LARGEST_SCALE
        same = [one for one in sharing[layer.codes] if at.scalar(one.scale_2) == at.scalar(layer.scale_2)]
        largest = max(at.seen.scales[one.scale].largest for one in same)
        if at.seen.scales[layer.scale].ones or low <= largest <= high:
            continue  # all 1 is another check's matter
        yield f"the largest of {layer.scale} is {largest:g}, and weight_scale_2 is made for {low:g} to {high:g}"


def _calibrated(at: Checkpoint) -> Iterator[str]:
    for suffix, what in (("input_scale", "activations"), ("weight_scale_2", "weights"), ("weight_scale", "weights")):
        named = {name: numbers for name, numbers in at.seen.scales.items() if name.endswith(suffix)}
        if len(named) > 1 and all(numbers.ones for numbers in named.values()):
            if suffix == "input_scale" and _recipe_sets_inputs(at):
                continue
            yield f"every {suffix} is 1, {min(named)} among them: the {what} were never calibrated"
        elif suffix == "weight_scale":
            ones = [name for name, numbers in named.items() if numbers.ones and numbers.values > 1]
            yield from (f"every value of {name} is 1: the weights were never calibrated" for name in ones)


def _fused(at: Checkpoint) -> Iterator[str]:
    for first, *others in at.groups():
        for part in ("scale_2", "input_scale", "pre_quant_scale"):
            mine: str | None = getattr(first, part)
            for other in others:
                theirs: str | None = getattr(other, part)
                if (mine is None) != (theirs is None):
                    yield f"{mine or theirs} has no counterpart in {other.module if mine else first.module}"
                elif mine is not None and theirs is not None and not _equal(at, mine, theirs):
                    yield f"{theirs} differs from {mine}, and loaders use one for both"


def _equal(at: Checkpoint, one: str, other: str) -> bool:
    if at.seen.scales[one] != at.seen.scales[other]:
        return at.seen.scales[one].not_finite and at.seen.scales[other].not_finite
    return at.seen.scales[one].values == 1 or torch.equal(at.shards[one], at.shards[other])


def _kv_cache(at: Checkpoint) -> Iterator[str]:
    stored = {name: at.seen.scales[name] for name in at.seen.scales if is_kv(name)}
    if at.declared.kv_cache is None:
        yield from (f"{name} is stored and no KV-cache format is declared" for name in sorted(stored))
        return
    scales = {name: numbers for name, numbers in stored.items() if name.endswith("_scale")}
    if not scales:
        if _recipe_calibrates_kv(at):
            yield f"a {at.declared.kv_cache} KV cache is declared and calibrated by the recipe, and has no scales"
        return  # none at all means a scale of 1, as ModelOpt's *_cast recipes export it
    if all(numbers.ones for numbers in scales.values()):
        yield f"every KV-cache scale is 1, {min(scales)} among them: the cache was never calibrated"
    for name, numbers in scales.items():
        if not _ACTIVATIONS[0] < numbers.largest * E4M3_MAX < _ACTIVATIONS[1]:
            yield f"{name} gives keys or values up to {numbers.largest * E4M3_MAX:.3g}"
    wanted = {name.rpartition(".")[2] for name in stored}
    if at.declared.kv_cache.endswith("AFFINE"):
        wanted |= {"k_bias", "v_bias"}
    if wanted & {"k_scale", "v_scale"}:
        wanted |= {"k_scale", "v_scale"}
    places = _kv_places(stored)
    for attention in sorted(_attentions(at, set(places))):
        have = places.get(attention, set())
        yield from (f"{_kv_name(attention, suffix)} is missing" for suffix in sorted(wanted - have))


def _kv_places(names: Iterable[str]) -> dict[str, set[str]]:
    """The KV-cache tensors of each attention."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        module, _, suffix = name.rpartition(".")
        found[re.sub(r"\.(k|v|kv)_proj$", "", module)].add(suffix)
    return found


def _kv_name(attention: str, suffix: str) -> str:
    inside = suffix in KV_SUFFIXES and suffix[1] == "_"
    return f"{attention}.{suffix[0]}_proj.{suffix}" if inside else f"{attention}.{suffix}"


def _attentions(at: Checkpoint, with_scales: set[str]) -> set[str]:
    """Every attention whose keys are cached; where none has a k_proj, all that lie beside one that has scales."""
    found = {name.removesuffix(".k_proj.weight") for name in at.shards if name.endswith(".k_proj.weight")}
    if found & with_scales:
        return found
    kinds = {attention.rpartition(".")[2] for attention in with_scales}
    return {
        module
        for name in at.shards
        for module in [name.rpartition(".")[0].rpartition(".")[0]]
        if module.rpartition(".")[2] in kinds and ".layers." in module
    }


def _recipe(at: Checkpoint) -> QuantizeSpec | None:
    """The quantize block of the run this checkpoint lies in."""
    run = RunFolder(at.root.resolve().parent)
    inside = run.checkpoint == at.root.resolve() and run.recipe.is_file()
    return load_recipe(str(run.recipe)).quantize if inside else None


def _recipe_calibrates_kv(at: Checkpoint) -> bool:
    """Whether the recipe asks for calibrated KV-cache scales, by name."""
    spec = _recipe(at)
    named = "" if spec is None else spec.kv_cache or (spec.recipe or "").partition("kv_")[2]
    return bool(named) and "none" not in named and "cast" not in named


def _recipe_sets_inputs(at: Checkpoint) -> bool:
    """Whether the recipe sets input scales to 1 on purpose, as ModelOpt's *_input_scale1 do."""
    spec = _recipe(at)
    return spec is not None and ("input_scale1" in (spec.recipe or "") or "constant_amax" in str(spec.quant_cfg))


RULES = (
    Rule("finite", "scales are positive and finite, codes and kept weights finite", _finite),
    Rule("range", "scales give weights and inputs of a size that a model can have", _range),
    Rule("calibrated", "scales were calibrated", _calibrated),
    Rule("fused", "linears that loaders fuse share their scales", _fused),
    Rule("kv cache", "KV-cache scales are there when declared, only then, and calibrated", _kv_cache),
)
