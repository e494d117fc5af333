"""The plan of a diffusers pipeline: each group of the transformer's layers with its format, before a weight is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from halfbyte.quant.attention import attention_format
from halfbyte.quant.configs import methods
from halfbyte.quant.layers import Layer
from halfbyte.quant.pipelines import TRANSFORMER, PipelineSource, copied_files, empty_transformer
from halfbyte.quant.plan import Plan, plan_of
from halfbyte.records.errors import UserError

_ALGORITHMS = (None, "max", "mse", "svdquant")
_NUMBER = re.compile(r"^((?:\w+_)?blocks)\.\d+\.")


@dataclass(frozen=True)
class PipelinePlan(Plan):
    """What quantizing a pipeline's transformer by a configuration will do."""

    attention: str | None = None
    """FP8, or None where attention is computed as it was."""
    attention_layers: int = 0
    copied_bytes: int = 0
    """Of the pipeline's other parts, which are copied."""

    @property
    def exported_bytes(self) -> int:
        """Of the whole exported pipeline."""
        return self.tensor_bytes + self.copied_bytes

    @property
    def groups(self) -> dict[str, tuple[str | None, int]]:
        """Format and number of layers of each group: the layers of all blocks that have one name in their block."""
        counts = Counter((group_of(layer), layer.format) for layer in self.layers)
        return {name: (found, count) for (name, found), count in counts.items()}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        groups = [{"layers": name, "format": found, "count": count} for name, (found, count) in self.groups.items()]
        known = {"attention": self.attention, "groups": groups, "copied_bytes": self.copied_bytes}
        return {key: value for key, value in super().as_dict().items() if key != "kv_cache"} | known

    def __str__(self) -> str:
        lines = []
        counts = Counter((layer.format, group_of(layer)) for layer in self.layers)
        for name in [*dict.fromkeys(layer.format for layer in self.quantized), None]:
            chosen = [layer for layer in self.layers if layer.format == name]
            share = sum(layer.weights for layer in chosen) / self.weights
            lines.append(f"{name or self.dtype:12} {len(chosen):5} layers, {share:.1%} of the weights")
            lines += [f"{'':12} {count:5} {group}" for (kind, group), count in counts.items() if kind == name]
        if self.attention:
            lines.append(f"{self.attention:12} {self.attention_layers:5} attentions are computed in it")
        lines.append(f"{TRANSFORMER:12} {self.tensor_bytes / 1e9:.3f} GB, {self.bits_per_weight:.2f} bits per weight")
        lines.append(f"{'other parts':12} {self.copied_bytes / 1e9:.3f} GB, copied as they are")
        return "\n".join(lines)


def group_of(layer: Layer) -> str:
    """A layer's name with a star for the number of its block: single_transformer_blocks.*.proj_out."""
    return _NUMBER.sub(r"\1.*.", layer.name)


def make_pipeline_plan(
    source: PipelineSource, config: dict[str, Any], dtype: torch.dtype, keep: Sequence[str] = ()
) -> PipelinePlan:
    """Plans from the transformer's configuration on the meta device; see plan.make_plan.

    Raises:
        UserError: when no layer matches, or a layer would get a format that cannot be exported and read back.
    """
    copied = sum(path.stat().st_size for path in copied_files(source.folder))
    return pipeline_plan_of(empty_transformer(source.transformer, dtype), config, keep, copied_bytes=copied)


def pipeline_plan_of(
    model: nn.Module, config: dict[str, Any], keep: Sequence[str] = (), *, copied_bytes: int = 0
) -> PipelinePlan:
    """The plan for a transformer on the meta device; quantizers are inserted into it."""
    for method in methods(config):
        if method not in _ALGORITHMS:
            raise UserError(
                f"calibration algorithm {method!r} is not supported for a model that draws",
                f"supported: {', '.join(name for name in _ALGORITHMS if name)}",
            )
    plan = plan_of(model, config, keep)
    attention, layers = attention_format(model)
    if attention is None and any(
        "bmm" in str(one.get("quantizer_name")) and one.get("cfg") for one in config["quant_cfg"]
    ):
        missing = find_spec("onnx") is None
        raise UserError(
            "the recipe quantizes attention, "
            + (
                "and ModelOpt's plugin for it needs the package onnx"
                if missing
                else "and ModelOpt knows no attention of this model"
            ),
            "pip install onnx" if missing else "take '*bmm_quantizer' out of quant_cfg",
        )
    found = {**vars(plan), "attention": attention, "attention_layers": layers, "copied_bytes": copied_bytes}
    return PipelinePlan(**found)
