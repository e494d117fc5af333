"""The comparison: what comparison.json holds of one candidate beside its baseline, and its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from halfbyte.records.errors import UserError
from halfbyte.records.files import read_as
from halfbyte.records.record import Fingerprint, Health, ModelSummary
from halfbyte.reports.loss import PairedLoss
from halfbyte.reports.policy import Policy, Waiver
from halfbyte.reports.statistics import Interval

COMPARISON_FILE = "comparison.json"
Word = Literal["pass", "fail", "inconclusive", "anomaly"]
EXIT_CODES: dict[Word, int] = {"pass": 0, "fail": 1, "inconclusive": 3, "anomaly": 4}


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
    samples_needed: int | None = None
    """Samples a question that would do the same with the same questions; None where no number would."""
    reason: str | None = None
    """What decided, where that is not the interval beside the margin."""
    waiver: Waiver | None = None
    """The waiver because of which it does not count."""


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


class NoiseFloor(_Strict):
    """What two evaluations of the baseline itself differ by: the flips that no quantization made."""

    questions: int
    lost: int
    gained: int
    loss: float
    largest: float
    """The end of the loss's interval that is farther from 0: what may be noise."""


class TaskResult(_Strict):
    """One task: a row of the accuracy-loss table."""

    task: str
    metric: str
    filter: str
    higher_is_better: bool
    bounds: tuple[float, float] | None
    """Smallest and largest value of one question by the metric's definition; None where it has none."""
    samples: int
    """Texts drawn for each question."""
    result: PairedLoss
    recovery: float | None
    """Candidate in percent of baseline, 100 when nothing is lost; None where the ratio says nothing."""
    recovery_interval: Interval | None
    p_degraded: float | None = None
    """Holm's adjusted p of being worse, among all tasks of the comparison; None where nothing varies."""
    clustered: Interval | None = None
    """Of a group: the interval if its subtasks, too, are a sample of many; advisory."""
    variances: dict[str, float] | None = None
    """With several samples a question: the variances `between` questions and `within` one."""
    noise: NoiseFloor | None = None
    baseline_length: float | None = None
    """Mean tokens of a generated text; None where nothing is generated or nothing is known."""
    candidate_length: float | None = None
    baseline_seconds: float
    """Of the evaluation, on that side's hardware."""
    candidate_seconds: float
    baseline_tokens: int
    """Prompt tokens scored plus tokens generated."""
    candidate_tokens: int
    subtasks: list[SubtaskResult]
    """Of a group; empty for a single task."""
    flips: list[Flip]
    """The questions that flipped, or as many as a report has room for; result.lost and result.gained count all."""
    settings: Fingerprint
    baseline_health: Health
    candidate_health: Health
    notes: list[str]
    judgement: Judgement | None = None
    """None without a policy, and where it names no margin for an advisory task."""

    @property
    def generates(self) -> bool:
        """Whether its answers are generated texts."""
        return any(one.generation is not None for one in self.settings.subtasks.values())


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


class Layer(_Strict):
    """One line of the quantization's layer table: layers of the same name but for their number, with one format."""

    name: str
    """With a * where the numbers were."""
    format: str
    """As stored: NVFP4, FP8, BF16, ..."""
    layers: int
    bytes: int
    """Of their weights and scales."""


class PublishedCell(_Strict):
    """One published figure beside ours, both in the published unit."""

    benchmark: str
    row: str
    value: float | None
    """None where it was not published or not seen."""
    ours: float | None
    """None where we measured nothing of the kind."""
    difference: float | None


class PublishedTable(_Strict):
    """A published table beside ours."""

    id: str
    model: str | None
    unit: str
    source: list[str]
    seen: str
    """primary, mirror, secondary or translation: how surely it was seen."""
    settings: str
    cells: list[PublishedCell]


class Cost(_Strict):
    """What one side weighs, and what its evaluation took on that side's hardware."""

    bytes_share: float | None
    """Size on disk over the baseline's; None where that is not known."""
    tokens: int
    """Prompt tokens scored plus tokens generated, over all tasks."""
    seconds: float
    tokens_per_second: float | None


class Verdict(_Strict):
    """What was decided and why; written as verdict.json."""

    verdict: Word
    exit_code: int
    candidate: str
    policy: str
    release_evidence: bool
    decided_by: str
    """The task that decided, or "perplexity", or "canary"."""
    sentence: str
    next_step: str


class Comparison(_Strict):
    """One candidate beside its baseline."""

    schema_version: Literal[2] = 2
    created: str
    not_before: str
    """The latest time that the records or an earlier gate have seen: a waiver is not younger than that."""
    baseline: ModelSummary
    candidate: ModelSummary
    same_model: bool
    """Both sides are one model: the table shows the noise floor."""
    tasks: list[TaskResult] = Field(min_length=1)
    degraded: list[str] = Field(default_factory=list)
    """Tasks that are worse beyond chance, at 5 % for all of them together (Holm)."""
    fidelity: FidelityResult | None = None
    canary_failure: str | None = None
    """What the canary found wrong with the candidate."""
    allowed: list[str] = Field(default_factory=list)
    """Differences between the sides that the policy allows, as sentences."""
    waivers: list[str] = Field(default_factory=list)
    """Waivers applied and not applied, as sentences."""
    policy: Policy | None = None
    verdict: Verdict | None = None
    """None where no policy was asked for."""
    published: list[PublishedTable] = Field(default_factory=list)
    layers: list[Layer] = Field(default_factory=list)
    """How the candidate is quantized; empty where its checkpoint is not at hand."""
    manifest: dict[str, Any] | None = None
    """What made the candidate; None where that is not at hand."""
    costs: dict[str, Cost]
    """Of "baseline" and "candidate"."""
    packages: dict[str, dict[str, str | None]]
    """Package versions of "baseline" and "candidate"."""
    hardware: dict[str, dict[str, Any]]
    notes: list[str]


class ComparisonFile(_Strict):
    """comparison.json: one or several candidates beside one baseline."""

    schema_version: Literal[2] = 2
    comparisons: list[Comparison] = Field(min_length=1)


def load_comparisons(folder: Path) -> list[Comparison]:
    """Reads comparison.json in `folder`.

    Raises:
        UserError: when it is missing, or of another version.
    """
    if not (folder / COMPARISON_FILE).is_file():
        raise UserError(
            f"{folder} holds no {COMPARISON_FILE}", "`halfbyte run`, `report` and `compare --output` write one"
        )
    what = "a comparison of this version of halfbyte"
    return read_as(folder / COMPARISON_FILE, ComparisonFile, what, hint="compare again").comparisons
