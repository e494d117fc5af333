"""Where in a transformers model the tensors of a checkpoint belong: its linears, stacks of experts, and the rest."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from halfbyte.quant.checkpoint import QuantFormat, Tensors
from halfbyte.quant.layouts import StoredLayer, fits, is_kv, is_scale
from halfbyte.records.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# One expert's projection in a checkpoint, and which part of transformers' stacked parameter it is.
_EXPERT = re.compile(
    r"^(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<projection>w1|w2|w3|gate_proj|up_proj|down_proj)$"
)
_PARTS = {
    "gate_proj": ("gate_up_proj", 0),
    "w1": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "w3": ("gate_up_proj", 1),
    "down_proj": ("down_proj", 0),
    "w2": ("down_proj", 0),
}


class Stack(NamedTuple):
    """A parameter that holds all experts."""

    module: str
    """The experts of a block, by the model's name."""
    parameter: str


Part = tuple[int, int]
"""Which expert, and which part of its weight: 0 for gate or all of it, 1 for up."""


@dataclass
class Places:
    """What of a checkpoint goes where."""

    linears: dict[str, StoredLayer] = field(default_factory=dict)
    """By the model's name of the module."""
    stacks: dict[Stack, dict[Part, StoredLayer | str]] = field(default_factory=dict)
    """Experts stored one by one; a name stands for a weight that is not quantized."""
    whole: dict[Stack, StoredLayer] = field(default_factory=dict)
    """Experts stored in one tensor."""
    others: dict[str, StoredLayer] = field(default_factory=dict)
    """Quantized weights of other modules, such as embeddings, by the tensor's name."""
    plain: list[str] = field(default_factory=list)
    """Tensors that transformers loads as they are."""
    kv_cache: dict[str, str] = field(default_factory=dict)
    """Scales and offsets of the KV cache: the model's name of each, and the checkpoint's."""


def find_places(tensors: Tensors, declared: QuantFormat, model: PreTrainedModel) -> Places:
    """Says for every tensor of a checkpoint where in `model` it belongs.

    Tensors that the model leaves out on purpose, such as layers for predicting several tokens, are skipped.

    Args:
        tensors: The checkpoint's.
        declared: What it declares.
        model: On the meta device.

    Raises:
        UserError: when a layer is stored in another format than declared, a tensor of a quantized layer belongs to no
            layer of the model, or no weight is quantized at all.
    """
    rename, skipped = renaming(model), _skipped(model)
    modules = dict(model.named_modules())
    places, used, quantized = Places(), set[str](), 0
    for name in tensors:
        if skipped(name) or is_scale(name):
            continue
        layer = tensors.layer(name)
        if layer is None:
            continue
        quantized += 1
        require_declared(layer, declared)
        used |= set(layer.tensors)
        _place(places, layer, rename, modules)
    _require_untied(places, model)
    if not quantized:
        raise UserError(
            f"the checkpoint declares {declared.label}, but no weight in it is quantized",
            "its weights or its configuration are of another model; export the model again",
        )
    for name in tensors:
        if name in used or skipped(name):
            continue
        if is_kv(name) and declared.kv_cache is not None:
            places.kv_cache[rename(name)] = name
        elif is_scale(name):
            raise UserError(f"{name} belongs to no quantized layer", "the checkpoint does not fit its configuration")
        else:
            target = _expert_of(rename(name).removesuffix(".weight"), modules)
            if target is not None and target[0] in places.stacks:
                places.stacks[target[0]][target[1]] = name
            else:
                places.plain.append(name)
    return places


def _require_untied(places: Places, model: PreTrainedModel) -> None:
    """Refuses a quantized head that the configuration ties to embeddings: loaders would use one of the two for both."""
    head = next((name for name in places.linears if name.rpartition(".")[2] == "lm_head"), None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        raise UserError(
            f"{head} is quantized, but the configuration ties it to the embeddings",
            "keep lm_head out of the quantization, or export the model untied",
        )


def require_declared(layer: StoredLayer, declared: QuantFormat) -> None:
    """Compares how a layer is stored with what is declared of it.

    Raises:
        UserError: when they differ.
    """
    expected = declared.format_of(layer.module)
    if expected is None:
        raise UserError(
            f"{layer.module} is stored as {layer.format} but declared to be kept as it is", "export the model again"
        )
    if layer.format == "FP8" and expected == "FP8" and layer.input_scale is None:
        raise UserError(f"{layer.module} has no input_scale", "the checkpoint is incomplete; export the model again")
    if not fits(layer, expected):
        raise UserError(
            f"{layer.module} is stored as {layer.format} but declared as {expected}", "export the model again"
        )


def _place(places: Places, layer: StoredLayer, rename: Callable[[str], str], modules: dict[str, nn.Module]) -> None:
    if layer.parameter != "weight":
        stack = Stack(rename(f"{layer.module}.{layer.parameter}").rpartition(".")[0], layer.parameter)
        if not hasattr(modules.get(stack.module), stack.parameter):
            raise _homeless(layer)
        places.whole[stack] = layer
        return
    name = rename(layer.codes).removesuffix(".weight")
    target = _expert_of(name, modules)
    if target is not None:
        places.stacks.setdefault(target[0], {})[target[1]] = layer
    elif name not in modules:
        raise _homeless(layer)
    elif isinstance(modules[name], nn.Linear):
        places.linears[name] = layer
    else:
        places.others[layer.codes] = layer


def _homeless(layer: StoredLayer) -> UserError:
    return UserError(f"{layer.codes} belongs to no layer of the model", "the checkpoint does not fit its configuration")


def _expert_of(name: str, modules: dict[str, nn.Module]) -> tuple[Stack, Part] | None:
    """The stack and the part of it that a module of the checkpoint is; None when the model has such a module itself."""
    match = _EXPERT.match(name)
    if match is None or name in modules:
        return None
    experts = modules.get(match["experts"])
    parameter, part = _PARTS[match["projection"]]
    if parameter == "gate_up_proj" and not hasattr(experts, parameter):
        parameter, part = "up_proj", 0  # experts without a gate
    if not isinstance(getattr(experts, parameter, None), nn.Parameter):
        return None
    return Stack(match["experts"], parameter), (int(match["index"]), part)


def _conversions(model: PreTrainedModel) -> list[Any]:
    """How transformers converts names when it loads a model; nothing before version 5, which has one name for both.

    diffusers' models have one name for both too.
    """
    if not hasattr(model, "base_model_prefix"):
        return []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return []
    return list(get_model_conversion_mapping(model))


def renaming(model: PreTrainedModel) -> Callable[[str], str]:
    """From a checkpoint's tensor names to the model's, as transformers renames them when it loads a model."""
    conversions, known = _conversions(model), model.state_dict()
    if not conversions:
        return lambda name: name
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]

    def rename(name: str) -> str:
        if name in known:
            return name
        return rename_source_key(name, renamings, [], model.base_model_prefix, known)[0]

    return rename


def hub_names(model: PreTrainedModel) -> Callable[[str], str]:
    """From a checkpoint's tensor names to those that transformers loads.

    ModelOpt writes the names of the model in memory where it cannot turn them back, as for experts with FP8 squares;
    transformers would not find these.
    """
    conversions, known = _conversions(model), model.state_dict()
    if not conversions:
        return lambda name: name
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]

    @cache
    def back() -> Callable[[str], str]:
        from modelopt.torch.export.quant_aware_conversion import build_reverse_name_mapper

        return build_reverse_name_mapper(model) or str

    def rename(name: str) -> str:
        if name in known or ".experts." not in name:
            return name
        if rename_source_key(name, renamings, converters, model.base_model_prefix, known)[0] in known:
            return name
        module, _, leaf = name.rpartition(".")
        return f"{back()(module)}.{leaf}"

    return rename


def _skipped(model: PreTrainedModel) -> Callable[[str], bool]:
    """Which tensors the model's class leaves out, and layers behind its last: those that predict further tokens."""
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    config: Any = model.config
    layers = getattr(config, "num_hidden_layers", None) if getattr(config, "num_nextn_predict_layers", 0) else None
    numbered = re.compile(r"(?:^|\.)layers\.(\d+)\.")

    def skipped(name: str) -> bool:
        match = numbered.search(name)
        behind = layers is not None and match is not None and int(match[1]) >= layers
        return behind or any(pattern.search(name) for pattern in patterns)

    return skipped
