"""The measurement of memory: what each pipeline takes at most in each stage, its parts all loaded or one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from halfbyte.records.files import write_json
from halfbyte.records.manifest import hardware, now, package_versions
from halfbyte.records.record import MemoryKind

MEMORY_FILE = "memory.json"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class MemoryRow(_Strict):
    """One pipeline run in one way."""

    model: str
    format: str
    """"bfloat16", "FP8", "NVFP4", ... of the transformer."""
    weights: str
    """original; or packed, an exported checkpoint's weights as they are stored."""
    low_vram: bool
    stages: dict[str, int]
    """Peak bytes by stage, in order."""
    transformer_bytes: int
    """Of the transformer's weights in memory."""

    @property
    def peak(self) -> int:
        """The most of all stages."""
        return max(self.stages.values())


class MemoryRecord(_Strict):
    """memory.json: the rows of one measurement, the unquantized pipeline first."""

    schema_version: int = 1
    created: str = Field(default_factory=now)
    height: int
    width: int
    """Pixels."""
    kind: MemoryKind
    packages: dict[str, str | None] = Field(default_factory=package_versions)
    hardware: dict[str, Any] = Field(default_factory=hardware)
    rows: list[MemoryRow] = Field(min_length=1)

    def save(self, path: Path) -> None:
        """Writes it atomically."""
        write_json(path, self.model_dump(mode="json"))
