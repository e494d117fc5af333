"""The plan: which layers a recipe quantizes and how, and what the checkpoint will weigh, before any weight is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from traceback import extract_tb
from typing import Any

import torch
from torch import nn

from halfbyte.quant.attention import attentions
from halfbyte.quant.expert_blocks import require_exported_as_calibrated
from halfbyte.quant.folding import folded_into, input_shapes, keeps_smoothing, require_smoothable
from halfbyte.quant.layers import (
    SCALAR,
    Layer,
    keeping,
    layers_of,
    refuse_tied,
    refuse_unreadable,
    require_fit,
    require_known,
)
from halfbyte.quant.layouts import NVFP4_AWQ, NVFP4_SVD
from halfbyte.quant.models import Source, empty_model
from halfbyte.quant.rounding import kept_buffers
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.records.errors import UserError

_KV_NAMES = {((4, 3), False): "FP8", ((2, 1), False): "NVFP4", ((4, 3), True): "FP8", ((2, 1), True): "NVFP4_AFFINE"}


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
    def exported_bytes(self) -> int:
        """Of all that an export will hold."""
        return self.tensor_bytes

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
        small = self.tensor_bytes < 1e8
        size = f"{self.tensor_bytes / 1e6:.2f} MB" if small else f"{self.tensor_bytes / 1e9:.3f} GB"
        lines.append(f"checkpoint   {size}, {self.bits_per_weight:.2f} bits per weight")
        return "\n".join(lines)


def _groups(layers: list[Layer]) -> str:
    counts = Counter(layer.name.rsplit(".", 1)[-1] for layer in layers)
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counts.items())


def make_plan(source: Source, config: dict[str, Any], dtype: torch.dtype, keep: Sequence[str] = ()) -> Plan:
    """Plans from the model's configuration on the meta device: no weight is read.

    Args:
        source: The original model.
        config: What configs.quant_config made.
        dtype: Type of what is kept.
        keep: The recipe's quantize.keep: each pattern must match a layer, and hints add to it.

    Raises:
        UserError: when no layer matches, or a layer would get a format that cannot be exported and read back.
    """
    _, model = empty_model(source, dtype)
    return plan_of(model, config, keep)


def plan_of(model: nn.Module, config: dict[str, Any], keep: Sequence[str] = ()) -> Plan:
    """The plan for a model on the meta device; quantizers are inserted into it."""
    from modelopt.torch.quantization.conversion import replace_quant_module, set_quantizer_by_cfg

    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    dtype = next(iter(parameters.values())).dtype
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
    size += sum(buffer.numel() * kind.itemsize for buffer, kind in kept_buffers(model, dtype).values())
    with quiet_upstream():
        with _rewriting_attention(model):
            replace_quant_module(model)
        try:
            set_quantizer_by_cfg(model, config["quant_cfg"])
        except ValueError as error:
            if not str(error).startswith("parent_class"):
                raise
            raise UserError(f"quant_cfg: {str(error).split('. ')[0]}", "name a class of the model's layers") from None
    refuse_unreadable(model)
    layers = tuple(layers_of(model, kinds, config))
    require_known(model, layers, keep)
    if not any(layer.format for layer in layers):
        example = next(
            (layer.name for layer in layers if layer.kind == "Linear" or layer.of_experts), "(none is a linear)"
        )
        patterns = [entry.get("quantizer_name") for entry in config["quant_cfg"] if entry.get("cfg")]
        raise UserError(
            f"the recipe matches no layer of the model (quantizers enabled: {', '.join(map(str, patterns)) or 'none'})",
            f"its layers are named like {example}",
        )
    refuse_tied(model, layers, keep)
    _require_exported(model, layers, keep)
    require_fit(layers, keep)
    layers = _with_smoothing(model, layers, config, keep)
    kv_cache, kv_layers, kv_bytes = _kv_cache(model)
    require_exported_as_calibrated(model, layers, kv_cache)
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


@contextmanager
def _rewriting_attention(model: nn.Module) -> Iterator[None]:
    """Turns ModelOpt's failure at the source of an attention it does not know into a UserError.

    It puts quantizers where an old attention class multiplies, by the position of arguments; Bloom names them.
    """
    try:
        yield
    except IndexError as error:
        if not extract_tb(error.__traceback__)[-1].filename.endswith("quantization/plugins/attention.py"):
            raise
        raise UserError(
            f"ModelOpt {version('nvidia-modelopt')} cannot put quantizers into the attention of {type(model).__name__}",
            "models of this class cannot be quantized",
        ) from error


def _require_exported(model: nn.Module, layers: Sequence[Layer], keep: Sequence[str]) -> None:
    """Refuses layers of classes that ModelOpt quantizes in memory and leaves as they are in its export, by their name.

    Raises:
        UserError: naming the first and its class.
    """
    from modelopt.torch.export.registry import ExportModuleRegistry

    chosen = [layer for layer in layers if layer.format and not layer.of_experts]
    left = [layer for layer in chosen if ExportModuleRegistry.match(model.get_submodule(layer.name)) is None]
    if left:
        raise UserError(
            f"{left[0].name} is a {left[0].kind}, which ModelOpt quantizes in memory and would export as it is",
            f"keep what is one: {keeping(layers, [layer.name for layer in left], keep)}",
        )


def _with_smoothing(
    model: nn.Module, layers: tuple[Layer, ...], config: dict[str, Any], keep: Sequence[str]
) -> tuple[Layer, ...]:
    """The layers as they are after AWQ or SVDQuant: their format, and where a smoothing scale is left to store."""
    rank, chosen = require_smoothable(layers, model, config)
    if not chosen:
        return layers
    if not rank:
        quantized = {layer.name for layer in layers if layer.format}
        changed = {of: into for of, into in folded_into(model, chosen).items() if into not in quantized}
        for of, into in changed.items():
            raise UserError(
                f"{into} would not stay as it is: the smoothing scale of {of} is folded into it",
                f"keep both: {keeping(layers, changed, keep)}",
            )
    kept = chosen if rank else keeps_smoothing(model, chosen)
    return tuple(
        replace(layer, format=NVFP4_SVD if rank else NVFP4_AWQ, smoothing=layer.name in kept, rank=rank)
        if layer.name in chosen
        else layer
        for layer in layers
    )


def _kv_cache(model: nn.Module) -> tuple[str | None, int, int]:
    """The KV cache's format, the number of layers that have it, and the bytes of its scales and biases."""
    found: set[str] = set()
    layers = size = 0
    affine: list[Any] = []
    scores = attentions(model)
    for name, module in model.named_modules():
        if name in scores:
            continue  # of a model that draws, which keeps no cache
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
            size += 2 * SCALAR
        affine += [quantizer for quantizer in enabled if quantizer.bias]
    if len(found) > 1:
        raise UserError("the recipe gives the KV cache several formats", "a checkpoint can declare one")
    for quantizer, shape in zip(affine, input_shapes(model, affine) if affine else (), strict=True):
        taken = {axis % len(shape) for axis in quantizer.bias if isinstance(axis, int)}
        size += SCALAR * math.prod(1 if axis in taken else length for axis, length in enumerate(shape))
    return next(iter(found), None), layers, size
