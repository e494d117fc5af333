"""The stages of a run beside its evaluations: the checkpoint, fidelity, and the canary of baseline and candidate."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.eval.canary import PROMPTS, judge, load_observation, observe, save_observation
from halfbyte.eval.fidelity import measure_fidelity
from halfbyte.recipes.schema import CanarySpec, FidelitySpec
from halfbyte.records.cache import locked, mark_used
from halfbyte.records.canary import CANARY_FILE, CanaryRecord, load_canary
from halfbyte.records.digests import cache_folder, text_identity, value_digest
from halfbyte.records.errors import Anomaly
from halfbyte.records.fidelity import FIDELITY_FILE, FidelityRecord, load_fidelity
from halfbyte.records.manifest import package_versions
from halfbyte.records.record import ModelSummary
from halfbyte.sides import Side

if TYPE_CHECKING:
    from halfbyte.quant.produce import Job
    from halfbyte.records.run import RunFolder

logger = logging.getLogger(__name__)


def make_checkpoint(job: Job, folder: RunFolder, data_root: Path | None) -> ModelSummary:
    """The checkpoint of a recipe; where it trains, its texts are compared with the questions of its evaluation first.

    Raises:
        UserError: see produce.produce.
    """
    from halfbyte.quant import produce

    questions = None
    if job.recipe.train is not None and not produce.has_checkpoint(job, folder):
        from halfbyte.eval.question_texts import question_texts

        questions = question_texts(job.recipe.evaluate, data_root)
    return produce.produce(job, folder, data_root=data_root, questions=questions)


def measure(
    baseline: Side, candidate: Side, spec: FidelitySpec, folder: Path, data_root: Path | None
) -> FidelityRecord:
    """The candidate's fidelity against the baseline, measured once below `folder`."""
    asked = [spec.model_dump(mode="json"), text_identity(spec.source.dataset), package_versions()]
    key = value_digest([baseline.digest, candidate.digest, candidate.device, candidate.dtype, asked])
    output = folder / key[:16]
    if (output / FIDELITY_FILE).is_file():
        logger.info("fidelity: done already")
        return load_fidelity(output)
    first, second = baseline.loaded(), candidate.loaded()
    return measure_fidelity(
        first.model, second.model, first.tokenizer, spec, first.summary, second.summary, output, data_root, replace=True
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
