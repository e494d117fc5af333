"""What training may do to the quantizers' ranges: learned block scales of NVFP4 weights, and what is out of range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.quant.rounding import quantized_weights
from halfbyte.records.errors import UserError

LEARNED = "_amax_post"
"""ModelOpt's name of the learned amax of a quantizer's blocks."""
_LEAST = 2.0**-9
"""Of the global amax: where ModelOpt's LSQ stops a block's amax from below."""
FAR = 16.0
"""How many times a weight may outgrow its range before its training has failed; what is beyond it is clipped."""


def learn_scales(model: nn.Module) -> None:
    """Makes the block scales of static NVFP4 weights parameters (ModelOpt's LSQ), in place.

    One scale quantizes and dequantizes: a checkpoint has place for no second one.

    Raises:
        UserError: when the weights have no static block scales.
    """
    found = list(_static_quantizers(model))
    if not found:
        raise UserError(
            "learned_scales needs weights with static block scales, and the recipe's have none",
            "use preset NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG, or leave learned_scales out",
        )
    for _, quantizer in found:
        quantizer.enable_lsq(learnable_amax=["pre", "post"], tied_amax=True)


def fix_scales(model: nn.Module, learned: dict[str, Tensor]) -> None:
    """Puts learned scales into a calibrated model, in place, where the export looks for them.

    Args:
        model: As calibrated; learn_scales was not called.
        learned: Amax of the blocks by the name of the parameter that was trained; each is taken out.
    """
    for name, quantizer in _static_quantizers(model):
        found = learned.pop(f"{name}.{LEARNED}", None)
        if found is not None:
            amax = found.to(quantizer._amax.device, torch.float32).reshape(quantizer._amax.shape)
            quantizer._amax = torch.maximum(amax, _LEAST * quantizer.global_amax.to(amax.device))


def _static_quantizers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from modelopt.torch.quantization.nn import NVFP4StaticQuantizer

    for name, module in model.named_modules():
        if isinstance(module, NVFP4StaticQuantizer) and module.is_enabled and module.has_quantized_block_scale:
            yield name, module


@torch.no_grad()
def scales_fault(model: nn.Module) -> str | None:
    """What is wrong with the ranges of a model in training, naming the first weight; None where nothing is.

    A weight's global amax stays as calibrated, and values that outgrow it are clipped in training as in the
    checkpoint. Blocks get their scales from the weights as they are at each step.
    """
    for weight in quantized_weights(model):
        values = _local(weight.values)
        largest = float(values.abs().amax()) if values.numel() else 0.0
        if largest != largest or largest == float("inf"):
            return f"{weight.name} holds values that are no numbers"
        learned = getattr(weight.quantizer, LEARNED, None)
        if learned is not None:
            low, high = (float(value) for value in torch.aminmax(_local(learned)))
            limit = FAR * float(weight.quantizer.global_amax)
            if not (low > -limit and high < limit):
                return f"the learned scales of {weight.name} have exploded: amax up to {max(-low, high):.3g}"
        amax = getattr(weight.quantizer, "_global_amax", None)
        amax = getattr(weight.quantizer, "_amax", None) if amax is None else amax
        limit = FAR * float(amax.float().amax()) if amax is not None else float("inf")
        if largest > limit > 0:
            return (
                f"{weight.name} has grown to {largest:.3g}, {largest / limit * FAR:.0f} times the range of its scales"
            )
    return None


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, or the tensor."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
