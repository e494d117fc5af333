"""One model on one task or group: lm-eval's files and the record, in a folder that appears when it is whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.recipes.data import FILE_FORMATS, dataset_digest, folder_digest
from halfbyte.recipes.data import data_root as find_root
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.digests import value_digest
from halfbyte.records.errors import UserError, disk_full_is_a_user_error
from halfbyte.records.files import PARTIAL, hold, replace_folder
from halfbyte.records.record import (
    OUR_TASKS,
    OWN_TASKS,
    RECORD_FILE,
    SCHEMA_VERSION,
    DamagedRecord,
    EvaluationRecord,
    ModelSummary,
    load_record,
    verify_content,
)

if TYPE_CHECKING:
    from halfbyte.eval.backend import Backend

TASKS = Path(__file__).resolve().parent / "tasks"
"""Our own task files, of which a record of one of these tasks keeps a digest."""


def settings_key(
    spec: TaskSpec,
    settings: EvaluateSpec,
    model_digest: str,
    *,
    device: str,
    dtype: str,
    repeat: int = 0,
    served: str | None = None,
) -> str:
    """What decides a record: the task, the settings, the model, and the packages that compute it. No torch needed.

    Args:
        spec: The task.
        settings: The settings all tasks share; `tasks`, `images`, `fidelity`, `canary`, `weights` and `allow_truncated`
            have no part in it. Nor has `include_path`, of whose content a record keeps a digest.
        model_digest: records.digests.model_digest of the model evaluated.
        device: Kind of device: cpu, cuda.
        dtype: Type to compute in, as resolved: bfloat16, float16, float32.
        repeat: See evaluate_task.
        served: See evaluate_backend.
    """
    without_effect = {"tasks", "images", "fidelity", "canary", "dtype", "weights", "allow_truncated", "include_path"}
    shared = settings.model_dump(mode="json", exclude=without_effect)
    if settings.server is not None:
        shared["server"] = settings.server.api, served  # the same engine answers the same, wherever it runs
    packages = {name: version(name) for name in ("halfbyte", "lm-eval", "transformers", "torch", "nvidia-modelopt")}
    if settings.backend == "vllm":
        packages["vllm"] = _version("vllm")
    asked = [spec.model_dump(mode="json"), shared, model_digest, device, dtype, packages]
    return value_digest([*asked, SCHEMA_VERSION, repeat])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def data_digests(names: Iterable[str], root: Path | None, include_path: str | None = None) -> dict[str, str]:
    """The digests a record keeps of its data: of the data sets `names`, and of task files.

    Args:
        names: Of data sets; OUR_TASKS for our own task files, OWN_TASKS for those of the user.
        root: See recipes.data.data_root.
        include_path: The user's folder of tasks.
    """
    folders = {OUR_TASKS: TASKS} | ({} if include_path is None else {OWN_TASKS: Path(include_path).expanduser()})
    digests = {name: dataset_digest(name, root) for name in names if name not in (*FILE_FORMATS, OUR_TASKS, OWN_TASKS)}
    return digests | {name: folder_digest(folder) for name, folder in folders.items() if name in names}


def usable_record(output: Path, key: str, settings: EvaluateSpec, root: Path | None) -> EvaluationRecord | None:
    """The record in `output` where it is the one of that key and its data is as it was. No torch needed.

    Raises:
        UserError: when prompts were cut for it and that is no longer allowed.
    """
    if not (output / RECORD_FILE).is_file():
        return None
    record = load_record(output)
    if record.key != key or record.data != data_digests(record.data, root, settings.include_path):
        return None
    if record.health.truncated and not settings.allow_truncated:
        raise UserError(
            f"{record.health.truncated} prompts of task '{record.task}' were cut, and that is not allowed",
            "raise max_length, ask with fewer examples, or set evaluate.allow_truncated",
        )
    return record


def evaluate_task(
    model: Any,
    tokenizer: Any,
    spec: TaskSpec,
    settings: EvaluateSpec,
    summary: ModelSummary,
    output: Path,
    data_root: Path | None = None,
    *,
    replace: bool = False,
    repeat: int = 0,
) -> EvaluationRecord:
    """Evaluates a loaded model on a task; see evaluate_backend.

    Args:
        model: A causal LM of transformers, on its device, in the type to compute in.
        tokenizer: Its tokenizer.
        spec: See evaluate_backend, as all others.
        settings: The settings all tasks share.
        summary: Which model this is.
        output: The record's folder.
        data_root: See recipes.data.data_root.
        replace: Whether another record there is replaced.
        repeat: 1 for the second evaluation of a baseline.
    """

    def backend() -> Backend:
        from halfbyte.eval.hf import HFBackend
        from halfbyte.eval.resolve import quiet_lm_eval

        def open_with(size: int | None, tokens: int | None) -> HFBackend:
            with quiet_lm_eval():
                return HFBackend(model, tokenizer, batch_size=size, batch_tokens=tokens, max_length=settings.max_length)

        usual = open_with(settings.batch_size, settings.batch_tokens)
        return open_with(_other(usual.generator.most), _other(usual.scorer.budget)) if repeat else usual

    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer names no token that ends a text", "name its eos_token in tokenizer_config.json")
    dtype = str(model.dtype).removeprefix("torch.")
    return evaluate_backend(
        backend,
        spec,
        settings,
        summary,
        output,
        data_root,
        device=model.device.type,
        dtype=dtype,
        replace=replace,
        repeat=repeat,
    )


def _other(size: int) -> int:
    """Five eighths: batches that hold other neighbours, and are still large enough to be quick."""
    return max(1, size * 5 // 8) if size > 1 else 2


def evaluate_backend(
    backend: Callable[[], Backend],
    spec: TaskSpec,
    settings: EvaluateSpec,
    summary: ModelSummary,
    output: Path,
    data_root: Path | None = None,
    *,
    device: str,
    dtype: str,
    replace: bool = False,
    repeat: int = 0,
    served: str | None = None,
) -> EvaluationRecord:
    """Evaluates on a task; returns the record `output` holds already where it is of the same settings.

    A run that was cut short goes on from its last whole batch, kept in `<output>.partial`.

    Args:
        backend: Opens what answers; called only where something must be computed.
        spec: The task.
        settings: The settings all tasks share.
        summary: Which model this is; goes into the record.
        output: The record's folder.
        data_root: See recipes.data.data_root.
        device: Kind of device: cpu, cuda.
        dtype: Type to compute in, as far as it is chosen here.
        replace: Evaluate again where `output` holds a record of other settings or another model, and replace it.
        repeat: 1 for the second evaluation of a baseline: the same questions and prompts in other batches, with other
            seeds for samples that are drawn.
        served: See served.served_by; None where no server answers.

    Raises:
        UserError: for an unknown task or metric, data that is not to be had, settings that have no effect on the
            task, nothing to evaluate, prompts that do not fit, and an `output` that holds another record.
    """
    key = settings_key(spec, settings, summary.digest, device=device, dtype=dtype, repeat=repeat, served=served)
    root = find_root(data_root)
    done = finished_record(output, key, settings, root, replace=replace)
    if done is not None:
        return done
    with resumable_folder(output) as partial:
        from halfbyte.eval.recording import record_of  # lm-eval takes seconds

        record = record_of(backend(), spec, settings, summary, partial, root, key=key, repeat=repeat, served=served)
        record.save(partial)
    return record


def finished_record(
    output: Path, key: str, settings: EvaluateSpec, root: Path | None, *, replace: bool = False
) -> EvaluationRecord | None:
    """The record in `output` when it is the one wanted; publishes one that was whole when its process was killed.

    Raises:
        UserError: when something else is there and is not to be replaced.
    """
    partial = output.with_name(output.name + PARTIAL)
    blocking = next((path for path in (output, *output.parents) if path.exists()), None)
    if blocking is not None and not blocking.is_dir():
        raise UserError(f"cannot write {output}: {blocking} is a file", "choose another --output")
    if (output / RECORD_FILE).exists():
        record = usable_record(output, key, settings, root)
        if record is not None and not (replace and _is_damaged(output)):
            return record
        if not replace:
            record = load_record(output)
            raise UserError(
                f"{output} holds a record of task '{record.task}' made with other settings, packages, data or another "
                f"model ({record.model.name})",
                "give another --output, or delete that folder",
            )
    elif output.exists() and any(output.iterdir()):
        raise UserError(f"{output} exists and is not an evaluation record", "give another --output")
    record = usable_record(partial, key, settings, root)
    if record is not None:
        _publish(partial, output)
    return record


def _is_damaged(output: Path) -> bool:
    try:
        verify_content(output)
    except DamagedRecord:
        return True
    return False


@contextmanager
def resumable_folder(output: Path) -> Iterator[Path]:
    """A folder to work in that keeps its journals over a kill and becomes `output` at the end.

    Not records.files.atomic_folder, which starts afresh each time.
    """
    partial = output.with_name(output.name + PARTIAL)
    with disk_full_is_a_user_error(output):
        partial.mkdir(parents=True, exist_ok=True)
        with _held(partial):
            for path in partial.iterdir():
                if not path.name.startswith("journal-"):
                    path.unlink()  # result files of a process that was killed while it wrote them
            yield partial
            _publish(partial, output)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keeps a second process, whose answers would mix with ours, out of a folder; a kill frees it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        message = f"another process evaluates into {folder.with_suffix('')}"
        hold(descriptor, message, "wait for it, or give another --output")
        yield
    finally:
        os.close(descriptor)


def _publish(partial: Path, output: Path) -> None:
    for path in partial.glob("journal-*"):
        path.unlink()
    replace_folder(partial, output)
