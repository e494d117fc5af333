"""The record of layer sensitivity: how far a model is from its baseline when some of its layers alone are quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from halfbyte.records.files import read_as, write_json
from halfbyte.records.record import ModelSummary

By = Literal["block", "kind", "layer"]
"""What is quantized at a time: one block of the model, all layers of one name in all blocks, or one layer."""


class LayerSensitivity(BaseModel):
    """What quantizing some layers, and nothing else, does to the next-token distributions."""

    model_config = ConfigDict(extra="forbid")

    group: str
    """model.layers.3 for a block, model.layers.*.mlp.down_proj for a kind, model.layers.3.mlp.down_proj for a layer."""
    layers: list[str]
    """The quantized layers in it, by module."""
    kl: float
    """Mean KL(baseline || model with these layers quantized), nats per token."""
    top1_agreement: float
    """Share of tokens at which both put the same token first, 0 to 1."""
    perplexity: float


class SensitivityRecord(BaseModel):
    """layer-sensitivity-BY.json."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    created: str
    key: str
    """Digest of everything that decides this record; a measurement of the same key is not done twice."""
    by: By
    baseline: ModelSummary
    candidate: ModelSummary
    """The checkpoint whose layers were put into the baseline."""
    text: str
    """Where the text is from, for people."""
    text_digest: str
    window: int
    tokens: int
    """Predicted tokens that each figure is a mean of."""
    dtype: str
    baseline_perplexity: float
    whole: LayerSensitivity
    """All layers at once: the candidate itself. The groups' divergences need not add up to this one."""
    groups: list[LayerSensitivity] = Field(min_length=1)
    """In the order of the model."""
    packages: dict[str, str | None]
    hardware: dict[str, Any]
    seconds: float
    """Of the process that finished it."""

    def worst_first(self) -> list[LayerSensitivity]:
        """The groups, the largest divergence first."""
        return sorted(self.groups, key=lambda group: group.kl, reverse=True)

    def save(self, folder: Path) -> None:
        """Writes the record atomically."""
        write_json(folder / sensitivity_file(self.by), self.model_dump(mode="json"))


def sensitivity_file(by: By) -> str:
    """The name of its file."""
    return f"layer-sensitivity-{by}.json"


def load_sensitivity(folder: Path, by: By) -> SensitivityRecord:
    """Reads a record of layer sensitivity.

    Raises:
        UserError: when there is none, or it is of another version.
    """
    return read_as(folder / sensitivity_file(by), SensitivityRecord, "a record of layer sensitivity of this version")
