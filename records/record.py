"""The evaluation record: one evaluation of one model on one task, with the fingerprint that makes two comparable.

A record is a folder: record.json beside lm-eval's own results_*.json and samples_*.jsonl. record.json is written
last, so a folder that has one is whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from halfbyte.records.digests import value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.files import read_as, read_json, write_json

RECORD_FILE = "record.json"
UNKNOWN = "unknown"
"""A setting that a server does not tell. It agrees with nothing, not even with itself."""
IMAGES_OUTPUT = "text_to_image"
"""The output type of a task whose answers are images."""
METRIC_WEIGHTS = "metric_weights"
"""What the digests of the networks that images are judged through are under in SubtaskFingerprint.generation."""
OUR_TASKS = "halfbyte/tasks"
"""What the digest of our own task files is under in EvaluationRecord.data."""
OWN_TASKS = "include_path"
"""What the digest of a user's folder of tasks is under."""
MemoryKind = Literal["cuda", "process"]
"""What a peak of memory is of. cuda: the most that CUDA's allocator gave out, on all devices together; process: the
largest resident size of the process, on a CPU."""
SCHEMA_VERSION: Literal[2] = 2
"""Of record.json. 2: `asked` and `generated` in the sample lines, speed, content digests; version 1 is still read."""


class DamagedRecord(UserError):
    """A record that is not, or no longer, as it was written."""


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
    """lm-eval's: loglikelihood, multiple_choice, generate_until, loglikelihood_rolling; or IMAGES_OUTPUT."""
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
    """SHA-256 of the chat template applied; None when none was; UNKNOWN where a server applied its own and does not say
    which, so that its BOS is unknown too."""
    system_prompt: str | None = None
    """SHA-256 of the system prompt; None when there was none."""
    bos_per_prompt: list[int] = Field(default_factory=list)
    """The numbers of BOS tokens seen at the head of the encoded prompts, sorted; [0] or [1] is sane, [2] is not."""
    max_length: int | None = None
    """Longest input in tokens; longer prompts are cut from the left and counted in Health.truncated."""
    backend: str = "hf"
    engine: str | None = None
    """What computes where the backend is not transformers in this process: "vllm 0.33.0"."""
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


class Asked(_Strict):
    """What the model was really given for one question: the key `asked` of a sample line.

    A question with several requests (one a choice) has one of these: the largest number of each.
    """

    input: str | None = None
    """SHA-256 of the token ids of all its requests as the model was fed with them: template applied, special tokens
    added, cut to the window. None where the backend has no tokenizer. lm-eval's prompt_hash beside it is of the first
    request's rendered text, before the tokenizer."""
    tokens: int | None = None
    """Of its longest request as the model is fed with it, a continuation that is scored included."""
    bos: list[int] = Field(default_factory=list)
    """The numbers of BOS tokens seen at the head, sorted; [0] or [1] is sane. Empty where it is unknown."""
    doubled: int = 0
    """Special tokens that directly follow the same special token: <bos><bos>, <|im_end|><|im_end|>."""
    cut: int = 0
    """Tokens cut off the prompt's beginning so that it fits into the window."""


class GeneratedSample(_Strict):
    """How one text came to its end: the key `generated` of a sample line has a list of them, one a sample."""

    tokens: int | None = None
    """Generated, the end token included."""
    stop: Literal["stop_string", "end_token", "stopped", "length"] | None = None
    """Why it ended: a stop sequence of the task, the model's end token, either of them (the server does not say
    which), or the cap. None: the backend does not say."""
    seed: int | None = None
    """None where nothing was drawn."""


class Health(_Strict):
    """Counts of what can make a score wrong without an error. None: does not apply, or the backend does not say."""

    prompts: int = 0
    """Questions asked: what truncated and doubled are counted in."""
    truncated: int = 0
    """Questions whose prompt was cut to fit max_length; 0 unless evaluate.allow_truncated is set."""
    doubled: int = 0
    """Questions whose prompt holds a special token twice in a row."""
    samples: int | None = None
    """Texts generated, k a question: what the following are counted in."""
    hit_cap: int | None = None
    """Texts that were still going on at the task's limit of tokens (max_gen_toks)."""
    unexpected_stops: int | None = None
    """Texts that ended neither by a stop sequence, nor by the end token, nor at the cap: the window was full before,
    or the backend gives no reason."""
    empty: int | None = None
    """Texts without a character."""
    cut: dict[str, int] = Field(default_factory=dict)
    """Images whose prompt was cut, by who read it: clip and t5 while it was drawn, and metrics such as clip_score."""
    unknown: int = 0
    """Images whose prompt holds characters that the pipeline's text encoder does not know."""
    unanswered: int | None = None
    """Texts in which the filter of the primary metric found no answer; not the same as a wrong answer."""


class Speed(_Strict):
    """How fast it went, where something was computed: what `--dry-run` and its total ETA go by."""

    distinct_tokens: int = 0
    """Prompt tokens that are computed once shared beginnings are counted once."""
    scored_per_second: float | None = None
    """Distinct tokens a second while scoring."""
    generated_per_second: float | None = None
    """Tokens a second while generating, all texts together."""
    generated_per_sample: float | None = None
    """Mean tokens of a generated text."""


class EvaluationRecord(_Strict):
    """record.json. A line of samples_*.jsonl has `asked`, `generated`, `answered` beside lm-eval's keys; see Sample."""

    schema_version: Literal[1, 2] = SCHEMA_VERSION
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
    speed: Speed | None = None
    memory_bytes: int | None = None
    """Peak memory of the evaluation, the model's weights included; of the last process, where it was cut short. None
    where nothing was computed in this process, and in older records."""
    memory_kind: MemoryKind | None = None
    """What memory_bytes is of."""
    missing: dict[str, str] = Field(default_factory=dict)
    """Metrics that were asked for and could not be computed, with the reason: no gate passes on them."""
    served: str | None = None
    """What a server said of itself: engine, version and the name of the model; None where none was asked."""
    repeat: int = 0
    """0; 1 for the second evaluation of a baseline, which asks the same in other batches and with other seeds."""
    data: dict[str, str] = Field(default_factory=dict)
    """Digest of each data set that lay in the data root, by hub id ("" for one of the hub), and of our task files."""
    files: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of each of the other files, by name."""
    seal: str = ""
    """SHA-256 of everything else in this file; "" in records of version 1. See verify_content."""

    @property
    def task(self) -> str:
        """The task as it was asked for: a single task or a group such as mmlu."""
        return self.fingerprint.task

    def save(self, folder: Path) -> None:
        """Seals the record and writes record.json atomically; call it after all other files of the record."""
        names = [name for name in (self.results_file, *self.samples_files.values()) if (folder / name).is_file()]
        self.files = {name: _content(folder / name) for name in names}
        self.seal = self._seal()
        write_json(folder / RECORD_FILE, self.model_dump(mode="json"))

    def _seal(self) -> str:
        return value_digest(self.model_dump(mode="json", exclude={"seal"}))


@dataclass(frozen=True, slots=True)
class SampleIdentity:
    """Which question of which subtask a sample line is of, under which filter."""

    subtask: str
    filter: str
    doc_id: int
    doc_hash: str
    prompt_hash: str
    target_hash: str

    @property
    def key(self) -> tuple[str, str, int]:
        """What pairs it with the same question of another record."""
        return (self.subtask, self.filter, self.doc_id)


@dataclass(frozen=True, slots=True)
class Sample(SampleIdentity):
    """One question of one subtask under one filter, as lm-eval wrote it."""

    metrics: dict[str, float]
    """Per-question values by metric name."""
    raw: dict[str, Any]
    """The whole line of samples_*.jsonl."""
    asked: Asked | None = None
    """None in records of version 1."""
    generated: list[GeneratedSample] | None = None
    """One a sample; None where nothing is generated, and in records of version 1."""
    answered: list[bool] | None = None
    """For each sample, whether this filter found an answer in it; None where the filter looks for none."""


def load_record(folder: Path) -> EvaluationRecord:
    """Reads the record in `folder`.

    Raises:
        DamagedRecord: when there is none, or it is of another version.
    """
    try:
        return read_as(
            folder / RECORD_FILE, EvaluationRecord, "a record of this version of halfbyte", hint="evaluate again"
        )
    except UserError as error:
        raise DamagedRecord(error.message, error.hint) from None


def verify_content(folder: Path) -> EvaluationRecord:
    """Reads the record in `folder` and the digests of its files: what a copy may be made of, and a cache may give.

    Raises:
        DamagedRecord: naming what is missing, has changed since it was written, or was written without digests.
    """
    record = load_record(folder)
    if not record.seal:
        raise DamagedRecord(f"{folder / RECORD_FILE} is of a version that wrote no digests", "evaluate again")
    refuse_edited(folder)
    for name in (record.results_file, *record.samples_files.values()):
        path = folder / name
        if not path.is_file():
            raise DamagedRecord(f"{path} is missing from the record", "evaluate again")
        if _content(path) != record.files.get(name):
            raise DamagedRecord(f"{path} has changed since it was written", "evaluate again")
    return record


def refuse_edited(folder: Path) -> None:
    """Raises a DamagedRecord when record.json is not what its seal says; those of version 1 alone have none."""
    content = read_json(folder / RECORD_FILE)
    seal = content.pop("seal", "") if isinstance(content, dict) else ""
    if seal != value_digest(content) and (seal or content.get("schema_version") != 1):
        raise DamagedRecord(f"{folder / RECORD_FILE} has changed since it was written", "evaluate again")


def _content(path: Path) -> str:
    # Not digests.file_digest, which believes a file's size and time of change.
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_of_images(record: EvaluationRecord) -> bool:
    """Whether it is of images drawn from prompts; such a record has several metrics that all count."""
    return any(part.output_type == IMAGES_OUTPUT for part in record.fingerprint.subtasks.values())


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
    rows = line.get("generated")
    return Sample(
        subtask=subtask,
        filter=line["filter"],
        doc_id=int(line["doc_id"]),
        doc_hash=line["doc_hash"],
        prompt_hash=line["prompt_hash"],
        target_hash=line["target_hash"],
        metrics=numbers,
        raw=line,
        asked=None if line.get("asked") is None else Asked.model_validate(line["asked"]),
        generated=None if rows is None else [GeneratedSample.model_validate(row) for row in rows],
        answered=line.get("answered"),
    )
