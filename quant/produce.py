"""From a recipe to a checkpoint on disk: plan, calibrate, export; what is done already is recognised and skipped."""

from __future__ import annotations

import logging
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from halfbyte.quant import calibration, ptq
from halfbyte.quant.checkpoint import quant_format, summarize, torch_dtype
from halfbyte.quant.configs import quant_config
from halfbyte.quant.load import Described, Loaded, describe, load
from halfbyte.quant.models import (
    Source,
    compute_dtype,
    device_of,
    locate,
    open_original,
    open_tokenizer,
    require_same_vocabulary,
)
from halfbyte.quant.plan import Plan, make_plan
from halfbyte.recipes.find import load_recipe, recipe_digest, resolved_yaml
from halfbyte.recipes.schema import ModelSpec, Recipe
from halfbyte.recipes.texts import load_texts, require_local
from halfbyte.records.digests import model_digest, text_identity, value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.files import atomic_folder, sync_files, write_text
from halfbyte.records.manifest import Manifest, load_manifest, package_versions
from halfbyte.records.record import ModelSummary
from halfbyte.records.run import RunFolder

logger = logging.getLogger(__name__)

# A change of one of these may change a calibration or an export.
_SHAPING_PACKAGES = ("halfbyte", "nvidia-modelopt", "transformers")


@dataclass(frozen=True)
class Job:
    """A recipe made ready: everything that can fail early has been looked at."""

    recipe: Recipe
    source: Source
    config: dict[str, Any]
    """ModelOpt's configuration."""
    plan: Plan
    device: torch.device
    dtype: str
    """What both sides are evaluated in: bfloat16, float16 or float32."""

    @cached_property
    def digest(self) -> str:
        """The original model's; reads all its files when asked for the first time."""
        return self.source.digest

    @cached_property
    def key(self) -> str:
        """Digest of all that shapes the checkpoint; it needs that of the original model."""
        versions = package_versions()
        block = self.recipe.quantize
        return value_digest(
            {
                "model": self.digest,
                "dtype": self.recipe.model.dtype,
                "quantize": block.model_dump(mode="json"),
                "texts": [text_identity(entry.dataset) for entry in block.calibration.sources],
                "device": self.device.type,
                "packages": {name: versions[name] for name in _SHAPING_PACKAGES},
            }
        )

    def open_baseline(self) -> Loaded:
        """The original model, ready to be evaluated."""
        return load(self.recipe.model, dtype=self.dtype, device=str(self.device))

    def describe_baseline(self) -> Described:
        """The original model, for an engine that loads it itself."""
        return describe(self.recipe.model)

    def describe_candidate(self, run: RunFolder) -> Described:
        """The exported checkpoint, for an engine that loads it itself, under the recipe's name."""
        found = describe(self._candidate(run))
        return replace(found, summary=found.summary.model_copy(update={"name": self.recipe.name}))

    def _candidate(self, run: RunFolder) -> ModelSpec:
        return self.recipe.model.model_copy(update={"id": str(run.checkpoint), "revision": None, "gguf_file": None})

    def open_candidate(self, run: RunFolder) -> Loaded:
        """The exported checkpoint, read back from disk, under the recipe's name."""
        spec = self._candidate(run)
        weights = self.recipe.evaluate.weights
        found = load(spec, dtype=self.dtype, device=str(self.device), weights=weights)
        return replace(found, summary=found.summary.model_copy(update={"name": self.recipe.name}))


def prepare(recipe: Recipe, device: str | None = None) -> Job:
    """Finds the model, resolves the quantize block and plans; reads no weight.

    Raises:
        UserError: for whatever can be known to fail before hours are spent.
    """
    where = device_of(device)
    if recipe.model.kind != "causal-lm":
        raise UserError(f"model kind '{recipe.model.kind}' cannot be quantized yet", "supported: causal-lm")
    config = quant_config(recipe.quantize)
    spec = recipe.model
    source = locate(spec.id, revision=spec.revision, gguf_file=spec.gguf_file, dtype=spec.dtype)
    if source.gguf_file is None and quant_format(source.folder) is not None:
        raise UserError(f"{recipe.model.id} is an exported checkpoint already", "give the original model")
    fidelity = recipe.evaluate.fidelity
    for entry in [*recipe.quantize.calibration.sources, *([fidelity.source] if fidelity else [])]:
        require_local(entry)
    plan = make_plan(source, config, torch_dtype(recipe.model.dtype), recipe.quantize.keep)
    computed = compute_dtype(recipe.evaluate.dtype, where, torch_dtype(recipe.model.dtype))
    return Job(recipe, source, config, plan, where, str(computed).removeprefix("torch."))


def require_own_folder(job: Job, run: RunFolder, *, force: bool) -> None:
    """Refuses an output folder that belongs to another recipe; with `force` what a run wrote there is removed.

    A recipe whose evaluate or gate block has changed is the same one: its checkpoint stays.

    Raises:
        UserError: when it does, or holds files that no run wrote.
    """
    if not run.root.exists():
        return
    if not run.root.is_dir():
        raise UserError(f"{run.root} is a file", "choose another --output")
    if {path.name for path in run.root.iterdir()} <= {".lock"}:
        return
    if not run.recipe.is_file():
        raise UserError(f"{run.root} is not empty and no run wrote it", "choose another --output")
    if force:
        for path in run.written():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return
    other = load_recipe(str(run.recipe))
    if other.name != job.recipe.name:
        raise UserError(
            f"{run.root} belongs to recipe '{other.name}', not to '{job.recipe.name}'",
            "choose another --output, or --force to replace it",
        )
    made = load_manifest(run.manifest).keys.get("checkpoint") if run.manifest.is_file() else job.key
    if (other.model, other.quantize) != (job.recipe.model, job.recipe.quantize) or made != job.key:
        raise UserError(
            f"{run.root} was made from another model, quantize block, device or version of the packages",
            "choose another --output, or --force to replace it",
        )


def claim(job: Job, run: RunFolder) -> None:
    """Makes the folder this recipe's, before anything else is put there."""
    write_text(run.recipe, resolved_yaml(job.recipe))


def has_checkpoint(job: Job, run: RunFolder) -> bool:
    """Whether the run's folder has a checkpoint of this job; that its files are still the same, produce() sees."""
    if not (run.manifest.is_file() and run.checkpoint.is_dir()):
        return False
    return load_manifest(run.manifest).keys.get("checkpoint") == job.key


def require_space(job: Job, run: RunFolder) -> None:
    """Refuses to start when the disk cannot hold the predicted checkpoint, and the weights kept until it is there.

    Of no concern to a run that has_checkpoint().

    Raises:
        UserError: with the sizes.
    """
    run.root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(run.root).free
    kept = 0 if run.calibration.is_dir() and ptq.has_calibration(run.calibration, job.key) else _kept_bytes(job)
    needed = job.plan.tensor_bytes + kept
    if free < needed:
        share = f" ({kept / 1e9:.2f} of them for a while, to keep the calibration)" if kept else ""
        raise UserError(
            f"no space for the checkpoint at {run.root}: {needed / 1e9:.2f} GB needed{share}, {free / 1e9:.2f} GB free",
            "free some space or choose another --output",
        )


def _kept_bytes(job: Job) -> int:
    """Of the weights that a calibration has changed, with low-rank factors; amax and scales are some kilobytes."""
    if not ptq.changes_weights(job.config):
        return 0
    size = compute_dtype("auto", job.device, torch_dtype(job.recipe.model.dtype)).itemsize
    layers = [layer for layer in job.plan.quantized if layer.kind != "Expert"]  # no algorithm changes fused experts
    return size * sum(layer.weights + layer.rank * sum(layer.shape) for layer in layers)


def produce(job: Job, run: RunFolder, *, data_root: Path | None = None) -> ModelSummary:
    """Writes run.checkpoint, run.calibration, run.recipe and run.manifest; skips what is there.

    The caller holds run.lock() and has called require_own_folder.

    Returns:
        What the checkpoint weighs.

    Raises:
        UserError: for bad calibration data, a full disk, or a calibration that overflows.
    """
    claim(job, run)
    if has_checkpoint(job, run) and load_manifest(run.manifest).checkpoint_digest == model_digest(run.checkpoint):
        ptq.drop_weights(run.calibration)
        logger.info("checkpoint: done already")
        return summarize(run.checkpoint, job.recipe.name)
    require_space(job, run)
    spec = job.recipe.quantize.calibration
    own = torch_dtype(job.recipe.model.dtype)
    seconds: dict[str, float] = {}
    data: dict[str, str] = {}
    with ThreadPoolExecutor(max_workers=1) as beside:
        hashed = beside.submit(lambda: job.key)  # reads the same files as loading, and leaves Python's lock to it
        with _timed(seconds, "load"):
            tokenizer = open_tokenizer(job.source)
            computed = compute_dtype("auto", job.device, own)
            model = open_original(job.source, weights=own, compute=computed, device=job.device)
            require_same_vocabulary(model, tokenizer)
        with _timed(seconds, "digest"):  # what loading left of it
            hashed.result()
    if ptq.has_calibration(run.calibration, job.key):
        logger.info("calibration: done already")
        with _timed(seconds, "restore calibration"):
            state = ptq.load_calibration(model, run.calibration)
        data, seconds["calibrate"] = state["data"], state["seconds"]
    else:
        texts: list[str] = []
        for entry in spec.sources:
            found = load_texts(entry, seed=spec.seed, data_root=data_root)
            texts += found.texts
            data[" ".join(filter(None, ["calibration:", entry.dataset, entry.name, entry.split]))] = found.digest
        sequences = calibration.tokenize(texts, tokenizer, spec.length)
        loop = calibration.forward_loop(
            sequences,
            tokens_per_row=spec.length * spec.batch_size,
            pack=calibration.packs_exactly(model),
        )
        with _timed(seconds, "calibrate"):
            ptq.calibrate(model, job.config, loop)
        with _timed(seconds, "keep calibration"):
            ptq.save_calibration(model, run.calibration, job.key, data=data, seconds=seconds["calibrate"])
    with _timed(seconds, "settle"):
        unstable = ptq.settle(model, own)
    with _timed(seconds, "publish"), atomic_folder(run.checkpoint) as partial:
        with _timed(seconds, "export"):
            ptq.export(model, tokenizer, partial, own, unstable)
        with ThreadPoolExecutor(max_workers=1) as beside:  # hashed from memory while the disk takes it in
            synced = beside.submit(sync_files, partial)
            checkpoint_digest = model_digest(partial)
            synced.result()
    seconds["publish"] = round(seconds["publish"] - seconds["export"], 3)
    Manifest(
        recipe=job.recipe.name,
        recipe_digest=recipe_digest(job.recipe),
        model=job.source.name,
        model_digest=job.digest,
        checkpoint_digest=checkpoint_digest,
        data=data,
        seeds={"calibration": spec.seed},
        keys={"checkpoint": job.key},
        seconds=seconds,
    ).save(run.manifest)
    ptq.drop_weights(run.calibration)
    return summarize(run.checkpoint, job.recipe.name)


class _timed:
    """Adds the wall time of a block to a table of seconds."""

    def __init__(self, seconds: dict[str, float], stage: str) -> None:
        self.seconds, self.stage = seconds, stage

    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.stage] = round(time.monotonic() - self.start, 3)
