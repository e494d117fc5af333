"""The evaluate.images block of a recipe: which images both sides draw, and which metrics look at them."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from halfbyte.recipes.sources import Strict

IMAGES = "images"
"""The task and subtask under which image evaluations are recorded."""


class ImagesSpec(Strict):
    """One image for each prompt and seed, from the same initial latent on both sides."""

    prompts: str = Field(min_length=1)
    """A .txt file with a prompt a line, or a .jsonl file with `prompt` and, for control pipelines, `control_image`."""
    limit: int | None = Field(default=None, ge=1)
    """First prompts only; None for all. Written into the record; the gate refuses a mismatch."""
    seeds: list[int] = Field(default=[0], min_length=1)
    """Each prompt is drawn once with each of them."""
    steps: int = Field(default=30, ge=1)
    guidance: float = Field(default=3.5, ge=0)
    size: list[int] = Field(default=[1024, 1024], min_length=2, max_length=2)
    """Height and width in pixels."""
    max_sequence_length: int = Field(default=512, ge=1)
    """Longest prompt of the text encoder that is not CLIP, in tokens."""
    metrics: list[str] = Field(default=["clip_score", "clip_iqa", "image_reward", "psnr", "ssim"], min_length=1)
    """Metrics by name, the one a verdict looks at first in front."""
    low_vram: bool = False
    """Whether text encoders, transformer and VAE are on the GPU only while they are needed. The images are the same."""
    latents: bool = False
    """Whether the latents after each step are kept, and the candidate's distance from the baseline's measured."""
    control_images: str | None = None
    """Folder of the control images that a .jsonl file names; None for the folder of the file."""
    weights_of: dict[str, str] = Field(default_factory=dict)
    """Local copies of metrics' weights: metric to folder or file."""

    @field_validator("size")
    @classmethod
    def _drawable(cls, size: list[int]) -> list[int]:
        if any(side < 16 or side % 16 for side in size):
            raise ValueError(f"size is {size}: height and width must be multiples of 16 pixels")
        return size

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
        """`seeds: 4` stands for seeds 0 to 3, and `size: 1024` for a square."""
        if not isinstance(given, dict):
            return given
        given = dict(given)
        seeds, size = given.get("seeds"), given.get("size")
        if type(seeds) is int and 1 <= seeds <= 10_000:
            given["seeds"] = list(range(seeds))
        if type(size) is int:
            given["size"] = [size, size]
        return given
