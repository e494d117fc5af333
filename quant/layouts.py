"""The formats that checkpoints declare, and which tensors beside a weight make up each of them.

ModelOpt's unified layout stores, beside a module's weight, weight_scale, weight_scale_2, input_scale, pre_quant_scale
and SVDQuant's two factors; weight_scale_inv is DeepSeek's name for the scales of 128 x 128 squares. Stacks of experts
have the parameter's name in the place of "weight" (gate_up_proj_weight_scale), or, as gpt-oss was published, in front
of _blocks and _scales. Sources: modelopt/torch/export/unified_export_hf.py and quant_utils.py, version 0.47; the index
files of deepseek-ai/DeepSeek-R1 and openai/gpt-oss-20b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from halfbyte.records.errors import UserError

FP8 = "FP8"
FP8_CHANNEL = "FP8_PER_CHANNEL_PER_TOKEN"
FP8_BLOCK_WEIGHTS = "FP8_PB_WO"
DEEPSEEK_FP8 = "FP8_BLOCK"
"""Squares of 128 x 128, and activations in groups of 128: DeepSeek's own, quant_method "fp8"."""
NVFP4 = "NVFP4"
NVFP4_AWQ = "NVFP4_AWQ"
NVFP4_SVD = "NVFP4_SVD"
W4A16_NVFP4 = "W4A16_NVFP4"
W4A8_NVFP4_FP8 = "W4A8_NVFP4_FP8"
MXFP4 = "MXFP4"
W4A16_MXFP4 = "W4A16_MXFP4"
"""gpt-oss as published, quant_method "mxfp4"."""
W4A8_MXFP4_FP8 = "W4A8_MXFP4_FP8"
MXFP8 = "MXFP8"
MIXED_PRECISION = "MIXED_PRECISION"

Storage = Literal["fp8", "fp8_channel", "fp8_block", "nvfp4", "mxfp4", "mxfp8"]
"""How a weight lies in the file."""
Activations = Literal["fp8", "fp8_token", "fp8_group", "nvfp4", "mxfp4", "mxfp8"]
"""How a linear's input is rounded; fp8 and nvfp4 have a stored scale, the others take theirs from the input."""


class Format(NamedTuple):
    """What a declared format means for weights and for inputs."""

    storage: Storage
    activations: Activations | None

    @property
    def has_input_scale(self) -> bool:
        """Whether a scale of its inputs must be stored; ModelOpt calibrates none beside MXFP4 weights."""
        return self.activations in ("fp8", "nvfp4") and self.storage != "mxfp4"


FORMATS: dict[str, Format] = {
    FP8: Format("fp8", "fp8"),
    FP8_CHANNEL: Format("fp8_channel", "fp8_token"),
    FP8_BLOCK_WEIGHTS: Format("fp8_block", None),
    DEEPSEEK_FP8: Format("fp8_block", "fp8_group"),
    NVFP4: Format("nvfp4", "nvfp4"),
    NVFP4_AWQ: Format("nvfp4", "nvfp4"),
    NVFP4_SVD: Format("nvfp4", "nvfp4"),
    W4A16_NVFP4: Format("nvfp4", None),
    W4A8_NVFP4_FP8: Format("nvfp4", "fp8"),
    MXFP4: Format("mxfp4", "mxfp4"),
    W4A16_MXFP4: Format("mxfp4", None),
    W4A8_MXFP4_FP8: Format("mxfp4", "fp8"),
    MXFP8: Format("mxfp8", "mxfp8"),
}
READABLE = tuple(FORMATS)
KV_FORMATS = (FP8, NVFP4, "NVFP4_AFFINE")

SCALE_SUFFIXES = (
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "input_scale",
    "pre_quant_scale",
    "k_scale",
    "v_scale",
    "kv_scale",
    "k_bias",
    "v_bias",
    "_svdquant_lora_a",
    "_svdquant_lora_b",
    "svdquant_lora_a",
    "svdquant_lora_b",
)
KV_SUFFIXES = ("k_scale", "v_scale", "kv_scale", "k_bias", "v_bias")
_STACKED = ("gate_up_proj", "down_proj", "up_proj")
_CODES = ("F8_E4M3", "U8", "F4")


class Heads(Protocol):
    """Names, shapes and types of a checkpoint's tensors; see checkpoint.Tensors."""

    def __contains__(self, name: object) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape as stored."""
        ...

    def dtype(self, name: str) -> str:
        """The tensor's type as safetensors names it."""
        ...


@dataclass(frozen=True)
class StoredLayer:
    """The tensors of one quantized weight, by name; None where the format has none."""

    module: str
    """The module that owns it, such as model.layers.0.self_attn.q_proj, or the experts of a block."""
    storage: Storage
    codes: str
    scale: str
    scale_2: str | None = None
    input_scale: str | None = None
    pre_quant_scale: str | None = None
    lora_a: str | None = None
    lora_b: str | None = None
    parameter: str = "weight"
    """The parameter's own name; gate_up_proj or down_proj for a stack of experts."""
    transposed: bool = False
    """A stack stored as [experts, in, out]."""
    blocks_first: bool = False
    """Whether its blocks and packed pairs lie along the first dimension of the two, not the last."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every tensor that belongs to it."""
        names = (self.codes, self.scale, self.scale_2, self.input_scale, self.pre_quant_scale, self.lora_a, self.lora_b)
        return tuple(name for name in names if name is not None)

    @property
    def format(self) -> str:
        """The format its tensors look like; a declared one may be narrower, see `fits`."""
        if self.storage == "nvfp4":
            if self.lora_a is not None:
                return NVFP4_SVD
            if self.pre_quant_scale is not None:
                return NVFP4_AWQ
            return NVFP4 if self.input_scale is not None else W4A16_NVFP4
        if self.storage == "mxfp4":
            if self.codes.endswith("_blocks"):
                return W4A16_MXFP4
            return W4A8_MXFP4_FP8 if self.input_scale is not None else MXFP4
        if self.storage == "fp8_block":
            return DEEPSEEK_FP8 if self.scale.endswith("_inv") else FP8_BLOCK_WEIGHTS
        return {"fp8": FP8, "fp8_channel": FP8_CHANNEL, "mxfp8": MXFP8}[self.storage]


def fits(layer: StoredLayer, declared: str | None) -> bool:
    """Whether a layer is stored as its declared format is.

    A layer without pre_quant_scale fits NVFP4_AWQ, since ModelOpt folds the scale into the layer before where it can. A
    weight of one square of FP8 blocks has one scale, like a tensor's; and the channels of a stack are its experts.
    """
    if declared is None:
        return False
    expected = FORMATS[declared]
    one_scale = expected.storage == "fp8_block" or (expected.storage == "fp8_channel" and layer.parameter != "weight")
    stored = expected.storage if layer.storage == "fp8" and one_scale else layer.storage
    calibrated = layer.input_scale is not None
    optional = calibrated and expected == FORMATS[W4A8_MXFP4_FP8]
    return stored == expected.storage and (optional or calibrated == expected.has_input_scale)


def find_layer(heads: Heads, name: str) -> StoredLayer | None:
    """The quantized weight whose codes are the tensor `name`; None when that is no quantized weight.

    Raises:
        UserError: when it holds codes without the scales that belong to them, or scales beside a weight without codes.
    """
    module, _, leaf = name.rpartition(".")
    if leaf.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in heads:
        parameter = leaf.removesuffix("_blocks")
        return StoredLayer(module, "mxfp4", name, f"{module}.{parameter}_scales", parameter=parameter)
    if leaf != "weight" and not (leaf in _STACKED and len(heads.shape(name)) == 3):
        return None
    prefix = f"{module}." if leaf == "weight" else f"{name}_"

    def beside(*suffixes: str) -> str | None:
        return next((prefix + suffix for suffix in suffixes if prefix + suffix in heads), None)

    scale = beside("weight_scale", "weight_scale_inv")
    kind = heads.dtype(name)
    if kind not in _CODES and scale is None:
        return None
    scale_2 = beside("weight_scale_2")
    storage = None if scale is None else _storage(heads, name, scale, scale_2)
    if scale is None or storage is None:
        raise UserError(
            f"{module} is stored as {kind} without the scales that belong to it", "the checkpoint is incomplete"
        )
    return StoredLayer(
        module,
        storage,
        codes=name,
        scale=scale,
        scale_2=scale_2,
        input_scale=beside("input_scale"),
        pre_quant_scale=beside("pre_quant_scale"),
        lora_a=beside("weight_quantizer._svdquant_lora_a", "weight_quantizer.svdquant_lora_a", "svdquant_lora_a"),
        lora_b=beside("weight_quantizer._svdquant_lora_b", "weight_quantizer.svdquant_lora_b", "svdquant_lora_b"),
        parameter=leaf,
        transposed=leaf != "weight",
        blocks_first=leaf != "weight" and storage == "nvfp4" and heads.shape(name)[-2] != heads.shape(scale)[-2],
    )


def _storage(heads: Heads, codes: str, scale: str, scale_2: str | None) -> Storage | None:
    """What codes and scales of these types and shapes are; None when they do not belong together."""
    kind, scale_kind = heads.dtype(codes), heads.dtype(scale)
    if kind == "U8":
        if scale_kind == "F8_E4M3" and scale_2 is not None:
            return "nvfp4"
        return "mxfp4" if scale_kind in ("U8", "F8_E8M0") and scale_2 is None else None
    if kind != "F8_E4M3" or scale_2 is not None:
        return None
    if scale_kind in ("U8", "F8_E8M0"):
        return "mxfp8"
    *stack, rows, columns = heads.shape(codes)
    shape = tuple(size for size in heads.shape(scale) if size != 1)
    if scale.endswith("_inv") or (rows > 1 and math.prod(shape) < rows and len(shape) == 2 and not stack):
        return "fp8_block"
    if math.prod(shape) == 1 or shape == tuple(stack):
        return "fp8"
    return "fp8_channel" if shape == (*stack, rows) or (stack and shape == (*stack, columns)) else "fp8_block"


def is_scale(name: str) -> bool:
    """Whether a tensor serves quantization and is no weight, by the last part of its name."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf in SCALE_SUFFIXES or leaf in ("gate_up_proj_scales", "down_proj_scales"):
        return True
    return leaf.startswith(_STACKED) and leaf.endswith(tuple(f"_{suffix}" for suffix in SCALE_SUFFIXES[:5]))


def is_kv(name: str) -> bool:
    """Whether a tensor is a scale or an offset of the KV cache."""
    return name.rsplit(".", 1)[-1] in KV_SUFFIXES
