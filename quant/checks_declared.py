"""Checks of a checkpoint against its own declaration: what is quantized, how, and what is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate

from halfbyte.quant.checks import FUSED, Checkpoint, Rule
from halfbyte.quant.checks_model import head_name
from halfbyte.quant.layouts import FORMATS, MIXED_PRECISION, fits, is_scale
from halfbyte.quant.places import renaming
from halfbyte.records.errors import UserError

# What loaders expect in high precision whatever is declared: packed weights read as these give noise.
_NEVER = re.compile(r"(norm|layernorm|\bwte\b|\brouter\b|\.gate$|shared_expert_gate$|\bconv1d\b)")
# Tables that are looked up and never multiplied; they need not be on the exclude list.
_TABLE = re.compile(r"(embed|\bwte\b|\bwpe\b|relative_attention_bias|rotary|norm)")
_FLOATS = ("F32", "BF16", "F16")


def _declarations(at: Checkpoint) -> Iterator[str]:
    other = at.config.get("quantization_config")
    if not isinstance(other, dict) or at.declaration is other or other.get("quant_method") != "modelopt":
        return
    for ours, theirs in (("quant_algo", "quant_algo"), ("quantized_layers", "quantized_layers")):
        if at.declaration.get(ours) != other.get(theirs) and (at.declaration.get(ours) or other.get(theirs)):
            yield f"{ours} differs between hf_quant_config.json and config.json"
    if set(at.declaration.get("exclude_modules") or ()) != set(other.get("ignore") or ()):
        yield "exclude_modules of hf_quant_config.json and ignore of config.json differ"
    if bool(at.declaration.get("kv_cache_quant_algo")) != bool(other.get("kv_cache_scheme")):
        yield "kv_cache_quant_algo of hf_quant_config.json and kv_cache_scheme of config.json differ"
    group = at.declaration.get("group_size")
    for name, content in (other.get("config_groups") or {}).items():
        size = (content.get("weights") or {}).get("group_size")
        if group is not None and size is not None and size != group:
            yield f"group_size is {group} in hf_quant_config.json and {size} in config.json ({name})"


def _complete(at: Checkpoint) -> Iterator[str]:
    yield from at.incomplete
    owned = {name for layer in at.layers for name in layer.tensors}
    for name in at.shards:
        leaf = name.rpartition(".")[2]
        if is_scale(name) and name not in owned and ("weight_scale" in leaf or "input_scale" in leaf):
            module = name.rpartition(".")[0]
            if module not in at.by_module:
                yield f"{name} belongs to no quantized weight"


def _declared(at: Checkpoint) -> Iterator[str]:
    if not at.layers:
        yield "no layer is quantized"
    for layer in at.layers:
        expected = at.format_of(layer)
        if not at.declared.excludes(layer.module) and not fits(layer, expected):
            yield f"{layer.module} is stored as {layer.format}, declared as {expected or 'not quantized'}"
    for module, expected in at.declared.layers.items():
        if not any(name == module or name.startswith(f"{module}.") for name in at.by_module):
            yield f"{module} is declared as {expected} and not quantized"


def _input_scales(at: Checkpoint) -> Iterator[str]:
    for layer in at.layers:
        expected = at.format_of(layer)
        if expected is not None and FORMATS[expected].has_input_scale and layer.input_scale is None:
            yield f"{layer.module} has no input_scale"


def _kept(at: Checkpoint) -> Iterator[str]:
    for module in at.by_module:
        if _NEVER.search(module) and not at.is_part:  # Flux's modulation, which a recipe may quantize
            yield f"{module} is quantized; loaders expect it in high precision"
        if at.declared.excludes(module):
            yield f"{module} is quantized and on the exclude list"
    if at.declared.algorithm == MIXED_PRECISION or at.declaration.get("quant_method") in ("fp8", "mxfp4"):
        return  # what is quantized is listed instead, or known to the loaders of these models
    for name in at.shards:
        module, _, leaf = name.rpartition(".")
        if (
            leaf != "weight"
            or module in at.by_module
            or len(at.shards.shape(name)) != 2
            or at.declared.excludes(module)
        ):
            continue
        if at.shards.dtype(name) in _FLOATS and not _TABLE.search(module) and not at.is_part:
            yield f"{module} is not quantized and not on the exclude list"


def _excluded(at: Checkpoint) -> Iterator[str]:
    ancestors = {module[:end] for module in at.modules for end in _ends(module)}
    for pattern in at.declared.exclude:
        if at.tied and pattern in ("lm_head", "lm_head*", "*lm_head*"):
            continue
        plain = pattern.removesuffix("*").removesuffix(".")
        named = plain in ancestors if "*" not in plain and "?" not in plain else False
        matches = re.compile(translate(pattern)).match
        if not named and not any(matches(module) or matches(f"{module}.") for module in ancestors):
            yield f"'{pattern}' on the exclude list matches no module"


def _ends(module: str) -> list[int]:
    return [*(found.start() for found in re.finditer(r"\.", module)), len(module)]


def _tied(at: Checkpoint) -> Iterator[str]:
    own = "lm_head.weight"
    heads = [name for name in at.shards if f".{name}".endswith(".lm_head.weight")]
    if not heads and at.model is not None and not isinstance(at.model, UserError):
        own, rename = f"{head_name(at.model)}.weight", renaming(at.model)  # GPT-NeoX's file calls it embed_out
        heads = [name for name in at.shards if name.endswith(".weight") and rename(name) == own]
    if at.tied:
        yield from (f"{name} is stored, and the configuration ties it to the embeddings" for name in heads)
    elif not heads and not at.is_part and at.text_config.get("vocab_size"):
        yield f"{own} is missing, and the configuration does not tie it to the embeddings"


def _precision_of_fused(at: Checkpoint) -> Iterator[str]:
    """Loaders make one weight of a group, which cannot be quantized in part."""
    for first, *rest in FUSED:
        for name in at.shards:
            module, _, leaf = name.rpartition(".")
            parent, _, last = module.rpartition(".")
            if leaf != "weight" or last != first:
                continue
            mine = _precision(at, module)
            for other in (f"{parent}.{name}" for name in rest):
                if f"{other}.weight" in at.shards and _precision(at, other) != mine:
                    yield f"{other} is {_precision(at, other)} and {module} {mine}, and loaders fuse them"


def _precision(at: Checkpoint, module: str) -> str:
    layer = at.by_module.get(module)
    return "not quantized" if layer is None else f"stored as {layer.storage}"


RULES = (
    Rule("declarations", "hf_quant_config.json and config.json declare the same", _declarations),
    Rule("complete", "each quantized weight has the scales of its format, and each scale its weight", _complete),
    Rule("declared", "layers are stored in the format that is declared", _declared),
    Rule("input scales", "layers with quantized activations have an input scale", _input_scales),
    Rule("kept", "norms, routers and excluded modules are kept, and every other linear is quantized", _kept),
    Rule("exclude list", "every entry of the exclude list matches a module", _excluded),
    Rule("one precision", "linears that loaders fuse are all quantized the same or all kept", _precision_of_fused),
    Rule("tied", "tied embeddings are stored once, others twice", _tied),
)
