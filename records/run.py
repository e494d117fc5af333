"""The run folder: where each stage of a run puts its result, and the lock that keeps two processes out of one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from halfbyte.records.errors import UserError, disk_full_is_a_user_error
from halfbyte.records.files import hold, remove

logger = logging.getLogger(__name__)

ENDINGS = (".partial", ".old")


@dataclass(frozen=True)
class RunFolder:
    """Paths in runs/<recipe>/. Nothing else in the project knows them."""

    root: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.root / "recipe.yaml"

    @property
    def manifest(self) -> Path:
        """What made the checkpoint."""
        return self.root / "manifest.json"

    @property
    def calibration(self) -> Path:
        """The quantizers' amax, saved before export."""
        return self.root / "calibration"

    @property
    def calibrating(self) -> Path:
        """What a calibration by prompts has found so far; gone when it is whole."""
        return self.root / "calibrating"

    @property
    def training(self) -> Path:
        """What QAT or QAD left: training.json, curves.jsonl and its checkpoints."""
        return self.root / "training"

    @property
    def checkpoint(self) -> Path:
        """The exported checkpoint, in the unified Hugging Face layout."""
        return self.root / "checkpoint"

    @property
    def verification(self) -> Path:
        """One row a check of the checkpoint."""
        return self.root / "verification.json"

    def evaluations(self, model_digest: str) -> Path:
        """The records of one model, a folder a task."""
        return self.root / "evaluations" / model_digest[:16]

    @property
    def images(self) -> Path:
        """The images of both sides, a folder a model and in it one for each set of settings."""
        return self.root / "images"

    def fidelity(self, candidate_digest: str) -> Path:
        """The fidelity record of one candidate."""
        return self.root / "fidelity" / candidate_digest[:16]

    def canary(self, candidate_digest: str) -> Path:
        """The canary's record of one candidate."""
        return self.root / "canary" / candidate_digest[:16]

    def written(self) -> list[Path]:
        """What a run put here, half-written folders included; anything else in the folder is somebody's own."""
        stages = ("calibration", "calibrating", "training", "checkpoint", "evaluations", "images", "fidelity", "canary")
        files = (
            "recipe.yaml",
            "manifest.json",
            "verification.json",
            "comparison.json",
            "verdict.json",
            "junit.xml",
            "memory.json",
        )
        reports = ("report.md", "report.html", "model-card.md", "eval_results.yaml")
        names = {*files, *reports, *stages, *(f"{stage}{end}" for stage in stages for end in ENDINGS)}
        return sorted(path for path in self.root.iterdir() if path.name in names)

    @property
    def replaced(self) -> Path:
        """What a run wrote here before a forced one, which is not done yet."""
        return self.root / "replaced"

    def set_aside(self) -> None:
        """Moves what a run wrote here into `replaced`; what is there already came first and stays."""
        first = not self.replaced.exists()
        self.replaced.mkdir(exist_ok=True)
        for path in self.written():
            if first:
                path.rename(self.replaced / path.name)
            else:
                remove(path)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Where a user's mistake ends what replaces a run before it has trained or exported, the run is put back."""
        try:
            yield
        except UserError:
            came = [self.checkpoint, *self.training.glob("checkpoints/step-*"), *self.training.glob("training.json")]
            if self.replaced.is_dir() and any(path.exists() for path in came):
                logger.warning("what was in %s before is in %s until a run is done", self.root, self.replaced)
            elif self.replaced.is_dir():
                for path in self.written():
                    remove(path)
                for path in self.replaced.iterdir():
                    path.rename(self.root / path.name)
                self.replaced.rmdir()
                logger.warning("nothing was replaced: what was in %s is there again", self.root)
            raise

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder for this process; a kill frees it.

        Raises:
            UserError: when another process holds it, or the folder cannot be made.
        """
        with disk_full_is_a_user_error(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            file = (self.root / ".lock").open("w")
        with file:
            hold(file, f"another process works in {self.root}", "wait for it, or choose another --output")
            yield
