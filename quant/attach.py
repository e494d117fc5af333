"""ModelOpt's quantizers set to what a checkpoint stores: for the inputs of its layers, and for its KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.quant import compiled
from halfbyte.quant.backend import register
from halfbyte.quant.elements import E2M1_BITS, E4M3_BITS, E8M0_BITS
from halfbyte.quant.layouts import FP8, Activations
from halfbyte.quant.numerics import E2M1_MAX, E4M3_MAX, FP8_BLOCK, MX_BLOCK, NVFP4_BLOCK, amax_of_scale
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.records.errors import UserError

_ATTRIBUTES: dict[Activations, dict[str, Any]] = {
    "fp8": {"num_bits": E4M3_BITS, "axis": None},
    "fp8_token": {"num_bits": E4M3_BITS, "axis": None, "type": "dynamic", "block_sizes": {-1: None}},
    "fp8_group": {"num_bits": E4M3_BITS, "axis": None, "type": "dynamic", "block_sizes": {-1: None}},  # see _InGroups
    "nvfp4": {"num_bits": E2M1_BITS, "block_sizes": {-1: NVFP4_BLOCK, "type": "dynamic", "scale_bits": E4M3_BITS}},
    "mxfp4": {"num_bits": E2M1_BITS, "block_sizes": {-1: MX_BLOCK, "type": "dynamic", "scale_bits": E8M0_BITS}},
    "mxfp8": {"num_bits": E4M3_BITS, "block_sizes": {-1: MX_BLOCK, "type": "dynamic", "scale_bits": E8M0_BITS}},
}
_AFFINE = {-2: None, -4: None, "type": "static"}
_LARGEST = {"fp8": E4M3_MAX, "nvfp4": E2M1_MAX * E4M3_MAX}


def prepare(device: torch.device) -> None:
    """Makes ModelOpt's quantizers work on `device`."""
    register()
    if device.type == "cuda":
        from modelopt.torch.quantization.extensions import get_cuda_ext_fp8

        compiled.register()
        with quiet_upstream():
            get_cuda_ext_fp8()  # built and announced on stdout at its first use, which is later than this block


class _InGroups(nn.Module):
    """Rounds each group of 128 values by itself: a quantizer for rows, given groups as rows.

    ModelOpt's quantizers with static blocks take inputs of one shape only.
    """

    amax = None
    pre_quant_scale = None

    def __init__(self, of_rows: nn.Module) -> None:
        super().__init__()
        self.of_rows = of_rows

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n] in its shape; a last group that is not full is filled with zeros."""
        padded = nn.functional.pad(x, (0, -x.shape[-1] % FP8_BLOCK))
        return self.of_rows(padded.reshape(-1, FP8_BLOCK)).reshape(padded.shape)[..., : x.shape[-1]]  # type: ignore[no-any-return]


def input_quantizer(
    kind: Activations | None,
    scale: Tensor | None,
    pre_quant_scale: Tensor | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Any | None:
    """ModelOpt's quantizer for the inputs of a layer; None where they are left as they are.

    Args:
        kind: What the declared format does to inputs.
        scale: The stored input_scale; None where the format takes it from each input.
        pre_quant_scale: AWQ's factors [in], multiplied into the input first.
        dtype: The model computes in.
        device: Where it does.
    """
    from modelopt.torch.quantization.nn import TensorQuantizer

    if kind is None and pre_quant_scale is None:
        return None
    quantizer = TensorQuantizer()
    if kind is None:
        quantizer.disable()
    else:
        _configure(quantizer, _ATTRIBUTES[kind], scale, _LARGEST.get(kind, 0.0), device)
    if pre_quant_scale is not None:
        quantizer.pre_quant_scale = pre_quant_scale.to(device=device, dtype=dtype)
    quantizer.to(device)
    return _InGroups(quantizer) if kind == "fp8_group" else quantizer


def _configure(
    quantizer: Any, attributes: dict[str, Any], scale: Tensor | None, largest: float, device: torch.device
) -> None:
    quantizer.set_from_attribute_config({**attributes, "enable": True})
    if scale is not None:
        quantizer.amax = amax_of_scale(scale.float().reshape(()).to(device), largest)
    if device.type == "cuda":
        quantizer.backend = compiled.BACKEND


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Puts ModelOpt's KV-cache quantizers, disabled, into the attention modules, in place; these by name."""
    from modelopt.torch.quantization.nn import QuantModuleRegistry
    from modelopt.torch.quantization.plugins.huggingface import register_hf_attentions_on_the_fly

    found = {}
    with quiet_upstream():
        register_hf_attentions_on_the_fly(model)
        for name, module in list(model.named_modules()):
            if type(module).__name__.endswith("Attention") and type(module) in QuantModuleRegistry:
                converted: Any = QuantModuleRegistry.convert(module)
                if hasattr(converted, "k_bmm_quantizer"):
                    for child in converted.children():
                        if type(child).__name__ == "TensorQuantizer":
                            child.disable()
                    found[name] = converted
    return found


def _spellings(attention: str, side: str) -> Iterable[str]:
    """Where exporters have put one scale: ModelOpt today, then older ones and other tools."""
    yield f"{attention}.{side}_proj.{side}_scale"
    yield f"{attention}.{side}_scale"
    yield f"{attention}.attn.{side}_scale"
    yield f"{attention}.qkv_proj.{side}_scale"
    yield f"{attention}.kv_scale"


def attach_kv_cache(model: nn.Module, stored: Mapping[str, Tensor], kv_cache: str, device: torch.device) -> None:
    """Sets the KV-cache quantizers of all attention modules, in place.

    No stored scale at all means a scale of 1, as ModelOpt's *_cast recipes export it. Offsets (k_bias, v_bias) make the
    quantizers affine; ModelOpt names the FP8 ones FP8 like those without.

    Args:
        model: On `device`.
        stored: Scales and offsets by tensor name, under the model's module names.
        kv_cache: FP8, NVFP4 or NVFP4_AFFINE.
        device: Where the model computes.

    Raises:
        UserError: when a scale belongs to no attention module, or only some of them are there.
    """
    attentions = attention_modules(model)
    if not attentions:
        raise UserError(f"a {kv_cache} KV cache is declared, but the model has no attention layer that can have one")
    scales = {name for name in stored if name.endswith("_scale")}
    used: set[str] = set()
    for attention, module in attentions.items():
        for side in ("k", "v"):
            name = next((name for name in _spellings(attention, side) if name in stored), None)
            if name is None and getattr(module, "layer_idx", None) is None:
                continue  # of a vision tower, which keeps no cache
            if name is None and scales:
                raise UserError(
                    f"{len(scales)} KV-cache scales for {len(attentions)} attention layers: "
                    f"{attention}.{side}_proj.{side}_scale is missing",
                    "the checkpoint is incomplete; export the model again",
                )
            offset = stored.get(f"{attention}.{side}_proj.{side}_bias")
            if offset is None and kv_cache.endswith("AFFINE"):
                raise UserError(f"{attention}.{side}_proj.{side}_bias is missing", "the checkpoint is incomplete")
            attributes = dict(_ATTRIBUTES["fp8" if kv_cache == FP8 else "nvfp4"])
            if offset is not None:
                attributes["bias"] = dict(_AFFINE)
            quantizer: Any = getattr(module, f"{side}_bmm_quantizer")
            # ModelOpt divides by 448 for the KV cache in every format: unified_export_hf.py.
            _configure(quantizer, attributes, torch.ones(()) if name is None else stored[name], E4M3_MAX, device)
            if offset is not None:
                quantizer.bias_value = offset.to(device)
            quantizer.to(device)
            used |= {name or "", f"{attention}.{side}_proj.{side}_bias"}
    stray = sorted(set(stored) - used)
    if stray:
        raise UserError(f"{stray[0]} belongs to no layer of the model", "the checkpoint does not fit its configuration")
