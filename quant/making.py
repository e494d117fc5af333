"""The model of a recipe on its way to the export: opened, calibrated, trained; each by an earlier process or now."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

import torch

from halfbyte.quant import calibration, ptq
from halfbyte.quant.checkpoint import torch_dtype
from halfbyte.quant.leakage import overlap
from halfbyte.quant.models import (
    Source,
    compute_dtype,
    device_of,
    open_original,
    open_tokenizer,
    require_same_vocabulary,
)
from halfbyte.quant.packing import packs_rows
from halfbyte.quant.processes import Processes
from halfbyte.quant.teacher_logits import StoredLogits, store_logits
from halfbyte.quant.teacher_texts import sample_texts
from halfbyte.quant.train import Training, checkpoints_of, finished, put_trained, train
from halfbyte.quant.training_texts import Examples, Sampled, training_examples
from halfbyte.recipes.texts import load_texts
from halfbyte.recipes.training import TeacherSpec, TrainSpec
from halfbyte.records.digests import value_digest
from halfbyte.records.manifest import calibration_name
from halfbyte.records.run import RunFolder
from halfbyte.records.training import OverlapFound

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from halfbyte.quant.produce import Job

logger = logging.getLogger(__name__)

T = TypeVar("T")

Questions: TypeAlias = Mapping[str, Mapping[str, str]]
"""Texts of an evaluation's questions by task and id."""


class Making:
    """The model of a job on its way to the export, and what the manifest says of it."""

    def __init__(self, job: Job, run: RunFolder, data_root: Path | None, processes: Processes) -> None:
        self.job, self.run, self.data_root, self.processes = job, run, data_root, processes
        self.seconds: dict[str, float] = {}
        self.data: dict[str, str] = {}
        self.seeds = {"calibration": job.recipe.quantize.calibration.seed}
        self.tokenizer = open_tokenizer(job.source)

    def _open(self) -> PreTrainedModel:
        own = torch_dtype(self.job.recipe.model.dtype)
        computed = compute_dtype("auto", self.job.device, own)
        return open_original(self.job.source, weights=own, compute=computed, device=self.processes.device)

    def calibrated(self) -> PreTrainedModel:
        """The model with its quantizers calibrated, now or by an earlier process."""
        job, run, seconds = self.job, self.run, self.seconds
        spec = job.recipe.quantize.calibration
        with ThreadPoolExecutor(max_workers=1) as beside:
            hashed = beside.submit(lambda: job.key)  # reads the same files as loading, and leaves Python's lock to it
            tokenized = beside.submit(self._sequences)
            with timed(seconds, "load"):
                model = self._open()
                require_same_vocabulary(model, self.tokenizer)
            with timed(seconds, "digest"):  # what loading left of it
                hashed.result()
            with timed(seconds, "texts"):
                sequences, data = tokenized.result()
        if job.recipe.train is not None and finished(run, job.key) is None:
            checkpoints_of(run, job.key).found()  # refuses those of another training before anything is written over
        known = ptq.has_calibration(run.calibration, job.key)
        self.processes.wait()  # until all have looked, before one writes it
        if known:
            logger.info("calibration: done already")
            with timed(seconds, "restore calibration"):
                state = ptq.load_calibration(model, run.calibration)
            self.data, seconds["calibrate"] = state["data"], state["seconds"]
            return model
        self.data = data
        most = spec.length * spec.batch_size
        pack = calibration.shares_rows(sequences, most) and calibration.packs_exactly(model)
        loop = calibration.forward_loop(sequences, tokens_per_row=most, pack=pack)
        with timed(seconds, "calibrate"):  # in all processes: ModelOpt takes the largest range and waits for all
            ptq.calibrate(model, job.config, loop)
        if self.processes.leads:
            with timed(seconds, "keep calibration"):
                ptq.save_calibration(model, run.calibration, job.key, data=self.data, seconds=seconds["calibrate"])
        self.processes.wait()
        return model

    def _sequences(self) -> tuple[list[list[int]], dict[str, str]]:
        """The calibration texts as tokens, and what the manifest says of them; nothing where none are needed."""
        texts: list[str] = []
        data: dict[str, str] = {}
        if ptq.has_calibration(self.run.calibration, self.job.key):
            return [], data
        spec = self.job.recipe.quantize.calibration
        for entry in spec.sources:
            found = load_texts(entry, seed=spec.seed, data_root=self.data_root)
            texts += found.texts
            data[calibration_name(entry.dataset, entry.name, entry.split)] = found.digest
        return calibration.tokenize(texts, self.tokenizer, spec.length), data

    def ready(self, questions: Questions | None) -> PreTrainedModel:
        """The model to be settled and exported: calibrated, and where the recipe trains the best of that.

        Of several processes that train together one gets here to the end. What is trained is put into a model that is
        opened and calibrated anew, so that nothing of the training is left in it but that.
        """
        model = self.calibrated()
        spec, key = self.job.recipe.train, self.job.key
        if spec is None:
            return model
        record = finished(self.run, key)
        if record is None:
            with timed(self.seconds, "train"):
                record = train(self._training(model, questions), self.run)
            self.processes.part()
            del model  # nobody else holds it: two would not fit
            gc.collect()
            if self.job.device.type == "cuda":
                torch.cuda.empty_cache()
            model = self._open()
            ptq.load_calibration(model, self.run.calibration)
        else:
            logger.info("training: done already")
            self.processes.part()
            self.seconds["train"] = record.seconds
        self.data |= {f"training: {name}": digest for name, digest in record.data.items()}
        self.seeds["training"] = record.seed
        ptq.share_scales(model)
        put_trained(model, spec, self.run, key)
        return model

    def _training(self, model: PreTrainedModel, questions: Questions | None) -> Training:
        job, spec = self.job, cast(TrainSpec, self.job.recipe.train)
        longest = getattr(model.config, "max_position_embeddings", None)
        packs = spec.packing and packs_rows(model)
        offline = spec.teacher is not None and spec.teacher.offline_top_k is not None
        if offline:
            model.cpu()  # the teacher is alone on the device while it is asked
        teacher = self._teacher()
        sampled = None if teacher is None else self._sampled(teacher)
        examples = training_examples(spec, self.tokenizer, longest, self.data_root, packs=packs, sampled=sampled)
        found = None
        if questions:
            overlapping = overlap(examples.texts, questions)
            for line in overlapping.describe():
                logger.info("overlap of the training texts with %s", line)
            for unknown in overlapping.unchecked:
                logger.warning(
                    "no question of '%s' can be looked for in the training texts: all are too short or alike; "
                    "whether it leaked is not known",
                    unknown,
                )
            overlapping.require_at_most(spec.max_overlap)
            checked = sum(task.checked for task in overlapping.tasks.values())
            found = OverlapFound(questions=checked, found=len(overlapping.touched), bound=spec.max_overlap)
        stored = None
        if offline and teacher is not None:
            stored = self._first(partial(self._stored, teacher, examples, int(model.config.vocab_size)))
            teacher = None
            gc.collect()
            if self.job.device.type == "cuda":
                torch.cuda.empty_cache()
            model.to(self.processes.device)  # type: ignore[arg-type]
        name = None if job.teacher is None else job.teacher.name
        return Training(spec, job.key, self.processes.device, model, examples, teacher, name, found, stored)

    def _teacher(self) -> PreTrainedModel | None:
        source, spec = self.job.teacher, cast(TrainSpec, self.job.recipe.train).teacher
        if source is None or spec is None:
            return None
        own = torch_dtype((spec.model or self.job.recipe.model).dtype)
        where = self.processes.device if spec.device is None else device_of(spec.device)
        return open_original(source, weights=own, compute=compute_dtype("auto", where, own), device=where)

    def _sampled(self, teacher: PreTrainedModel) -> list[Sampled] | None:
        spec = cast(TrainSpec, self.job.recipe.train).sampled
        if spec is None:
            return None
        folder, digest = self.run.training, cast(Source, self.job.teacher).digest
        return self._first(
            lambda: sample_texts(teacher, self.tokenizer, spec, folder, digest=digest, data_root=self.data_root)
        )

    def _stored(self, teacher: PreTrainedModel, examples: Examples, vocabulary: int) -> StoredLogits:
        spec = cast(TeacherSpec, cast(TrainSpec, self.job.recipe.train).teacher)
        identity = [examples.digest, cast(Source, self.job.teacher).digest, teacher.device.type, str(teacher.dtype)]
        return store_logits(
            teacher,
            [examples.train, examples.validation],
            self.run.training / "teacher",
            k=cast(int, spec.offline_top_k),
            key=value_digest(identity),
            temperature=spec.temperature,
            vocabulary=vocabulary,
        )

    def _first(self, make: Callable[[], T]) -> T:
        """What all processes need and one of them makes and keeps on disk; the others find it there."""
        if not self.processes.leads:
            self.processes.wait()
        made = make()
        if self.processes.leads:
            self.processes.wait()
        return made


class timed:
    """Adds the wall time of a block to a table of seconds."""

    def __init__(self, seconds: dict[str, float], stage: str) -> None:
        self.seconds, self.stage = seconds, stage

    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.stage] = round(time.monotonic() - self.start, 3)
