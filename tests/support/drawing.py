"""A tiny pipeline and what is drawn with it, as the tests of images need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from halfbyte.eval.pipeline_parts import open_parts
from halfbyte.eval.pipelines import Pipeline
from halfbyte.recipes.images import ImagesSpec
from halfbyte.records.record import ModelSummary

CPU = torch.device("cpu")
PROMPTS = ("a red circle", "a large blue square left of a green triangle", "two small green circles")


def opened(folder: Path, *, low_vram: bool = False) -> Pipeline:
    """A pipeline that computes in float32 on the CPU."""
    return Pipeline(open_parts(folder, dtype=torch.float32, device=CPU), CPU, low_vram)


def write_prompts(folder: Path, *prompts: str) -> Path:
    """A prompt file."""
    path = folder / "prompts.txt"
    path.write_text("".join(f"{prompt}\n" for prompt in prompts or PROMPTS), encoding="utf-8")
    return path


def asked(prompts: Path, **more: Any) -> ImagesSpec:
    """Images of 32 x 32 pixels in 2 steps."""
    content = {"prompts": str(prompts), "steps": 2, "size": 32, "max_sequence_length": 32, "metrics": ["fulfilment"]}
    return ImagesSpec.model_validate({**content, **more})


def summary(digest: str = "a") -> ModelSummary:
    """A model of that digest."""
    return ModelSummary(name="tiny", digest=digest * 64, format="bfloat16", bytes_on_disk=1000, bits_per_weight=16.0)
