"""The noise floor: what flips between two evaluations of one model that ask the same in other batches.

Both ask the same questions with the same prompts. The second computes them in other batches (vLLM and servers make
their own), so that sums are rounded in another order, and draws its samples, where a task draws any, with other seeds.
What flips between the two says nothing about a quantization; what flips between a baseline and its candidate is to be
seen beside it. On a CPU, in float32, it is often nothing.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from halfbyte.records.errors import UserError
from halfbyte.records.files import read_as, write_json
from halfbyte.records.manifest import now
from halfbyte.records.record import Sample, load_record, read_samples

NOISE_FILE = "noise.json"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Flips(_Strict):
    """One metric of one subtask under one filter: how the second evaluation differs from the first."""

    subtask: str
    metric: str
    filter: str
    questions: int
    lost: int
    """Questions with a smaller value in the second."""
    gained: int
    """Questions with a larger value in the second."""
    change: float
    """Mean of the second minus mean of the first, in the metric's own units."""
    doc_ids: list[int] = Field(default_factory=list)
    """The questions that differ."""


class NoiseFloor(_Strict):
    """noise.json, in the folder of the first record."""

    schema_version: int = 1
    created: str = Field(default_factory=now)
    task: str
    key: str
    """Of the first record."""
    second_key: str
    drawn: bool
    """Whether samples were drawn, with other seeds the second time; else only the batches were others."""
    flips: list[Flips]
    """In the order of subtask, filter and metric."""
    texts: int | None = None
    """Questions of which some generated text differs, right or wrong; None where nothing is generated."""

    def of(self, metric: str, filter_name: str) -> tuple[int, int, int]:
        """Questions, lost and gained of a metric under a filter, over all subtasks."""
        chosen = [one for one in self.flips if (one.metric, one.filter) == (metric, filter_name)]
        return sum(one.questions for one in chosen), sum(one.lost for one in chosen), sum(one.gained for one in chosen)

    def save(self, folder: Path) -> None:
        """Writes noise.json atomically."""
        write_json(folder / NOISE_FILE, self.model_dump(mode="json"))


def load_noise(folder: Path) -> NoiseFloor | None:
    """The noise floor in a record's folder; None where the baseline was evaluated once.

    Raises:
        UserError: when it is of another version, or of another record than the one in the folder.
    """
    if not (folder / NOISE_FILE).is_file():
        return None
    found = read_as(folder / NOISE_FILE, NoiseFloor, "a noise floor of this version of halfbyte", "evaluate again")
    if found.key != load_record(folder).key:
        raise UserError(f"{folder / NOISE_FILE} is of another record", "delete it")
    return found


def noise_between(first: Path, second: Path) -> NoiseFloor:
    """Compares two records of one model question by question.

    Raises:
        UserError: when they are not of one model, or did not ask the same.
    """
    one, other = load_record(first), load_record(second)
    if one.model.digest != other.model.digest or one.task != other.task:
        raise UserError(f"{first} and {second} are not two evaluations of one model on one task", "evaluate again")
    before = {sample.key: sample for sample in read_samples(first, one)}
    after = {sample.key: sample for sample in read_samples(second, other)}
    if not before or before.keys() != after.keys():
        raise UserError(f"{first} and {second} do not hold the same questions", "evaluate again")
    other_prompts = [key for key, sample in before.items() if sample.prompt_hash != after[key].prompt_hash]
    if other_prompts:
        raise UserError(f"{first} and {second} do not ask the same: question {other_prompts[0]}", "evaluate again")
    generated = [key for key, sample in before.items() if sample.generated is not None]
    texts = {key[::2] for key in generated if before[key].raw["resps"] != after[key].raw["resps"]}
    drawn = any(sample.seed is not None for key in generated for sample in before[key].generated or ())
    return NoiseFloor(
        task=one.task,
        key=one.key,
        second_key=other.key,
        drawn=drawn,
        flips=_flips(before, after),
        texts=len(texts) if generated else None,
    )


def _flips(before: dict[tuple[str, str, int], Sample], after: dict[tuple[str, str, int], Sample]) -> list[Flips]:
    found = []
    for (subtask, filter_name), group in groupby(sorted(before), key=lambda key: key[:2]):
        keys = list(group)
        for metric in sorted({name for key in keys for name in before[key].metrics}):
            changes = {
                key[2]: after[key].metrics[metric] - before[key].metrics[metric]
                for key in keys
                if metric in before[key].metrics and metric in after[key].metrics
            }
            found.append(
                Flips(
                    subtask=subtask,
                    metric=metric,
                    filter=filter_name,
                    questions=len(changes),
                    lost=sum(change < 0 for change in changes.values()),
                    gained=sum(change > 0 for change in changes.values()),
                    change=sum(changes.values()) / len(changes) if changes else 0.0,
                    doc_ids=[doc_id for doc_id, change in changes.items() if change],
                )
            )
    return found
