"""The stages of a run beside its evaluations: the checkpoint, fidelity, and the canary of baseline and candidate."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.eval.canary import PROMPTS, judge, load_observation, observe, save_observation
from halfbyte.eval.fidelity import (
    check_window,
    fidelity_key,
    measure_fidelity,
    read_text,
    vocabulary_of,
    windows_of,
)
from halfbyte.eval.kept import Kept, is_kept, keep
from halfbyte.recipes.schema import CanarySpec, FidelitySpec
from halfbyte.records.cache import KEPT, locked, mark_used
from halfbyte.records.canary import CANARY_FILE, CanaryRecord, load_canary
from halfbyte.records.digests import cache_folder, value_digest
from halfbyte.records.errors import Anomaly, UserError
from halfbyte.records.fidelity import FIDELITY_FILE, FidelityRecord, load_fidelity
from halfbyte.records.files import dumps, read_json, write_json
from halfbyte.records.manifest import package_versions
from halfbyte.records.record import ModelSummary
from halfbyte.sides import Side

if TYPE_CHECKING:
    from halfbyte.quant.produce import Job
    from halfbyte.quant.training_plan import TrainingPlan
    from halfbyte.records.run import RunFolder

logger = logging.getLogger(__name__)


def plan_training(job: Job, *, capacity: int | None = None, measured: bool | None = None) -> TrainingPlan | None:
    """What a recipe's training will take, with the time of a step where there is a GPU that has the memory for one.

    None for a recipe that does not train. A step of a model that draws is not timed.

    Args:
        job: The recipe made ready.
        capacity: Bytes of the device's memory; None to ask it.
        measured: Whether a step is timed on the device; None: on a GPU that has the memory for it.
    """
    spec = job.recipe.train
    if spec is None:
        return None
    from halfbyte.quant.pipelines import PipelineSource
    from halfbyte.quant.training_plan import measure_step, training_plan

    if isinstance(job.source, PipelineSource):
        from halfbyte.quant.drawing_plan import drawing_training_plan

        exported, dtype = job.plan.exported_bytes, job.recipe.model.dtype
        return drawing_training_plan(
            job.source, job.config, spec, device=job.device, exported=exported, dtype=dtype, capacity=capacity
        )
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    exported = job.plan.tensor_bytes
    plan = training_plan(
        job.source, job.config, spec, device=job.device, exported=exported, devices=devices, capacity=capacity
    )
    if measured is False or devices > 1 or not plan.fits or (job.device.type != "cuda" and not measured):
        return plan  # on a CPU a step would take longer than the answer is worth
    seconds, _ = measure_step(job.source, job.config, spec, job.device)
    return replace(plan, seconds=seconds)


def print_plan(job: Job, *, as_json: bool) -> None:
    """Prints what a recipe would quantize and how it would train."""
    print(dumps(plan_dict(job)) if as_json else f"{plan_text(job)}\n", end="")


def plan_dict(job: Job) -> dict[str, Any]:
    """What a recipe would quantize and how it would train, for JSON."""
    return described(job, plan_training(job))


def described(job: Job, training: TrainingPlan | None) -> dict[str, Any]:
    """plan_dict for a training that is planned already."""
    found = {"recipe": job.recipe.name, "model": job.source.name, **job.plan.as_dict()}
    return found if training is None else found | {"training": training.as_dict()}


def plan_text(job: Job) -> str:
    """The same to read."""
    return told(job, plan_training(job))


def told(job: Job, training: TrainingPlan | None) -> str:
    """plan_text for a training that is planned already."""
    head = f"{job.recipe.name}: {job.source.name} on {job.device}\n{job.plan}"
    return head if training is None else f"{head}\n{training}"


def make_checkpoint(job: Job, folder: RunFolder, data_root: Path | None) -> ModelSummary:
    """The checkpoint of a recipe; where it trains, its texts are compared with the questions of its evaluation first.

    Raises:
        UserError: see produce.produce.
    """
    from halfbyte.quant import produce

    questions = None
    asks = job.recipe.evaluate.tasks and job.recipe.train is not None
    if asks and not produce.has_checkpoint(job, folder):
        from halfbyte.eval.question_texts import question_texts

        questions = question_texts(job.recipe.evaluate, data_root)
    return produce.produce(job, folder, data_root=data_root, questions=questions)


def make_in_folder(job: Job, folder: RunFolder, data_root: Path | None, *, force: bool) -> ModelSummary:
    """As make_checkpoint, in a folder that is this recipe's alone meanwhile; of several processes the first locks it.

    Args:
        job: The recipe made ready.
        folder: Where.
        data_root: See recipes.data.data_root.
        force: Whether what another run wrote there is replaced.

    Raises:
        UserError: when the folder belongs to another recipe or another process; see make_checkpoint.
    """
    from halfbyte.quant import produce

    leads = os.environ.get("RANK", "0") == "0"
    if not force:
        produce.require_own_folder(job, folder, force=False)  # before the lock makes the folder
    with folder.lock() if leads else contextlib.nullcontext():
        if force and leads:
            produce.require_own_folder(job, folder, force=True)
        with folder.restoring() if force and leads else contextlib.nullcontext():
            return make_checkpoint(job, folder, data_root)


def require_verified(folder: RunFolder, digest: str, job: Job) -> None:
    """Checks the checkpoint's numbers before hours are spent on evaluating it; once for each content.

    Raises:
        UserError: naming the first check that failed and how many.
    """
    from halfbyte.quant.verify import verify

    if folder.verification.is_file():
        known = read_json(folder.verification)
        if known["checkpoint_digest"] == digest and all(row["passed"] for row in known["checks"]):
            logger.info("verify: done already")
            return
    # The tensors of a GGUF file have other names, and training changes weights on purpose; without the original,
    # errors of weights are not looked at.
    like_source = getattr(job.source, "gguf_file", None) is None and job.recipe.train is None
    checks = verify(folder.checkpoint, job.source.folder if like_source else None)
    rows = [check.as_dict() for check in checks]
    write_json(folder.verification, {"schema_version": 1, "checkpoint_digest": digest, "checks": rows})
    failed = [check for check in checks if not check.passed]
    if failed:
        raise UserError(
            f"{folder.checkpoint} fails {len(failed)} of {len(checks)} checks: {failed[0].name}: {failed[0].faults[0]}",
            f"see `halfbyte verify {folder.checkpoint}`; delete the checkpoint to have it exported again",
        )


def measure(
    baseline: Side, candidate: Side, spec: FidelitySpec, folder: Path, data_root: Path | None
) -> FidelityRecord:
    """The candidate's fidelity against the baseline, measured once below `folder`; see keep_baseline."""
    text = read_text(spec, data_root)
    where = {"device": candidate.device, "dtype": candidate.dtype}
    output = folder / fidelity_key(text, spec, baseline.digest, candidate.digest, **where)[:16]
    if (output / FIDELITY_FILE).is_file():
        logger.info("fidelity: done already")
        return load_fidelity(output)
    described = baseline.described()
    windows = windows_of(described.tokenizer, text, spec)
    kept = _kept_folder(baseline, text, spec)
    second = candidate.loaded()
    reference = Kept(kept, second.model.device) if is_kept(kept, windows) else baseline.loaded().model
    return measure_fidelity(
        reference, second.model, described.tokenizer, spec, described.summary, second.summary, text, output,
        replace=True,
    )  # fmt: skip


def keep_baseline(baseline: Side, spec: FidelitySpec, data_root: Path | None) -> None:
    """Keeps in the shared cache what fidelity needs of the baseline, so that it need not be loaded beside a candidate.

    Raises:
        UserError: when it would have to be, since its logits are more than its output embedding's, and there is no
            memory for two.
    """
    text = read_text(spec, data_root)
    folder = _kept_folder(baseline, text, spec)
    with locked(folder):
        windows = windows_of(baseline.described().tokenizer, text, spec)
        if not is_kept(folder, windows):
            model = baseline.loaded().model
            check_window(model, spec.window)
            if not keep(model, windows, vocabulary_of(model), folder):
                logger.info("fidelity: the baseline will be loaded beside the candidate")
                _require_memory_for_two(model)
        if folder.is_dir():
            mark_used(folder)


def _kept_folder(baseline: Side, text: str, spec: FidelitySpec) -> Path:
    key = fidelity_key(text, spec, baseline.digest, device=baseline.device, dtype=baseline.dtype)
    return cache_folder() / KEPT / baseline.digest[:16] / key[:16]


def _require_memory_for_two(model: Any) -> None:
    import torch

    needed = 2 * sum(part.numel() * part.element_size() for part in model.parameters())
    if model.device.type == "cuda":
        there = torch.cuda.get_device_properties(model.device).total_memory
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise UserError(
            f"fidelity needs baseline and candidate at once, {needed / 2**30:.1f} GiB, and {model.device.type} has "
            f"{there / 2**30:.1f} GiB",
            "set evaluate.fidelity to null",
        )


def observe_baseline(baseline: Side, spec: CanarySpec) -> Path:
    """What the baseline does with the canary's prompts, out of the shared cache; observed once."""
    asked = [spec.tokens, PROMPTS, baseline.device, baseline.dtype, package_versions()]
    path = cache_folder() / "canary" / baseline.digest[:16] / f"{value_digest(asked)[:16]}.safetensors"
    with locked(path):
        if not path.is_file():
            model = baseline.loaded()
            save_observation(observe(model.model, model.tokenizer, spec.tokens), path)
        mark_used(path)
    return path


def release_canary(
    reference: Path, baseline_digest: str, candidate: Side, spec: CanarySpec, folder: Path
) -> CanaryRecord:
    """The canary's record of the candidate, made once below `folder`.

    Raises:
        Anomaly: when the candidate is broken; the record is kept and says in what way.
    """
    asked = [candidate.digest, candidate.device, candidate.dtype, spec.model_dump(mode="json"), package_versions()]
    key = value_digest([baseline_digest, reference.name, asked])
    output = folder / key[:16]
    if (output / CANARY_FILE).is_file():
        logger.info("canary: done already")
        record = load_canary(output)
    else:
        model = candidate.loaded()
        observed = load_observation(reference)
        record = judge(
            observed,
            model.model,
            model.tokenizer,
            spec,
            baseline_digest=baseline_digest,
            candidate=model.summary,
            key=key,
        )
        record.save(output)
    if record.failure is not None:
        raise Anomaly(
            f"{record.candidate.name} is broken, not a bit worse: {record.failure}",
            f"nothing was evaluated; see {output / CANARY_FILE} and look at the checkpoint's scales, "
            "or set evaluate.canary to null to evaluate it all the same",
        )
    return record
