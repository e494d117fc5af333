"""LoRA with quantizers in place: what is quantized is the weight with the factors added, as it will be exported."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfbyte.quant.rounding import fused_experts, stacked_experts
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.recipes.training import LoraSpec
from halfbyte.records.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_FACTOR = ".lora_A.default.weight"
_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that peft takes for the fused weights of experts where a model has those."""


def add_lora(model: PreTrainedModel, spec: LoraSpec) -> None:
    """Puts peft's factors beside the linears of a calibrated model, in place; they alone are trained from then on.

    ModelOpt's own LoRA layer takes over the quantizers of each linear, and quantizes weight and factors as one.

    Raises:
        UserError: when no linear has such a name, or one that has is none that factors can be merged into.
    """
    from modelopt.torch.quantization.nn import QuantModuleRegistry
    from modelopt.torch.quantization.plugins import peft as _  # noqa: F401  registers that layer
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora.layer import Linear

    _require_linears(model, spec)
    config = LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=list(spec.targets), lora_dropout=0.0)  # type: ignore[arg-type]
    with quiet_upstream():
        inject_adapter_in_model(config, model)
    for layer in [module for module in model.modules() if isinstance(module, Linear)]:
        base: Any = layer.base_layer
        if not hasattr(base, "weight_quantizer"):
            continue
        converted: Any = QuantModuleRegistry.convert(layer)
        for side in ("input", "weight", "output"):
            setattr(converted, f"{side}_quantizer", getattr(base, f"{side}_quantizer"))


def _require_linears(model: PreTrainedModel, spec: LoraSpec) -> None:
    """Looks at what the targets name before peft does, which would train what merge_lora cannot merge."""
    named = {
        target: [one for name, one in model.named_modules() if name == target or name.endswith(f".{target}")]
        for target in spec.targets
    }
    found = [module for modules in named.values() for module in modules]
    holders = [module for module in model.modules() if fused_experts(module) or stacked_experts(module)]
    experts = {id(one) for holder in holders for one in holder.modules()}
    linears = {
        name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and id(one) not in experts
    }
    hint = f"its linears: {', '.join(sorted({name.rpartition('.')[2] for name in linears}))}"
    if not found:
        raise UserError(f"lora.targets {', '.join(spec.targets)} match no linear of the model", hint)
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # a Flux has none
    for target, modules in named.items():
        if experts and (target in _EXPERTS or any(id(one) in experts for one in modules)):  # peft means the experts
            raise UserError(f"lora.targets name {target}, and fused experts cannot be trained by lora", hint)
        if not modules:
            logger.warning("lora.targets: %s matches nothing of the model; %s", target, hint)
        for module in modules:
            if not isinstance(module, nn.Linear):
                raise UserError(f"lora.targets name {target}, which is no linear but {type(module).__name__}", hint)
            if embeddings is not None and module.weight is embeddings.weight:
                raise UserError(
                    f"lora.targets name {target}, whose weight is the input embedding's too",
                    "both would change; leave it out of train.lora.targets",
                )
            if spec.rank > min(module.weight.shape):
                raise UserError(
                    f"lora.rank is {spec.rank}, and {target} is {' x '.join(map(str, module.weight.shape))}",
                    f"set train.lora.rank to at most {min(module.weight.shape)}",
                )


@torch.no_grad()
def merge_lora(model: nn.Module, spec: LoraSpec, factors: dict[str, Tensor]) -> None:
    """Adds trained factors to the weights of a model that has none, in place.

    Args:
        model: As calibrated; add_lora was not called.
        spec: As it was trained.
        factors: By the name of the parameter that was trained; each is taken out.
    """
    for name in [name for name in factors if name.endswith(_FACTOR)]:
        prefix = name.removesuffix(_FACTOR)
        down, up = factors.pop(name), factors.pop(f"{prefix}.lora_B.default.weight")
        weight = model.get_parameter(f"{prefix}.weight")
        change = (spec.alpha / spec.rank * up.to(weight.device)) @ down.to(weight.device)
        weight.copy_((weight.float() + change).to(weight.dtype))
