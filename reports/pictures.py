"""What a comparison keeps of the images of two models: the pairs, what metrics say of them, and how far they differ."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Picture(_Strict):
    """One prompt and seed, with the image of each model."""

    index: int
    """Number of the image in its set, from 0."""
    prompt: str
    seed: int
    baseline: dict[str, float]
    """Its values by metric."""
    candidate: dict[str, float]
    """The same; those that compare with the baseline's image are here alone."""
    baseline_file: Path | None = Field(default=None, exclude=True)
    """The PNG; None where it was not found, or is another by now. Left out of comparison.json: a path on this machine
    says nothing elsewhere."""
    candidate_file: Path | None = Field(default=None, exclude=True)
    equal: bool
    """Whether both files have the same bytes."""


class Reference(_Strict):
    """How far the candidate's images are from the baseline's by one metric, which does not decide."""

    metric: str
    higher_is_better: bool
    images: int
    mean: float
    median: float
    worst: float


class Pictures(_Strict):
    """All of it, for one task."""

    task: str
    primary: str
    """The metric by which the worst pairs come first."""
    pairs: list[Picture]
    """The worst first: by the loss of the primary metric, and among equal ones by how far the images are apart."""
    references: list[Reference] = Field(default_factory=list)
    latent_distances: list[float] = Field(default_factory=list)
    """Mean over the images of the latents' distance from the baseline's after each step, as a share of its norm; empty
    where latents were not kept."""
    equal: int
    """Images with the same bytes on both sides."""
