"""Writes small record folders as `halfbyte eval` would: record.json beside samples_*.jsonl in lm-eval's layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from halfbyte.records.fidelity import FidelityRecord, Window
from halfbyte.records.manifest import Manifest
from halfbyte.records.record import (
    EvaluationRecord,
    Fingerprint,
    Health,
    MemoryKind,
    Metric,
    ModelSummary,
    SubtaskFingerprint,
)
from halfbyte.records.run import RunFolder
from halfbyte.records.training import CURVES_FILE, OverlapFound, TrainingRecord, Validation

CHOICES = ("red", "green", "blue", "yellow")
Edit = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def model(format: str = "bfloat16", name: str | None = None) -> ModelSummary:
    bits = {"bfloat16": 16.0, "FP8": 9.2, "NVFP4": 6.1}.get(format, 16.0)
    return ModelSummary(
        name=name or f"models/{format}",
        digest=digest(name or format),
        format=format,
        bytes_on_disk=int(134.5e6 * bits / 8),
        bits_per_weight=bits,
    )


def sample(doc_id: int, value: Any, metric: str = "acc", question: str | None = None) -> dict[str, Any]:
    """A four-choice line; the right choice is the first, and a wrong answer takes the second."""
    question = question or f"Which colour has the number {doc_id}?"
    prompt = f"Question: {question}\nAnswer:"
    best = 0 if value else 1
    scores = [["-1.0" if i == best else "-5.0", "False"] for i in range(len(CHOICES))]
    return {
        "doc_id": doc_id,
        "doc": {"question": question, "choices": list(CHOICES), "answer": 0},
        "target": "0",
        "arguments": {f"gen_args_{i}": {"arg_0": prompt, "arg_1": f" {c}"} for i, c in enumerate(CHOICES)},
        "resps": [[score] for score in scores],
        "filtered_resps": scores,
        "filter": "none",
        "metrics": [metric],
        "doc_hash": digest(question),
        "prompt_hash": digest(prompt),
        "target_hash": digest("0"),
        metric: value,
    }


def write_record(
    folder: Path,
    values: Sequence[Any] | dict[str, Sequence[Any]],
    *,
    task: str = "colours",
    metric: str = "acc",
    higher_is_better: bool = True,
    format: str = "bfloat16",
    of: ModelSummary | None = None,
    edit: Edit | None = None,
    questions: Callable[[int], str] | None = None,
    subtask: dict[str, Any] | None = None,
    reported: float | None = None,
    health: Health | None = None,
    packages: dict[str, str | None] | None = None,
    memory: tuple[int, MemoryKind] | None = None,
    more: Sequence[Metric] = (),
    **fingerprint: Any,
) -> Path:
    """Writes a record.

    Args:
        values: One value a question; by subtask for a group.
        edit: Changes the sample lines of each subtask after the record was counted, as damage would.
        questions: The text of each question.
        subtask: Fields of each subtask's fingerprint.
        reported: The metric's value as recorded, where it is not the mean.
        memory: Peak memory in bytes, and what it is of.
        more: Further figures of the task.
        fingerprint: Fields of the fingerprint.
    """
    groups = values if isinstance(values, dict) else {task: values}
    folder.mkdir(parents=True, exist_ok=True)
    subtasks, files, metrics = {}, {}, []
    for name, row in groups.items():
        lines = [sample(i, value, metric, questions(i) if questions else f"{name} {i}?") for i, value in enumerate(row)]
        subtasks[name] = SubtaskFingerprint(
            **{
                "version": "1.0",
                "num_fewshot": 0,
                "questions": len(lines),
                "documents": digest("".join(line["doc_hash"] for line in lines)),
                "prompts": digest("".join(line["prompt_hash"] for line in lines)),
                "targets": digest("".join(line["target_hash"] for line in lines)),
                "output_type": "multiple_choice",
                **(subtask or {}),
            }
        )
        files[name] = f"samples_{name}_2026-11-01T00-00-00.jsonl"
        mean = sum(float(value) for value in row) / len(row) if row else 0.0
        metrics.append(
            Metric(
                subtask=name,
                metric=metric,
                filter="none",
                value=mean if reported is None else reported,
                higher_is_better=higher_is_better,
                questions=len(row),
            )
        )
        written = edit(lines) if edit else lines
        (folder / files[name]).write_text(
            "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in written), encoding="utf-8"
        )
    EvaluationRecord(
        created="2026-11-01T00:00:00+00:00",
        model=of or model(format),
        fingerprint=Fingerprint(**{"task": task, "subtasks": subtasks, "bos_per_prompt": [0], **fingerprint}),
        primary=[metric, "none"],
        metrics=[*metrics, *more],
        health=health or Health(),
        results_file="results_2026-11-01T00-00-00.json",
        samples_files=files,
        packages=packages or {"torch": "2.13.0"},
        hardware={"machine": "x86_64"},
        seconds=1.0,
        tokens=100,
        memory_bytes=memory[0] if memory else None,
        memory_kind=memory[1] if memory else None,
    ).save(folder)
    return folder


def flipped(questions: int, right: int, lost: int, gained: int) -> tuple[list[float], list[float]]:
    """Outcomes of a baseline with `right` right answers and of a candidate that lost and gained so many."""
    baseline = [1.0] * right + [0.0] * (questions - right)
    candidate = [0.0] * lost + [1.0] * (right - lost + gained) + [0.0] * (questions - right - gained)
    return baseline, candidate


def fidelity(
    windows: int = 40, factor: float = 1.05, baseline: ModelSummary | None = None, candidate: ModelSummary | None = None
) -> FidelityRecord:
    """A record whose candidate has about `factor` times the baseline's perplexity."""
    from math import exp, log

    rows = [
        Window(
            tokens=2047,
            kl=2047 * 0.03 * (1 + i % 5 / 10),
            agree=1900 - i,
            baseline_nll=2047 * (2.9 + i % 7 / 20),
            candidate_nll=2047 * (2.9 + i % 7 / 20 + log(factor) + (i % 3 - 1) / 200),
        )
        for i in range(windows)
    ]
    tokens = sum(row.tokens for row in rows)
    return FidelityRecord(
        created="2026-11-01T00:00:00+00:00",
        baseline=baseline or model(),
        candidate=candidate or model("NVFP4"),
        text="Salesforce/wikitext, test",
        text_digest=digest("text"),
        window=2048,
        dtype="float32",
        windows=rows,
        tokens=tokens,
        kl=sum(row.kl for row in rows) / tokens if tokens else 0.0,
        top1_agreement=sum(row.agree for row in rows) / tokens if tokens else 0.0,
        baseline_perplexity=exp(sum(row.baseline_nll for row in rows) / tokens) if tokens else 1.0,
        candidate_perplexity=exp(sum(row.candidate_nll for row in rows) / tokens) if tokens else 1.0,
    )


def write_training(
    folder: Path,
    method: Literal["qat", "qad"] = "qad",
    *,
    seed: int = 1,
    steps: int = 40,
    best_step: int = 30,
    stopped: str = "max_steps",
    overlap: OverlapFound | None = None,
    key: str = "",
) -> TrainingRecord:
    """Writes training.json and curves.jsonl as a training of so many steps would, with a validation each ten."""
    folder.mkdir(parents=True, exist_ok=True)
    qad = method == "qad"
    validations = [
        Validation(step=i, loss=3.5 - i / 100, kl=0.4 - i / 200 if qad else None) for i in range(0, steps + 1, 10)
    ]
    lines: list[dict[str, Any]] = [
        {
            "step": i, "tokens": 1000 * i, "loss": (0.5 if qad else 4.0) - i / 200, "learning_rate": 1e-5,
            "grad_norm": 1.0, "seconds": i / 4,
        }
        for i in range(1, steps + 1)
    ]  # fmt: skip
    lines += [
        {"step": one.step, "tokens": 1000 * one.step, "validation_loss": one.loss, "validation_kl": one.kl}
        for one in validations
    ]
    (folder / CURVES_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    record = TrainingRecord(
        created="2026-11-01T00:00:00+00:00",
        key=key,
        method=method,
        seed=seed,
        steps=steps,
        best_step=best_step,
        stopped=stopped,
        start=validations[0],
        best=next(one for one in validations if one.step == best_step),
        tokens=1000 * steps,
        seconds=steps / 4,
        teacher="models/bf16" if qad else None,
        data={"texts": digest("texts")},
        overlap=overlap,
    )
    record.save(folder)
    return record


def write_run(
    root: Path,
    values: Sequence[Any] | dict[str, Sequence[Any]],
    *,
    of: ModelSummary,
    baseline: ModelSummary | None = None,
    baseline_values: Sequence[Any] | dict[str, Sequence[Any]] | None = None,
    preset: str = "nvfp4_default",
    train: str = "null",
    **record: Any,
) -> RunFolder:
    """Writes a run folder with the records of a candidate and its baseline, as `halfbyte run` leaves it."""
    run, before = RunFolder(root), baseline or model()
    write_record(run.evaluations(of.digest) / "task", values, of=of, **record)
    if baseline_values is not None:
        write_record(run.evaluations(before.digest) / "task", baseline_values, of=before, **record)
    run.recipe.write_text(
        f"gate: {{policy: release}}\nquantize: {{preset: {preset}}}\ntrain: {train}\n", encoding="utf-8"
    )
    Manifest(
        recipe=root.name,
        recipe_digest=digest("recipe"),
        model=before.name,
        model_digest=before.digest,
        checkpoint_digest=of.digest,
    ).save(run.manifest)
    return run
