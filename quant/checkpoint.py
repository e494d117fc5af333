"""What lies in a checkpoint folder: its configuration, its tensors, and which of them are quantized how.

Reads ModelOpt's unified Hugging Face layout: hf_quant_config.json, or quantization_config in config.json with
quant_method "modelopt"; and what DeepSeek ("fp8") and gpt-oss ("mxfp4") declare. What the tensors beside a weight mean
is in halfbyte.quant.layouts. Source: modelopt/torch/export/unified_export_hf.py and convert_hf_config.py, version 0.47.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from halfbyte.quant.layouts import (
    DEEPSEEK_FP8,
    FORMATS,
    FP8,
    KV_FORMATS,
    MIXED_PRECISION,
    MXFP4,
    NVFP4,
    READABLE,
    SCALE_SUFFIXES,
    W4A16_MXFP4,
    W4A16_NVFP4,
    StoredLayer,
    find_layer,
    is_scale,
)
from halfbyte.quant.numerics import NVFP4_BLOCK
from halfbyte.records.digests import model_digest
from halfbyte.records.errors import UserError, unknown_name
from halfbyte.records.files import read_json
from halfbyte.records.record import ModelSummary

__all__ = [
    "FP8",
    "NVFP4",
    "READABLE",
    "SCALE_SUFFIXES",
    "W4A16_NVFP4",
    "QuantFormat",
    "Tensors",
    "is_scale",
    "plain_dtype",
    "quant_format",
    "read_config",
    "shard_files",
    "summarize",
    "torch_dtype",
]


@dataclass(frozen=True)
class QuantFormat:
    """What a checkpoint declares of its quantization."""

    algorithm: str
    """One of layouts.FORMATS, or MIXED_PRECISION."""
    kv_cache: str | None = None
    """FP8, NVFP4, NVFP4_AFFINE or None."""
    exclude: tuple[str, ...] = ()
    layers: dict[str, str] = field(default_factory=dict)
    """Algorithm by module, for MIXED_PRECISION; a module with experts stands for all of them."""

    def format_of(self, layer: str) -> str | None:
        """The algorithm declared for a module; None when it is declared to be kept as it is."""
        if self.algorithm != MIXED_PRECISION:
            return None if self.excludes(layer) else self.algorithm
        name = layer
        while name and name not in self.layers:
            name = name.rpartition(".")[0]
        return self.layers.get(name)

    def excludes(self, layer: str) -> bool:
        """Whether the exclude list names a module: by a pattern, or by the name of one that contains it."""
        return self._excluded.match(layer) is not None

    @cached_property
    def _excluded(self) -> re.Pattern[str]:
        """All patterns as one, since a model may have 45,000 modules and the list 100 entries."""
        either = [translate(spelled) for pattern in self.exclude for spelled in (pattern, f"{pattern}.*")]
        return re.compile("|".join(either) or r"(?!)")

    @property
    def label(self) -> str:
        """For tables: "NVFP4", or "NVFP4 + FP8 KV"."""
        return f"{self.algorithm} + {self.kv_cache} KV" if self.kv_cache else self.algorithm


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        UserError: when the folder or the file is missing, empty or not JSON.
    """
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist", "check the path")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no model folder: it has no config.json", "give the folder that holds config.json")
    config = read_json(folder / "config.json", "restore it from its source")
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'} is not a model configuration", "restore it from its source")
    if config.get("text_config") is not None:
        _mapping(config["text_config"], folder / "config.json", "text_config")
    return config


def quant_format(folder: Path) -> QuantFormat | None:
    """What the checkpoint in `folder` declares; None for a model that ModelOpt has not quantized.

    Raises:
        UserError: when it declares an algorithm that cannot be read back, or another library quantized it.
    """
    config = read_config(folder)
    block = config.get("quantization_config")
    block = {} if block is None else _mapping(block, folder / "config.json", "quantization_config")
    own = folder / "hf_quant_config.json"
    if own.is_file():
        block = _mapping(_mapping(read_json(own), own, "its content").get("quantization"), own, "quantization")
    elif not block:
        return None
    elif block.get("quant_method") != "modelopt":
        return _other_method(folder, block)
    algorithm = _normal(block.get("quant_algo"))
    if algorithm is None:
        raise UserError(f"{folder} says it was quantized by ModelOpt but names no quant_algo", "quantize it again")
    by_layer = _mapping(block.get("quantized_layers") or {}, own, "quantized_layers")
    layers = {name: str(_normal(_mapping(layer, own, name).get("quant_algo"))) for name, layer in by_layer.items()}
    for name in [*layers.values()] if algorithm == MIXED_PRECISION else [algorithm]:
        if name not in READABLE:
            raise UserError(f"{folder} is quantized as {name}, which cannot be read back", f"readable: {READABLE}")
    if algorithm == MXFP4 and block.get("weight_only"):
        algorithm = W4A16_MXFP4  # ModelOpt declares both alike, our export tells them apart
    group = block.get("group_size")
    if group not in (None, NVFP4_BLOCK) and algorithm in FORMATS and FORMATS[algorithm].activations == "nvfp4":
        raise UserError(f"{folder} has NVFP4 blocks of {group}", f"blocks of {NVFP4_BLOCK} can be read back")
    return QuantFormat(
        algorithm=algorithm,
        kv_cache=_kv_algorithm(folder, block),
        exclude=_names(folder, block, "exclude_modules", "ignore"),
        layers=layers,
    )


def _normal(algorithm: Any) -> str | None:
    """ModelOpt writes some algorithms in lower case: fp8_pb_wo, mxfp4."""
    return None if algorithm is None else str(algorithm).upper()


def _other_method(folder: Path, block: dict[str, Any]) -> QuantFormat:
    """What two models declare that were published in low precision: DeepSeek's FP8 and gpt-oss's MXFP4."""
    method = block.get("quant_method")
    exclude = _names(folder, block, "modules_to_not_convert", "ignored_layers")
    if method == "mxfp4":
        return QuantFormat(W4A16_MXFP4, exclude=exclude)
    if method == "fp8" and block.get("weight_block_size") == [128, 128]:
        return QuantFormat(DEEPSEEK_FP8, exclude=exclude)
    raise UserError(f"{folder} is quantized already, by {method}, which cannot be read back", "give the original model")


def _mapping(value: Any, path: Path, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{path}: {what} is no mapping", "restore it from its source, or export the model again")
    return value


def _names(folder: Path, block: dict[str, Any], *keys: str) -> tuple[str, ...]:
    """The modules listed under the first of the keys that lists any."""
    key, found = next(((key, block[key]) for key in keys if block.get(key)), (keys[0], []))
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise UserError(f"{folder}: {key} is no list of names", "restore it from its source, or export the model again")
    return tuple(found)


def _kv_algorithm(folder: Path, block: dict[str, Any]) -> str | None:
    scheme = block.get("kv_cache_quant_algo", block.get("kv_cache_scheme"))
    if isinstance(scheme, dict):
        scheme = {8: "FP8", 4: "NVFP4"}.get(scheme.get("num_bits", 0), str(scheme))
    scheme = _normal(scheme)
    if scheme not in (None, *KV_FORMATS):
        raise UserError(f"{folder} has a {scheme} KV cache, which cannot be read back", f"readable: {KV_FORMATS}")
    return scheme


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in the order of their index.

    Raises:
        UserError: when there are none, or the index names one that is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = read_json(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index} names no weights", "copy it again, or delete it where there is one file only")
        names = sorted(set(map(str, weight_map.values())))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"{folder} lacks {len(missing)} of {len(names)} shards: {missing[0]}", "copy it again, whole"
            )
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = next(iter(sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.gguf")])), None)
        hint = "point to a folder with *.safetensors" if other is None else f"convert {other.name} to safetensors first"
        if other is not None and other.suffix == ".gguf":
            hint = f"name the file: --set model.gguf_file={other.name}"
        raise UserError(f"{folder} holds no safetensors weights", hint)
    return files


class Tensors:
    """The tensors of a checkpoint by name, read lazily from its memory-mapped files; use it as a context."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        for path in shard_files(folder):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise UserError(
                    f"{path} is damaged: {str(error).splitlines()[0]}",
                    "it is cut short or no safetensors; copy it again",
                ) from None
            self._where.update(dict.fromkeys(file.keys(), file))
        if not self._where:
            raise UserError(f"{folder} holds no tensors", "copy it again, whole")

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._where))

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> Tensor:
        return self._where[name].get_tensor(name)  # type: ignore[no-any-return]

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape as stored, without reading it."""
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The tensor's type as safetensors names it: BF16, F8_E4M3, U8, ..."""
        return str(self._where[name].get_slice(name).get_dtype())

    def layer(self, name: str) -> StoredLayer | None:
        """The quantized weight whose codes are the tensor `name`; None when that is no quantized weight.

        Raises:
            UserError: when its tensors fit no format.
        """
        return find_layer(self, name)

    def layer_format(self, module: str) -> str | None:
        """The format by what is stored for a module; None when its weight is not quantized.

        Raises:
            UserError: when its tensors fit none.
        """
        layer = self.layer(f"{module}.weight")
        return None if layer is None else layer.format


def summarize(folder: Path, name: str) -> ModelSummary:
    """What a model folder weighs: bytes on disk and bits per weight (packed pairs count as two, scales as none)."""
    declared = quant_format(folder)
    weights = 0
    with Tensors(folder) as tensors:
        for tensor in tensors:
            if not is_scale(tensor):
                packed = tensors.dtype(tensor) == "U8"
                weights += math.prod(tensors.shape(tensor)) * (2 if packed else 1)
    size = sum(path.stat().st_size for path in shard_files(folder))
    return ModelSummary(
        name=name,
        digest=model_digest(folder),
        format=declared.label if declared else plain_dtype(folder),
        bytes_on_disk=size,
        bits_per_weight=8 * size / weights,
    )


def plain_dtype(folder: Path) -> str:
    """The type an unquantized model's configuration names; of a pipeline's part, which names none, its tensors'."""
    config = read_config(folder)
    if "_class_name" in config:
        return _dtype_of_tensors(folder)
    text = config.get("text_config") or {}
    return str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "float32")


def _dtype_of_tensors(folder: Path) -> str:
    """The type that most of the tensors have, scales left out."""
    known = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    with Tensors(folder) as tensors:
        found = [known.get(tensors.dtype(name)) for name in tensors if not is_scale(name)]
    counts = Counter(kind for kind in found if kind is not None)
    return counts.most_common(1)[0][0] if counts else "float32"


def torch_dtype(name: str) -> torch.dtype:
    """bfloat16, float16 or float32 as a torch type.

    Raises:
        UserError: for any other, as a model's configuration may name it.
    """
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in known:
        raise unknown_name("dtype", name, known)
    return known[name]
