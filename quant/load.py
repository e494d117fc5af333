"""Read-back: opens a model for evaluation, an original or an exported FP8 or NVFP4 checkpoint, from its files alone.

transformers' from_pretrained loads a ModelOpt export as garbage with only a log line. Here the packed weights are
dequantized by what the checkpoint stores, and ModelOpt's quantizers are set to the stored input and KV-cache scales, so
that activations and cache are quantized by the same code as in the quantized model in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfbyte.quant import checkpoint as ck
from halfbyte.quant.backend import BACKEND, register
from halfbyte.quant.checkpoint import QuantFormat, Tensors
from halfbyte.quant.models import (
    Source,
    compute_dtype,
    device_of,
    empty_model,
    locate,
    open_original,
    open_tokenizer,
    original_summary,
    require_same_vocabulary,
)
from halfbyte.quant.numerics import (
    E2M1_MAX,
    E4M3_MAX,
    FP8,
    NVFP4,
    NVFP4_BLOCK,
    amax_of_scale,
    fp8_dequantize,
    nvfp4_dequantize,
)
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.recipes.schema import ModelSpec
from halfbyte.records.errors import UserError
from halfbyte.records.record import ModelSummary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FP8_ATTRIBUTES: dict[str, Any] = {"num_bits": (4, 3), "axis": None}
_NVFP4_ATTRIBUTES: dict[str, Any] = {
    "num_bits": (2, 1),
    "block_sizes": {-1: NVFP4_BLOCK, "type": "dynamic", "scale_bits": (4, 3)},
}


@dataclass(frozen=True)
class Loaded:
    """A model ready to be evaluated."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    summary: ModelSummary
    dtype: str
    """What it computes in: bfloat16, float16 or float32."""


def load(spec: ModelSpec, *, dtype: str = "auto", device: str | None = None) -> Loaded:
    """Opens an original model or an exported checkpoint.

    Args:
        spec: Where it is; a bare path or hub id goes in as ModelSpec(id=...).
        dtype: bfloat16, float16, float32, or auto: the model's own on CUDA and float32 on a CPU.
        device: cpu, cuda, cuda:1, ...; None takes the first CUDA device, else the CPU.

    Raises:
        UserError: when the model cannot be found, is damaged, or is in a format that cannot be read back.
    """
    source = locate(spec.id, revision=spec.revision, gguf_file=spec.gguf_file, dtype=spec.dtype)
    where = device_of(device)
    declared = None if source.gguf_file else ck.quant_format(source.folder)
    if declared is None:
        own = ck.torch_dtype(spec.dtype)
        computed = compute_dtype(dtype, where, own)
        model = open_original(source, weights=own, compute=computed, device=where)
        summary = original_summary(source, spec)
    else:
        computed = compute_dtype(dtype, where, ck.torch_dtype(ck.plain_dtype(source.folder)))
        model = open_exported(source, declared, dtype=computed, device=where)
        summary = ck.summarize(source.folder, source.name)
    tokenizer = open_tokenizer(source)
    require_same_vocabulary(model, tokenizer)
    return Loaded(model, tokenizer, summary, str(computed).removeprefix("torch."))


def load_as_it_is(name: str, *, dtype: str = "auto", device: str | None = None) -> Loaded:
    """Opens a model with its weights in the type its configuration names; a GGUF file in bfloat16. See load."""
    source = locate(name)
    own: Any = "bfloat16" if source.gguf_file else ck.plain_dtype(source.folder)
    ck.torch_dtype(own)  # refuses other types
    return load(ModelSpec(id=name, dtype=own), dtype=dtype, device=device)


def open_exported(
    source: Source, declared: QuantFormat, *, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The exported checkpoint as a transformers model in evaluation mode.

    Raises:
        UserError: when tensors are missing, damaged or do not fit what the checkpoint declares.
    """
    config, empty = empty_model(source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # or transformers looks for a quantizer of its own
    architecture: Any = type(empty)
    with Tensors(source.folder) as tensors:
        scales = read_scales(tensors, declared)
        weights = {name: _weight(tensors, name, dtype) for name in tensors if not ck.is_scale(name)}
        with quiet_upstream():
            model, info = architecture.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, by name
            )
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if info[kind]:
            first = sorted(map(str, info[kind]))[0]
            raise UserError(
                f"{source.folder} does not fit its configuration: {len(info[kind])} {kind}, first {first}",
                "copy the checkpoint again, whole, or export it again",
            )
    model = model.to(device).eval()
    attach_quantizers(model, scales, declared)
    return model  # type: ignore[no-any-return]


def _weight(tensors: Tensors, name: str, dtype: torch.dtype) -> Tensor:
    module, _, leaf = name.rpartition(".")
    kind = tensors.layer_format(module) if leaf == "weight" else None
    if kind is None:
        return tensors[name]
    scale = tensors[f"{module}.weight_scale"]
    if kind == ck.FP8:
        return fp8_dequantize(FP8(tensors[name], scale), dtype)
    return nvfp4_dequantize(NVFP4(tensors[name], scale, tensors[f"{module}.weight_scale_2"]), dtype)


def read_scales(tensors: Tensors, declared: QuantFormat) -> dict[str, Tensor]:
    """The input and KV-cache scales of a checkpoint by tensor name, checked.

    Raises:
        UserError: when a scale is missing, zero or not finite, or a layer is stored in another format than declared.
    """
    quantized = 0
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if leaf != "weight":
            continue
        stored = tensors.layer_format(module)
        quantized += stored is not None
        expected = declared.layers.get(module, declared.algorithm)
        if stored is not None and stored != expected:
            raise UserError(f"{module} is stored as {stored} but declared as {expected}", "export the model again")
        if stored == ck.FP8 and f"{module}.input_scale" not in tensors:
            raise UserError(f"{module} has no input_scale", "the checkpoint is incomplete; export the model again")
    if not quantized:
        raise UserError(
            f"the checkpoint declares {declared.label}, but no weight in it is quantized",
            "its weights or its configuration are of another model; export the model again",
        )
    scales = {}
    for name in filter(ck.is_scale, tensors):
        scale = tensors[name].float()
        if not bool(torch.isfinite(scale).all()) or bool((scale <= 0).any()):
            raise UserError(
                f"{name} is zero, negative or not finite", "the checkpoint is damaged; export the model again"
            )
        if not name.endswith(("weight_scale", "weight_scale_2")):  # those are read again with their weights, one by one
            scales[name] = scale
    return scales


def attach_quantizers(model: nn.Module, scales: Mapping[str, Tensor], declared: QuantFormat) -> None:
    """Sets ModelOpt input and KV-cache quantizers to a checkpoint's scales, in place; weights are left as they are.

    A declared KV cache without any scale means a scale of 1, as ModelOpt's *_cast recipes export it.

    Raises:
        UserError: when a scale belongs to no module, or only some of the KV scales are there.
    """
    from modelopt.torch.quantization.conversion import replace_quant_module, set_quantizer_by_cfg
    from modelopt.torch.quantization.extensions import get_cuda_ext_fp8

    register()
    with quiet_upstream():
        if next(model.parameters()).device.type == "cuda":
            get_cuda_ext_fp8()  # built and announced on stdout at its first use, which is later than this block
        replace_quant_module(model)
        set_quantizer_by_cfg(model, [{"quantizer_name": "*", "enable": False}])
    modules = dict(model.named_modules())
    device = next(model.parameters()).device
    for name, scale in scales.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "input_scale":
            four_bit = declared.layers.get(module, declared.algorithm) == ck.NVFP4
            divisor = E2M1_MAX * E4M3_MAX if four_bit else E4M3_MAX
            _enable(modules.get(f"{module}.input_quantizer"), name, scale, four_bit, divisor, device)
    if declared.kv_cache is None:
        return
    attentions = [name for name, module in modules.items() if hasattr(module, "k_bmm_quantizer")]
    stored = [name for name in scales if name.endswith((".k_scale", ".v_scale"))]
    if not attentions or len(stored) not in (0, 2 * len(attentions)):
        raise UserError(
            f"{len(stored)} KV-cache scales for {len(attentions)} attention layers", "the checkpoint is incomplete"
        )
    for attention in attentions:
        for side in ("k", "v"):
            name = f"{attention}.{side}_proj.{side}_scale"
            scale = scales.get(name, torch.ones(())) if not stored else _one(scales, name)
            quantizer = modules.get(f"{attention}.{side}_bmm_quantizer")
            _enable(quantizer, name, scale, declared.kv_cache == ck.NVFP4, E4M3_MAX, device)


def _one(scales: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in scales:
        raise UserError(f"{name} is missing", "the checkpoint is incomplete; export the model again")
    return scales[name]


def _enable(quantizer: Any, name: str, scale: Tensor, four_bit: bool, divisor: float, device: torch.device) -> None:
    if quantizer is None:
        raise UserError(f"{name} belongs to no layer of the model", "the checkpoint does not fit its configuration")
    attributes = {**(_NVFP4_ATTRIBUTES if four_bit else _FP8_ATTRIBUTES), "enable": True}
    if four_bit and device.type == "cpu":
        attributes["backend"] = BACKEND
    quantizer.set_from_attribute_config(attributes)
    quantizer.amax = amax_of_scale(scale.reshape(()).to(device), divisor)
