"""The comparison: what comparison.json holds of one candidate beside its baseline, and its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from halfbyte.records.errors import UserError
from halfbyte.records.fidelity import Window
from halfbyte.records.files import read_as
from halfbyte.records.record import IMAGES_OUTPUT, Fingerprint, Health, MemoryKind, ModelSummary
from halfbyte.records.training import TrainingRecord, TrainingStep, ValidationStep
from halfbyte.reports import figures
from halfbyte.reports.loss import PairedLoss
from halfbyte.reports.metrics import Bounds
from halfbyte.reports.pictures import Pictures
from halfbyte.reports.policy import Policy, Waiver
from halfbyte.reports.statistics import Interval

COMPARISON_FILE = "comparison.json"
Word = Literal["pass", "fail", "inconclusive", "anomaly"]
Method = Literal["ptq", "qat", "qad"]
"""Quantized after training, trained with quantizers in place, or distilled so."""
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


class SetMetric(_Strict):
    """A figure of a whole set of questions, such as FID: a diagnostic without an interval, which never decides."""

    task: str
    subtask: str
    """The task itself, or a subtask of a group that has no figure of its own."""
    metric: str
    filter: str
    higher_is_better: bool
    questions: int
    baseline: float
    candidate: float
    loss: float
    """Positive when the candidate is worse, whichever direction the metric has."""
    main: bool
    """Whether it is what its task is looked at by, so that the task has no other result."""


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
    """The row's name: the task, and of images `task/metric`; settings.task is the task alone."""
    metric: str
    filter: str
    higher_is_better: bool
    bounds: Bounds | None
    """Smallest and largest value of one question, by the metric's definition or the policy's; None where not known."""
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
        return not self.draws and any(one.generation is not None for one in self.settings.subtasks.values())

    @property
    def draws(self) -> bool:
        """Whether its answers are images."""
        return any(one.output_type == IMAGES_OUTPUT for one in self.settings.subtasks.values())

    @property
    def unit(self) -> str:
        """What result.questions counts, for people."""
        return "images" if self.draws else "questions"


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
    """A pass is read off its upper end."""
    ratio_wide: Interval | None = None
    """The interval of the smaller error at which a loss is called proven: a fail is read off its lower end."""
    judgement: Judgement | None = None
    text_digest: str = ""
    sums: list[Window] = Field(default_factory=list)
    """Of each window, what the figures above are made of."""


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
    asked: list[str] = Field(default_factory=list)
    """Whose figures ours are and how each benchmark was asked, with what is known to differ from the published way."""


class Training(_Strict):
    """What QAT or QAD did to the candidate: training.json of its run, and its curves."""

    record: TrainingRecord
    steps: list[TrainingStep]
    """Of the training curve; of a long one as many as can be drawn, evenly through it, the last one among them."""
    validations: list[ValidationStep]
    settings: str = ""
    """Digest of what the recipe says of model, quantization and training, but for the seed of training: candidates with
    the same one are seeds of one training."""


class Gain(_Strict):
    """One task of a trained candidate beside the same model after PTQ alone, question by question."""

    task: str
    metric: str
    filter: str
    questions: int
    ptq: float
    trained: float
    gain: float
    """Positive when training made it better, whichever direction the metric has."""
    interval: Interval | None
    """Of the gain."""
    gained: int
    """Questions on which the trained one is better."""
    lost: int
    p: float | None
    """Two-sided, adjusted for all tasks of this candidate (Holm); None where nothing varies."""
    says: Literal["better", "worse", "no difference shown"]
    """better, worse: beyond chance, at 5 % for all tasks together."""


class FidelityGain(_Strict):
    """How a trained candidate's fidelity compares with that of PTQ, window by window of one text."""

    text: str
    windows: int
    ptq_kl: float
    trained_kl: float
    kl_share: float | None
    """Trained over PTQ's; below 1 where training brought the candidate nearer to the baseline."""
    kl_change: float
    """Trained minus PTQ's, nats a token."""
    kl_interval: Interval | None
    """Of the change."""
    perplexity_ratio: float
    """Trained over PTQ's."""
    perplexity_interval: Interval | None
    """Of that ratio."""


class SeedFigure(_Strict):
    """A figure of the same training with several seeds."""

    mean: float
    deviation: float | None
    """Standard deviation among the seeds (divisor n - 1); None of one."""
    values: list[float]
    """In the order of the seeds."""


class ScoreOfSeeds(SeedFigure):
    """The score of one task."""

    task: str
    metric: str


class MethodSummary(_Strict):
    """One row of the table PTQ, QAT, QAD: the candidates of one format that were made by one method."""

    label: str
    format: str
    method: Method
    seeds: list[int]
    """Of training; empty for ptq."""
    candidates: list[str]
    """Their digests, in the order of the seeds."""
    scores: list[ScoreOfSeeds]
    kl: SeedFigure | None
    """Nats a token; None unless all of them have it, as for the following."""
    top1_agreement: SeedFigure | None
    perplexity: SeedFigure | None
    flips: SeedFigure
    """Questions of all tasks that flipped against the baseline, lost and gained together."""


class Cost(_Strict):
    """What one side weighs, and what its evaluation took on that side's hardware."""

    bytes_share: float | None
    """Size on disk over the baseline's; None where that is not known."""
    tokens: int
    """Prompt tokens scored plus tokens generated, over all tasks."""
    seconds: float
    tokens_per_second: float | None
    memory_bytes: int | None = None
    """Peak memory of its evaluations; None unless all records say it, and of the same kind."""
    memory_kind: MemoryKind | None = None
    """cuda: what CUDA's allocator gave out at most; process: the largest resident size of the process, on a CPU."""


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
    tasks: list[TaskResult]
    set_metrics: list[SetMetric] = Field(default_factory=list)
    """Figures that no question has a value of; they are shown and never decide."""
    missing: dict[str, str] = Field(default_factory=dict)
    """What was asked for and could not be measured on both sides, by the name its row would have, with the reason."""
    pictures: list[Pictures] = Field(default_factory=list)
    """Of each task that draws images: the pairs, and how far they are apart."""
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
    quantized_by: str | None = None
    """The recipe, preset or algorithm of the candidate's quantization; None where its run is not at hand."""
    training: Training | None = None
    """None where nothing was trained, or its run is not at hand."""
    gains: list[Gain] = Field(default_factory=list)
    """What training changed, where the same model after PTQ alone is a candidate of the same report."""

    fidelity_gain: FidelityGain | None = None
    """The same of its fidelity, where both were measured on one text."""

    @property
    def method(self) -> Method:
        """How the candidate was made."""
        return "ptq" if self.training is None else self.training.record.method

    @property
    def label(self) -> str:
        """The candidate's short name: its format, and qat or qad where it was trained."""
        name = figures.model_label(self.candidate)
        return name if self.training is None else f"{name} {self.method.upper()}"

    @model_validator(mode="after")
    def _compares_something(self) -> Comparison:
        if not self.tasks and not self.set_metrics:
            raise ValueError("a comparison holds at least one task")
        return self


class ComparisonFile(_Strict):
    """comparison.json: one or several candidates beside one baseline."""

    schema_version: Literal[2] = 2
    verdict: Word | None = None
    """The worst of the comparisons' verdicts; None unless all of them were judged."""
    exit_code: int | None = None
    sentence: str | None = None
    """Of the first comparison with that verdict: what decided it."""
    comparisons: list[Comparison] = Field(min_length=1)
    methods: list[MethodSummary] = Field(default_factory=list)
    """Of a report with trained candidates: a row for each method, mean and spread of its seeds."""


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
