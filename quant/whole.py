"""Checkpoints of a training: one counts only when it is whole, and the best and the last few are kept."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.records.errors import UserError
from halfbyte.records.files import fsync_folder, read_json, remove, replace_folder, sync_files, write_json

logger = logging.getLogger(__name__)

MARKER = "whole.json"
"""Written last: a folder without it is what a killed process left."""


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint."""

    folder: Path
    step: int
    loss: float | None
    """Of the validation at its step; None where there was none."""
    kl: float | None

    def value(self, metric: str) -> float | None:
        """What it is judged by: metric is loss or kl."""
        return self.kl if metric == "kl" else self.loss


class Checkpoints:
    """The folder training/checkpoints of a run, step-N each.

    Args:
        folder: Where they are.
        key: Digest of all that decides the training; a checkpoint of another is refused.
        began: What else must be as it was for who goes on: the digest of the rows, and how many processes; empty for
            who only reads what was trained.
    """

    def __init__(self, folder: Path, key: str, began: Mapping[str, Any] | None = None) -> None:
        self.folder, self.key, self.began = folder, key, dict(began or {})

    @property
    def scratch(self) -> Path:
        """Where the trainer writes before a checkpoint is whole."""
        return self.folder / "partial"

    def add(self, written: Path, step: int, *, loss: float | None, kl: float | None) -> Saved:
        """Makes what the trainer wrote a checkpoint: content on the disk, marker, then its name."""
        final = self.folder / f"step-{step}"
        sync_files(written)
        sizes = {str(path.relative_to(written)): path.stat().st_size for path in written.rglob("*") if path.is_file()}
        facts = {"schema_version": 1, "key": self.key, "step": step, "loss": loss, "kl": kl, "files": sizes}
        facts["began"] = self.began
        write_json(written / MARKER, facts)
        replace_folder(written, final)
        return Saved(final, step, loss, kl)

    def clear(self) -> None:
        """Removes what a killed process left incomplete."""
        if not self.folder.is_dir():
            return
        whole = {saved.folder for saved in self.found()}
        for path in self.folder.iterdir():
            if path not in whole:
                logger.info("%s is incomplete and is removed", path)
                remove(path)

    def found(self) -> list[Saved]:
        """The whole checkpoints, in the order of their steps.

        Raises:
            UserError: when one is of another training, or of one that began otherwise.
        """
        saved = []
        for path in self.folder.glob("step-*"):
            facts = _marker(path)
            if facts is None or path.name != f"step-{facts['step']}":
                continue
            if facts["key"] != self.key:
                raise UserError(
                    f"{path} is of a training with another recipe, texts, model or version of the packages",
                    "take the change back to go on with it, choose another --output, or --force to begin anew",
                )
            for name, ours in self.began.items():
                theirs = facts["began"].get(name)
                if theirs != ours:
                    raise UserError(
                        f"{path} is of a training with other {name}: {theirs}, and now {ours}",
                        f"take the same {name} to go on with it, choose another --output, or --force to begin anew",
                    )
            saved.append(Saved(path, int(facts["step"]), facts["loss"], facts["kl"]))
        return sorted(saved, key=lambda one: one.step)

    def last(self) -> Saved | None:
        """What a training goes on from."""
        found = self.found()
        return found[-1] if found else None

    def best(self, metric: str) -> Saved | None:
        """The whole checkpoint with the lowest validation loss or KL divergence, the earlier of two equal ones."""
        judged = [(one.value(metric), one.step, one) for one in self.found()]
        known = [(value, step, one) for value, step, one in judged if value is not None]
        return min(known, key=lambda entry: entry[:2])[2] if known else None

    def thin(self, metric: str, keep: int) -> None:
        """Removes all but the last `keep` and the best."""
        found = self.found()
        best = self.best(metric)
        for one in found[:-keep]:
            if best is None or one.step != best.step:
                shutil.rmtree(one.folder)
        fsync_folder(self.folder)


def _marker(folder: Path) -> dict[str, Any] | None:
    """The marker of a checkpoint; None where it is missing or a file it names is, or has another size."""
    if not (folder / MARKER).is_file():
        return None
    facts: dict[str, Any] = read_json(folder / MARKER)
    for name, size in facts["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return None
    return facts
