"""Writes a quantized checkpoint as a plain one that any tool opens, shard by shard.

The plain checkpoint has the quantized weights' values and nothing of the rounding of inputs and KV cache. AWQ's factors
are multiplied into the weights they were taken out of, and SVDQuant's low-rank branch is added to them.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor

from halfbyte.quant.build import Builder, checked, logical_shape
from halfbyte.quant.checkpoint import QuantFormat, Tensors, quant_format, read_config
from halfbyte.quant.checks_model import misfits
from halfbyte.quant.layouts import StoredLayer, is_kv, is_scale
from halfbyte.quant.models import Source, empty_model
from halfbyte.quant.places import hub_names, require_declared
from halfbyte.records.errors import UserError
from halfbyte.records.files import atomic_folder, write_json
from halfbyte.records.progress import progress_bar

SHARD_BYTES = 4 * 2**30
"""Size of a shard, and so the memory that is needed, unless one tensor is larger."""
_CPU = torch.device("cpu")
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True)
class Written:
    """What was written."""

    folder: Path
    dtype: str
    tensors: int
    shards: int
    bytes: int


@dataclass(frozen=True)
class _Plain:
    """One tensor of the plain checkpoint, read when its shard is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None for what is copied as it is."""
    read: Callable[[], Tensor]
    bytes: int


def dequantize_checkpoint(source: Source, output: Path, dtype: torch.dtype) -> Written:
    """Writes the checkpoint of `source` to the folder `output`, with tokenizer and the other files beside it.

    The folder appears whole or not at all; what a killed attempt left is removed by the next one. Memory is bounded by
    a shard or the largest tensor, whichever is more.

    Args:
        source: The exported checkpoint.
        output: A folder that does not exist yet.
        dtype: Of the weights; what is stored in float32 stays so.

    Raises:
        UserError: when `source` is not quantized or damaged, `output` exists, a value does not fit `dtype`, or the disk
            is full.
    """
    declared = quant_format(source.folder)
    if declared is None:
        raise UserError(f"{source.folder} is not quantized", "it can be opened as it is")
    if output.exists():
        raise UserError(f"{output} exists", "choose another --output, or remove it")
    _, empty = empty_model(source)
    with Tensors(source.folder) as tensors:
        fault = next(misfits(tensors, declared, empty), None)
        if fault is not None:
            raise UserError(f"{source.folder} is damaged: {fault}", "copy it again, whole, or export the model again")
        builder = Builder(tensors, declared, dtype, _CPU)
        plan = dict(_plan(tensors, declared, builder, hub_names(empty)))
        shards = _shards(plan)
        with atomic_folder(output) as partial:
            _write(partial, plan, shards)
            _write_config(source.folder, partial, dtype)
            _copy_companions(source.folder, partial)
    size = sum(plain.bytes for plain in plan.values())
    return Written(output, str(dtype).removeprefix("torch."), len(plan), len(shards.filename_to_tensors), size)


def _plan(
    tensors: Tensors, declared: QuantFormat, builder: Builder, rename: Callable[[str], str]
) -> Iterator[tuple[str, _Plain]]:
    """The names and shapes of the plain tensors; none is read."""
    layers = {name: tensors.layer(name) for name in tensors if not is_scale(name)}
    belonging = {name for layer in layers.values() if layer is not None for name in layer.tensors}
    if not belonging:
        raise UserError(f"the checkpoint declares {declared.label}, but no weight in it is quantized")
    size = builder.dtype.itemsize
    for name in tensors:
        layer = layers.get(name)
        if layer is not None:
            require_declared(layer, declared)
            shape = logical_shape(tensors, layer)
            if layer.codes.endswith("_blocks"):  # gpt-oss's own loader turns these too
                shape = (shape[0], shape[2], shape[1])
            plain = name if layer.parameter == "weight" else f"{layer.module}.{layer.parameter}"
            yield rename(plain), _Plain(shape, builder.dtype, _reading(builder, layer), math.prod(shape) * size)
        elif name in belonging or is_kv(name):
            continue
        elif is_scale(name):
            raise UserError(f"{name} belongs to no quantized layer", "the checkpoint does not fit its configuration")
        else:
            yield rename(name), _kept(tensors, name, builder.dtype)


def _reading(builder: Builder, layer: StoredLayer) -> Callable[[], Tensor]:
    if layer.parameter != "weight":
        return lambda: _finite(builder.stacked_values(layer), layer.codes)
    return lambda: _finite(_whole_weight(builder, layer), layer.codes)


def _finite(values: Tensor, name: str) -> Tensor:
    """Values after rounding to the chosen type, of which none may have become infinite."""
    if values.dtype == torch.float16 and not bool(torch.isfinite(values).all()):
        raise UserError(f"{name} has values that float16 cannot hold", "use --dtype bfloat16 or float32")
    return values


def _whole_weight(builder: Builder, layer: StoredLayer) -> Tensor:
    """A weight with the parts put back that AWQ and SVDQuant took out: (W + B A) x s, for inputs that they scaled."""
    if layer.pre_quant_scale is None and layer.lora_a is None:
        return builder.values(layer)
    weight = builder.values(layer, torch.float32)
    if layer.lora_a is not None and layer.lora_b is not None:
        factors = [checked(builder.tensors, name).float() for name in (layer.lora_b, layer.lora_a)]
        weight += factors[0] @ factors[1]
    if layer.pre_quant_scale is not None:
        weight *= checked(builder.tensors, layer.pre_quant_scale).float().flatten()
    return weight.to(builder.dtype)


def _kept(tensors: Tensors, name: str, dtype: torch.dtype) -> _Plain:
    shape, stored = tensors.shape(name), _TYPES.get(tensors.dtype(name))
    convert = stored in (torch.float16, torch.bfloat16) and stored != dtype

    def read() -> Tensor:
        return _finite(tensors[name].to(dtype), name) if convert else tensors[name]

    kept = dtype if convert else stored
    return _Plain(shape, kept, read, math.prod(shape) * (kept.itemsize if kept else tensors[name].dtype.itemsize))


def _shards(plan: dict[str, _Plain]) -> StateDictSplit:
    """Which tensors go into which file, as transformers names and fills them."""
    return split_state_dict_into_shards_factory(
        plan,
        get_storage_size=lambda plain: plain.bytes,
        get_storage_id=lambda _: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )


def _write(folder: Path, plan: dict[str, _Plain], shards: StateDictSplit) -> None:
    with progress_bar(total=len(plan), desc="dequantizing", unit=" tensors") as bar:
        for file, names in shards.filename_to_tensors.items():
            content = {}
            for name in names:
                content[name] = plan[name].read().contiguous()
                bar.update()
            save_file(content, folder / file, metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)


def _write_config(source: Path, folder: Path, dtype: torch.dtype) -> None:
    config = read_config(source)
    config.pop("quantization_config", None)
    parts: list[Any] = [config, config.get("text_config")]
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            if isinstance(part, dict) and part.get(key) is not None:
                part[key] = str(dtype).removeprefix("torch.")
    config.setdefault("torch_dtype" if "dtype" not in config else "dtype", str(dtype).removeprefix("torch."))
    write_json(folder / "config.json", config)


def _copy_companions(source: Path, folder: Path) -> None:
    """Tokenizer, generation config, chat template, licence: all that is neither weights nor about them."""
    for path in sorted(source.iterdir()):
        about_weights = path.name in ("config.json", "hf_quant_config.json") or path.name.endswith(".index.json")
        if path.is_file() and not about_weights and path.suffix not in (".safetensors", ".bin", ".pt", ".gguf"):
            shutil.copyfile(path, folder / path.name)
