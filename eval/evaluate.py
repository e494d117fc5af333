"""One model on one task or group: lm-eval's files and the record, in a folder that appears when it is whole."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from halfbyte.recipes.data import data_root as find_root
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.digests import value_digest
from halfbyte.records.errors import UserError, disk_full_is_a_user_error, unknown_name
from halfbyte.records.files import PARTIAL, replace_folder
from halfbyte.records.manifest import hardware, now, package_versions
from halfbyte.records.record import (
    RECORD_FILE,
    EvaluationRecord,
    Fingerprint,
    Health,
    ModelSummary,
    load_record,
)


def settings_key(spec: TaskSpec, settings: EvaluateSpec, model_digest: str, *, device: str, dtype: str) -> str:
    """What decides a record: the task, the settings, the model, and the packages that compute it. No torch needed.

    Args:
        spec: The task.
        settings: The settings all tasks share; its `tasks`, `fidelity`, `canary` and `weights` have no part in it.
        model_digest: records.digests.model_digest of the model evaluated.
        device: Kind of device: cpu, cuda.
        dtype: Type to compute in, as resolved: bfloat16, float16, float32.
    """
    shared = settings.model_dump(mode="json", exclude={"tasks", "fidelity", "canary", "dtype", "weights"})
    packages = {name: version(name) for name in ("halfbyte", "lm-eval", "transformers", "torch", "nvidia-modelopt")}
    return value_digest([spec.model_dump(mode="json"), shared, model_digest, device, dtype, packages])


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
) -> EvaluationRecord:
    """Evaluates a loaded model on a task; returns the record `output` holds already where it is of the same settings.

    A run that was cut short goes on from its last whole batch, kept in `<output>.partial`.

    Args:
        model: A causal LM of transformers, on its device, in the type to compute in.
        tokenizer: Its tokenizer.
        spec: The task.
        settings: The settings all tasks share.
        summary: Which model this is; goes into the record.
        output: The record's folder.
        data_root: See recipes.data.data_root.
        replace: Evaluate again where `output` holds a record of other settings or another model, and replace it.

    Raises:
        UserError: for an unknown task or metric, data that is not to be had, settings that have no effect on the
            task, nothing to evaluate, and an `output` that holds another record.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    key = settings_key(spec, settings, summary.digest, device=model.device.type, dtype=dtype)
    done = _finished(output, key, replace=replace)
    if done is not None:
        return done
    with _resumable_folder(output) as partial:
        run = _Run(model, tokenizer, spec, settings, partial, key)
        record = run.evaluate(summary, find_root(data_root), dtype)
        record.save(partial)
    return record


def _finished(output: Path, key: str, *, replace: bool) -> EvaluationRecord | None:
    """The record in `output` when it is the one wanted; publishes one that was whole when its process was killed."""
    partial = output.with_name(output.name + PARTIAL)
    blocking = next((path for path in (output, *output.parents) if path.exists()), None)
    if blocking is not None and not blocking.is_dir():
        raise UserError(f"cannot write {output}: {blocking} is a file", "choose another --output")
    if (output / RECORD_FILE).exists():
        record = load_record(output)
        if record.key == key:
            return record
        if not replace:
            raise UserError(
                f"{output} holds a record of task '{record.task}' made with other settings, packages or another model "
                f"({record.model.name})",
                "give another --output, or delete that folder",
            )
    elif output.exists() and any(output.iterdir()):
        raise UserError(f"{output} exists and is not an evaluation record", "give another --output")
    if (partial / RECORD_FILE).exists():
        record = load_record(partial)
        if record.key == key:
            _publish(partial, output)
            return record
    return None


@contextmanager
def _resumable_folder(output: Path) -> Iterator[Path]:
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
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(
            f"another process evaluates into {folder.with_suffix('')}", "wait for it, or give another --output"
        ) from None
    finally:
        os.close(descriptor)


def _publish(partial: Path, output: Path) -> None:
    for path in partial.glob("journal-*"):
        path.unlink()
    replace_folder(partial, output)


class _Run:
    """One evaluation on its way into `folder`."""

    def __init__(
        self, model: Any, tokenizer: Any, spec: TaskSpec, settings: EvaluateSpec, folder: Path, key: str
    ) -> None:
        from halfbyte.eval.hf import HFBackend
        from halfbyte.eval.lm import JournaledLM
        from halfbyte.eval.resolve import quiet_lm_eval

        if settings.apply_chat_template and not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "apply_chat_template is set, but the tokenizer has no chat template",
                "evaluate without it, or add chat_template.jinja to the model folder",
            )
        if tokenizer.eos_token_id is None:
            raise UserError(
                "the tokenizer names no token that ends a text", "name its eos_token in tokenizer_config.json"
            )
        self.spec = spec
        self.settings = settings
        self.folder = folder
        self.key = key
        with quiet_lm_eval():
            backend = HFBackend(
                model,
                tokenizer,
                batch_size=settings.batch_size,
                batch_tokens=settings.batch_tokens,
                max_length=settings.max_length,
            )
        self.lm = JournaledLM(backend, folder, key, seed=settings.seed, label=spec.task)

    def evaluate(self, summary: ModelSummary, root: Path | None, dtype: str) -> EvaluationRecord:
        """Runs lm-eval, writes its files and returns the record, which is still to be saved."""
        from halfbyte.eval import results as files
        from halfbyte.eval.resolve import load_task

        start = time.perf_counter()
        loaded = load_task(self.spec.task, root, self.settings.seed)
        tasks = _leaves(loaded)
        gen_kwargs = self._check(tasks)
        results = self._lm_eval(loaded, gen_kwargs)
        samples: dict[str, list[dict[str, Any]]] = results["samples"]
        seconds = time.perf_counter() - start
        self._describe(results, summary, seconds)
        metrics = files.metrics_of(results, self.spec.task)
        if not metrics or not all(samples.values()):
            raise UserError(f"task '{self.spec.task}' gave nothing to score", "check its data set and --limit")
        primary = files.primary_metric(self.spec.metric, metrics)
        date = datetime.now().isoformat().replace(":", "-")
        sample_files = files.write_samples(self.folder, date, samples)
        asked = self.lm.book.asked.values()
        generated = [one for samples in self.lm.generated.values() for one in samples]
        template = self.lm.chat_template(True) if self.settings.apply_chat_template else None
        return EvaluationRecord(
            created=now(),
            key=self.key,
            model=summary,
            fingerprint=Fingerprint(
                task=self.spec.task,
                subtasks={
                    name: files.subtask_fingerprint(task, samples[name], self.lm.backend.max_gen_toks)
                    for name, task in tasks.items()
                },
                limit=self.spec.limit,
                chat_template=files.template_digest(template),
                system_prompt=files.template_digest(self.settings.system_prompt),
                bos_per_prompt=sorted({count for one in asked for count in one.bos}),
                max_length=self.lm.max_length,
                backend=self.settings.backend,
                dtype=dtype,
                seeds=self._seeds(),
            ),
            primary=primary,
            metrics=metrics,
            health=Health(
                truncated=sum(one.cut > 0 for one in asked),
                hit_cap=sum(one.stop == "length" for one in generated) if generated else None,
                empty=sum(not one.text.strip() for one in generated) if generated else None,
                unanswered=files.unanswered(tasks, samples, primary[1]),
            ),
            results_file=files.write_results(self.folder, date, results),
            samples_files=sample_files,
            packages=package_versions(),
            hardware=hardware(),
            seconds=seconds,
            tokens=self.lm.tokens,
        )

    def _seeds(self) -> dict[str, int]:
        return dict.fromkeys(("python", "numpy", "torch", "fewshot"), self.settings.seed)

    def _check(self, tasks: dict[str, Any]) -> dict[str, Any] | None:
        """The generation settings to apply; refuses settings that lm-eval would drop without a word."""
        known = {
            f"{metric},{entry.name}"
            for task in tasks.values()
            for metric in task.aggregation()
            for entry in task._filters
        }
        wanted = self.spec.metric
        if wanted is not None and not any(wanted in (name, name.partition(",")[0]) for name in known):
            raise unknown_name("metric", wanted, known)
        shots = self.spec.num_fewshot
        fixed = [name for name, task in tasks.items() if task.config.num_fewshot == 0]
        if shots and fixed:
            raise UserError(
                f"task '{fixed[0]}' is defined with no examples; num_fewshot {shots} would have no effect",
                "leave num_fewshot out for this task",
            )
        if self.spec.gen_kwargs is None:
            return None
        if not any(task.OUTPUT_TYPE == "generate_until" for task in tasks.values()):
            raise UserError(
                f"task '{self.spec.task}' generates nothing; gen_kwargs would have no effect", "leave gen_kwargs out"
            )
        given = dict(self.spec.gen_kwargs)
        if float(given.get("temperature") or 0.0) > 0:
            given.setdefault("do_sample", True)  # else a task's own do_sample: false sets the temperature back to 0
        return given

    def _lm_eval(self, loaded: list[Any], gen_kwargs: dict[str, Any] | None) -> dict[str, Any]:
        from lm_eval import simple_evaluate

        from halfbyte.eval.resolve import find_manager, quiet_lm_eval

        seed = self.settings.seed
        try:
            with quiet_lm_eval():
                results = simple_evaluate(
                    model=self.lm,
                    tasks=loaded,
                    num_fewshot=self.spec.num_fewshot,
                    batch_size=self.settings.batch_size,
                    device=str(self.lm.device),
                    limit=self.spec.limit,
                    log_samples=True,
                    system_instruction=self.settings.system_prompt,
                    apply_chat_template=self.settings.apply_chat_template,
                    fewshot_as_multiturn=self.settings.apply_chat_template,
                    gen_kwargs=gen_kwargs,
                    task_manager=find_manager(self.spec.task),
                    random_seed=seed,
                    numpy_random_seed=seed,
                    torch_random_seed=seed,
                    fewshot_random_seed=seed,
                )
        except ValueError as error:
            if "did not find any docs" not in str(error):
                raise
            raise UserError(f"task '{self.spec.task}' has no question", "check its data set and --limit") from error
        return cast(dict[str, Any], results)

    def _describe(self, results: dict[str, Any], summary: ModelSummary, seconds: float) -> None:
        """Adds what lm-eval's own writer adds to its results file."""
        from lm_eval.utils import hash_string, sanitize_model_name

        from halfbyte.eval.results import task_hashes

        template = self.lm.chat_template(True) if self.settings.apply_chat_template else None
        system = self.settings.system_prompt
        results["config"].update(model=self.settings.backend, model_args={"pretrained": summary.name})
        results["config"]["model_sha"] = summary.digest
        results.update(
            task_hashes=task_hashes(results["samples"]),
            model_source=self.settings.backend,
            model_name=summary.name,
            model_name_sanitized=sanitize_model_name(summary.name),
            system_instruction=system,
            system_instruction_sha=hash_string(system) if system else None,
            fewshot_as_multiturn=self.settings.apply_chat_template,
            chat_template=template,
            chat_template_sha=hash_string(template) if template else None,
            total_evaluation_time_seconds=str(seconds),
        )


def _leaves(loaded: list[Any]) -> dict[str, Any]:
    """The tasks in a list of tasks and groups, by name."""
    tasks: dict[str, Any] = {}
    for entry in loaded:
        for task in entry.get_all_tasks() if hasattr(entry, "get_all_tasks") else [entry]:
            tasks[task.task_name] = task
    return tasks
