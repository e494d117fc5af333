"""What to know before a recipe is run: what it follows, what of that was never said, and what a run of it takes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from halfbyte.recipes.sources import Strict

MEMORY_GB = {"RTX 5090": 34.2, "H100": 85.5, "H200": 150.7, "B200": 192.3, "B300": 288.4}
"""What NVIDIA's driver says of each, in GB (1e9 bytes)."""


class StageFacts(Strict):
    """What one stage of a run takes, and the machine it was planned for."""

    device: Literal["CPU", "RTX 5090", "H100", "H200", "B200", "B300"]
    count: int = Field(default=1, ge=1)
    """GPUs; 1 for a CPU."""
    memory_gb: float | None = Field(default=None, gt=0)
    """A CPU's memory in GB; that of a GPU is known."""
    needs_gb: float = Field(gt=0)
    """Expected peak in GB, over all GPUs."""
    hours: float = Field(gt=0)
    """Of both sides where both are evaluated."""

    @property
    def holds_gb(self) -> float:
        """The memory of the whole machine."""
        return self.count * MEMORY_GB[self.device] if self.memory_gb is None else self.memory_gb

    @property
    def machine(self) -> str:
        """For a sentence: one H200, a CPU with 16 GB."""
        if self.memory_gb is not None:
            return f"a CPU with {self.memory_gb:,.0f} GB"
        return f"{self.count} x {self.device}" if self.count > 1 else f"one {self.device}"

    @model_validator(mode="after")
    def _fits(self) -> StageFacts:
        if (self.memory_gb is None) != (self.device != "CPU"):
            raise ValueError("memory_gb is for a CPU, which needs it; that of a GPU is known")
        if self.needs_gb > self.holds_gb:
            raise ValueError(f"needs_gb {self.needs_gb:g} does not fit {self.machine}, which has {self.holds_gb:g} GB")
        return self


class FactsSpec(Strict):
    """Nothing in it changes a run; a recipe of another model does not take it from its base."""

    protocol: str
    """How the published figures were measured, as far as that was said, and how this recipe asks instead."""
    calibration: str
    """What the original was calibrated on, as far as that was said."""
    unknown: list[str]
    """What was never published about the original."""
    published: list[str] = Field(default_factory=list)
    """The ids of published tables that have rows of this model."""
    notes: list[str] = Field(default_factory=list)
    """What else to know: where this recipe departs from the original, and why."""
    checkpoint_gb: dict[str, float]
    """Expected size in GB (1e9 bytes) of the tensors of a checkpoint, by the format of most of its weights."""
    stages: dict[Literal["quantize", "train", "evaluate"], StageFacts]
    hours_from: str
    """Where the hours are from: a measured run, or how they were estimated."""
    unsupported: str | None = None
    """Why the recipe cannot be run as it is; it is refused before anything is computed."""

    def lines(self, *, trains: bool) -> Iterator[str]:
        """For a terminal, each paragraph wrapped.

        Args:
            trains: Whether the recipe has a train block.
        """
        sizes = ", ".join(f"{size:g} GB in {name}" for name, size in self.checkpoint_gb.items())
        paragraphs = [
            *([f"cannot be run: {self.unsupported}"] if self.unsupported else []),
            f"protocol: {self.protocol}",
            f"calibration: {self.calibration}",
            f"checkpoint: {sizes}",
            *(
                f"{name}: {stage.needs_gb:,.4g} GB on {stage.machine}, {stage.hours:g} hours"
                for name, stage in self.stages.items()
                if trains or name != "train"
            ),
            f"hours: {self.hours_from}",
            *(f"not known: {one}" for one in self.unknown),
            *(f"note: {one}" for one in self.notes),
            *([f"published tables: {', '.join(self.published)}"] if self.published else []),
        ]
        for paragraph in paragraphs:
            yield from textwrap.wrap(paragraph, 110, subsequent_indent="  ")
