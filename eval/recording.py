"""Asks a task of a backend and makes the record: lm-eval's files, what was asked, and how each text ended."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

from lm_eval.utils import hash_string, sanitize_model_name

from halfbyte.eval import results as files
from halfbyte.eval.backend import Backend
from halfbyte.eval.evaluate import data_digests
from halfbyte.eval.lm import JournaledLM
from halfbyte.eval.memory import PeakMemory
from halfbyte.eval.questions import Questions
from halfbyte.eval.resolve import origin
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.errors import UserError
from halfbyte.records.manifest import hardware, now, package_versions
from halfbyte.records.record import UNKNOWN, EvaluationRecord, Fingerprint, Health, ModelSummary, Speed


def record_of(
    backend: Backend,
    spec: TaskSpec,
    settings: EvaluateSpec,
    summary: ModelSummary,
    folder: Path,
    root: Path | None,
    *,
    key: str,
    repeat: int = 0,
    served: str | None = None,
) -> EvaluationRecord:
    """The record of one evaluation, whose other files are written into `folder`; it is still to be saved.

    Args:
        backend: What answers.
        spec: The task.
        settings: What all tasks share.
        summary: The model.
        folder: Where the journals are and the files go.
        root: The data root.
        key: See evaluate.settings_key.
        repeat: See evaluate.evaluate_backend.
        served: See evaluate.evaluate_backend.

    Raises:
        UserError: see evaluate.evaluate_backend.
    """
    if settings.apply_chat_template and not backend.chat_template(True):
        raise UserError(
            "apply_chat_template is set, but the tokenizer has no chat template",
            "evaluate without it, or add chat_template.jinja to the model folder",
        )
    start = time.perf_counter()
    questions = Questions(spec, settings, root)
    questions.warn_of_a_missing_template(backend.tokenizer)
    lm = JournaledLM(
        backend,
        folder,
        key,
        seed=settings.seed + repeat,
        label=spec.task,
        allow_truncated=settings.allow_truncated,
    )
    peak = PeakMemory(backend)
    results = questions.ask(lm)
    memory = peak.bytes() if lm.spent else None  # else all answers came from the journal
    seconds = time.perf_counter() - start
    samples: dict[str, list[dict[str, Any]]] = results["samples"]
    _describe(results, lm, settings, summary, seconds)
    metrics = files.metrics_of(results, spec.task)
    if not metrics or not all(samples.values()):
        raise UserError(f"task '{spec.task}' gave nothing to score", "check its data set and --limit")
    primary = files.primary_metric(spec.metric, metrics)
    files.add_proof(questions.tasks, samples, lm)
    date = datetime.now().isoformat().replace(":", "-")
    used = [*questions.datasets, *origin(spec.task, settings.include_path)]
    return EvaluationRecord(
        created=now(),
        key=key,
        model=summary,
        fingerprint=_fingerprint(questions, lm, samples),
        primary=primary,
        metrics=metrics,
        health=health_of(questions, lm, samples, primary[1]),
        results_file=files.write_results(folder, date, results),
        samples_files=files.write_samples(folder, date, samples),
        packages=package_versions(),
        hardware=hardware(),
        seconds=seconds,
        tokens=lm.tokens,
        speed=_speed(lm),
        memory_bytes=memory,
        memory_kind=None if memory is None else peak.kind,
        served=served,
        repeat=repeat,
        data=data_digests(used, root, settings.include_path),
    )


def _fingerprint(questions: Questions, lm: JournaledLM, samples: dict[str, list[dict[str, Any]]]) -> Fingerprint:
    settings, backend = questions.settings, lm.backend
    template = lm.chat_template(True) if settings.apply_chat_template else None
    return Fingerprint(
        task=questions.spec.task,
        subtasks={name: files.subtask_fingerprint(task, samples[name]) for name, task in questions.tasks.items()},
        limit=questions.spec.limit,
        chat_template=UNKNOWN if template == UNKNOWN else files.template_digest(template),
        system_prompt=files.template_digest(settings.system_prompt),
        bos_per_prompt=sorted({count for one in lm.book.asked.values() for count in one.bos}) or list(backend.bos),
        max_length=lm.max_length,
        backend=backend.name,
        engine=backend.engine,
        dtype=backend.dtype,
        seeds=dict.fromkeys(("python", "numpy", "torch", "fewshot"), settings.seed),
    )


def health_of(
    questions: Questions, lm: JournaledLM, samples: dict[str, list[dict[str, Any]]], filter_name: str
) -> Health:
    """What the counts of a record say; see records.record.Health."""
    asked = lm.book.asked.values()
    caps = {
        name: files.generation_settings(task)["max_gen_toks"]
        for name, task in questions.tasks.items()
        if task.OUTPUT_TYPE == "generate_until"
    }
    texts = [(caps[task], one) for (task, _), some in lm.generated.items() for one in some]
    tells = any(one.stop is not None for _, one in texts)
    return Health(
        prompts=len(asked),
        truncated=sum(one.cut > 0 for one in asked),
        doubled=sum(one.doubled > 0 for one in asked),
        samples=len(texts) if texts else None,
        hit_cap=sum(one.stop == "length" and one.tokens >= cap for cap, one in texts) if tells else None,
        unexpected_stops=sum(
            one.stop is None or (one.stop == "length" and one.tokens < cap) for cap, one in texts
        ) if texts else None,
        empty=sum(not one.text.strip() for _, one in texts) if texts else None,
        unanswered=files.unanswered(samples, filter_name),
    )  # fmt: skip


def _speed(lm: JournaledLM) -> Speed:
    texts = [one.tokens for some in lm.generated.values() for one in some]

    def rate(*methods: str) -> float | None:
        spent = [lm.spent[method] for method in methods if method in lm.spent]
        seconds = sum(part for _, part in spent)
        return sum(tokens for tokens, _ in spent) / seconds if seconds > 0 else None

    return Speed(
        distinct_tokens=lm.distinct_tokens,
        scored_per_second=rate("loglikelihood", "loglikelihood_rolling"),
        generated_per_second=rate("generate_until"),
        generated_per_sample=sum(texts) / len(texts) if texts else None,
    )


def _describe(
    results: dict[str, Any], lm: JournaledLM, settings: EvaluateSpec, summary: ModelSummary, seconds: float
) -> None:
    """Adds what lm-eval's own writer adds to its results file."""
    template = lm.chat_template(True) if settings.apply_chat_template else None
    system = settings.system_prompt
    results["config"].update(model=lm.backend.name, model_args={"pretrained": summary.name})
    results["config"]["model_sha"] = summary.digest
    results.update(
        task_hashes=files.task_hashes(results["samples"]),
        model_source=lm.backend.name,
        model_name=summary.name,
        model_name_sanitized=sanitize_model_name(summary.name),
        system_instruction=system,
        system_instruction_sha=hash_string(system) if system else None,
        fewshot_as_multiturn=settings.apply_chat_template,
        chat_template=template,
        chat_template_sha=hash_string(template) if template else None,
        total_evaluation_time_seconds=str(seconds),
    )
