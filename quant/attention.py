"""FP8 attention of diffusers' transformers: ModelOpt's quantizers of the operands and the result of attention.

ModelOpt's export stores the amax of each beside the attention's weights, as <attention>.q_bmm_quantizer._amax, and
declares keys and values in FP8 where an LLM's KV cache is declared. Source: _QuantAttention in
modelopt/torch/quantization/plugins/diffusion/diffusers.py and hide_quantizers_from_state_dict, version 0.47.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.quant.elements import E4M3_BITS
from halfbyte.quant.layouts import FP8
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.records.errors import UserError

OPERANDS = ("q_bmm_quantizer", "k_bmm_quantizer", "v_bmm_quantizer")
RESULT = "bmm2_output_quantizer"
UNREACHED = (
    *("*p_bmm_quantizer", "*softmax_quantizer"),
    *("*norm.input_quantizer", "*norm2.input_quantizer", "*norm2_context.input_quantizer"),
)
"""Quantizers of probabilities, which diffusers' attention never gives out of its kernel, and of the inputs of layer
norms, which ModelOpt's presets for language models switch on here and its export does not hold."""
_AMAX = "._amax"


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules of diffusers into which ModelOpt's quantizers were inserted, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, RESULT)}


def is_attention_quantizer(model: nn.Module, name: str) -> bool:
    """Whether a quantizer is one of a diffusers attention's operands or result."""
    parent, _, last = name.rpartition(".")
    return last in (*OPERANDS, RESULT) and hasattr(model.get_submodule(parent), RESULT)


def attention_format(model: nn.Module) -> tuple[str | None, int]:
    """The format in which attention is computed and in how many modules; None where it is left as it is.

    Raises:
        UserError: when it cannot be exported and read back.
    """
    found = 0
    for name, module in attentions(model).items():
        quantizers: list[Any] = [getattr(module, each) for each in (*OPERANDS, RESULT)]
        enabled = [each for each in quantizers if each.is_enabled]
        if not enabled:
            continue
        if not all(each.is_enabled for each in quantizers[:3]):
            raise UserError(
                f"{name} would quantize some of queries, keys and values only", "enable '*[qkv]_bmm_quantizer'"
            )
        if any(each.num_bits != E4M3_BITS or each.block_sizes or each.axis is not None for each in enabled):
            raise UserError(
                f"{name} would be computed in a format that cannot be exported and read back",
                "give '*[qkv]_bmm_quantizer' FP8: num_bits [4, 3] with axis null",
            )
        found += 1
    return (FP8 if found else None), found


def amax_names(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Of a checkpoint's tensors the amax of attention quantizers: by attention, quantizer to tensor."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, quantizer = name.removesuffix(_AMAX).rpartition(".")
        if name.endswith(_AMAX) and quantizer in (*OPERANDS, RESULT):
            found.setdefault(module, {})[quantizer] = name
    return found


def attach_attention(model: nn.Module, stored: Mapping[str, Mapping[str, Tensor]], device: torch.device) -> None:
    """Has the attention of a transformer computed in FP8, in place, by ModelOpt's code.

    Args:
        model: On `device`.
        stored: By attention, quantizer to amax.
        device: Where the model computes.

    Raises:
        UserError: when an amax belongs to no attention, or one is missing or no positive number.
    """
    from modelopt.torch.quantization.nn import QuantModuleRegistry
    from modelopt.torch.quantization.plugins.diffusion import diffusers as _  # noqa: F401  registers the classes

    for name, amaxes in stored.items():
        module = dict(model.named_modules()).get(name)
        if module is None or type(module) not in QuantModuleRegistry:
            raise UserError(f"{name} is no attention of the model", "the checkpoint does not fit its configuration")
        lacking = [each for each in OPERANDS if each not in amaxes]
        if lacking:
            raise UserError(f"{name}.{lacking[0]}{_AMAX} is missing", "the checkpoint is incomplete; export it again")
        with quiet_upstream():
            converted: Any = QuantModuleRegistry.convert(module)
        for child in converted.children():
            if type(child).__name__ == "TensorQuantizer":
                child.disable()
        for each, amax in amaxes.items():
            _require_positive(f"{name}.{each}{_AMAX}", amax)
            quantizer = getattr(converted, each)
            quantizer.set_from_attribute_config({"num_bits": E4M3_BITS, "axis": None, "enable": True})
            quantizer.amax = amax.float().reshape(()).to(device)
            quantizer.to(device)


def _require_positive(name: str, amax: Tensor) -> None:
    if amax.numel() != 1 or not bool(torch.isfinite(amax).all()) or float(amax) <= 0:
        raise UserError(f"{name} is no positive number", "the checkpoint is damaged; export the model again")
