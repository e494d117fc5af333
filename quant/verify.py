"""Verifying: reads an exported checkpoint tensor by tensor and says, one row a check, whether its numbers can be right.

Loaders of serving engines do not complain about most of what is checked here; they answer wrongly. Memory is bounded by
the largest tensor, time by the disk. Links to the incidents behind each check are in its docstring's words:
uncalibrated layers, fused linears with different scales, routers and heads quantized by a wildcard, missing KV scales.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from halfbyte.quant.checkpoint import FP8, NVFP4, QuantFormat, Tensors, quant_format, read_config
from halfbyte.quant.numerics import NVFP4_BLOCK
from halfbyte.records.errors import UserError
from halfbyte.records.files import read_json

# Linears that loaders fuse into one, and which must therefore share scales: names of the last part, by group.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_SHOWN = 5
# What no format here quantizes: reading them as packed weights gives noise.
_NEVER = re.compile(r"(norm|layernorm|embed_tokens|\bwte\b|router|\.gate$)")
# A block's largest value lies on the format's maximum by design (1 in 16), and some beside it; half of all is damage.
_MOST_SATURATED = {FP8: 0.05, NVFP4: 0.5}


@dataclass
class Check:
    """One row of verification.json."""

    name: str
    asks: str
    """What holds in a sound checkpoint."""
    faults: list[str] = field(default_factory=list)
    """The tensors or modules at fault, each with what is wrong; empty when the check passed."""

    @property
    def passed(self) -> bool:
        """Whether nothing is at fault."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"check": self.name, "passed": self.passed, "asks": self.asks, "faults": self.faults}

    def __str__(self) -> str:
        if self.passed:
            return f"ok    {self.name}"
        more = f" and {len(self.faults) - _SHOWN} more" if len(self.faults) > _SHOWN else ""
        return f"FAIL  {self.name}: {'; '.join(self.faults[:_SHOWN])}{more}"


@dataclass
class _Open:
    """An open checkpoint and what is known of it."""

    folder: Path
    tensors: Tensors
    declared: QuantFormat
    layers: dict[str, str]
    """Format by quantized module, as stored."""


def verify(folder: Path) -> list[Check]:
    """Runs every check on the exported checkpoint in `folder`.

    Raises:
        UserError: when it is no exported checkpoint or a file cannot be read at all.
    """
    declared = quant_format(folder)
    if declared is None:
        raise UserError(f"{folder} is no exported checkpoint: it declares no quantization", "give the exported folder")
    with Tensors(folder) as tensors:
        layers, broken = {}, []
        for name in tensors:
            module, _, leaf = name.rpartition(".")
            if leaf == "weight":
                try:
                    stored = tensors.layer_format(module)
                except UserError as error:
                    broken.append(error.message)
                    continue
                if stored is not None:
                    layers[module] = stored
        opened = _Open(folder, tensors, declared, layers)
        complete = Check("complete", "each quantized weight has the scales of its format", broken)
        return [complete, *(Check(name, asks, list(find(opened))) for name, asks, find in CHECKS)]


def _declared(at: _Open) -> Iterator[str]:
    if not at.layers:
        yield "no layer is quantized"
    for module, stored in at.layers.items():
        expected = at.declared.layers.get(module, at.declared.algorithm)
        if stored != expected:
            yield f"{module} is stored as {stored}, declared as {expected}"
    for module in at.declared.layers:
        if module not in at.layers:
            yield f"{module} is declared as {at.declared.layers[module]} and not quantized"


def _shapes(at: _Open) -> Iterator[str]:
    for module, stored in at.layers.items():
        rows, columns = at.tensors.shape(f"{module}.weight")[-2:]
        scale = at.tensors.shape(f"{module}.weight_scale")
        expected = (rows, columns * 2 // NVFP4_BLOCK) if stored != FP8 else ()
        if scale != expected:
            yield f"{module}.weight_scale has shape {scale}, expected {expected}"
        if stored != FP8 and at.tensors.dtype(f"{module}.weight_scale") != "F8_E4M3":
            yield f"{module}.weight_scale is {at.tensors.dtype(f'{module}.weight_scale')}, expected F8_E4M3"


def _input_scales(at: _Open) -> Iterator[str]:
    for module, stored in at.layers.items():
        if stored in (FP8, NVFP4) and f"{module}.input_scale" not in at.tensors:
            yield f"{module} has no input_scale"


def _finite(at: _Open) -> Iterator[str]:
    for name in at.tensors:
        if name.endswith("_scale") or name.endswith("_scale_2"):
            value = at.tensors[name].float()
            if not bool(torch.isfinite(value).all()):
                yield f"{name} is not finite"
            elif bool((value <= 0).any()):
                yield f"{name} has zero or negative values"
        elif at.tensors.dtype(name) in ("BF16", "F16", "F32") and not bool(torch.isfinite(at.tensors[name]).all()):
            yield f"{name} is not finite"


def _calibrated(at: _Open) -> Iterator[str]:
    inputs = [name for name in at.tensors if name.endswith(".input_scale")]
    values = {float(at.tensors[name]) for name in inputs}
    if len(inputs) > 1 and values == {1.0}:
        yield "every input_scale is 1: the activations were never calibrated"


def _fused(at: _Open) -> Iterator[str]:
    for module in at.layers:
        parent, _, last = module.rpartition(".")
        for group in FUSED:
            if last == group[0]:
                others = [f"{parent}.{name}" for name in group[1:] if f"{parent}.{name}" in at.layers]
                yield from _differences(at, module, others)


def _differences(at: _Open, module: str, others: Iterable[str]) -> Iterator[str]:
    for scale in ("input_scale", "weight_scale_2"):
        if (at.layers[module] == FP8 and scale == "weight_scale_2") or f"{module}.{scale}" not in at.tensors:
            continue
        first = at.tensors[f"{module}.{scale}"]
        for other in others:
            if f"{other}.{scale}" in at.tensors and not torch.equal(first, at.tensors[f"{other}.{scale}"]):
                yield f"{other}.{scale} differs from {module}'s, and loaders use one for both"


def _kept(at: _Open) -> Iterator[str]:
    for module in at.layers:
        if _NEVER.search(module):
            yield f"{module} is quantized; loaders expect it in high precision"
        if any(fnmatch(module, pattern) for pattern in at.declared.exclude):
            yield f"{module} is quantized and on the exclude list"
    if at.declared.layers:
        return  # a mixed-precision checkpoint lists what is quantized instead
    for name in at.tensors:
        module, _, leaf = name.rpartition(".")
        plain = leaf == "weight" and module not in at.layers and len(at.tensors.shape(name)) == 2
        if plain and not _NEVER.search(module) and not any(fnmatch(module, p) for p in at.declared.exclude):
            yield f"{module} is not quantized and not on the exclude list"


def _excluded(at: _Open) -> Iterator[str]:
    modules = {name.rpartition(".")[0] for name in at.tensors}
    tied = "lm_head" if read_config(at.folder).get("tie_word_embeddings") else None
    for pattern in at.declared.exclude:
        if pattern != tied and not any(fnmatch(module, pattern) or module.startswith(pattern) for module in modules):
            yield f"'{pattern}' on the exclude list matches no module"


def _tied(at: _Open) -> Iterator[str]:
    head = "lm_head.weight"
    if read_config(at.folder).get("tie_word_embeddings") and head in at.tensors:
        embeddings = next((name for name in at.tensors if name.endswith("embed_tokens.weight")), None)
        if embeddings is None or not torch.equal(at.tensors[head], at.tensors[embeddings]):
            yield f"{head} is stored beside the embeddings it is tied to, and differs"


def _kv_cache(at: _Open) -> Iterator[str]:
    stored = {name for name in at.tensors if name.endswith((".k_scale", ".v_scale"))}
    if at.declared.kv_cache is None:
        yield from (f"{name} is stored and no KV-cache format is declared" for name in sorted(stored))
        return
    if stored:  # none at all means a scale of 1, as ModelOpt's *_cast recipes export it
        for name in at.tensors:
            if name.endswith(".k_proj.weight"):
                parent = name.removesuffix(".k_proj.weight")
                for scale in (f"{parent}.k_proj.k_scale", f"{parent}.v_proj.v_scale"):
                    if scale not in stored:
                        yield f"{scale} is missing"


def _saturated(at: _Open) -> Iterator[str]:
    for module, stored in at.layers.items():
        codes = at.tensors[f"{module}.weight"]
        if stored == FP8:
            share = float((codes.float().abs() == 448).float().mean())
        else:
            share = float((((codes & 7) == 7).float().mean() + ((codes >> 4 & 7) == 7).float().mean()) / 2)
        if share > _MOST_SATURATED.get(stored, _MOST_SATURATED[NVFP4]):
            yield f"{module}: {share:.0%} of the values lie at the format's maximum"


def _index(at: _Open) -> Iterator[str]:
    path = at.folder / "model.safetensors.index.json"
    if path.is_file():
        listed = set(read_json(path).get("weight_map", {}))
        yield from (f"{name} is in the index and in no shard" for name in sorted(listed - set(at.tensors)))
        yield from (f"{name} is in a shard and not in the index" for name in sorted(set(at.tensors) - listed))


def _companions(at: _Open) -> Iterator[str]:
    for names in (("tokenizer.json", "tokenizer.model", "vocab.json"), ("generation_config.json",)):
        if not any((at.folder / name).is_file() for name in names):
            yield f"{names[0]} is missing"


Finder = Callable[[_Open], Iterator[str]]
CHECKS: tuple[tuple[str, str, Finder], ...] = (
    ("declared", "layers are stored in the format that is declared", _declared),
    ("shapes", "scales have the shape and type of their format", _shapes),
    ("input scales", "layers with quantized activations have an input scale", _input_scales),
    ("finite", "scales are positive and finite, kept weights finite", _finite),
    ("calibrated", "activations were calibrated", _calibrated),
    ("fused", "linears that loaders fuse share their scales", _fused),
    ("kept", "norms, embeddings, routers and excluded modules are kept, everything else is quantized", _kept),
    ("exclude list", "every entry of the exclude list matches a module", _excluded),
    ("tied", "tied embeddings are stored once", _tied),
    ("kv cache", "KV-cache scales are there when declared, and only then", _kv_cache),
    ("saturation", "few values lie at the format's maximum", _saturated),
    ("index", "the index lists what the shards hold", _index),
    ("companions", "tokenizer and generation config are there", _companions),
)
