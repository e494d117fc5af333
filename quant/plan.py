"""The plan: which layers a recipe quantizes and how, and what the checkpoint will weigh, before any weight is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from halfbyte.quant.configs import methods
from halfbyte.quant.folding import input_shapes, keeps_smoothing, require_smoothable
from halfbyte.quant.models import Source, empty_model
from halfbyte.quant.rounding import SQUARE, fused_experts, kept_buffers
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.records.errors import UserError

# ModelOpt's names for a layer's format, and what its export declares.
_DECLARED = {
    "fp8": "FP8",
    "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8_pb_wo": "fp8_pb_wo",
    "nvfp4": "NVFP4",
    "w4a16_nvfp4": "W4A16_NVFP4",
    "w4a8_nvfp4_fp8": "W4A8_NVFP4_FP8",
    "w4a8_mxfp4_fp8": "W4A8_MXFP4_FP8",
    "mxfp4": "mxfp4",
    "mxfp8": "MXFP8",
}
_AWQ, _SVD = "NVFP4_AWQ", "NVFP4_SVD"
_QUANTIZERS = (".input_quantizer", ".weight_quantizer", ".k_bmm_quantizer", ".v_bmm_quantizer")
_KV_NAMES = {((4, 3), False): "FP8", ((2, 1), False): "NVFP4", ((4, 3), True): "FP8", ((2, 1), True): "NVFP4_AFFINE"}
_SCALAR = 4
"""Bytes of a float32 scale."""


@dataclass(frozen=True)
class Layer:
    """One linear that could be quantized; of a layer's experts, which are stored as linears, each one."""

    name: str
    kind: str
    """Its class before quantizers were inserted: Linear, Embedding, ...; Expert for an expert's linear."""
    shape: tuple[int, ...]
    """[out, in]."""
    format: str | None
    """As a checkpoint declares it: FP8, NVFP4, NVFP4_AWQ, mxfp4, ...; None when it is kept."""
    block: int = 0
    """Values that share a scale; 0 where a tensor or a row does."""
    input_scale: bool = False
    """Whether a calibrated scale of its inputs is stored."""
    smoothing: bool = False
    """Whether a scale for each input is stored, as AWQ and SVDQuant find it."""
    rank: int = 0
    """Of SVDQuant's low-rank branch."""

    @property
    def weights(self) -> int:
        """Values of its weight."""
        return math.prod(self.shape)

    def stored_bytes(self, kept: int) -> int:
        """Bytes in the checkpoint of its weight and all that belongs to it.

        Args:
            kept: Bytes of a value of what is not quantized.
        """
        if self.format is None:
            return self.weights * kept
        rows, columns = self.shape
        scale = _SCALAR if self.input_scale else 0
        if self.format == "FP8":
            return self.weights + _SCALAR + scale
        if self.format == "FP8_PER_CHANNEL_PER_TOKEN":
            return self.weights + rows * _SCALAR + scale
        if self.format == "fp8_pb_wo":
            return self.weights + -(-rows // SQUARE) * -(-columns // SQUARE) * _SCALAR + scale
        scale += self.weights // self.block  # a block's scale is one byte, E4M3 or E8M0
        if self.format == "MXFP8":
            return self.weights + scale
        if self.format in ("mxfp4", "W4A8_MXFP4_FP8"):
            return self.weights // 2 + scale
        smoothing = columns * kept if self.smoothing else 0
        return self.weights // 2 + scale + _SCALAR + smoothing + self.rank * (rows + columns) * kept


@dataclass(frozen=True)
class Plan:
    """What quantizing a model by a configuration will do."""

    layers: tuple[Layer, ...]
    kv_cache: str | None
    """FP8, NVFP4, NVFP4_AFFINE or None."""
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
        for name in dict.fromkeys(layer.format for layer in self.quantized):
            chosen = [layer for layer in self.layers if layer.format == name]
            share = sum(layer.weights for layer in chosen) / self.weights
            lines.append(f"{name!s:12} {len(chosen):5} layers, {share:.1%} of the weights: {_groups(chosen)}")
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
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
    size += sum(buffer.numel() * kind.itemsize for buffer, kind in kept_buffers(model, dtype).values())
    with quiet_upstream():
        replace_quant_module(model)
        set_quantizer_by_cfg(model, config["quant_cfg"])
    _refuse_unreadable(model)
    layers = tuple(_layers(model, kinds, config))
    if not any(layer.format for layer in layers):
        example = next((layer.name for layer in layers if layer.kind in ("Linear", "Expert")), "(none is a linear)")
        patterns = [entry.get("quantizer_name") for entry in config["quant_cfg"] if entry.get("cfg")]
        raise UserError(
            f"the recipe matches no layer of the model (quantizers enabled: {', '.join(map(str, patterns)) or 'none'})",
            f"its layers are named like {example}",
        )
    _refuse_tied(model, layers)
    layers = _with_smoothing(model, layers, config)
    kv_cache, kv_layers, kv_bytes = _kv_cache(model)
    size += kv_bytes
    for layer in layers:
        size += layer.stored_bytes(dtype.itemsize) - layer.weights * dtype.itemsize
    return Plan(
        layers=layers,
        kv_cache=kv_cache,
        kv_layers=kv_layers,
        weights=sum(parameter.numel() for parameter in parameters.values()),
        tensor_bytes=size,
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


def _layers(model: nn.Module, kinds: dict[str, str], config: dict[str, Any]) -> Iterator[Layer]:
    for name, module in model.named_modules():
        for tensor in fused_experts(module):
            weight = getattr(module, tensor)
            quantizers = getattr(module, f"{tensor}_weight_quantizers")
            inputs = getattr(module, f"{tensor}_input_quantizer")
            parts = ("gate_proj", "up_proj") if tensor == "gate_up_proj" else (tensor,)
            shape = (weight.shape[-2] // len(parts), weight.shape[-1])
            for index, quantizer in enumerate(quantizers):
                for part in parts:
                    yield _layer(f"{name}.{index}.{part}", "Expert", shape, quantizer, inputs, config)
        quantizer = getattr(module, "weight_quantizer", None)
        weight = getattr(module, "weight", None)
        if quantizer is not None and isinstance(weight, nn.Parameter):
            inputs = getattr(module, "input_quantizer", None)
            kind = kinds.get(name, type(module).__name__)
            yield _layer(name, kind, tuple(weight.shape), quantizer, inputs, config)


def _layer(name: str, kind: str, shape: tuple[int, ...], quantizer: Any, inputs: Any, config: dict[str, Any]) -> Layer:
    """What one weight becomes.

    Raises:
        UserError: when it cannot be exported and read back.
    """
    if not quantizer.is_enabled:
        return Layer(name, kind, shape, None)
    found = _format(name, quantizer, inputs)
    if kind == "Conv1D":
        raise UserError(
            f"{name} is a Conv1D, as in GPT-2, whose transposed weight cannot be exported and read back yet",
            f"keep it: {_keeping(name)}",
        )
    blocks = quantizer.block_sizes or {}
    block = 0 if found == "fp8_pb_wo" else int(blocks.get(-1) or 0)
    if block and shape[-1] % block:
        raise UserError(
            f"{name} has {shape[-1]} inputs, which is no multiple of the {found} block of {block}",
            f"keep it: {_keeping(name)}",
        )
    if found == "fp8_pb_wo" and (blocks.get(-1), blocks.get(-2)) != (SQUARE, SQUARE):
        raise UserError(f"{name} would have FP8 blocks of another size than {SQUARE} x {SQUARE}", "change block_sizes")
    if found == "fp8_pb_wo" and kind == "Expert" and name.endswith(("gate_proj", "up_proj")) and shape[0] % SQUARE:
        raise UserError(
            f"{name} has {shape[0]} outputs: a block of {SQUARE} would hold parts of gate and up, which ModelOpt's"
            " export splits wrongly",
            f"keep it: {_keeping(name.rsplit('.', 2)[0])}",
        )
    enabled = inputs is not None and inputs.is_enabled
    if found == "FP8" and not enabled:
        raise UserError(
            f"{name} would have an FP8 weight and unquantized inputs, which cannot be read back yet",
            "quantize its inputs too: enable '*input_quantizer' with num_bits [4, 3]",
        )
    constant = enabled and inputs._constant_amax is not None
    measured = enabled and not inputs._dynamic and not inputs.is_mx_format and any(methods(config))
    return Layer(name, kind, shape, found, block, constant or measured)


def _format(name: str, quantizer: Any, inputs: Any) -> str:
    from modelopt.torch.export.quant_utils import get_quantization_format

    holder = nn.Module()
    holder.weight, holder.weight_quantizer = nn.Parameter(torch.empty(0, device="meta")), quantizer
    if inputs is not None:
        holder.input_quantizer = inputs
    blocks = quantizer.block_sizes or {}
    scale = tuple(blocks.get("scale_bits") or ())
    if scale == (8, 0) and quantizer.num_bits not in ((2, 1), (4, 3)):
        found: Any = "MXINT8" if quantizer.num_bits == 8 else f"MXFP{1 + sum(quantizer.num_bits)}"
    else:
        try:
            found = get_quantization_format(holder)
        except (NotImplementedError, AssertionError):
            found = f"num_bits {quantizer.num_bits} with block_sizes { ({str(k): v for k, v in blocks.items()}) }"
    if found not in _DECLARED:
        raise UserError(
            f"{name} would be quantized as {found}, which cannot be exported and read back",
            f"supported: {', '.join(_DECLARED.values())}",
        )
    return _DECLARED[found]


def _with_smoothing(model: nn.Module, layers: tuple[Layer, ...], config: dict[str, Any]) -> tuple[Layer, ...]:
    """The layers as they are after AWQ or SVDQuant: their format, and where a smoothing scale is left to store."""
    rank, chosen = require_smoothable(layers, model, config)
    if not chosen:
        return layers
    kept = chosen if rank else keeps_smoothing(model, chosen)
    return tuple(
        replace(layer, format=_SVD if rank else _AWQ, smoothing=layer.name in kept, rank=rank)
        if layer.name in chosen
        else layer
        for layer in layers
    )


def _keeping(name: str) -> str:
    return f"add {{quantizer_name: '*{name}*', enable: false}} to quant_cfg"


def _refuse_unreadable(model: nn.Module) -> None:
    """Refuses quantizers whose work an exported checkpoint would not hold or could not be read back with."""
    from modelopt.torch.quantization.nn import SequentialQuantizer, TensorQuantizer

    experts = {
        f"{name}.{tensor}_{kind}"
        for name, module in model.named_modules()
        for tensor in fused_experts(module)
        for kind in ("weight_quantizers", "input_quantizer")
    }
    for name, module in model.named_modules():
        if not isinstance(module, TensorQuantizer) or not module.is_enabled:
            continue
        if module.rotate_is_enabled:
            raise UserError(
                f"{name} would rotate its values, which cannot be exported", "choose a recipe without rotate"
            )
        if name in experts or name.rpartition(".")[0] in experts:
            continue
        if not name.endswith(_QUANTIZERS) or isinstance(module, SequentialQuantizer):
            parts = name.split(".")  # ending in a number where there are several of them
            at = next(i for i, part in enumerate(parts) if "quantizer" in part)
            parent = ".".join(parts[:at])
            raise UserError(
                f"{parent} would be quantized through {parts[at]}, which cannot be exported and read back yet",
                f"keep it: {_keeping(parent)}",
            )


def _kv_cache(model: nn.Module) -> tuple[str | None, int, int]:
    """The KV cache's format, the number of layers that have it, and the bytes of its scales and biases."""
    found: set[str] = set()
    layers = size = 0
    affine: list[Any] = []
    for name, module in model.named_modules():
        sides = [getattr(module, f"{side}_bmm_quantizer", None) for side in ("k", "v")]
        enabled = [quantizer for quantizer in sides if quantizer is not None and quantizer.is_enabled]
        if not enabled:
            continue
        kinds = {_KV_NAMES.get((quantizer.num_bits, bool(quantizer.bias))) for quantizer in enabled}
        if len(enabled) < 2 or len(kinds) > 1 or None in kinds:
            raise UserError(
                f"{name} would quantize its keys and values differently, or as no KV-cache format",
                "give '*[kv]_bmm_quantizer' one format: FP8 or NVFP4",
            )
        found |= {str(kind) for kind in kinds}
        layers += 1
        if not enabled[0]._use_constant_amax:
            size += 2 * _SCALAR
        affine += [quantizer for quantizer in enabled if quantizer.bias]
    if len(found) > 1:
        raise UserError("the recipe gives the KV cache several formats", "a checkpoint can declare one")
    for quantizer, shape in zip(affine, input_shapes(model, affine) if affine else (), strict=True):
        taken = {axis % len(shape) for axis in quantizer.bias if isinstance(axis, int)}
        size += _SCALAR * math.prod(1 if axis in taken else length for axis, length in enumerate(shape))
    return next(iter(found), None), layers, size
