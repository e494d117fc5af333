"""The comparison: what comparison.json holds of one candidate beside its baseline, and its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from halfbyte.records.files import read_as
from halfbyte.records.record import Fingerprint, Health, ModelSummary
from halfbyte.reports.policy import Policy
from halfbyte.reports.statistics import Interval, PairedLoss

COMPARISON_FILE = "comparison.json"
Word = Literal["pass", "fail", "inconclusive"]
EXIT_CODES: dict[Word, int] = {"pass": 0, "fail": 1, "inconclusive": 3}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Judgement(_Strict):
    """What a policy says of one task, or of the perplexity."""

    margin: float
    """Largest tolerable loss, in the metric's own units; for perplexity the largest tolerable ratio minus 1."""
    primary: bool
    """Whether it takes part in the verdict."""
    verdict: Word
    needed: int | None = None
    """Questions that would settle an inconclusive task with 80 % power if the measured rates are the true ones."""
    reason: str | None = None
    """Why it is inconclusive, where that is not the width of the interval."""


class SubtaskResult(_Strict):
    """One subtask of a group such as mmlu; shown, never judged alone."""

    subtask: str
    questions: int
    baseline: float
    candidate: float
    lost: int
    gained: int


class Flip(_Strict):
    """A question on which the two sides got different values, with what both answered, cut for reading."""

    subtask: str
    doc_id: int
    change: Literal["lost", "gained"]
    question: str
    target: str
    baseline: str
    candidate: str


class TaskResult(_Strict):
    """One task: a row of the accuracy-loss table."""

    task: str
    metric: str
    filter: str
    higher_is_better: bool
    result: PairedLoss
    recovery: float | None
    """Candidate in percent of baseline, 100 when nothing is lost; None where the ratio says nothing."""
    recovery_interval: Interval | None
    subtasks: list[SubtaskResult]
    """Of a group; empty for a single task."""
    flips: list[Flip]
    """Some of the questions that flipped; result.lost and result.gained count all of them."""
    settings: Fingerprint
    baseline_health: Health
    candidate_health: Health
    notes: list[str]
    judgement: Judgement | None = None


class FidelityResult(_Strict):
    """How far the candidate's next-token distributions are from the baseline's; advisory unless a policy says so."""

    text: str
    tokens: int
    windows: int
    window: int
    dtype: str
    kl: float
    """Mean KL divergence, nats per token."""
    top1_agreement: float
    """Share of tokens, 0 to 1."""
    baseline_perplexity: float
    candidate_perplexity: float
    ratio: float
    """Candidate's perplexity over the baseline's; lower is better."""
    ratio_interval: Interval | None
    judgement: Judgement | None = None


class Verdict(_Strict):
    """What was decided and why; written as verdict.json."""

    verdict: Word
    exit_code: int
    candidate: str
    policy: str
    release_evidence: bool
    decided_by: str
    """The task that decided, or "perplexity"."""
    sentence: str
    next_step: str


class Comparison(_Strict):
    """One candidate beside its baseline."""

    schema_version: Literal[1] = 1
    created: str
    baseline: ModelSummary
    candidate: ModelSummary
    same_model: bool
    """Both sides are one model: the table shows the noise floor."""
    tasks: list[TaskResult] = Field(min_length=1)
    fidelity: FidelityResult | None = None
    policy: Policy | None = None
    verdict: Verdict | None = None
    """None where no policy was asked for."""
    packages: dict[str, dict[str, str | None]]
    """Package versions of "baseline" and "candidate"."""
    hardware: dict[str, dict[str, Any]]
    notes: list[str]


class ComparisonFile(_Strict):
    """comparison.json: one or several candidates beside one baseline."""

    schema_version: Literal[1] = 1
    comparisons: list[Comparison] = Field(min_length=1)


def load_comparisons(folder: Path) -> list[Comparison]:
    """Reads comparison.json in `folder`.

    Raises:
        UserError: when it is missing, or of another version.
    """
    what = "a comparison of this version of halfbyte"
    return read_as(folder / COMPARISON_FILE, ComparisonFile, what, hint="compare again").comparisons
