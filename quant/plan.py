"""The plan: which layers a recipe quantizes and how, and what the checkpoint will weigh, before any weight is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfbyte.quant.checkpoint import FP8, NVFP4, W4A16_NVFP4
from halfbyte.quant.models import Source, empty_model
from halfbyte.quant.numerics import NVFP4_BLOCK
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.records.errors import UserError

_NAMES = {"fp8": FP8, "nvfp4": NVFP4, "w4a16_nvfp4": W4A16_NVFP4}
_READABLE = (".input_quantizer", ".weight_quantizer", ".k_bmm_quantizer", ".v_bmm_quantizer")
_SCALAR = 4
"""Bytes of a float32 scale."""


@dataclass(frozen=True)
class Layer:
    """One module that could be quantized."""

    name: str
    kind: str
    """Its class before quantizers were inserted: Linear, Embedding, ..."""
    weights: int
    format: str | None
    """FP8, NVFP4, W4A16_NVFP4, or None when it is kept."""


@dataclass(frozen=True)
class Plan:
    """What quantizing a model by a configuration will do."""

    layers: tuple[Layer, ...]
    kv_cache: str | None
    """FP8, NVFP4 or None."""
    kv_layers: int
    weights: int
    """Parameters of the model; a tied one counts once."""
    tensor_bytes: int
    """Predicted bytes of all tensors in the checkpoint; the files add some kilobytes of header."""
    dtype: str
    """Type of what is kept."""

    @property
    def bits_per_weight(self) -> float:
        """8 x tensor_bytes / weights."""
        return 8 * self.tensor_bytes / self.weights

    @property
    def quantized(self) -> tuple[Layer, ...]:
        """The layers that will be quantized."""
        return tuple(layer for layer in self.layers if layer.format)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "quantized": len(self.quantized),
            "kept": [layer.name for layer in self.layers if not layer.format],
            "kv_cache": self.kv_cache,
            "weights": self.weights,
            "checkpoint_bytes": self.tensor_bytes,
            "bits_per_weight": self.bits_per_weight,
        }

    def __str__(self) -> str:
        lines = []
        for name in (FP8, NVFP4, W4A16_NVFP4):
            chosen = [layer for layer in self.layers if layer.format == name]
            if chosen:
                share = sum(layer.weights for layer in chosen) / self.weights
                lines.append(f"{name:12} {len(chosen):5} layers, {share:.1%} of the weights: {_groups(chosen)}")
        kept = [layer for layer in self.layers if not layer.format]
        lines.append(f"{self.dtype:12} {len(kept):5} layers kept: {_groups(kept) or 'none'}")
        if self.kv_cache:
            lines.append(f"{'KV cache':12} {self.kv_layers:5} layers in {self.kv_cache}")
        lines.append(f"checkpoint   {self.tensor_bytes / 1e9:.3f} GB, {self.bits_per_weight:.2f} bits per weight")
        return "\n".join(lines)


def _groups(layers: list[Layer]) -> str:
    counts = Counter(layer.name.rsplit(".", 1)[-1] for layer in layers)
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counts.items())


def make_plan(source: Source, config: dict[str, Any], dtype: torch.dtype) -> Plan:
    """Plans from the model's configuration on the meta device: no weight is read.

    Args:
        source: The original model.
        config: What configs.quant_config made.
        dtype: Type of what is kept.

    Raises:
        UserError: when no layer matches, or a layer would get a format that cannot be exported and read back.
    """
    _, model = empty_model(source, dtype)
    return plan_of(model, config)


def plan_of(model: nn.Module, config: dict[str, Any]) -> Plan:
    """The plan for a model on the meta device; quantizers are inserted into it."""
    from modelopt.torch.quantization.conversion import replace_quant_module, set_quantizer_by_cfg

    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    dtype = next(iter(parameters.values())).dtype
    with quiet_upstream():
        replace_quant_module(model)
        set_quantizer_by_cfg(model, config["quant_cfg"])
    _refuse_unreadable(model)
    layers = tuple(_layers(model, kinds))
    if not any(layer.format for layer in layers):
        example = next((layer.name for layer in layers if layer.kind == "Linear"), "(none can be quantized)")
        patterns = [entry.get("quantizer_name") for entry in config["quant_cfg"] if entry.get("cfg")]
        raise UserError(
            f"the recipe matches no layer of the model (quantizers enabled: {', '.join(map(str, patterns)) or 'none'})",
            f"its layers are named like {example}",
        )
    _refuse_tied(model, layers)
    kv_cache, kv_layers = _kv_cache(model)
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
    for layer in layers:
        size += _bytes(layer, dtype.itemsize) - layer.weights * dtype.itemsize
    return Plan(
        layers=layers,
        kv_cache=kv_cache,
        kv_layers=kv_layers,
        weights=sum(parameter.numel() for parameter in parameters.values()),
        tensor_bytes=size + 2 * _SCALAR * kv_layers,
        dtype=str(dtype).removeprefix("torch."),
    )


def _refuse_tied(model: nn.Module, layers: tuple[Layer, ...]) -> None:
    """Rounding a weight that another module shares would change that module too, and a loader would tie them again."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            owners.setdefault(id(weight), []).append(name)
    quantized = {layer.name for layer in layers if layer.format}
    for names in owners.values():
        chosen = [name for name in names if name in quantized]
        if chosen and len(names) > 1:
            other = next(name for name in names if name != chosen[0])
            raise UserError(
                f"{chosen[0]} shares its weight with {other}, which would be changed with it",
                f"keep it: {_keeping(chosen[0])}",
            )


def _bytes(layer: Layer, kept: int) -> int:
    if layer.format is None:
        return layer.weights * kept
    if layer.format == FP8:
        return layer.weights + 2 * _SCALAR
    scales = layer.weights // NVFP4_BLOCK
    return layer.weights // 2 + scales + (2 if layer.format == NVFP4 else 1) * _SCALAR


def _layers(model: nn.Module, kinds: dict[str, str]) -> Iterator[Layer]:
    from modelopt.torch.export.quant_utils import get_quantization_format

    for name, module in model.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        weight = getattr(module, "weight", None)
        if quantizer is None or not isinstance(weight, nn.Parameter):
            continue
        found = get_quantization_format(module)
        if found is not None and found not in _NAMES:
            raise UserError(
                f"{name} would be quantized as {found}, which cannot be exported and read back yet",
                f"supported: {', '.join(_NAMES.values())}",
            )
        if found is not None and kinds.get(name) == "Conv1D":
            raise UserError(
                f"{name} is a Conv1D, as in GPT-2, whose transposed weight cannot be exported and read back yet",
                f"keep it: {_keeping(name)}",
            )
        if found == "fp8" and not module.input_quantizer.is_enabled:
            raise UserError(
                f"{name} would have an FP8 weight and unquantized inputs, which cannot be read back yet",
                "quantize its inputs too: enable '*input_quantizer' with num_bits [4, 3]",
            )
        kind = _NAMES.get(str(found))
        if kind in (NVFP4, W4A16_NVFP4) and weight.shape[-1] % NVFP4_BLOCK:
            raise UserError(
                f"{name} has {weight.shape[-1]} inputs, which is no multiple of the NVFP4 block of {NVFP4_BLOCK}",
                f"keep it: {_keeping(name)}",
            )
        yield Layer(name, kinds.get(name, type(module).__name__), math.prod(weight.shape), kind)


def _keeping(name: str) -> str:
    return f"add {{quantizer_name: '*{name}*', enable: false}} to quant_cfg"


def _refuse_unreadable(model: nn.Module) -> None:
    """Refuses quantizers whose work an exported checkpoint would not hold or could not be read back with."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer) and module.is_enabled and not name.endswith(_READABLE):
            parts = name.split(".")  # ending in a number where there is a quantizer for each expert
            at = next(i for i, part in enumerate(parts) if "quantizer" in part)
            parent = ".".join(parts[:at])
            raise UserError(
                f"{parent} would be quantized through {parts[at]}, which cannot be exported and read back yet",
                f"keep it: {_keeping(parent)}",
            )


def _kv_cache(model: nn.Module) -> tuple[str | None, int]:
    enabled: list[Any] = [
        module.k_bmm_quantizer
        for module in model.modules()
        if getattr(getattr(module, "k_bmm_quantizer", None), "is_enabled", False)
    ]
    if not enabled:
        return None, 0
    return (FP8 if enabled[0].num_bits == (4, 3) else NVFP4), len(enabled)
