"""One of the two models of a comparison: identified from its files, its records found, and loaded only to compute."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.eval.evaluate import evaluate_backend, evaluate_task, finished_record, settings_key, usable_record
from halfbyte.recipes.data import data_root as find_root
from halfbyte.recipes.find import require_distinct
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.cache import evaluation_folder, locked, mark_used
from halfbyte.records.digests import cache_folder, model_digest
from halfbyte.records.errors import UserError, disk_full_is_a_user_error
from halfbyte.records.files import PARTIAL, atomic_folder, read_json
from halfbyte.records.noise import load_noise, noise_between
from halfbyte.records.record import RECORD_FILE, DamagedRecord, EvaluationRecord, load_record, verify_content
from halfbyte.records.run import RunFolder

if TYPE_CHECKING:
    from halfbyte.eval.backend import Backend
    from halfbyte.quant.load import Described, Loaded

logger = logging.getLogger(__name__)

ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Without one of these device files (NVIDIA, AMD, Windows' Linux) there is no GPU, and torch need not be asked."""
ASIDE = ".aside"
"""Where a run folder keeps the records of other settings: hidden, so that one task has one record."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What decides a model's answers, known from its files."""

    digest: str
    device: str
    """Kind of device it will be on: cpu or cuda."""
    dtype: str
    """What it will compute in."""
    quantized: bool
    """Whether it is an exported checkpoint, whose records belong to its run, and not to the cache."""


def identify(name: str, *, dtype: str = "auto", device: str | None = None) -> Identity:
    """The identity that quant.load.load_as_it_is would give the model, without loading it.

    torch is imported only where that cannot be said without it: for hub ids and GGUF files, and where there may be a
    GPU.

    Args:
        name: Folder, GGUF file or hub id.
        dtype: As for load_as_it_is.
        device: As for load_as_it_is.

    Raises:
        UserError: when the model cannot be found.
    """
    found = _from_files(name, dtype, device)
    if found is not None:
        return found
    from halfbyte.quant.checkpoint import plain_dtype, quant_format, torch_dtype  # torch takes seconds
    from halfbyte.quant.models import compute_dtype, device_of, locate

    source = locate(name)
    where = device_of(device)
    own = "bfloat16" if source.gguf_file else plain_dtype(source.folder)
    if source.gguf_file:
        source = locate(name, dtype=own)
    computed = compute_dtype(dtype, where, torch_dtype(own))
    quantized = source.gguf_file is None and quant_format(source.folder) is not None
    return Identity(source.digest, where.type, str(computed).removeprefix("torch."), quantized)


def _from_files(name: str, dtype: str, device: str | None) -> Identity | None:
    folder = Path(name).expanduser()
    run = RunFolder(folder)
    if run.recipe.is_file() and run.checkpoint.is_dir():
        folder = run.checkpoint
    if device not in (None, "auto", "cpu") or any(Path(file).exists() for file in ACCELERATORS):
        return None
    if not (folder / "config.json").is_file():
        return None
    quantized = (folder / "hf_quant_config.json").is_file()
    quantized = quantized or bool(read_json(folder / "config.json").get("quantization_config"))
    return Identity(model_digest(folder), "cpu", "float32" if dtype == "auto" else dtype, quantized)


class Side:
    """A model and what opens it."""

    def __init__(
        self,
        digest: str,
        device: str,
        dtype: str,
        opener: Callable[[], Loaded],
        describer: Callable[[], Described],
        *,
        candidate: bool = False,
    ) -> None:
        """Takes what identifies the model.

        Args:
            digest: Of its files.
            device: Kind of device it will be on: cpu or cuda.
            dtype: What it will compute in.
            opener: Loads it.
            describer: Describes it for an engine that loads it itself.
            candidate: Whether a server that serves two models has it as the candidate.
        """
        self.digest, self.device, self.dtype = digest, device, dtype
        self._opener, self._describer, self._candidate = opener, describer, candidate
        self._loaded: Loaded | None = None
        self._described: Described | None = None
        self._backend: Backend | None = None
        self._served: str | None = None

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

    def described(self) -> Described:
        """What is known of it without loading it, made at the first call."""
        if self._described is None:
            self._described = self._describer()
        return self._described

    def free(self) -> None:
        """Forgets the loaded model, so that its memory can be used again."""
        held, self._loaded = self._loaded is not None or self._backend is not None, None
        self._backend = None
        if held and self.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def key(self, spec: TaskSpec, settings: EvaluateSpec, repeat: int = 0) -> str:
        """See eval.evaluate.settings_key."""
        device, dtype = self._where(settings)
        served = self._server(settings)
        return settings_key(spec, settings, self.digest, device=device, dtype=dtype, repeat=repeat, served=served)

    def _server(self, settings: EvaluateSpec) -> str | None:
        """What the server says of itself, asked once; None where none is asked."""
        if settings.server is not None and self._served is None:
            from halfbyte.eval.served import served_by

            self._served = served_by(settings, candidate=self._candidate)
        return self._served

    def _where(self, settings: EvaluateSpec) -> tuple[str, str]:
        """Device and type as far as they are chosen here."""
        return {"hf": (self.device, self.dtype), "vllm": (self.device, settings.dtype)}.get(
            settings.backend, (settings.backend, settings.backend)
        )

    def evaluate(
        self, spec: TaskSpec, settings: EvaluateSpec, output: Path, data_root: Path | None, repeat: int = 0
    ) -> EvaluationRecord:
        """Computes a record, in the place of what is there; see eval.evaluate.evaluate_task."""
        if settings.backend != "hf":
            described = self.described()
            device, dtype = self._where(settings)
            return evaluate_backend(
                lambda: self._opened_backend(settings, described),
                spec,
                settings,
                described.summary,
                output,
                data_root,
                device=device,
                dtype=dtype,
                replace=True,
                repeat=repeat,
                served=self._server(settings),
            )
        model = self.loaded()
        return evaluate_task(
            model.model,
            model.tokenizer,
            spec,
            settings,
            model.summary,
            output,
            data_root,
            replace=True,
            repeat=repeat,
        )

    def _opened_backend(self, settings: EvaluateSpec, described: Described) -> Backend:
        from halfbyte.eval.opening import open_backend  # torch and lm-eval take seconds

        if self._backend is None:
            self._backend = opened = open_backend(settings, described, candidate=self._candidate)
            found = getattr(getattr(opened, "served", None), "name", None)
            if found != self._server(settings):
                raise UserError(f"the server was {self._server(settings)} and now is {found}", "run it again")
        return self._backend


def cached_records(side: Side, settings: EvaluateSpec, data_root: Path | None, repeat: int = 0) -> list[Path]:
    """The records of a baseline in the shared cache, one a task; what is there and whole is not computed again.

    Of two processes that want the same record one computes it and the other waits for it. A record whose content has
    changed since it was written is computed again.

    Args:
        side: The model.
        settings: The recipe's evaluate block.
        data_root: Where data sets are looked up first.
        repeat: See eval.evaluate.evaluate_backend.
    """
    found = []
    for spec in settings.tasks:
        output = cached_folder(side, spec, settings, repeat)
        with locked(output):
            if _cached_record(output, side.key(spec, settings, repeat), settings, data_root) is None:
                side.evaluate(spec, settings, output, data_root, repeat)
            else:
                logger.info("%s: done already", spec.task)
            mark_used(output)
        found.append(output)
    return found


def cached_folder(side: Side, spec: TaskSpec, settings: EvaluateSpec, repeat: int = 0) -> Path:
    """Where the shared cache has the record of a model on a task."""
    return evaluation_folder(side.digest, spec.task, side.key(spec, settings, repeat))


def whole_record(output: Path, key: str, settings: EvaluateSpec, data_root: Path | None) -> EvaluationRecord | None:
    """The record in `output` where it is the one of that key.

    Raises:
        DamagedRecord: when its content has changed since it was written.
    """
    record = usable_record(output, key, settings, find_root(data_root))
    return record and verify_content(output)


def _whole(output: Path) -> bool:
    """Whether a record is as it was written; says so where it is not, and will be replaced."""
    try:
        verify_content(output)
    except DamagedRecord as damage:
        logger.warning("%s; evaluating again", damage.message)
        return False
    return True


def _cached_record(output: Path, key: str, settings: EvaluateSpec, data_root: Path | None) -> EvaluationRecord | None:
    """As whole_record, for a folder of the shared cache: a damaged record is deleted, to be computed again."""
    if output.is_dir() and not (output / RECORD_FILE).is_file():
        shutil.rmtree(output)  # what somebody's tidying left of one
    try:
        return whole_record(output, key, settings, data_root)
    except DamagedRecord as damage:
        logger.warning("%s; evaluating again", damage.message)
        shutil.rmtree(output)
        return None


def evaluate_into(
    output: Path, side: Side, settings: EvaluateSpec, data_root: Path | None, *, cached: bool
) -> list[Path]:
    """The records of a model in `output`/<task>; those that are there are kept, and nothing else is replaced.

    Args:
        output: The folder.
        side: The model.
        settings: The evaluate block.
        data_root: Where data sets are looked up first.
        cached: Whether records are taken from the shared cache and kept there: those of an original model, which may
            be the baseline of many.

    Raises:
        UserError: see eval.evaluate.evaluate_backend.
    """
    require_distinct(settings)
    root = find_root(data_root)
    folders = [output / spec.task for spec in settings.tasks]
    waiting = [
        (spec, folder)
        for spec, folder in zip(settings.tasks, folders, strict=True)
        if finished_record(folder, side.key(spec, settings), settings, root) is None or not _whole(folder)
    ]
    cached = cached and _writable(cache_folder())
    if cached:
        waiting = [pair for pair in waiting if not _taken(*pair, side, settings, data_root)]
    if waiting:
        from halfbyte.eval.resolve import require_tasks  # lm-eval takes seconds

        require_tasks(settings)
    for spec, folder in waiting:
        if cached:
            one = settings.model_copy(update={"tasks": [spec]})
            _copy(cached_records(side, one, data_root)[0], folder)
        else:
            side.evaluate(spec, settings, folder, data_root)
    return folders


def _taken(spec: TaskSpec, folder: Path, side: Side, settings: EvaluateSpec, data_root: Path | None) -> bool:
    """Whether the cache had the record, which now is in `folder` too."""
    cached = cached_folder(side, spec, settings)
    if not cached.is_dir():
        return False
    with locked(cached):
        if _cached_record(cached, side.key(spec, settings), settings, data_root) is None:
            return False
        mark_used(cached)
        logger.info("%s: out of the cache", spec.task)
        _copy(cached, folder)
    return True


def _writable(folder: Path) -> bool:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return os.access(there, os.W_OK)


def _copy(record: Path, folder: Path) -> None:
    with atomic_folder(folder) as partial:
        shutil.copytree(record, partial, dirs_exist_ok=True)


def own_records(side: Side, settings: EvaluateSpec, folder: Path, data_root: Path | None) -> list[Path]:
    """The records of a candidate in its run, one a task; what is there is not computed again."""
    found = []
    for spec in settings.tasks:
        key = side.key(spec, settings)
        output = folder / f"{spec.task}@{key[:16]}"
        bring_forward(output)
        with locked(output):
            if usable_record(output, key, settings, find_root(data_root)) is not None and _whole(output):
                logger.info("%s: done already", spec.task)
            else:
                side.evaluate(spec, settings, output, data_root)
        found.append(output)
    return found


def keep_copy(record: Path, folder: Path) -> Path:
    """Copies a record out of the cache into a run, which is then whole by itself; returns the copy."""
    copy = folder / record.name
    bring_forward(copy)
    if not (copy / RECORD_FILE).is_file() or load_record(copy).seal != load_record(record).seal:
        _copy(record, copy)
    return copy


def bring_forward(record: Path) -> None:
    """Makes room for the record of a task in a run: those of other settings (another limit, ...) are put aside.

    They are not deleted, since they may have taken hours: a run with the old settings finds them again.
    """
    aside = record.parent / ASIDE
    task = record.name.partition("@")[0]
    with disk_full_is_a_user_error(record):
        for other in sorted(record.parent.glob(f"{task}@*")) if record.parent.is_dir() else []:
            if other.name not in (record.name, record.name + PARTIAL):
                aside.mkdir(exist_ok=True)
                shutil.rmtree(aside / other.name, ignore_errors=True)
                os.replace(other, aside / other.name)
        if (aside / record.name).is_dir() and not record.exists():
            os.replace(aside / record.name, record)


def measure_noise(side: Side, settings: EvaluateSpec, records: Sequence[Path], data_root: Path | None) -> None:
    """Evaluates a baseline once more and writes what flips between the two beside each of its records.

    Args:
        side: The baseline.
        settings: The recipe's evaluate block.
        records: Its records, one a task.
        data_root: Where data sets are looked up first.
    """
    for first, second in zip(records, cached_records(side, settings, data_root, repeat=1), strict=True):
        known = load_noise(first)
        if known is None or known.second_key != load_record(second).key:
            noise_between(first, second).save(first)
