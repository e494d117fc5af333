"""The canary's record: whether a checkpoint answers a few prompts as a quantized version of its baseline would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from halfbyte.records.files import read_as, write_json
from halfbyte.records.record import ModelSummary

CANARY_FILE = "canary.json"


class CanaryRow(BaseModel):
    """What one prompt showed."""

    model_config = ConfigDict(extra="forbid")

    finite: bool
    """Whether all the candidate's logits are finite numbers (-inf, a token ruled out, is one)."""
    kl: float | None
    """Mean KL(baseline || candidate) over the prompt's last positions, nats a token; None where it is no number."""
    collapsed: bool
    """Whether one token makes up more than half of the candidate's greedy continuation."""
    baseline_collapsed: bool


class CanaryRecord(BaseModel):
    """canary.json."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    created: str
    key: str
    """Digest of everything that decides this record."""
    baseline_digest: str
    candidate: ModelSummary
    max_kl: float
    kl: float | None
    """Mean over the prompts, nats a token."""
    rows: list[CanaryRow]
    failure: str | None
    """What is wrong, as a sentence; None when the candidate may be evaluated."""
    packages: dict[str, str | None] = Field(default_factory=dict)
    hardware: dict[str, Any] = Field(default_factory=dict)
    seconds: float = 0.0

    def save(self, folder: Path) -> None:
        """Writes canary.json atomically."""
        write_json(folder / CANARY_FILE, self.model_dump(mode="json"))


def load_canary(folder: Path) -> CanaryRecord:
    """Reads the canary's record in `folder`.

    Raises:
        UserError: when there is none, or it is of another version.
    """
    return read_as(folder / CANARY_FILE, CanaryRecord, "a canary's record of this version")
