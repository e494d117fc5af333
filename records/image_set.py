"""The image set: one PNG for each prompt and seed of one model, and what was asked, in a folder that can be paired."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from halfbyte.records.digests import file_digest, value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.files import read_as, write_json, write_text

SETTINGS_FILE = "settings.json"
ENTRIES_FILE = "images.jsonl"
"""Written last: a folder that has it is whole."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ImageEntry(_Strict):
    """One image: a line of images.jsonl."""

    index: int
    """Number of the image in its set, from 0: prompts in the order of their file, and the seeds of each in order."""
    prompt: str
    seed: int
    file: str
    """Name of the PNG in the set's folder."""
    sha256: str
    """Of the PNG."""
    clip_cut: int = 0
    """Tokens of the prompt that CLIP's text encoder did not see, since it takes 77."""
    t5_cut: int = 0
    """Tokens of the prompt that the other text encoder (T5, ...) did not see."""
    unknown: int = 0
    """Characters of the prompt that a text encoder's tokenizer does not know, such as Chinese ones to T5."""
    control: str | None = None
    """SHA-256 of the control image; None where the pipeline takes none."""
    latents: str | None = None
    """Name of the file with the latents after each step; None where they are not kept."""
    latent_distances: list[float] | None = None
    """Distance of the latents from the baseline's after each step, as a share of the baseline's norm; None where it
    was not asked for."""
    seconds: float
    """Wall time of this image."""


class ImageSettings(_Strict):
    """What was asked of a pipeline for all images of a set: settings.json."""

    schema_version: int = 1
    model: str
    """Hub id, folder or name, for people."""
    model_digest: str
    pipeline: str
    """Class of the diffusers pipeline: FluxPipeline."""
    scheduler: str
    """Class of the scheduler."""
    scheduler_digest: str
    """Of the scheduler's class and configuration."""
    steps: int
    guidance: float
    height: int
    width: int
    """Pixels."""
    max_sequence_length: int | None = None
    """Longest prompt of the text encoder that is not CLIP, in tokens; None where there is none."""
    dtype: str
    device: str
    """Kind of device: cpu or cuda."""
    prompts_digest: str
    """Of the prompts, their order, and the control images."""
    seeds: list[int]
    limit: int | None = None
    """First prompts only; None for all."""
    latents: bool = False
    """Whether the latents after each step are kept."""
    reference: str | None = None
    """prompts_digest and model of the set whose latents the distances are from; None where there are none."""
    versions: dict[str, str | None]
    """Of the packages that compute an image."""

    @property
    def key(self) -> str:
        """Digest of everything that decides the images, the model's name for people excepted."""
        return value_digest(self.model_dump(mode="json", exclude={"model"}))

    def asked(self) -> dict[str, Any]:
        """What both sides of a comparison must have in common."""
        names = ("pipeline", "scheduler", "scheduler_digest", "steps", "guidance", "height", "width")
        more = ("max_sequence_length", "prompts_digest", "seeds")
        return {name: getattr(self, name) for name in (*names, *more)}


@dataclass(frozen=True)
class ImageSet:
    """A whole set of images on disk."""

    folder: Path
    settings: ImageSettings
    entries: list[ImageEntry]
    """In the order of their index."""

    @classmethod
    def load(cls, folder: Path) -> ImageSet:
        """Reads the set in `folder`; the images themselves are read when they are looked at.

        Raises:
            UserError: when there is none, it is not whole, or it is of another version.
        """
        path = folder / ENTRIES_FILE
        if not path.is_file():
            raise UserError(f"{folder} holds no whole set of images", "generate it again")
        settings = read_as(
            folder / SETTINGS_FILE, ImageSettings, "the settings of a set of images", "generate it again"
        )
        entries: list[ImageEntry] = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                entries.append(ImageEntry.model_validate(json.loads(line)))
            except ValueError as error:
                raise UserError(f"{path}:{number} is not an image's line: {error}", "generate it again") from None
        if not entries:
            raise UserError(f"{folder} holds no image", "generate it again")
        return cls(folder, settings, entries)

    def path(self, entry: ImageEntry) -> Path:
        """The image's file."""
        return self.folder / entry.file

    def save(self) -> None:
        """Writes settings.json and images.jsonl, atomically and in this order; the images are there already."""
        write_json(self.folder / SETTINGS_FILE, self.settings.model_dump(mode="json"))
        lines = [
            json.dumps(entry.model_dump(mode="json"), sort_keys=True, ensure_ascii=False) for entry in self.entries
        ]
        write_text(self.folder / ENTRIES_FILE, "".join(f"{line}\n" for line in lines))

    def verify(self) -> None:
        """Compares each image with its digest.

        Raises:
            UserError: naming the first that is missing or has changed.
        """
        for entry in self.entries:
            path = self.path(entry)
            if not path.is_file():
                raise UserError(f"{path} is missing from the set of images", "generate it again")
            if file_digest(path) != entry.sha256:
                raise UserError(f"{path} has changed since it was written", "generate it again")


def require_paired(candidate: ImageSet, baseline: ImageSet) -> None:
    """Refuses two sets whose images cannot be compared one by one.

    Raises:
        UserError: naming the first prompt, seed or setting that differs.
    """
    if len(candidate.entries) != len(baseline.entries):
        raise UserError(
            f"{candidate.folder} holds {len(candidate.entries)} images and {baseline.folder} {len(baseline.entries)}",
            "generate both sides from the same prompts and seeds",
        )
    for one, other in zip(candidate.entries, baseline.entries, strict=True):
        for field in ("prompt", "seed", "control"):
            ours, theirs = getattr(one, field), getattr(other, field)
            if ours != theirs:
                raise UserError(
                    f"image {one.index} is of {field} {ours!r} in {candidate.folder} and of {theirs!r} in "
                    f"{baseline.folder}",
                    "generate both sides from the same prompts and seeds",
                )
    for field, ours in candidate.settings.asked().items():
        theirs = getattr(baseline.settings, field)
        if ours != theirs:
            raise UserError(
                f"the images were made with other settings: {field} is {ours} in {candidate.folder} and {theirs} in "
                f"{baseline.folder}",
                "generate both sides with the same settings",
            )
