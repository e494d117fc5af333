"""A pipeline's transformer on its way to the export: opened, calibrated by prompts, written beside the other parts."""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from halfbyte.quant import ptq
from halfbyte.quant.calibration_progress import Progress
from halfbyte.quant.checkpoint import torch_dtype
from halfbyte.quant.configs import methods
from halfbyte.quant.making import Questions, timed
from halfbyte.quant.models import compute_dtype
from halfbyte.quant.patches import counted_svd
from halfbyte.quant.pipeline_calibration import PASSES, DrawingLoop, calibration_prompts, drawn, encoded
from halfbyte.quant.pipelines import (
    CONTROL,
    TRANSFORMER,
    PipelineSource,
    copied_files,
    open_parts,
    open_transformer,
    quiet_diffusers,
)
from halfbyte.quant.processes import Processes
from halfbyte.quant.rounding import Unstable
from halfbyte.records.digests import value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.progress import progress_bar
from halfbyte.records.run import RunFolder

if TYPE_CHECKING:
    from halfbyte.quant.produce import Job

logger = logging.getLogger(__name__)


class PipelineMaking:
    """The transformer of a job on its way to the export, and what the manifest says of it."""

    def __init__(self, job: Job, run: RunFolder, data_root: Path | None, processes: Processes) -> None:
        self.job, self.run, self.data_root, self.processes = job, run, data_root, processes
        self.source = cast(PipelineSource, job.source)
        self.seconds: dict[str, float] = {}
        self.data: dict[str, str] = {}
        self.seeds = {"calibration": job.recipe.quantize.calibration.seed}
        self.own = torch_dtype(job.recipe.model.dtype)
        self.computed = compute_dtype("auto", job.device, self.own)

    def open(self) -> Any:
        """The original transformer."""
        device = self.processes.device
        return open_transformer(self.source.transformer, weights=self.own, compute=self.computed, device=device)

    def calibrated(self) -> Any:
        """The transformer with its quantizers calibrated, now or by an earlier process."""
        job, run, seconds = self.job, self.run, self.seconds
        with timed(seconds, "digest"):
            key = job.key
        if ptq.has_calibration(run.calibration, key):
            logger.info("calibration: done already")
            with timed(seconds, "load"):
                model = self.open()
            with timed(seconds, "restore calibration"):
                state = ptq.load_calibration(model, run.calibration)
            self.data, seconds["calibrate"] = state["data"], state["seconds"]
            return model
        loop = self._loop(key)
        with timed(seconds, "load"):
            model = self.open()
        with timed(seconds, "calibrate"), self._decomposing():
            ptq.calibrate(model, job.config, loop)
        if not loop.index:
            raise UserError("the recipe's algorithm looks at no activations", "choose max or svdquant")
        with timed(seconds, "keep calibration"):
            ptq.save_calibration(model, run.calibration, key, data=self.data, seconds=seconds["calibrate"])
        shutil.rmtree(run.calibrating, ignore_errors=True)
        del loop
        self._free()
        return model

    def _loop(self, key: str) -> DrawingLoop:
        """The text encoders are opened, asked and let go of before the transformer is there."""
        spec = self.job.recipe.quantize.calibration
        control = self.source.class_name == CONTROL
        prompts, self.data = calibration_prompts(spec, control=control, data_root=self.data_root)
        with timed(self.seconds, "encode"):
            pipeline: Any = open_parts(self.source, self.computed)
            calls = encoded(pipeline, prompts, drawn(spec), self.processes.device)
            pipeline.vae.to(self.processes.device)
        return DrawingLoop(
            pipeline,
            calls,
            drawn(spec),
            seed=spec.seed,
            progress=Progress(self.run.calibrating, value_digest([key, self.data])),
            passes=max(PASSES.get(str(method), 1) for method in methods(self.job.config)),
        )

    @contextmanager
    def _decomposing(self) -> Iterator[None]:
        """SVDQuant's decompositions have a bar of their own, with the time that is left."""
        layers = sum(1 for layer in self.job.plan.quantized if layer.rank)
        bars: list[Any] = []

        def counted() -> None:
            if not bars:  # the first of them ends long after the calibration has begun
                bars.append(progress_bar(total=layers, unit="layer", desc="decompose"))
            bars[0].update()

        with counted_svd(counted):
            yield
        for bar in bars:
            bar.close()

    def _free(self) -> None:
        gc.collect()
        if self.job.device.type == "cuda":
            torch.cuda.empty_cache()

    def ready(self, questions: Questions | None) -> Any:  # noqa: ARG002  a language model's
        """The transformer to be settled and exported: calibrated, and where the recipe trains the best of that."""
        if self.job.recipe.train is None:
            return self.calibrated()
        from halfbyte.quant.flux_distill import trained  # it imports transformers' trainer

        return trained(self)

    def export(self, model: Any, folder: Path, unstable: Sequence[Unstable]) -> None:
        """Writes the pipeline: the settled transformer in ModelOpt's layout, and the other parts as they were."""
        (folder / TRANSFORMER).mkdir()
        with quiet_diffusers():
            ptq.export(model, None, folder / TRANSFORMER, self.own, unstable)
        for path in copied_files(self.source.folder):
            copy = folder / path.relative_to(self.source.folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
