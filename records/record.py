"""The evaluation record: one evaluation of one model on one task, with the fingerprint that makes two comparable.

A record is a folder: record.json beside lm-eval's own results_*.json and samples_*.jsonl. record.json is written
last, so a folder that has one is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from halfbyte.records.errors import UserError
from halfbyte.records.files import read_as, write_json

RECORD_FILE = "record.json"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ModelSummary(_Strict):
    """Which model was evaluated, and what it weighs."""

    name: str
    """Hub id or folder, for people."""
    digest: str
    """Digest of its files: the identity."""
    format: str
    """"bfloat16" and the like, or the checkpoint's algorithm: "FP8", "NVFP4", "NVFP4 + FP8 KV"."""
    bytes_on_disk: int
    """Size of the weight files."""
    bits_per_weight: float
    """8 x bytes_on_disk / number of weights (a tied weight counts once)."""


class SubtaskFingerprint(_Strict):
    """What was asked in one (sub)task. Digests are over the per-question hashes in the order of doc_id."""

    version: str
    """The task definition's version."""
    num_fewshot: int
    questions: int
    documents: str
    prompts: str
    targets: str
    output_type: str
    """lm-eval's: loglikelihood, multiple_choice, generate_until, loglikelihood_rolling."""
    generation: dict[str, Any] | None = None
    """Generation settings as applied: until, max_gen_toks, temperature, ...; None where nothing is generated."""
    repeats: int = 1
    chance: float | None = None
    """Accuracy of choosing at random, the mean of 1 / choices; None where nothing is chosen."""


class Fingerprint(_Strict):
    """What makes two records comparable: all of it must agree, but for the model."""

    task: str
    subtasks: dict[str, SubtaskFingerprint]
    limit: int | None = None
    """Questions a subtask was cut to; None for all."""
    chat_template: str | None = None
    """SHA-256 of the chat template applied; None when none was."""
    system_prompt: str | None = None
    """SHA-256 of the system prompt; None when there was none."""
    bos_per_prompt: list[int] = Field(default_factory=list)
    """The numbers of BOS tokens seen at the head of the encoded prompts, sorted; [0] or [1] is sane, [2] is not."""
    max_length: int | None = None
    """Longest input in tokens; longer prompts are cut from the left and counted in Health.truncated."""
    backend: str = "hf"
    dtype: str = "float32"
    seeds: dict[str, int] = Field(default_factory=dict)


class Metric(_Strict):
    """One aggregated figure, as lm-eval reports it."""

    subtask: str
    """The task itself, or the group or subtask the value belongs to."""
    metric: str
    """lm-eval's name: acc, acc_norm, exact_match, ..."""
    filter: str
    value: float
    stderr: float | None = None
    higher_is_better: bool
    questions: int


class Health(_Strict):
    """Counts of what can make a score wrong without an error."""

    truncated: int = 0
    """Prompts cut to fit max_length."""
    hit_cap: int | None = None
    """Generations that ended at the token limit; None where nothing is generated."""
    empty: int | None = None
    """Generations without a character; None where nothing is generated."""
    unanswered: int | None = None
    """Generations from which lm-eval's filter extracted no answer; None where nothing is extracted."""


class EvaluationRecord(_Strict):
    """record.json."""

    schema_version: int = 1
    status: Literal["done"] = "done"
    created: str
    key: str = ""
    """Digest of everything that decides this record; an evaluation of the same key is not done twice."""
    model: ModelSummary
    fingerprint: Fingerprint
    primary: list[str]
    """The metric a verdict looks at first, as [metric, filter]."""
    metrics: list[Metric]
    health: Health = Field(default_factory=Health)
    results_file: str
    samples_files: dict[str, str]
    """samples_*.jsonl by subtask."""
    packages: dict[str, str | None]
    hardware: dict[str, Any]
    seconds: float
    tokens: int
    """Prompt tokens scored plus tokens generated."""

    @property
    def task(self) -> str:
        """The task as it was asked for: a single task or a group such as mmlu."""
        return self.fingerprint.task

    def save(self, folder: Path) -> None:
        """Writes record.json atomically; call it after all other files of the record."""
        write_json(folder / RECORD_FILE, self.model_dump(mode="json"))


@dataclass(frozen=True, slots=True)
class Sample:
    """One question of one subtask under one filter, as lm-eval wrote it."""

    subtask: str
    filter: str
    doc_id: int
    doc_hash: str
    prompt_hash: str
    target_hash: str
    metrics: dict[str, float]
    """Per-question values by metric name."""
    raw: dict[str, Any]
    """The whole line of samples_*.jsonl."""

    @property
    def key(self) -> tuple[str, str, int]:
        """What pairs it with the same question of another record."""
        return (self.subtask, self.filter, self.doc_id)


def load_record(folder: Path) -> EvaluationRecord:
    """Reads the record in `folder`.

    Raises:
        UserError: when there is none, or it is of another version.
    """
    return read_as(
        folder / RECORD_FILE, EvaluationRecord, "a record of this version of halfbyte", hint="evaluate again"
    )


def find_records(folder: Path) -> dict[str, Path]:
    """The record folders at or below `folder`, by task.

    Raises:
        UserError: when there is no such folder, no record in it, or two of one task.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder", "give a folder written by `halfbyte eval`")
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob(RECORD_FILE)):
        if any(part.startswith(".") or part.endswith(".partial") for part in path.relative_to(folder).parts[:-1]):
            continue
        task = load_record(path.parent).task
        if task in found:
            raise UserError(
                f"two records of task '{task}' below {folder}: {found[task]} and {path.parent}", "name one of the two"
            )
        found[task] = path.parent
    if not found:
        raise UserError(f"no evaluation record in {folder}", "make one with `halfbyte eval MODEL --output FOLDER`")
    return found


_SAMPLE_FIELDS = {
    "doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash",
    "prompt_hash", "target_hash",
}  # fmt: skip


def read_samples(folder: Path, record: EvaluationRecord) -> Iterator[Sample]:
    """The questions of a record, in the order of its files.

    Raises:
        UserError: when a samples file is missing or a line is not what lm-eval writes.
    """
    for subtask, name in sorted(record.samples_files.items()):
        path = folder / name
        try:
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, start=1):
                    try:
                        yield _sample(subtask, json.loads(line))
                    except (ValueError, KeyError, TypeError, RecursionError) as error:
                        raise UserError(f"{path}:{number} is not a sample line: {error}", "evaluate again") from None
        except FileNotFoundError:
            raise UserError(f"{path} is missing from the record", "evaluate again") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: {error}", "evaluate again") from None


def _sample(subtask: str, line: dict[str, Any]) -> Sample:
    metrics = {name: line[name] for name in line["metrics"]}
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (bool, int, float))}
    return Sample(
        subtask=subtask,
        filter=line["filter"],
        doc_id=int(line["doc_id"]),
        doc_hash=line["doc_hash"],
        prompt_hash=line["prompt_hash"],
        target_hash=line["target_hash"],
        metrics=numbers,
        raw=line,
    )
