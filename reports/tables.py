"""The tables every report shows, as rows of text: one of all models, and one of losses for each candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.records.errors import UserError
from halfbyte.records.record import ModelSummary
from halfbyte.reports import figures
from halfbyte.reports.comparison import Comparison, FidelityResult, Judgement, TaskResult, Word

MAX_TASK_COLUMNS = 6  # more do not fit beside each other on a laptop
MAX_TASK_COLUMNS_BESIDE_FIDELITY = 4
WORDS: dict[Word, str] = {"pass": "PASS", "fail": "FAIL", "inconclusive": "INCONCLUSIVE", "anomaly": "ANOMALY"}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text cells; the first `labels` columns hold words and the others numbers."""

    title: str
    headers: list[str]
    rows: list[list[str]]
    labels: int = 1


def check_one_baseline(comparisons: Sequence[Comparison]) -> None:
    """Raises a UserError unless there is something to report and all of it has one baseline."""
    if not comparisons:
        raise UserError("there is no comparison to report", "compare a candidate with its baseline first")
    digests = {one.baseline.digest for one in comparisons}
    if len(digests) > 1:
        names = ", ".join(sorted(one.baseline.name for one in comparisons))
        raise UserError(f"one report holds one baseline, not {len(digests)}: {names}", "write one report for each")
    candidates = [one.candidate.digest for one in comparisons]
    if len(set(candidates)) < len(candidates):
        raise UserError("one candidate is in the report twice", "name each candidate once")
    seen: dict[str, float] = {}
    for row in (row for one in comparisons for row in one.tasks):
        if seen.setdefault(f"{row.task} {row.metric}", row.result.baseline) != row.result.baseline:
            raise UserError(
                f"the baseline has two different figures of {row.task} {row.metric} in one report",
                "compare all candidates with the same baseline records",
            )


def labels(comparisons: Sequence[Comparison]) -> tuple[str, list[str]]:
    """Short names: the baseline's, and those of the candidates."""
    first, *others = figures.model_labels([comparisons[0].baseline, *(one.candidate for one in comparisons)])
    return first, others


def verdict_word(comparison: Comparison) -> str:
    """PASS, FAIL or INCONCLUSIVE; "not judged" without a policy."""
    return WORDS[comparison.verdict.verdict] if comparison.verdict else "not judged"


def row_word(judgement: Judgement | None) -> str:
    """A task's verdict in lower case; in brackets when the task does not decide, and with "waived" where it is."""
    if judgement is None:
        return figures.NONE
    word = f"{judgement.verdict}, waived" if judgement.waiver is not None else judgement.verdict
    return word if judgement.primary else f"({word})"


def models_table(comparisons: Sequence[Comparison]) -> Table:
    """One row a model, the baseline first: size, scores, distances and verdict."""
    check_one_baseline(comparisons)
    columns = list(dict.fromkeys((row.task, row.metric) for one in comparisons for row in one.tasks))
    measured = next((one.fidelity for one in comparisons if one.fidelity), None)
    shown = columns if len(columns) <= (MAX_TASK_COLUMNS_BESIDE_FIDELITY if measured else MAX_TASK_COLUMNS) else []
    distance = ["KL (nats)", "top-1 agreement", "perplexity"] if measured else []
    headers = ["model", *(f"{task} {metric}" for task, metric in shown), *distance, "size on disk", "bits/weight"]
    first, others = labels(comparisons)
    baseline = {(row.task, row.metric): row.result.baseline for one in comparisons for row in one.tasks}
    nothing = [figures.NONE, figures.NONE, figures.figure(measured.baseline_perplexity, 2)] if measured else []
    rows = [
        [f"{first} (baseline)", *_scores(baseline, shown), *nothing, *_weight(comparisons[0].baseline), "baseline"],
    ]
    for label, one in zip(others, comparisons, strict=True):
        scores = {(row.task, row.metric): row.result.candidate for row in one.tasks}
        distances = _distance(one.fidelity) if measured else []
        rows.append([label, *_scores(scores, shown), *distances, *_weight(one.candidate), verdict_word(one)])
    return Table("Models", [*headers, "verdict"], rows)


def _scores(scores: dict[tuple[str, str], float], shown: list[tuple[str, str]]) -> list[str]:
    return [figures.figure(scores.get(key)) for key in shown]


def _weight(model: ModelSummary) -> list[str]:
    return [figures.size(model.bytes_on_disk), figures.figure(model.bits_per_weight, 2)]


def _distance(fidelity: FidelityResult | None) -> list[str]:
    if fidelity is None:
        return [figures.NONE] * 3
    agreement = figures.share(fidelity.top1_agreement)
    return [figures.figure(fidelity.kl), agreement, figures.figure(fidelity.candidate_perplexity, 2)]


def losses_table(comparison: Comparison, label: str, baseline: str) -> Table:
    """One row a task: both scores, the loss with its interval and margin, recovery, flips and verdict."""
    level = next((figures.level(row.result.interval.level) for row in comparison.tasks if row.result.interval), "")
    headers = [
        "task", "metric", "questions", baseline, label, "loss", f"{level} interval".strip(),
        "margin", "recovery", "lost", "gained", "McNemar p", "verdict",
    ]  # fmt: skip
    rows = [_loss_row(row) for row in comparison.tasks]
    return Table(f"{label} against {baseline}", headers, rows, labels=2)


def _loss_row(row: TaskResult) -> list[str]:
    result = row.result
    return [
        row.task,
        row.metric if row.filter == "none" else f"{row.metric} ({row.filter})",
        figures.count(result.questions),
        figures.figure(result.baseline),
        figures.figure(result.candidate),
        figures.figure(result.loss),
        figures.interval(result.interval),
        figures.figure(row.judgement.margin if row.judgement else None),
        figures.percent(row.recovery),
        figures.count(result.lost),
        figures.count(result.gained),
        figures.p_value(result.mcnemar_p),
        row_word(row.judgement),
    ]


def perplexity_line(fidelity: FidelityResult, label: str) -> str:
    """Fidelity in one sentence."""
    after = figures.figure(fidelity.candidate_perplexity, 2)
    before = figures.figure(fidelity.baseline_perplexity, 2)
    text = (
        f"Perplexity of {label} on {figures.count(fidelity.tokens)} tokens of {fidelity.text}: {after} against "
        f"{before}, ratio {figures.figure(fidelity.ratio)}"
    )
    if (found := fidelity.ratio_interval) is not None:
        text += f" ({figures.level(found.level)} interval {figures.interval(found)})"
    if fidelity.judgement is not None:
        text += f", at most {figures.figure(1 + fidelity.judgement.margin)} tolerated: {row_word(fidelity.judgement)}"
    return text + ("." if fidelity.judgement else "; it does not decide.")


def how_to_read(comparison: Comparison) -> str:
    """How a loss and its interval are read."""
    policy = comparison.policy
    sure = figures.level(1 - policy.alpha) if policy else figures.level(0.95)
    text = (
        "Loss is baseline minus candidate in the metric's own units, positive when the candidate is worse. Each end of "
        f"its interval is a bound with {sure} confidence"
    )
    if policy is None:
        return text + "."
    if policy.ratio is not None:
        return text + (
            f". Under policy '{policy.name}' a task passes when its recovery is at least {100 * policy.ratio:g}%, "
            "whatever its interval, and fails when chance does not explain that it is not."
        )
    proven = figures.level(1 - policy.fail_alpha)
    both = " and the lower end above the negative margin" if policy.rule == "two-sided" else ""
    return text + (
        f": a task passes when the upper end is below the margin{both}, and fails when its loss is above the margin "
        f"with {proven} confidence."
    )


def all_notes(comparisons: Sequence[Comparison]) -> list[str]:
    """What a reader must know beside the numbers: of the whole comparison and of each task."""
    _, names = labels(comparisons)
    notes = []
    for label, one in zip(names, comparisons, strict=True):
        notes += [f"{label}: allowed by the policy: {difference}" for difference in one.allowed]
        notes += [f"{label}: {waiver}" for waiver in one.waivers]
        if one.degraded and len(one.tasks) > 1:
            notes.append(
                f"{label}: worse beyond chance, at 5% for all {len(one.tasks)} tasks together (Holm): "
                f"{', '.join(one.degraded)}"
            )
        notes += [f"{label}: {note}" for note in one.notes]
        for row in one.tasks:
            notes += [f"{label}, {row.task}: {note}" for note in [*_more_of(row), *row.notes]]
        if one.policy is not None and not one.policy.release_evidence:
            notes.append(f"{label}: policy '{one.policy.name}' is no evidence for a release. {one.policy.description}")
    return notes


def _more_of(row: TaskResult) -> list[str]:
    """What the table of losses has no column for."""
    found = []
    if row.noise is not None:
        noise, result = row.noise, row.result
        found.append(
            f"two evaluations of the baseline differ by {figures.count(noise.lost)} lost and "
            f"{figures.count(noise.gained)} gained of {figures.count(noise.questions)} questions (noise floor); the "
            f"candidate by {figures.count(result.lost)} and {figures.count(result.gained)}"
        )
    if row.clustered is not None:
        found.append(
            f"{figures.interval(row.clustered)} is the interval of the loss if the subtasks, too, are a sample of many"
        )
    if row.samples > 1:
        found.append(f"{row.samples} samples a question: lost and gained count questions whose mean changed")
    return found
