"""The fidelity record: how far a candidate's next-token distributions are from its baseline's on one text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from halfbyte.records.files import read_as, write_json
from halfbyte.records.record import ModelSummary

FIDELITY_FILE = "fidelity.json"


class Window(BaseModel):
    """Sums over the predicted tokens of one window of text."""

    model_config = ConfigDict(extra="forbid")

    tokens: int
    kl: float
    """Sum of KL(baseline || candidate), nats."""
    agree: int
    """Tokens at which both models put the same token first."""
    baseline_nll: float
    """Sum of -ln p(token) under the baseline, nats."""
    candidate_nll: float


class FidelityRecord(BaseModel):
    """fidelity.json."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    created: str
    key: str = ""
    """Digest of everything that decides this record; a measurement of the same key is not done twice."""
    baseline: ModelSummary
    candidate: ModelSummary
    text: str
    """Where the text is from, for people."""
    text_digest: str
    window: int
    """Window length in tokens; windows do not overlap and each starts without context."""
    dtype: str
    windows: list[Window]
    tokens: int
    kl: float
    """Mean KL divergence, nats per token."""
    top1_agreement: float
    """Share of tokens, 0 to 1."""
    baseline_perplexity: float
    candidate_perplexity: float
    packages: dict[str, str | None] = Field(default_factory=dict)
    hardware: dict[str, Any] = Field(default_factory=dict)
    seconds: float = 0.0

    def save(self, folder: Path) -> None:
        """Writes fidelity.json atomically."""
        write_json(folder / FIDELITY_FILE, self.model_dump(mode="json"))


def load_fidelity(folder: Path) -> FidelityRecord:
    """Reads the fidelity record in `folder`.

    Raises:
        UserError: when there is none, or it is of another version.
    """
    return read_as(folder / FIDELITY_FILE, FidelityRecord, "a fidelity record of this version")
