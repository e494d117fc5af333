"""Ways to damage a checkpoint on disk: its tensors, its declaration, its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Damage = Callable[[Path], None]

INDEX = "model.safetensors.index.json"


def tensors(change: Callable[[Tensors], None]) -> Damage:
    """Changes tensors by name; each stays in its file, new ones go into the last."""

    def damage(folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        where = {name: path for path in files for name in load_file(path)}
        values = {name: value for path in files for name, value in load_file(path).items()}
        change(values)
        for path in files:
            own = {name: value for name, value in values.items() if where.get(name, files[-1]) == path}
            save_file({name: value.contiguous() for name, value in own.items()}, path, metadata={"format": "pt"})

    return damage


def put(name: str, value: Any) -> Damage:
    """Stores a value in the place of a tensor, in that tensor's type."""

    def change(values: Tensors) -> None:
        old = values.get(name)
        values[name] = torch.as_tensor(value) if old is None else torch.as_tensor(value).to(old.dtype)

    return tensors(change)


def drop(*names: str) -> Damage:
    """Removes tensors."""

    def change(values: Tensors) -> None:
        for name in names:
            del values[name]

    return tensors(change)


def scale(name: str, by: float) -> Damage:
    """Multiplies a tensor."""

    def change(values: Tensors) -> None:
        values[name] = (values[name].float() * by).to(values[name].dtype)

    return tensors(change)


def bits(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """Changes a tensor as uint8."""

    def changed(values: Tensors) -> None:
        old = values[name]
        flat = old.contiguous().reshape(-1, old.shape[-1] if old.dim() else 1)
        values[name] = change(flat.view(torch.uint8)).contiguous().view(old.dtype).reshape(old.shape)

    return tensors(changed)


def every(suffix: str, value: float) -> Damage:
    """Sets all tensors whose names end so."""

    def change(values: Tensors) -> None:
        for name in [name for name in values if name.endswith(suffix)]:
            values[name] = torch.full_like(values[name].float(), value).to(values[name].dtype)

    return tensors(change)


def swap(one: str, other: str) -> Damage:
    """Exchanges what lies under two prefixes."""

    def change(values: Tensors) -> None:
        for name in [name for name in values if name.startswith(one)]:
            twin = other + name.removeprefix(one)
            values[name], values[twin] = values[twin], values[name]

    return tensors(change)


def copy(one: str, other: str) -> Damage:
    """Stores the tensors under one prefix under another as well."""

    def change(values: Tensors) -> None:
        for name in [name for name in values if name.startswith(one)]:
            values[other + name.removeprefix(one)] = values[name].clone()

    return tensors(change)


def declare(**changes: Any) -> Damage:
    """Changes hf_quant_config.json; config.json keeps what it says."""

    def damage(folder: Path) -> None:
        edit_json(folder / "hf_quant_config.json", lambda content: content["quantization"].update(changes))

    return damage


def exclude(change: Callable[[list[str]], list[str]]) -> Damage:
    """Changes the exclude list in both declarations."""

    def damage(folder: Path) -> None:
        def own(content: Any) -> None:
            content["quantization"]["exclude_modules"] = change(content["quantization"]["exclude_modules"])

        def other(content: Any) -> None:
            content["quantization_config"]["ignore"] = change(content["quantization_config"]["ignore"])

        edit_json(folder / "hf_quant_config.json", own)
        edit_json(folder / "config.json", other)

    return damage


def configure(name: str, **changes: Any) -> Damage:
    """Changes another JSON file of the folder."""
    return lambda folder: edit_json(folder / name, lambda content: content.update(changes))


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    """Changes a JSON file in place."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def remove(name: str) -> Damage:
    """Removes a file."""
    return lambda folder: (folder / name).unlink()


def both(*damages: Damage) -> Damage:
    """One after the other."""

    def damage(folder: Path) -> None:
        for one in damages:
            one(folder)

    return damage


def shard(folder: Path, count: int = 3) -> None:
    """Splits model.safetensors into several files with an index, as save_pretrained does."""
    whole = folder / "model.safetensors"
    values = load_file(whole)
    names = sorted(values)
    where = {}
    for index in range(count):
        file = f"model-{index + 1:05}-of-{count:05}.safetensors"
        own = {name: values[name] for name in names[index::count]}
        save_file(own, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(own, file))
    size = sum(value.nbytes for value in values.values())
    content = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(content), encoding="utf-8")
    whole.unlink()


def file_of(folder: Path, name: str) -> Path:
    """The file a tensor lies in."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                return path
    raise KeyError(name)


def exchange_files(folder: Path) -> None:
    """Gives two shards each other's name."""
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    spare = folder / "spare"
    shutil.move(first, spare)
    shutil.move(second, first)
    shutil.move(spare, second)
