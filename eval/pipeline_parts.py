"""The parts of a diffusers pipeline, original or exported: found at once, and each loaded when it is asked for."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from halfbyte.quant.load import Weights, load_transformer
from halfbyte.records.digests import PIPELINE_FILE
from halfbyte.records.errors import UserError
from halfbyte.records.files import read_json

Opener = Callable[[], nn.Module]
"""Loads one part of a pipeline onto the device, ready to run."""
TRANSFORMER = "transformer"


@dataclass(frozen=True)
class Parts:
    """Where the parts of a pipeline come from."""

    skeleton: Any
    """A diffusers pipeline with its tokenizers and scheduler; the parts with weights are on the meta device."""
    openers: Mapping[str, Opener]
    """By the part's name in the pipeline: text_encoder, transformer, vae, ..."""
    bytes: Mapping[str, int]
    """Of the weights of each part as it is loaded."""
    packed_bytes: int | None = None
    """Of the transformer's weights where they can be kept as an exported checkpoint stores them; None where not."""


def open_parts(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    own: str | None = None,
    weights: Weights = "folded",
) -> Parts:
    """The parts of the pipeline in a folder; no weights are read before a stage needs them.

    Args:
        folder: As diffusers' save_pretrained writes it.
        dtype: To compute in.
        device: Where parts are put.
        own: The type an original transformer's weights have; None for that of its files.
        weights: How an exported transformer's weights are held; see quant.load.load_transformer.

    Raises:
        UserError: when it is no pipeline, or of a class that diffusers does not have.
    """
    diffusers = _diffusers()
    if not (folder / PIPELINE_FILE).is_file():
        raise UserError(f"{folder} holds no pipeline", f"a diffusers pipeline has {PIPELINE_FILE}")
    index = read_json(folder / PIPELINE_FILE)
    with quiet():  # which imports it
        kind = getattr(diffusers, str(index.get("_class_name")), None)
    if kind is None:
        raise UserError(f"diffusers {diffusers.__version__} has no pipeline {index.get('_class_name')!r}")
    meta: dict[str, nn.Module] = {}
    found: dict[str, Opener] = {}
    absent: dict[str, None] = {}
    for name, entry in index.items():
        if not (isinstance(entry, list) and len(entry) == 2):
            continue
        if entry[0] is None or name == "safety_checker":  # which would blacken images, and not the same on both sides
            absent[name] = None
            continue
        architecture = _class_of(entry)
        if not issubclass(architecture, nn.Module):
            continue
        with _opening(folder / name):
            meta[name] = _empty(architecture, folder / name, dtype)
        found[name] = _opener(architecture, folder / name, dtype, device)
    if TRANSFORMER in found:
        computed = str(dtype).removeprefix("torch.")
        found[TRANSFORMER] = partial(
            load_transformer, folder / TRANSFORMER, own=own, dtype=computed, device=device, weights=weights
        )
    given: dict[str, Any] = {**meta, **absent}
    if "requires_safety_checker" in index:
        given["requires_safety_checker"] = False
    with _opening(folder):
        skeleton = kind.from_pretrained(folder, **given)
    sizes = {name: weight_bytes(one) for name, one in meta.items()}
    packed = _packed_bytes(folder / TRANSFORMER)
    if packed is not None and weights == "packed":
        sizes[TRANSFORMER] = packed
    return Parts(skeleton, found, sizes, packed)


def part_bytes(folder: Path, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the weights of each part of a pipeline, from the parts' configurations: no weight is read.

    Args:
        folder: As diffusers' save_pretrained writes it; of a part, config.json is enough.
        dtype: The type they are loaded in.

    Raises:
        UserError: when a part has no configuration, or is of a class that is not known.
    """
    _diffusers()
    found = {}
    for name, entry in read_json(folder / PIPELINE_FILE).items():
        if not (isinstance(entry, list) and len(entry) == 2) or entry[0] is None or name == "safety_checker":
            continue
        with quiet():
            architecture = _class_of(entry)
        if issubclass(architecture, nn.Module):
            with _opening(folder / name):
                found[name] = weight_bytes(_empty(architecture, folder / name, dtype))
    return found


def _packed_bytes(transformer: Path) -> int | None:
    """Of an exported transformer's weights as they are stored; None for an original."""
    if not (transformer / "config.json").is_file():
        return None
    if not read_json(transformer / "config.json").get("quantization_config"):
        return None
    return sum(path.stat().st_size for path in transformer.glob("*.safetensors"))


def weight_bytes(part: nn.Module) -> int:
    """Of the weights of a part; those that are shared count once."""
    return sum(one.numel() * one.element_size() for one in (*part.parameters(), *part.buffers()))


def _diffusers() -> Any:
    try:
        with quiet():
            import diffusers
    except ImportError:
        raise UserError("diffusers is not installed", "pip install 'halfbyte[image]'") from None
    return diffusers


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the bars and the advice of transformers and diffusers within the block."""
    from transformers.utils import logging as of_transformers

    loggers: list[Any] = [of_transformers]
    if "diffusers" in sys.modules:
        loggers.append(sys.modules["diffusers"].utils.logging)
    before = [(one, one.get_verbosity(), one.is_progress_bar_enabled()) for one in loggers]
    for one in loggers:
        one.set_verbosity_error()
        one.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for one, level, bars in before:
            one.set_verbosity(level)
            if bars:
                one.enable_progress_bar()


@contextmanager
def _opening(folder: Path) -> Iterator[None]:
    """Turns what diffusers and transformers say about files they cannot open into a UserError."""
    from safetensors import SafetensorError

    try:
        with quiet():
            yield
    except torch.OutOfMemoryError:  # a RuntimeError that says nothing of the files
        raise
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"diffusers cannot open {folder}: {' '.join(str(error).split())[:300]}", "copy the pipeline again, whole"
        ) from error


def _class_of(entry: list[str]) -> type:
    """The class that an entry of model_index.json names, as [library, class]."""
    import diffusers
    import transformers

    library: Any = {"diffusers": diffusers, "transformers": transformers}.get(entry[0])
    found = getattr(library, entry[1], None)
    if found is None:
        raise UserError(f"the pipeline has a part of class {entry[1]} of {entry[0]}, which is not known here")
    return cast(type, found)


def _empty(architecture: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A part without weights: its configuration is what a pipeline looks at before it runs."""
    with torch.device("meta"):
        if hasattr(architecture, "load_config"):
            config = dict(read_json(folder / "config.json"))
            config.pop("quantization_config", None)
            empty: Any = architecture.from_config(config)
        else:
            empty = architecture(architecture.config_class.from_pretrained(folder))
    return cast(nn.Module, empty.to(dtype).eval())


def _opener(architecture: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> Opener:
    word = "torch_dtype" if hasattr(architecture, "load_config") else "dtype"  # diffusers' and transformers'

    def opened() -> nn.Module:
        with _opening(folder):
            part: Any = architecture.from_pretrained(folder, **{word: dtype}, local_files_only=True)
        return cast(nn.Module, part.to(device).eval())

    return opened
