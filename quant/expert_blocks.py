"""gpt-oss's experts in MXFP4, exported as OpenAI published them: each tensor as blocks and scales, [experts, out, ...].

ModelOpt 0.47 turns a stack of experts [experts, in, out] around before it cuts blocks only for NVFP4: what
export/unified_export_hf.py (_export_quantized_weight) writes for MX formats has blocks across the outputs, which are
not those that fake quantization rounded, and which no serving engine reads. Its own converter to OpenAI's layout is an
example outside of the package.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfbyte.quant.layers import Layer
from halfbyte.quant.layouts import FP8, FP8_CHANNEL, NVFP4, W4A16_MXFP4, W4A16_NVFP4
from halfbyte.quant.numerics import mxfp4_quantize
from halfbyte.quant.rounding import stacked_experts
from halfbyte.records.errors import UserError
from halfbyte.records.files import write_json

_STACKED = (FP8, FP8_CHANNEL, NVFP4, W4A16_NVFP4)
"""Formats in which ModelOpt exports experts in one tensor as they were calibrated."""
_BLOCK_BYTES = 16
"""Of the codes of one block, in OpenAI's layout a dimension of their own."""
_PUBLISHED = "GptOssExperts"


def is_published_as_blocks(module: nn.Module) -> bool:
    """Whether a module with quantizers holds gpt-oss's experts, with weights in MXFP4 and inputs left as they are."""
    if not any(cls.__name__ == _PUBLISHED for cls in type(module).__mro__):
        return False
    sides = [
        (getattr(module, f"{tensor}_weight_quantizer"), getattr(module, f"{tensor}_input_quantizer"))
        for tensor in stacked_experts(module)
    ]
    return bool(sides) and all(
        weight.is_enabled and weight.is_mx_format and weight.num_bits == (2, 1) and not inputs.is_enabled
        for weight, inputs in sides
    )


def require_exported_as_calibrated(model: nn.Module, layers: Sequence[Layer], kv_cache: str | None) -> None:
    """Refuses formats of experts in one tensor whose blocks ModelOpt's export would cut otherwise than calibration.

    Args:
        model: With ModelOpt's quantizers inserted.
        layers: All of the model's.
        kv_cache: The plan's.

    Raises:
        UserError: naming the experts, or what OpenAI's layout has no place for.
    """
    blocks = {name for name, module in model.named_modules() if is_published_as_blocks(module)}
    stacks = [layer for layer in layers if layer.kind == "Experts" and layer.format]
    for layer in stacks:
        if layer.owner not in blocks and layer.format not in _STACKED:
            raise UserError(
                f"{layer.name} would be {layer.format}, whose blocks ModelOpt's export cuts otherwise than calibration"
                " where experts are in one tensor",
                f'choose {" or ".join(_STACKED)}, or keep it: --set "quantize.keep={[layer.owner]}"',
            )
    if not blocks:
        return
    other = next((layer for layer in layers if layer.format and layer.owner not in blocks), None)
    if other is not None or kv_cache is not None:
        what = f"the KV cache would be {kv_cache}" if other is None else f"{other.name} would be {other.format}"
        raise UserError(
            f"{what}, and a checkpoint of gpt-oss with experts in {W4A16_MXFP4} declares nothing else",
            "quantize the experts alone, as general/ptq/mxfp4_mlp_weight_only does",
        )


def register_blocks() -> None:
    """Has ModelOpt export such experts by the function below."""
    from modelopt.torch.export import ExportModuleRegistry

    ExportModuleRegistry.register(_PUBLISHED, predicate=is_published_as_blocks, prepend=True)(_export)


@torch.no_grad()
def _export(name: str, module: nn.Module, context: Any) -> None:  # noqa: ARG001
    """Replaces each tensor [experts, in, out] by blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32].

    Source: the index file of openai/gpt-oss-20b, and vLLM's model_executor/models/gpt_oss.py.
    """
    for tensor in stacked_experts(module):
        packed = [mxfp4_quantize(expert.mT.contiguous()) for expert in getattr(module, tensor).detach()]
        delattr(module, tensor)
        codes, scales = (torch.stack(parts) for parts in zip(*packed, strict=True))
        module.register_buffer(f"{tensor}_blocks", codes.view(*scales.shape, _BLOCK_BYTES))
        module.register_buffer(f"{tensor}_scales", scales)


def declare_blocks(folder: Path) -> None:
    """Declares an exported checkpoint as OpenAI's are: quant_method "mxfp4" in config.json, and no file beside it."""
    own = folder / "hf_quant_config.json"
    excluded = json.loads(own.read_text(encoding="utf-8"))["quantization"]["exclude_modules"]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [pattern.removesuffix("*") for pattern in excluded],
    }
    write_json(folder / "config.json", config)
    own.unlink()
