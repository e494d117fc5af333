"""The stages of a run that measure: records of the baseline out of a shared cache, records of a candidate, fidelity."""

from __future__ import annotations

import fcntl
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from halfbyte.eval.canary import PROMPTS, judge, load_observation, observe, save_observation
from halfbyte.eval.evaluate import evaluate_task, settings_key
from halfbyte.eval.fidelity import measure_fidelity
from halfbyte.quant.load import Loaded
from halfbyte.recipes.schema import CanarySpec, EvaluateSpec, FidelitySpec, TaskSpec
from halfbyte.records.canary import CANARY_FILE, CanaryRecord, load_canary
from halfbyte.records.digests import cache_folder, text_identity, value_digest
from halfbyte.records.errors import Anomaly, UserError, disk_full_is_a_user_error
from halfbyte.records.fidelity import FIDELITY_FILE, FidelityRecord, load_fidelity
from halfbyte.records.files import atomic_folder
from halfbyte.records.manifest import package_versions
from halfbyte.records.record import RECORD_FILE, load_record

logger = logging.getLogger(__name__)


class Side:
    """One of the two models of a comparison: identified at once, loaded only when something must be computed."""

    def __init__(self, digest: str, device: str, dtype: str, opener: Callable[[], Loaded]) -> None:
        """Takes what identifies the model.

        Args:
            digest: Of its files.
            device: Kind of device it will be on: cpu or cuda.
            dtype: What it will compute in.
            opener: Loads it.
        """
        self.digest, self.device, self.dtype = digest, device, dtype
        self._opener = opener
        self._loaded: Loaded | None = None

    def loaded(self) -> Loaded:
        """The model, loaded at the first call.

        Raises:
            UserError: when its files have changed since it was identified.
        """
        if self._loaded is None:
            self._loaded = self._opener()
            if self._loaded.summary.digest != self.digest:
                raise UserError(f"{self._loaded.summary.name} changed while the run was under way", "run it again")
        return self._loaded

    def free(self) -> None:
        """Forgets the loaded model, so that its memory can be used again."""
        held, self._loaded = self._loaded is not None, None
        if held and self.device == "cuda":
            import torch

            torch.cuda.empty_cache()


def evaluate_side(
    side: Side, settings: EvaluateSpec, folder: Callable[[TaskSpec, str], Path], data_root: Path | None
) -> list[Path]:
    """The record folders of a model, one a task of `settings`; what is on disk already is not computed again.

    Args:
        side: The model.
        settings: The recipe's evaluate block.
        folder: Where the record of a task with that settings key lies or will lie.
        data_root: Where data sets are looked up first.
    """
    found = []
    for spec in settings.tasks:
        key = settings_key(spec, settings, side.digest, device=side.device, dtype=side.dtype)
        output = folder(spec, key)
        with locked(output):
            if (output / RECORD_FILE).is_file() and load_record(output).key == key:
                logger.info("%s: done already", spec.task)
            else:
                model = side.loaded()
                evaluate_task(
                    model.model, model.tokenizer, spec, settings, model.summary, output, data_root, replace=True
                )
        found.append(output)
    return found


def cached_record(digest: str) -> Callable[[TaskSpec, str], Path]:
    """Where the shared cache keeps the records of a model, so that a second candidate costs no baseline."""
    return lambda spec, key: cache_folder() / "evaluations" / digest[:16] / f"{spec.task}@{key[:16]}"


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


def keep_copy(record: Path, folder: Path) -> Path:
    """Copies a record out of the cache into a run, which is then whole by itself; returns the copy."""
    copy = folder / record.name
    if not (copy / RECORD_FILE).is_file():
        with atomic_folder(copy) as partial:
            shutil.copytree(record, partial, dirs_exist_ok=True)
    return copy


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from computing the same record; waits for them to finish."""
    with disk_full_is_a_user_error(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = (folder.parent / f".{folder.name}.lock").open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
