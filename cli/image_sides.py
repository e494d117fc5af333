"""One of the two pipelines of a comparison of images: its set of images drawn once, its record made once."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.eval.image_scores import evaluate_images, record_key
from halfbyte.eval.images import Drawing
from halfbyte.recipes.images import IMAGES as TASK
from halfbyte.recipes.images import ImagesSpec
from halfbyte.recipes.schema import EvaluateSpec
from halfbyte.records.cache import IMAGES, evaluation_folder, locked, mark_used
from halfbyte.records.digests import cache_folder
from halfbyte.records.errors import UserError
from halfbyte.records.files import atomic_folder
from halfbyte.records.image_set import ENTRIES_FILE, ImageSet
from halfbyte.records.run import RunFolder
from halfbyte.sides import bring_forward, keep_copy

if TYPE_CHECKING:
    from halfbyte.eval.pipelines import Pipeline
    from halfbyte.quant.pipelines import PipelineSource
    from halfbyte.quant.produce import Job
    from halfbyte.records.record import MemoryKind, ModelSummary

logger = logging.getLogger(__name__)


@dataclass
class ImageSide:
    """A pipeline, known by its files, whose parts are loaded only to draw."""

    summary: ModelSummary
    device: str
    """Kind of device: cpu or cuda."""
    dtype: str
    opener: Callable[[], Pipeline]
    _pipeline: Pipeline | None = None

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline, found at the first call; its weights are not loaded yet."""
        if self._pipeline is None:
            self._pipeline = self.opener()
        return self._pipeline

    def free(self) -> None:
        """Lets go of what is loaded."""
        if self._pipeline is not None:
            self._pipeline.free()

    def drawing(self, settings: EvaluateSpec, reference: ImageSet | None = None) -> Drawing:
        """What would be drawn; see eval.images.Drawing."""
        return Drawing(
            self.pipeline,
            images_of(settings),
            self.summary,
            dtype=self.dtype,
            allow=settings.allow_truncated,
            reference=reference,
        )

    def record(
        self, images: ImageSet, reference: ImageSet | None, settings: EvaluateSpec, output: Path, *, replace: bool
    ) -> Path:
        """The record of a set in `output`, made where it is not there; returns `output`."""
        peaks = self.pipeline.peaks
        kind: MemoryKind = "cuda" if self.device == "cuda" else "process"
        evaluate_images(
            images,
            reference,
            settings,
            self.summary,
            output,
            device=self.device,
            replace=replace,
            memory=(max(peaks.values()), kind) if peaks else None,
        )
        return output


def images_of(settings: EvaluateSpec) -> ImagesSpec:
    """The images block.

    Raises:
        UserError: when there is none.
    """
    if settings.images is None:
        raise UserError("the recipe asks for no images", "give an evaluate.images block")
    return settings.images


def open_side(
    source: PipelineSource, summary: ModelSummary, settings: EvaluateSpec, *, dtype: str, device: str, own: str | None
) -> ImageSide:
    """The side of a pipeline, original or exported.

    Args:
        source: Its files.
        summary: What it weighs.
        settings: The evaluate block.
        dtype: What it computes in: bfloat16, float16 or float32.
        device: Where.
        own: The type an original transformer's weights are rounded to; None for that of its files.
    """

    def opened() -> Pipeline:
        import torch

        from halfbyte.eval.pipeline_parts import open_parts
        from halfbyte.eval.pipelines import Pipeline

        where = torch.device(device)
        computed = getattr(torch, dtype)
        parts = open_parts(source.folder, dtype=computed, device=where, own=own, weights=settings.weights)
        return Pipeline(parts, where, images_of(settings).low_vram)

    return ImageSide(summary, device.partition(":")[0], dtype, opened)


def baseline_of(job: Job) -> ImageSide:
    """The original pipeline of a recipe."""
    from halfbyte.quant.pipelines import summarize_pipeline

    source = _pipeline(job)
    found = summarize_pipeline(source.folder, source.name)
    rounded = found.format if source.rounded_to is None else f"{source.rounded_to} from {found.format}"
    summary = found.model_copy(update={"digest": job.digest, "format": rounded})
    return open_side(
        source, summary, job.recipe.evaluate, dtype=job.dtype, device=str(job.device), own=job.recipe.model.dtype
    )


def candidate_of(job: Job, run: RunFolder) -> ImageSide:
    """The exported pipeline of a run, read back from disk, under the recipe's name."""
    from halfbyte.quant.pipelines import locate_pipeline, summarize_pipeline

    source = locate_pipeline(str(run.checkpoint))
    summary = summarize_pipeline(source.folder, job.recipe.name)
    return open_side(source, summary, job.recipe.evaluate, dtype=job.dtype, device=str(job.device), own=None)


def _pipeline(job: Job) -> PipelineSource:
    from halfbyte.quant.pipelines import PipelineSource

    if not isinstance(job.source, PipelineSource):
        raise UserError(f"recipe '{job.recipe.name}' is of a model that draws nothing", "set model.kind to flux")
    return job.source


def cached_images(side: ImageSide, settings: EvaluateSpec) -> ImageSet:
    """The images of a baseline in the shared cache, so that a second candidate costs no baseline."""
    drawing = side.drawing(settings)
    root = cache_folder() / IMAGES
    with locked(drawing.folder(root)):
        images = drawing.draw(root)
        mark_used(images.folder)
    return images


def cached_record(side: ImageSide, images: ImageSet, settings: EvaluateSpec) -> Path:
    """The record of a baseline's images in the shared cache."""
    output = evaluation_folder(side.summary.digest, TASK, record_key(images, None, images_of(settings)))
    with locked(output):
        side.record(images, None, settings, output, replace=True)
        mark_used(output)
    return output


def keep_baseline(side: ImageSide, settings: EvaluateSpec, run: RunFolder) -> tuple[ImageSet, Path]:
    """The baseline's images and record, out of the cache and in the run as well, which is then whole by itself."""
    images = cached_images(side, settings)
    record = keep_copy(cached_record(side, images, settings), run.evaluations(side.summary.digest))
    return keep_images(images, run.images), record


def keep_images(images: ImageSet, root: Path) -> ImageSet:
    """A copy of a set below `root`, whose files are the same ones where the disk allows that."""
    copy = root / images.folder.parent.name / images.folder.name
    if not (copy / ENTRIES_FILE).is_file():
        with atomic_folder(copy) as partial:
            for path in images.folder.iterdir():
                try:
                    os.link(path, partial / path.name)
                except OSError:  # another disk, or one without hard links
                    shutil.copyfile(path, partial / path.name)
    return ImageSet.load(copy)


def own_record(side: ImageSide, baseline: ImageSet, settings: EvaluateSpec, run: RunFolder) -> Path:
    """The candidate's record in its run, its images drawn from the latents that the baseline's were drawn from."""
    images = side.drawing(settings, baseline).draw(run.images)
    key = record_key(images, baseline, images_of(settings))
    output = run.evaluations(side.summary.digest) / f"{TASK}@{key[:16]}"
    bring_forward(output)
    with locked(output):
        return side.record(images, baseline, settings, output, replace=True)
