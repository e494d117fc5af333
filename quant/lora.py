"""LoRA with quantizers in place: what is quantized is the weight with the factors added, as it will be exported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfbyte.quant.upstream import quiet_upstream
from halfbyte.recipes.training import LoraSpec
from halfbyte.records.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FACTOR = ".lora_A.default.weight"


def add_lora(model: PreTrainedModel, spec: LoraSpec) -> None:
    """Puts peft's factors beside the linears of a calibrated model, in place; they alone are trained from then on.

    ModelOpt's own LoRA layer takes over the quantizers of each linear, and quantizes weight and factors as one.

    Raises:
        UserError: when no linear has such a name.
    """
    from modelopt.torch.quantization.nn import QuantModuleRegistry
    from modelopt.torch.quantization.plugins import peft as _  # noqa: F401  registers that layer
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora.layer import Linear

    config = LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=list(spec.targets), lora_dropout=0.0)  # type: ignore[arg-type]
    try:
        with quiet_upstream():
            inject_adapter_in_model(config, model)
    except ValueError as error:
        if "not found in the base model" not in str(error):
            raise
        names = sorted({name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.Linear)})
        raise UserError(
            f"lora.targets {', '.join(spec.targets)} match no linear of the model", f"its linears: {', '.join(names)}"
        ) from None
    for layer in [module for module in model.modules() if isinstance(module, Linear)]:
        base: Any = layer.base_layer
        if not hasattr(base, "weight_quantizer"):
            continue
        converted: Any = QuantModuleRegistry.convert(layer)
        for side in ("input", "weight", "output"):
            setattr(converted, f"{side}_quantizer", getattr(base, f"{side}_quantizer"))


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
