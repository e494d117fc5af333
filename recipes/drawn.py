"""The train.drawn block of a recipe: what a model that draws is distilled on, made by its unquantized self."""

from __future__ import annotations

from pydantic import Field

from halfbyte.recipes.images import DrawnSpec
from halfbyte.recipes.sources import Strict, TextSource


class DrawnTrajectories(Strict):
    """Prompts from which the teacher draws; the student learns its velocity at every step. No images are needed."""

    prompts: TextSource
    """One image of each, up to `samples`."""
    images: DrawnSpec = DrawnSpec()
    """How they are drawn: steps, guidance, size."""
    batch_size: int = Field(default=1, ge=1)
    """Prompts drawn together."""
    seed: int = Field(default=1234, ge=0, lt=2**32)
    """Of the first image's noise; the next one has the seed after it."""
