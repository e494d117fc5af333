"""The manifest: what made a result, so that another person can make it again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from halfbyte.records.files import read_as, write_json

PACKAGES = ("halfbyte", "torch", "nvidia-modelopt", "transformers", "lm-eval", "datasets", "diffusers", "accelerate")
CALIBRATION = "calibration:"
"""What the data of a calibration is called by."""


def calibration_name(*source: str | None) -> str:
    """What a manifest calls a source of calibration data, given its data set, configuration and split."""
    return " ".join(filter(None, [CALIBRATION, *source]))


def now() -> str:
    """The time in UTC to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def package_versions() -> dict[str, str | None]:
    """The installed version of each package that shapes a result; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def git_commit(folder: Path | None = None) -> str | None:
    """The commit of the source tree halfbyte runs from, with "-dirty" when it differs; None outside a checkout."""
    where = folder or Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=where, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> dict[str, Any]:
    """The processor, its number of usable cores and, where torch is loaded already, the CUDA devices."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {"machine": platform.machine(), "processor": _processor(), "cores": cores, "cuda": []}
    torch = sys.modules.get("torch")  # never imported for this alone: it takes seconds
    if torch is not None and torch.cuda.is_available():
        found["cuda"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["cuda_version"] = torch.version.cuda
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


class Manifest(BaseModel):
    """What made a checkpoint or a run; written as manifest.json."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    created: str = Field(default_factory=now)
    command: list[str] = Field(default_factory=lambda: list(sys.argv))
    packages: dict[str, str | None] = Field(default_factory=package_versions)
    hardware: dict[str, Any] = Field(default_factory=hardware)
    git_commit: str | None = Field(default_factory=git_commit)
    recipe: str
    """Name of the recipe."""
    recipe_digest: str
    model: str
    """Hub id or path of the original model as the recipe names it."""
    model_digest: str
    """Digest of the original model's files (see digests.model_digest)."""
    checkpoint_digest: str | None = None
    data: dict[str, str] = Field(default_factory=dict)
    """Digest of each calibration or training text collection, by name."""
    seeds: dict[str, int] = Field(default_factory=dict)
    keys: dict[str, str] = Field(default_factory=dict)
    """What each stage depended on, as a digest; a stage whose key is unchanged is not done again."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Wall time of each stage."""

    def save(self, path: Path) -> None:
        """Writes the manifest atomically."""
        write_json(path, self.model_dump(mode="json"))


def load_manifest(path: Path) -> Manifest:
    """Reads a manifest.

    Raises:
        UserError: when it is missing, or no manifest of this version.
    """
    return read_as(path, Manifest, "a manifest of this version of halfbyte")
