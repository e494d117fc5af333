"""Draws a set of images: one for each prompt and seed, from the same initial latent on both sides, image by image.

An image is in its place, under its final name, before its line is in the journal; a kill loses the one that was being
drawn. The same settings give the same bytes on the same machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from PIL import Image, PngImagePlugin

from halfbyte.eval.image_metrics import latent_distances
from halfbyte.eval.image_prompts import Seen, look_at, require_seen
from halfbyte.eval.pipelines import STAGES, Pipeline, Request
from halfbyte.eval.vram import enough_memory
from halfbyte.recipes.images import ImagesSpec
from halfbyte.recipes.prompts import Prompt, load_prompts, prompts_digest
from halfbyte.records.digests import file_digest
from halfbyte.records.errors import UserError, disk_full_is_a_user_error
from halfbyte.records.files import PARTIAL, hold, replace_folder, write_bytes
from halfbyte.records.image_set import ENTRIES_FILE, SETTINGS_FILE, ImageEntry, ImageSet, ImageSettings
from halfbyte.records.journal import Journal
from halfbyte.records.progress import progress_bar
from halfbyte.records.record import ModelSummary

logger = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"
CHUNK = 64
"""Images a stage is loaded for in low-VRAM mode: the parts are loaded rarely, and embeddings take 4 MB an image."""
_PACKAGES = ("halfbyte", "diffusers", "transformers", "torch", "nvidia-modelopt")


@dataclass(frozen=True, slots=True)
class Asked:
    """One image that is asked for."""

    index: int
    prompt: Prompt
    seed: int
    seen: Seen

    @property
    def name(self) -> str:
        """Of its file, without the ending."""
        return f"{self.index:04d}-{self.seed}"


class Drawing:
    """A set of images to be drawn by one pipeline.

    Args:
        pipeline: Draws; its parts need not be loaded.
        spec: What is asked.
        summary: Which model it is.
        dtype: What it computes in.
        allow: See image_prompts.require_seen.
        reference: The baseline's set; None for the baseline itself.

    Raises:
        UserError: for prompts that are missing, there twice, too long or unreadable to the pipeline, control images
            that are missing or not wanted, and settings that are not those of the reference.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        spec: ImagesSpec,
        summary: ModelSummary,
        *,
        dtype: str,
        allow: bool = False,
        reference: ImageSet | None = None,
    ) -> None:
        self.pipeline, self.spec, self.reference = pipeline, spec, reference
        prompts = load_prompts(spec.prompts, spec.limit, spec.control_images)
        _require_controls(pipeline, prompts)
        longest = _longest(pipeline, spec.max_sequence_length)
        seen = look_at(pipeline.tokenizers, prompts, longest)
        require_seen(prompts, seen, allow=allow)
        pairs = [(prompt, one, seed) for prompt, one in zip(prompts, seen, strict=True) for seed in spec.seeds]
        self.asked = [Asked(index, prompt, seed, one) for index, (prompt, one, seed) in enumerate(pairs)]
        self.settings = ImageSettings(
            model=summary.name,
            model_digest=summary.digest,
            pipeline=pipeline.kind,
            scheduler=pipeline.scheduler,
            scheduler_digest=pipeline.scheduler_digest,
            steps=spec.steps,
            guidance=spec.guidance,
            height=spec.size[0],
            width=spec.size[1],
            max_sequence_length=longest,
            dtype=dtype,
            device=pipeline.device.type,
            prompts_digest=prompts_digest(prompts),
            seeds=spec.seeds,
            limit=spec.limit,
            latents=spec.latents,
            reference=reference.settings.key if reference is not None and spec.latents else None,
            versions={name: version(name) for name in _PACKAGES},
        )
        if reference is not None:
            _require_same(self.settings, reference)

    def folder(self, root: Path) -> Path:
        """Where the set will be."""
        return root / self.settings.model_digest[:16] / self.settings.key[:16]

    def draw(self, root: Path) -> ImageSet:
        """The set, whole, below `root`/<model digest>/<settings key>; what is there is not drawn again.

        Raises:
            UserError: when another process draws it, the disk is full, or the GPU has too little memory.
            Anomaly: when an image is of no numbers.
        """
        output = self.folder(root)
        partial = output.with_name(output.name + PARTIAL)
        if (output / ENTRIES_FILE).is_file():
            known = ImageSet.load(output)
            lost = [entry.file for entry in known.entries if not _is_whole(known.path(entry), entry.sha256)]
            if not lost:
                logger.info("images: done already")
                return known
            logger.warning("%s: %d images are damaged; drawing them again", output, len(lost))
            _reopened(output, partial, known, self.settings.key)
        with disk_full_is_a_user_error(output):
            partial.mkdir(parents=True, exist_ok=True)
            with _held(partial), enough_memory(self.pipeline), Journal(partial / JOURNAL, self.settings.key) as journal:
                entries = {int(entry["index"]): ImageEntry.model_validate(entry) for entry in journal.entries}
                done = {i: one for i, one in entries.items() if _is_whole(partial / one.file, one.sha256)}
                left = [one for one in self.asked if one.index not in done]
                with progress_bar(total=len(self.asked), initial=len(done), desc="images", unit="image") as bar:
                    for entry in self._drawn(left, partial):
                        journal.append(entry.model_dump(mode="json"))
                        done[entry.index] = entry
                        bar.update()
            ImageSet(partial, self.settings, [done[one.index] for one in self.asked]).save()
            for path in [partial / JOURNAL, *partial.glob("*.latent")]:
                path.unlink()
            replace_folder(partial, output)
        return ImageSet.load(output)

    def _drawn(self, left: Sequence[Asked], folder: Path) -> Iterator[ImageEntry]:
        """Draws images and writes their files; several go through a stage together only where it is loaded for them."""
        size = CHUNK if self.pipeline.low_vram else 1
        for start in range(0, len(left), size):
            chunk = left[start : start + size]
            seconds = dict.fromkeys((one.index for one in chunk), 0.0)
            requests = {one.index: self._request(one) for one in chunk}
            waiting = [one for one in chunk if not (folder / f"{one.name}.latent").is_file()]
            encoded: dict[int, Any] = {}
            if waiting:
                with self.pipeline.stage(STAGES[0]):
                    for one in waiting:
                        with _timed(seconds, one.index):
                            encoded[one.index] = self.pipeline.encode(requests[one.index])
                with self.pipeline.stage(STAGES[1]):
                    for one in waiting:
                        with _timed(seconds, one.index):
                            self._denoise(one, requests[one.index], encoded.pop(one.index), folder)
            with self.pipeline.stage(STAGES[2]):
                for one in chunk:
                    with _timed(seconds, one.index):
                        latent = folder / f"{one.name}.latent"
                        kept = safetensors.torch.load(latent.read_bytes())
                        image = self.pipeline.decode(requests[one.index], kept["latents"])
                        content = self._png(one, image)
                        write_bytes(folder / f"{one.name}.png", content)
                    yield self._entry(one, content, folder, kept, seconds[one.index])
                    latent.unlink()

    def _request(self, one: Asked) -> Request:
        spec = self.spec
        control = None
        if one.prompt.control is not None:
            with Image.open(one.prompt.control) as file:
                control = file.convert("RGB")
        return Request(
            prompt=one.prompt.text,
            seed=one.seed,
            steps=spec.steps,
            guidance=spec.guidance,
            height=spec.size[0],
            width=spec.size[1],
            max_sequence_length=self.settings.max_sequence_length or spec.max_sequence_length,
            control=control,
        )

    def _denoise(self, one: Asked, request: Request, encoded: Any, folder: Path) -> None:
        steps: list[torch.Tensor] = []
        on_step = (lambda latents: steps.append(latents.cpu())) if self.spec.latents else None
        latents = self.pipeline.denoise(request, encoded, on_step)
        tensors = {"latents": latents.contiguous()}
        if steps:
            write_bytes(folder / f"{one.name}.safetensors", safetensors.torch.save({"steps": torch.stack(steps)}))
            if self.reference is not None:
                tensors["distances"] = torch.tensor(self._distances(one, steps), dtype=torch.float64)
        write_bytes(folder / f"{one.name}.latent", safetensors.torch.save(tensors))

    def _distances(self, one: Asked, steps: list[torch.Tensor]) -> list[float]:
        if self.reference is None:
            raise ValueError("no reference")
        theirs = self.reference.entries[one.index]
        if theirs.latents is None:
            raise UserError(
                f"{self.reference.folder} keeps no latents", "draw the baseline with evaluate.images.latents"
            )
        content = (self.reference.folder / theirs.latents).read_bytes()
        return latent_distances(steps, list(safetensors.torch.load(content)["steps"]))

    def _png(self, one: Asked, image: Image.Image) -> bytes:
        about = PngImagePlugin.PngInfo()
        settings = self.settings.model_dump(mode="json", exclude={"reference", "schema_version", "seeds", "limit"})
        about.add_itxt("prompt", one.prompt.text)
        about.add_itxt("halfbyte", json.dumps({"seed": one.seed, **settings}, sort_keys=True, ensure_ascii=False))
        buffer = io.BytesIO()
        image.save(buffer, "PNG", pnginfo=about)
        return buffer.getvalue()

    def _entry(
        self, one: Asked, content: bytes, folder: Path, kept: dict[str, torch.Tensor], seconds: float
    ) -> ImageEntry:
        latents = f"{one.name}.safetensors"
        return ImageEntry(
            index=one.index,
            prompt=one.prompt.text,
            seed=one.seed,
            file=f"{one.name}.png",
            sha256=hashlib.sha256(content).hexdigest(),
            clip_cut=one.seen.clip_cut,
            t5_cut=one.seen.t5_cut,
            unknown=one.seen.unknown,
            control=None if one.prompt.control is None else file_digest(one.prompt.control),
            latents=latents if (folder / latents).is_file() else None,
            latent_distances=kept["distances"].tolist() if "distances" in kept else None,
            seconds=round(seconds, 3),
        )


def _require_controls(pipeline: Pipeline, prompts: Sequence[Prompt]) -> None:
    without = [prompt for prompt in prompts if prompt.control is None]
    if pipeline.takes_control and without:
        raise UserError(
            f"{pipeline.kind} needs a control image for each prompt, and {len(without)} of {len(prompts)} have none, "
            f"the first on line {without[0].line}",
            'give evaluate.images.prompts a .jsonl file with {"prompt": "...", "control_image": "..."} a line',
        )
    if not pipeline.takes_control and len(without) < len(prompts):
        raise UserError(f"{pipeline.kind} takes no control image, and the prompts name some", "leave control_image out")


def _longest(pipeline: Pipeline, asked: int) -> int:
    most = 512 if pipeline.kind.startswith("Flux") else None  # which its call refuses to go beyond
    if most is not None and asked > most:
        raise UserError(f"{pipeline.kind} reads {most} tokens at most, not {asked}", "lower max_sequence_length")
    return asked


def _require_same(ours: ImageSettings, reference: ImageSet) -> None:
    """Refuses, before anything is drawn, a candidate that would draw otherwise than its baseline did."""
    for field, value in ours.asked().items():
        theirs = getattr(reference.settings, field)
        if value != theirs:
            raise UserError(
                f"the two sides would draw with other settings: {field} is {theirs} in the baseline and {value} in the "
                "candidate",
                "copy the baseline's scheduler folder into the candidate"
                if field.startswith("scheduler")
                else "draw both sides with the same settings",
            )


def _is_whole(path: Path, sha256: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def _reopened(output: Path, partial: Path, known: ImageSet, key: str) -> None:
    """Makes a set with damaged images one that is under way, its whole images kept."""
    os.replace(output, partial)
    for name in (ENTRIES_FILE, SETTINGS_FILE):
        (partial / name).unlink(missing_ok=True)
    with Journal(partial / JOURNAL, key) as journal:
        for entry in known.entries:
            if _is_whole(partial / entry.file, entry.sha256):
                journal.append(entry.model_dump(mode="json"))


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keeps a second process out of a set that is being drawn; a kill frees it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        hold(descriptor, f"another process draws into {folder}", "wait for it, or give another --output")
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _timed(seconds: dict[int, float], index: int) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[index] += time.perf_counter() - start
