"""How a recipe's images are drawn: those of evaluate.images on both sides, and those a calibration looks at."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from halfbyte.recipes.sources import Strict

IMAGES = "images"
"""The task and subtask under which image evaluations are recorded."""


class DrawnSpec(Strict):
    """What a pipeline is called with beside a prompt and a seed."""

    steps: int = Field(default=30, ge=1)
    guidance: float = Field(default=3.5, ge=0)
    size: list[int] = Field(default=[1024, 1024], min_length=2, max_length=2)
    """Height and width in pixels."""
    max_sequence_length: int = Field(default=512, ge=1)
    """Longest prompt of the text encoder that is not CLIP, in tokens."""
    control_images: str | None = None
    """Folder of the control images that a .jsonl file names; None for the folder of the file."""

    @field_validator("size")
    @classmethod
    def _drawable(cls, size: list[int]) -> list[int]:
        if any(side < 16 or side % 16 for side in size):
            raise ValueError(f"size is {size}: height and width must be multiples of 16 pixels")
        return size

    @model_validator(mode="before")
    @classmethod
    def _square(cls, given: Any) -> Any:
        """`size: 1024` stands for a square."""
        if isinstance(given, dict) and type(given.get("size")) is int:
            return {**given, "size": [given["size"]] * 2}
        return given


class ImagesSpec(DrawnSpec):
    """One image for each prompt and seed, from the same initial latent on both sides."""

    prompts: str = Field(min_length=1)
    """A .txt file with a prompt a line, or a .jsonl file with `prompt` and, for control pipelines, `control_image`."""
    limit: int | None = Field(default=None, ge=1)
    """First prompts only; None for all. Written into the record; the gate refuses a mismatch."""
    seeds: list[int] = Field(default=[0], min_length=1)
    """Each prompt is drawn once with each of them."""
    metrics: list[str] = Field(default=["clip_score", "clip_iqa", "image_reward", "psnr", "ssim"], min_length=1)
    """Metrics by name, the one a verdict looks at first in front."""
    low_vram: bool = False
    """Whether text encoders, transformer and VAE are on the GPU only while they are needed. The images are the same."""
    latents: bool = False
    """Whether the latents after each step are kept, and the candidate's distance from the baseline's measured."""
    weights_of: dict[str, str] = Field(default_factory=dict)
    """Local copies of metrics' weights: metric to folder or file."""

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if any(not 0 <= seed < 2**63 for seed in seeds):
            raise ValueError("a seed is a whole number of at least 0")
        if len(set(seeds)) != len(seeds):
            raise ValueError("a seed is named twice: it would draw the same image twice")
        return seeds

    @field_validator("metrics")
    @classmethod
    def _once(cls, metrics: list[str]) -> list[str]:
        twice = {name for name in metrics if metrics.count(name) > 1}
        if twice:
            raise ValueError(f"metric '{min(twice)}' is named twice")
        return metrics

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        """`seeds: 4` stands for seeds 0 to 3."""
        seeds = given.get("seeds") if isinstance(given, dict) else None
        if type(seeds) is int and 1 <= seeds <= 10_000:
            return {**given, "seeds": list(range(seeds))}
        return given
