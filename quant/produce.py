"""From a recipe to a checkpoint on disk: plan, calibrate, train, export; what is done already is skipped."""

from __future__ import annotations

import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from halfbyte.quant import ptq
from halfbyte.quant.attention import UNREACHED
from halfbyte.quant.checkpoint import quant_format, summarize, torch_dtype
from halfbyte.quant.configs import quant_config
from halfbyte.quant.load import Described, Loaded, describe, load
from halfbyte.quant.making import Making, Questions, timed
from halfbyte.quant.models import Source, compute_dtype, device_of, locate, wake
from halfbyte.quant.pipeline_making import PipelineMaking
from halfbyte.quant.pipeline_plan import make_pipeline_plan
from halfbyte.quant.pipelines import CONTROL, PipelineSource, locate_pipeline, require_quantizable, summarize_pipeline
from halfbyte.quant.plan import Plan, make_plan
from halfbyte.quant.processes import Processes
from halfbyte.quant.trainable import identity, require_trainable
from halfbyte.quant.upstream import importing
from halfbyte.recipes.find import load_recipe, recipe_digest, require_supported, resolved_yaml
from halfbyte.recipes.schema import ModelSpec, Recipe
from halfbyte.recipes.texts import require_local
from halfbyte.records.digests import model_digest, text_identity, value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.files import atomic_folder, sync_files, write_text
from halfbyte.records.manifest import Manifest, load_manifest, package_versions
from halfbyte.records.record import ModelSummary
from halfbyte.records.run import RunFolder
from halfbyte.records.training import TRAINING_FILE

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
    teacher: Source | None = None
    """Of a recipe that trains."""

    @cached_property
    def digest(self) -> str:
        """The original model's; reads all its files when asked for the first time."""
        return self.source.digest

    @cached_property
    def key(self) -> str:
        """Digest of all that shapes the checkpoint; it needs that of the original model."""
        versions = package_versions()
        shaping = (*_SHAPING_PACKAGES, "diffusers") if isinstance(self.source, PipelineSource) else _SHAPING_PACKAGES
        block, train = self.recipe.quantize, self.recipe.train
        return value_digest(
            {
                "model": self.digest,
                "dtype": self.recipe.model.dtype,
                "quantize": block.model_dump(mode="json"),
                "texts": [text_identity(entry.dataset) for entry in block.calibration.sources],
                "device": self.device.type,
                "packages": {name: versions[name] for name in shaping},
                **({} if train is None else identity(train, self.teacher, self.source)),
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


@importing()
def prepare(
    recipe: Recipe, device: str | torch.device | None = None, *, read_ahead: bool = True, weights: bool = True
) -> Job:
    """Finds the model, resolves the quantize block and plans.

    Args:
        recipe: What is asked for.
        device: See models.device_of; one of torch's is taken as it is, whether it is here or not.
        read_ahead: Whether to begin with what takes as long as importing ModelOpt: hashing the model's files, and
            making the GPU ready. Of no use to who wants the plan alone.
        weights: Whether the models' weights must be there; without them a job can be planned and not done.

    Raises:
        UserError: for whatever can be known to fail before hours are spent.
    """
    if weights:
        require_supported(recipe)
    where = device if isinstance(device, torch.device) else device_of(device)
    if read_ahead:
        wake(where)
    if recipe.model.kind == "flux":
        return _prepare_pipeline(recipe, where, read_ahead=read_ahead, weights=weights)
    spec = recipe.model
    find = partial(locate, spec.id, revision=spec.revision, gguf_file=spec.gguf_file, dtype=spec.dtype, weights=weights)
    local = Path(spec.id).expanduser().exists()  # what must be fetched waits for the quantize block
    if local and read_ahead:
        find().read_ahead()
    config = quant_config(recipe.quantize)
    source = find()
    if source.gguf_file is None and quant_format(source.folder) is not None:
        raise UserError(f"{recipe.model.id} is an exported checkpoint already", "give the original model")
    fidelity = recipe.evaluate.fidelity
    for entry in [*recipe.quantize.calibration.sources, *([fidelity.source] if fidelity else [])]:
        require_local(entry)
    plan = make_plan(source, config, torch_dtype(recipe.model.dtype), recipe.quantize.keep)
    teacher = require_trainable(recipe, source, weights=weights)
    computed = compute_dtype(recipe.evaluate.dtype, where, torch_dtype(recipe.model.dtype))
    return Job(recipe, source, config, plan, where, str(computed).removeprefix("torch."), teacher)


def _prepare_pipeline(recipe: Recipe, where: torch.device, *, read_ahead: bool, weights: bool) -> Job:
    """As prepare, for a diffusers pipeline, of which the transformer is quantized."""
    from halfbyte.quant.pipeline_calibration import calibration_prompts

    spec = recipe.model
    if spec.gguf_file is not None:
        raise UserError("model.gguf_file: a pipeline's transformer is read from safetensors", "leave gguf_file out")
    source = locate_pipeline(spec.id, revision=spec.revision, dtype=spec.dtype, weights=weights)
    require_quantizable(source)
    if read_ahead:
        source.read_ahead()
    config = quant_config(recipe.quantize, UNREACHED)
    train = recipe.train.drawn if recipe.train is not None else None
    for entry in [*recipe.quantize.calibration.sources, *([train.prompts] if train is not None else [])]:
        require_local(entry)
    if all(Path(entry.dataset).expanduser().is_file() for entry in recipe.quantize.calibration.sources):
        calibration_prompts(recipe.quantize.calibration, control=source.class_name == CONTROL)
    plan = make_pipeline_plan(source, config, torch_dtype(spec.dtype), recipe.quantize.keep)
    computed = compute_dtype(recipe.evaluate.dtype, where, torch_dtype(spec.dtype))
    return Job(recipe, source, config, plan, where, str(computed).removeprefix("torch."))


def require_own_folder(job: Job, run: RunFolder, *, force: bool) -> None:
    """Refuses an output folder that belongs to another recipe; with `force` what a run wrote there is set aside.

    A recipe whose evaluate or gate block has changed is the same one: its checkpoint stays.

    Raises:
        UserError: when it does, or holds files that no run wrote.
    """
    if not run.root.exists():
        return
    if not run.root.is_dir():
        raise UserError(f"{run.root} is a file", "choose another --output")
    if {path.name for path in run.root.iterdir()} <= {".lock", run.recipe.name, run.replaced.name}:
        return  # claimed, and nothing came of it
    if not run.recipe.is_file():
        raise UserError(f"{run.root} is not empty and no run wrote it", "choose another --output")
    if force:
        run.set_aside()
        return
    other = load_recipe(str(run.recipe))
    if other.name != job.recipe.name:
        raise UserError(
            f"{run.root} belongs to recipe '{other.name}', not to '{job.recipe.name}'",
            "choose another --output, or --force to replace it",
        )
    if not any(path.exists() for path in (run.manifest, run.checkpoint, run.training)):
        return  # nothing that it would go on with; a calibration has a key of its own
    made = load_manifest(run.manifest).keys.get("checkpoint") if run.manifest.is_file() else job.key
    ours = job.recipe
    if (other.model, other.quantize, other.train) != (ours.model, ours.quantize, ours.train) or made != job.key:
        raise UserError(
            f"{run.root} was made from another model, quantize or train block, device or version of the packages",
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
    """Refuses to start when the disk cannot hold the predicted checkpoint, and what is kept until it is there.

    That is weights that calibration changes, and the checkpoints of a training. Of no concern to a run that
    has_checkpoint().

    Raises:
        UserError: with the sizes.
    """
    run.root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(run.root).free
    kept = 0 if run.calibration.is_dir() and ptq.has_calibration(run.calibration, job.key) else _kept_bytes(job)
    trained = _training_bytes(job, run)
    needed = job.plan.exported_bytes + kept + trained
    if free < needed and run.replaced.is_dir():  # no place for both
        shutil.rmtree(run.replaced)
        free = shutil.disk_usage(run.root).free
    if free < needed:
        share = f" ({kept / 1e9:.2f} of them for a while, to keep the calibration)" if kept else ""
        share += f" ({trained / 1e9:.2f} of them for checkpoints of the training)" if trained else ""
        less = "lower train.validation.keep, " if trained else ""
        raise UserError(
            f"no space for the checkpoint at {run.root}: {needed / 1e9:.2f} GB needed{share}, {free / 1e9:.2f} GB free",
            f"{less}free some space or choose another --output",
        )


def _training_bytes(job: Job, run: RunFolder) -> int:
    """Of what a training has still to write: its checkpoints, and what a teacher that draws leaves for it."""
    spec = job.recipe.train
    if spec is None or (run.training / TRAINING_FILE).is_file():
        return 0
    if isinstance(job.source, PipelineSource):
        return max(0, _drawn_training_bytes(job, job.source) - _bytes_below(run.training))
    from halfbyte.quant.training_memory import compute_type
    from halfbyte.quant.training_plan import divided, most_kept, saved_bytes

    devices = int(os.environ.get("WORLD_SIZE", "1"))
    each = saved_bytes(job.source, job.config, divided(spec, compute_type(spec, job.device), devices))
    return max(0, most_kept(spec) * each - _bytes_below(run.training / "checkpoints"))


def _drawn_training_bytes(job: Job, source: PipelineSource) -> int:
    from halfbyte.quant.drawing_plan import training_bytes

    assert job.recipe.train is not None
    return training_bytes(source, job.config, job.recipe.train, device=job.device, dtype=job.recipe.model.dtype)


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/**/*") if path.is_file())


def _kept_bytes(job: Job) -> int:
    """Of the weights that a calibration has changed, with low-rank factors; amax and scales are some kilobytes."""
    if not ptq.changes_weights(job.config):
        return 0
    size = compute_dtype("auto", job.device, torch_dtype(job.recipe.model.dtype)).itemsize
    layers = [layer for layer in job.plan.quantized if not layer.of_experts]  # which no algorithm changes
    return size * sum(layer.weights + layer.rank * sum(layer.shape) for layer in layers)


def produce(
    job: Job, run: RunFolder, *, data_root: Path | None = None, questions: Questions | None = None
) -> ModelSummary:
    """Writes run.checkpoint, run.calibration, run.training, run.recipe and run.manifest; skips what is there.

    The caller holds run.lock() and has called require_own_folder. Where several processes train together, the others
    end here once training is done, and the first exports.

    Args:
        job: What to make.
        run: Where.
        data_root: See recipes.data.data_root.
        questions: Of the evaluation by task and id, which the texts of a training must not hold.

    Returns:
        What the checkpoint weighs.

    Raises:
        UserError: for bad calibration data, a full disk, a calibration that overflows, or a training that diverges.
    """
    processes = Processes(job.device)
    if processes.leads:
        claim(job, run)
    if has_checkpoint(job, run) and load_manifest(run.manifest).checkpoint_digest == model_digest(run.checkpoint):
        logger.info("checkpoint: done already")
        return _done(job, run)
    require_space(job, run)
    own = torch_dtype(job.recipe.model.dtype)
    draws = isinstance(job.source, PipelineSource)
    made: Making | PipelineMaking = (PipelineMaking if draws else Making)(job, run, data_root, processes)
    model = made.ready(questions)
    with timed(made.seconds, "settle"):
        unstable = ptq.settle(model, own, scales_are_shared=job.recipe.train is not None)
    with timed(made.seconds, "publish"), atomic_folder(run.checkpoint) as partial:
        with timed(made.seconds, "export"):
            if isinstance(made, PipelineMaking):
                made.export(model, partial, unstable)
            else:
                ptq.export(model, made.tokenizer, partial, own, unstable)
        with ThreadPoolExecutor(max_workers=1) as beside:  # hashed from memory while the disk takes it in
            synced = beside.submit(sync_files, partial)
            checkpoint_digest = model_digest(partial)
            synced.result()
    made.seconds["publish"] = round(made.seconds["publish"] - made.seconds["export"], 3)
    Manifest(
        recipe=job.recipe.name,
        recipe_digest=recipe_digest(job.recipe),
        model=job.source.name,
        model_digest=job.digest,
        checkpoint_digest=checkpoint_digest,
        data=made.data,
        seeds=made.seeds,
        keys={"checkpoint": job.key},
        seconds=made.seconds,
    ).save(run.manifest)
    return _done(job, run)


def _done(job: Job, run: RunFolder) -> ModelSummary:
    """Removes what was kept until there is a checkpoint, and weighs it."""
    ptq.drop_weights(run.calibration)
    if run.replaced.is_dir():
        shutil.rmtree(run.replaced)
    weigh = summarize_pipeline if isinstance(job.source, PipelineSource) else summarize
    return weigh(run.checkpoint, job.recipe.name)
