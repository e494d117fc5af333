"""The layers of a model as a recipe would store them: their formats and sizes, and what cannot be exported by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from halfbyte.quant.attention import is_attention_quantizer
from halfbyte.quant.configs import keep_patterns, methods
from halfbyte.quant.layouts import (
    FP8,
    FP8_BLOCK_WEIGHTS,
    FP8_CHANNEL,
    MXFP4,
    MXFP8,
    NVFP4,
    W4A8_MXFP4_FP8,
    W4A8_NVFP4_FP8,
    W4A16_MXFP4,
    W4A16_NVFP4,
)
from halfbyte.quant.numerics import FP8_BLOCK
from halfbyte.quant.rounding import fused_experts, stacked_experts
from halfbyte.records.errors import UserError

# ModelOpt's names for a layer's format, and what a checkpoint declares.
_DECLARED = {
    "fp8": FP8,
    "fp8_pc_pt": FP8_CHANNEL,
    "fp8_pb_wo": FP8_BLOCK_WEIGHTS,
    "nvfp4": NVFP4,
    "w4a16_nvfp4": W4A16_NVFP4,
    "w4a8_nvfp4_fp8": W4A8_NVFP4_FP8,
    "w4a8_mxfp4_fp8": W4A8_MXFP4_FP8,
    "mxfp4": MXFP4,
    "mxfp8": MXFP8,
}
_QUANTIZERS = (".input_quantizer", ".weight_quantizer", ".k_bmm_quantizer", ".v_bmm_quantizer")
# Linears below one parent that read the same input: ModelOpt's export and serving engines give them one format.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
)
SCALAR = 4
"""Bytes of a float32 scale."""


@dataclass(frozen=True)
class Layer:
    """One linear that could be quantized; of a layer's experts each one's, or a tensor that is stored for all."""

    name: str
    kind: str
    """Its class before quantizers were inserted: Linear, Embedding, ...; Expert for an expert's linear, Experts for a
    tensor of all experts with one scale."""
    shape: tuple[int, ...]
    """[out, in]; of Experts [experts, out, in]."""
    format: str | None
    """One of layouts.FORMATS: FP8, NVFP4, NVFP4_AWQ, MXFP4, ...; None when it is kept."""
    block: int = 0
    """Values that share a scale; 0 where a tensor or a row does."""
    input_scale: bool = False
    """Whether a calibrated scale of its inputs is stored."""
    smoothing: bool = False
    """Whether a scale for each input is stored, as AWQ and SVDQuant find it."""
    rank: int = 0
    """Of SVDQuant's low-rank branch."""

    @property
    def of_experts(self) -> bool:
        """Whether a token passes through it, or through its parts, only where a router sends it there."""
        return self.kind in ("Expert", "Experts")

    @property
    def owner(self) -> str:
        """What a pattern of quantize.keep has to match: of experts in one tensor the module that holds them all."""
        parts = {"Expert": 2, "Experts": 1}.get(self.kind, 0)
        return self.name.rsplit(".", parts)[0] if parts else self.name

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
        *stack, rows, columns = self.shape
        scale = SCALAR if self.input_scale else 0
        if self.format == FP8:
            return self.weights + SCALAR + scale
        if self.format == FP8_CHANNEL:
            return self.weights + (stack[0] if stack else rows) * SCALAR + scale
        if self.format == FP8_BLOCK_WEIGHTS:
            return self.weights + -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK) * SCALAR + scale
        scale += self.weights // self.block  # a block's scale is one byte, E4M3 or E8M0
        if self.format == MXFP8:
            return self.weights + scale
        if self.format in (MXFP4, W4A16_MXFP4, W4A8_MXFP4_FP8):
            return self.weights // 2 + scale
        smoothing = columns * kept if self.smoothing else 0
        return self.weights // 2 + scale + SCALAR + smoothing + self.rank * (rows + columns) * kept


def layers_of(model: nn.Module, kinds: dict[str, str], config: dict[str, Any]) -> Iterator[Layer]:
    """Every linear with quantizers beside it, enabled or not, and of experts in one tensor each one's linears.

    Args:
        model: With ModelOpt's quantizers inserted; its weights may be on the meta device.
        kinds: The classes of its modules, by name, before that.
        config: ModelOpt's configuration, which tells whether inputs will be measured.

    Raises:
        UserError: when one of them could not be exported and read back.
    """
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
        for tensor in stacked_experts(module):
            quantizer, inputs = (getattr(module, f"{tensor}_{side}_quantizer") for side in ("weight", "input"))
            stack = tuple(getattr(module, tensor).mT.shape)
            yield _layer(f"{name}.{tensor}", "Experts", stack, quantizer, inputs, config)
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
    block = 0 if found == FP8_BLOCK_WEIGHTS else int(blocks.get(-1) or 0)
    if found == FP8_BLOCK_WEIGHTS and (blocks.get(-1), blocks.get(-2)) != (FP8_BLOCK, FP8_BLOCK):
        raise UserError(
            f"{name} would have FP8 blocks of another size than {FP8_BLOCK} x {FP8_BLOCK}", "change block_sizes"
        )
    if (
        found == FP8_BLOCK_WEIGHTS
        and kind == "Expert"
        and name.endswith(("gate_proj", "up_proj"))
        and shape[0] % FP8_BLOCK
    ):
        raise UserError(
            f"{name} has {shape[0]} outputs: a block of {FP8_BLOCK} would hold parts of gate and up, which ModelOpt's"
            " export splits wrongly",
            f"keep it: {_keeping(name.rsplit('.', 2)[0])}",
        )
    enabled = inputs is not None and inputs.is_enabled
    if found == FP8 and not enabled:
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
    if found == "mxfp4" and (inputs is None or not inputs.is_enabled):
        return W4A16_MXFP4
    return _DECLARED[found]


def refuse_tied(model: nn.Module, layers: tuple[Layer, ...], keep: Sequence[str] = ()) -> None:
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
                f"keep it: {keeping(layers, [chosen[0]], keep)}",
            )


def _keeping(*patterns: str) -> str:
    return f'--set "quantize.keep={list(patterns)}"'


def keeping(layers: Sequence[Layer], names: Iterable[str], keep: Sequence[str] = ()) -> str:
    """The option that keeps some layers, with those that must be kept with them, and what is kept already.

    Args:
        layers: All of the model's.
        names: Of those to keep.
        keep: The recipe's quantize.keep.
    """
    owners = {layer.name: layer.owner for layer in layers}
    wanted = {owners[name] for name in names}
    wanted |= {owners[name] for group in fused_groups(layers) if {owners[n] for n in group} & wanted for name in group}
    quantized = dict.fromkeys(owners[layer.name] for layer in layers if layer.format)
    spared = quantized.keys() - wanted
    exact: dict[str, bool] = {}
    patterns = []
    for owner in (name for name in quantized if name in wanted):
        every = ".".join("*" if part.isdigit() else part for part in owner.split("."))
        if every not in exact:
            exact[every] = not any(fnmatch(other, every) for other in spared)
        patterns.append(every if exact[every] else owner)
    return _keeping(*dict.fromkeys([*keep, *patterns]))


def fused_groups(layers: Sequence[Layer]) -> list[list[str]]:
    """The names of the layers that must have the same format, of each such group with more than one member."""
    known = {layer.name for layer in layers}
    groups = []
    for layer in layers:
        parent, _, last = layer.name.rpartition(".")
        for members in _FUSED:
            if last == members[0]:
                group = [name for name in (f"{parent}.{member}" for member in members) if name in known]
                groups += [group] if len(group) > 1 else []
    return groups


def require_fit(layers: Sequence[Layer], keep: Sequence[str] = ()) -> None:
    """Refuses blocks that do not divide the inputs of their layers, and groups of layers quantized in part.

    Args:
        layers: All of the model's.
        keep: The recipe's quantize.keep, which the hints repeat.

    Raises:
        UserError: naming all layers that are to be kept.
    """
    uneven = [layer for layer in layers if layer.block and layer.shape[-1] % layer.block]
    if uneven:
        first, more = uneven[0], f"; nor do {len(uneven) - 1} more layers fit" if len(uneven) > 1 else ""
        raise UserError(
            f"{first.name} has {first.shape[-1]} inputs, which is no multiple of the {first.format} block of"
            f" {first.block}{more}",
            f"keep what does not fit: {keeping(layers, [layer.name for layer in uneven], keep)}",
        )
    formats = {layer.name: layer.format for layer in layers}
    split = [group for group in fused_groups(layers) if len({formats[name] for name in group}) > 1]
    if split:
        said = ", ".join(f"{name} {formats[name] or 'kept'}" for name in split[0])
        raise UserError(
            f"layers that are fused when they are served would have different formats: {said}",
            f"keep all of them: {keeping(layers, [name for group in split for name in group], keep)}",
        )


def require_known(model: nn.Module, layers: Sequence[Layer], keep: Iterable[str]) -> None:
    """Refuses a pattern of quantize.keep that matches nothing.

    Args:
        model: With ModelOpt's quantizers inserted.
        layers: All of the model's.
        keep: The recipe's quantize.keep.

    Raises:
        UserError: naming the pattern, and the nearest layer.
    """
    from modelopt.torch.quantization.conversion import _normalize_fused_experts_quantizer_name as normalized

    names = [normalized(name) for name, _ in model.named_modules()]
    for pattern in keep:
        if not any(fnmatch(name, entry) for entry in keep_patterns(pattern) for name in names):
            owners = list(dict.fromkeys(layer.owner for layer in layers))
            near = get_close_matches(pattern, owners, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"layers are named like '{owners[-1]}'" if owners else None
            raise UserError(f"quantize.keep: '{pattern}' matches no layer that could be quantized", hint)


def refuse_unreadable(model: nn.Module) -> None:
    """Refuses quantizers whose work an exported checkpoint would not hold or could not be read back with."""
    from modelopt.torch.quantization.nn import SequentialQuantizer, TensorQuantizer

    experts = {
        f"{name}.{tensor}_{kind}"
        for name, module in model.named_modules()
        for tensor in (*fused_experts(module), *stacked_experts(module))
        for kind in ("weight_quantizers", "weight_quantizer", "input_quantizer")
    }
    for name, module in model.named_modules():
        if not isinstance(module, TensorQuantizer) or not module.is_enabled:
            continue
        if module.rotate_is_enabled:
            raise UserError(
                f"{name} would rotate its values, which cannot be exported", "choose a recipe without rotate"
            )
        if name in experts or name.rpartition(".")[0] in experts or is_attention_quantizer(model, name):
            continue
        if not name.endswith(_QUANTIZERS) or isinstance(module, SequentialQuantizer):
            parts = name.split(".")  # ending in a number where there are several of them
            at = next(i for i, part in enumerate(parts) if "quantizer" in part)
            parent = ".".join(parts[:at])
            raise UserError(
                f"{parent} would be quantized through {parts[at]}, which cannot be exported and read back yet",
                f"keep it: {_keeping(parent)}",
            )
