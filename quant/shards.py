"""A checkpoint's files as they are, damaged or not: which tensors each holds, what is wrong, and the bytes, streamed.

`checkpoint.Tensors` opens a sound checkpoint and refuses any other. Here every file is looked at by itself, so that all
faults are found in one go. Source: the safetensors format, https://github.com/huggingface/safetensors (8 bytes of
length, a JSON header with type, shape and offsets of each tensor, the bytes of the tensors without gaps).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfbyte.quant.layouts import StoredLayer, find_layer
from halfbyte.records.errors import UserError
from halfbyte.records.files import read_json

CHUNK = 1 << 20
"""Bytes read at once: what fits a core's second-level cache, so that several operations cost one trip to memory."""
_HEADER_LIMIT = 100_000_000  # as in safetensors
BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4,
}  # fmt: skip
_TORCH = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.uint8, "F4": torch.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies."""

    path: Path
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    begin: int
    """Of its bytes in the file."""
    end: int


@dataclass
class Shards:
    """The readable tensors of a model folder, and what is wrong with its files."""

    folder: Path
    entries: dict[str, Entry] = field(default_factory=dict)
    """By name, in the order they lie on disk."""
    faults: list[str] = field(default_factory=list)
    """Files that are missing or damaged, and tensors that are cut short, empty or stored twice."""
    index_faults: list[str] = field(default_factory=list)
    """Where the index and the files disagree."""

    def __iter__(self) -> Iterator[str]:
        """The names in the order the tensors lie on disk."""
        return iter(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape as stored."""
        return self.entries[name].shape

    def dtype(self, name: str) -> str:
        """The tensor's type as safetensors names it."""
        return self.entries[name].dtype

    def layer(self, name: str) -> StoredLayer | None:
        """The quantized weight whose codes are this tensor; see layouts.find_layer."""
        return find_layer(self, name)

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor, as a copy in memory; scales of type F8_E8M0 as uint8."""
        entry = self.entries[name]
        buffer = bytearray(entry.end - entry.begin)
        with entry.path.open("rb") as file:
            file.seek(entry.begin)
            if file.readinto(buffer) != len(buffer):
                raise _cut(entry.path)
        if not buffer:
            return torch.empty(entry.shape, dtype=_TORCH[entry.dtype])
        flat = torch.frombuffer(buffer, dtype=_TORCH[entry.dtype])
        return flat if entry.dtype == "F4" else flat.reshape(entry.shape)

    def part(self, name: str, first: int, last: int) -> Tensor:
        """The values from the first to before the last, counted through the whole tensor, as a copy in memory.

        Raises:
            UserError: when the file ends before them.
        """
        entry = self.entries[name]
        size = _TORCH[entry.dtype].itemsize
        buffer = np.empty((last - first) * size, dtype=np.uint8)
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.begin + first * size)
            _fill(file, buffer, entry.path)
        return torch.from_numpy(buffer).view(_TORCH[entry.dtype])

    def chunks(self, name: str, unit: int = 1) -> Iterator[NDArray[np.uint8]]:
        """The tensor's bytes, about CHUNK at once and always whole units of `unit` bytes; each is valid until the next.

        Raises:
            UserError: when the file ends before the tensor does.
        """
        entry = self.entries[name]
        size = max(CHUNK // unit, 1) * unit
        buffer = np.empty(min(size, entry.end - entry.begin), dtype=np.uint8)
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.begin)
            left = entry.end - entry.begin
            while left:
                part = buffer[: min(size, left)]
                _fill(file, part, entry.path)
                left -= len(part)
                yield part


def _fill(file: FileIO, buffer: NDArray[np.uint8], path: Path) -> None:
    filled = 0
    while filled < len(buffer):
        count = file.readinto(buffer[filled:].data)
        if not count:
            raise _cut(path)
        filled += count


def _cut(path: Path) -> UserError:
    return UserError(f"{path} ends too early", "it is cut short or still being written; copy it again")


def open_shards(folder: Path) -> Shards:
    """Reads the headers of all safetensors files of a model folder, and its index.

    Raises:
        UserError: when there is no safetensors file at all.
    """
    found = Shards(folder)
    files = sorted(folder.glob("*.safetensors"))
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if not files and not indexes:
        raise UserError(f"{folder} holds no safetensors weights", "point to a folder with *.safetensors")
    for path in files:
        try:
            header = _header(path)
        except ValueError as error:
            found.faults.append(f"{path.name} {error}")
            continue
        _take(found, path, header)
    if indexes:
        _compare(found, indexes[0], {path.name for path in files})
    elif len(files) > 1:
        found.index_faults.append(f"{len(files)} files and no index")
    return found


def _header(path: Path) -> dict[str, Any]:
    """The header with absolute offsets; ValueError when the file is not laid out as it says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise ValueError("is cut short or no safetensors file")
        try:
            pairs: list[tuple[str, Any]] = json.loads(file.read(length), object_pairs_hook=list)
            header = {name: dict(value) for name, value in pairs if name != "__metadata__"}
        except (ValueError, TypeError):
            raise ValueError("has a damaged header") from None
    if len(header) < sum(name != "__metadata__" for name, _ in pairs):
        raise ValueError("names a tensor twice")
    for name, entry in header.items():
        if not _sound(entry):
            raise ValueError(f"has a damaged header: {name} cannot have this type, shape and size")
        entry["data_offsets"] = [offset + 8 + length for offset in entry["data_offsets"]]
    reached = 8 + length
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != reached:
            raise ValueError(f"has a damaged header: {name} does not begin where the tensor before it ends")
        reached = end
    if size > reached:
        raise ValueError(f"has {size - reached} bytes that belong to no tensor")
    return header


def _sound(entry: dict[str, Any]) -> bool:
    shape, offsets, bits = entry.get("shape"), entry.get("data_offsets"), BITS.get(str(entry.get("dtype")))
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2 or bits is None:
        return False
    fits: bool = math.prod(shape) * bits == 8 * (offsets[1] - offsets[0])
    return fits and min([0, *shape]) == 0


def _take(found: Shards, path: Path, header: dict[str, Any]) -> None:
    size = path.stat().st_size
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if end > size:
            found.faults.append(f"{name} is cut short: {path.name} ends {end - size} bytes too early")
        elif begin == end:
            found.faults.append(f"{name} is empty: its shape is {entry['shape']}, as of a tensor that was never there")
        elif name in found.entries:
            found.faults.append(f"{name} is stored twice: in {found.entries[name].path.name} and {path.name}")
        else:
            found.entries[name] = Entry(path, entry["dtype"], tuple(entry["shape"]), begin, end)


def _compare(found: Shards, index: Path, files: set[str]) -> None:
    content = read_json(index)
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not where:
        found.index_faults.append(f"{index.name} names no weights")
        return
    found.faults += [f"{name} is missing, and the index names it" for name in sorted(set(where.values()) - files)]
    found.index_faults += [f"{name} is in no index" for name in sorted(files - set(where.values()))]
    for name in sorted(set(where) | set(found.entries)):
        if name not in found.entries:
            found.index_faults.append(f"{name} is in the index and in no file")
        elif name not in where:
            found.index_faults.append(f"{name} is in {found.entries[name].path.name} and not in the index")
        elif where[name] != found.entries[name].path.name:
            found.index_faults.append(f"{name} is in {found.entries[name].path.name}, the index says {where[name]}")
    total = (content.get("metadata") or {}).get("total_size")
    stored = sum(entry.end - entry.begin for entry in found.entries.values())
    if isinstance(total, int) and total != stored and not found.faults:
        found.index_faults.append(f"the index says total_size {total}, the tensors have {stored} bytes")
