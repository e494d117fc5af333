"""The tables every report shows, as rows of text: one of all models, and one of losses for each candidate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.records.errors import UserError
from halfbyte.records.record import ModelSummary
from halfbyte.reports import figures
from halfbyte.reports.comparison import Comparison, FidelityResult, Judgement, TaskResult, Word
from halfbyte.reports.methods import flips, grouped

MAX_TASK_COLUMNS = 6  # more do not fit beside each other on a laptop
MAX_TASK_COLUMNS_BESIDE_FIDELITY = 4
SET_METRIC = "one figure for the whole set: it has no interval and does not decide"
WORDS: dict[Word, str] = {"pass": "PASS", "fail": "FAIL", "inconclusive": "INCONCLUSIVE", "anomaly": "ANOMALY"}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text cells; the first `labels` columns hold words and the others numbers, but for a verdict's."""

    title: str
    headers: list[str]
    rows: list[list[str]]
    labels: int = 1

    def has_words(self, column: int) -> bool:
        """Whether a column holds words, which stand to the left, and no numbers, which stand to the right."""
        return column < self.labels or self.headers[column] in ("verdict", "beyond chance")


def check_one_baseline(comparisons: Sequence[Comparison]) -> None:
    """Raises a UserError unless there is something to report and all of it has one baseline."""
    if not comparisons:
        raise UserError("there is no comparison to report", "compare a candidate with its baseline first")
    digests = {one.baseline.digest for one in comparisons}
    if len(digests) > 1:
        names = ", ".join(sorted(one.baseline.name for one in comparisons))
        raise UserError(f"one report holds one baseline, not {len(digests)}: {names}", "write one report for each")
    # Trainings that made nothing better export the same bytes as PTQ, and are no mistake.
    candidates = [
        (one.candidate.digest, one.method, one.training.record.seed if one.training else None) for one in comparisons
    ]
    if len(set(candidates)) < len(candidates):
        raise UserError("one candidate is in the report twice", "name each candidate once")
    seen: dict[tuple[str, str], float] = {}
    for (task, metric), (value, _) in (pair for one in comparisons for pair in _scores_of(one).items()):
        if seen.setdefault((task, metric), value) != value:
            raise UserError(
                f"the baseline has two different figures of {task} {metric} in one report",
                "compare all candidates with the same baseline records",
            )


def labels(comparisons: Sequence[Comparison]) -> tuple[str, list[str]]:
    """Short names: the baseline's, and those of the candidates."""
    trained = any(one.training for one in comparisons)
    first = figures.model_label(comparisons[0].baseline)
    plain = [f"{one.label} PTQ" if trained and one.training is None else one.label for one in comparisons]
    seeds = [
        f"{name}, seed {one.training.record.seed}" if one.training and plain.count(name) > 1 else name
        for name, one in zip(plain, comparisons, strict=True)
    ]
    names = [first, *seeds]
    digests = [comparisons[0].baseline.digest, *(one.candidate.digest for one in comparisons)]
    first, *others = (
        name if names.count(name) == 1 else f"{name} {digest[:6]}" for name, digest in zip(names, digests, strict=True)
    )
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
    """One row a model, the baseline first: scores, distances, size and verdict.

    With trained candidates it has the rows PTQ, QAT and QAD; several seeds of one training are one row, with the mean
    and the standard deviation among them.
    """
    return _models("Models", comparisons, grouped(comparisons))


def seeds_table(comparisons: Sequence[Comparison]) -> Table | None:
    """The same columns with a row for each seed; None where no training was repeated."""
    repeated = [row for row in grouped(comparisons) if len(row) > 1]
    if not repeated:
        return None
    return _models("Seeds", comparisons, [[one] for row in repeated for one in row])


def _models(title: str, comparisons: Sequence[Comparison], rows: list[list[Comparison]]) -> Table:
    check_one_baseline(comparisons)
    scores = [_scores_of(one) for one in comparisons]
    columns = list(dict.fromkeys(key for one in scores for key in one))
    measured = next((one.fidelity for one in comparisons if one.fidelity), None)
    shown = columns if len(columns) <= (MAX_TASK_COLUMNS_BESIDE_FIDELITY if measured else MAX_TASK_COLUMNS) else []
    distance = ["KL (nats)", "top-1 agreement", "perplexity"] if measured else []
    flipped = any(one.training for one in comparisons) and any(one.tasks for one in comparisons)
    headers = ["model", *(f"{task} {metric}" for task, metric in shown), *distance, *(["flips"] * flipped)]
    headers += ["size on disk", "bits/weight"]
    first, others = labels(comparisons)
    names = {id(one): label for label, one in zip(others, comparisons, strict=True)}
    cells = []
    if title == "Models":
        before = {key: pair[0] for one in scores for key, pair in one.items()}
        nothing = [figures.NONE, figures.NONE, figures.figure(measured.baseline_perplexity, 2)] if measured else []
        weight = _weight([comparisons[0].baseline])
        nothing += [figures.NONE] * flipped
        known = [figures.figure(before[key]) for key in shown]
        cells.append([f"{first} (baseline)", *known, *nothing, *weight, "baseline"])
    together = [f"{row[0].label}, {len(row)} seeds" for row in rows]
    for row, name in zip(rows, together, strict=True):
        if len(row) == 1:
            name = names[id(row[0])]
        elif together.count(name) > 1 and row[0].training is not None:
            name = f"{name} {row[0].training.settings[:6]}"
        after = [{key: pair[1] for key, pair in _scores_of(one).items()} for one in row]
        cells.append(
            [
                name,
                *(_spread([one.get(key) for one in after]) for key in shown),
                *(_distance([one.fidelity for one in row]) if measured else []),
                *([_flips(row)] * flipped),
                *_weight([one.candidate for one in row]),
                _words(row),
            ]
        )
    return Table(title, [*headers, "verdict"], cells)


def _scores_of(comparison: Comparison) -> dict[tuple[str, str], tuple[float, float]]:
    """Both sides' scores by task and metric, a task's figure of the whole set among them."""
    found = {(row.settings.task, row.metric): (row.result.baseline, row.result.candidate) for row in comparison.tasks}
    return found | {
        (row.task, row.metric): (row.baseline, row.candidate)
        for row in comparison.set_metrics
        if row.main and row.subtask == row.task
    }


def _spread(values: Sequence[float | None], digits: int = 4) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return figures.NONE
    return figures.spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, digits)


def _weight(models: Sequence[ModelSummary]) -> list[str]:
    sizes = dict.fromkeys(figures.size(one.bytes_on_disk) for one in models)
    return [" / ".join(sizes), " / ".join(dict.fromkeys(figures.figure(one.bits_per_weight, 2) for one in models))]


def _distance(found: Sequence[FidelityResult | None]) -> list[str]:
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return [figures.NONE] * 3
    agreement = [100 * one.top1_agreement for one in known]
    return [
        _spread([one.kl for one in known]),
        f"{_spread(agreement, 1)}%",
        _spread([one.candidate_perplexity for one in known], 2),
    ]


def _flips(row: Sequence[Comparison]) -> str:
    found = [flips(one) for one in row]
    return figures.count(round(found[0])) if len(found) == 1 else _spread(found, 1)


def _words(row: Sequence[Comparison]) -> str:
    """The verdict of a row; of several that differ, how often each."""
    words = [verdict_word(one) for one in row]
    if len(set(words)) == 1:
        return words[0]
    return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))


def set_metrics_table(comparisons: Sequence[Comparison]) -> Table | None:
    """Figures of whole sets, which have no interval and never decide; None where there are none."""
    _, names = labels(comparisons)
    rows = [
        [
            label,
            row.task if row.subtask == row.task else f"{row.task}: {row.subtask}",
            figures.metric_label(row.metric, row.filter),
            figures.count(row.questions),
            figures.figure(row.baseline),
            figures.figure(row.candidate),
            figures.figure(row.loss),
        ]
        for label, one in zip(names, comparisons, strict=True)
        for row in one.set_metrics
    ]
    if not rows:
        return None
    return Table(
        "Whole-set figures", ["model", "task", "metric", "questions", "baseline", "candidate", "loss"], rows, 3
    )


def references_table(comparisons: Sequence[Comparison]) -> Table | None:
    """How far the candidates' images are from the baseline's, by metrics that do not decide; None without any."""
    _, names = labels(comparisons)
    rows = [
        [
            label,
            row.metric,
            figures.count(row.images),
            figures.figure(row.mean),
            figures.figure(row.median),
            figures.figure(row.worst),
            figures.count(one.equal),
        ]
        for label, side in zip(names, comparisons, strict=True)
        for one in side.pictures
        for row in one.references
    ]
    if not rows:
        return None
    headers = ["model", "metric", "images", "mean", "median", "worst", "equal images"]
    return Table("Distance from the baseline's images", headers, rows, labels=2)


def losses_table(comparison: Comparison, label: str, baseline: str) -> Table:
    """One row a task: both scores, the loss with its interval and margin, recovery, flips and verdict."""
    level = next((figures.level(row.result.interval.level) for row in comparison.tasks if row.result.interval), "")
    unit = "images" if comparison.tasks and all(row.draws for row in comparison.tasks) else "questions"
    headers = [
        "task", "metric", unit, baseline, label, "loss", f"{level} interval".strip(),
        "margin", "recovery", "lost", "gained", "McNemar p", "verdict",
    ]  # fmt: skip
    rows = [_loss_row(row) for row in comparison.tasks]
    return Table(f"{label} against {baseline}", headers, rows, labels=2)


def _loss_row(row: TaskResult) -> list[str]:
    result = row.result
    return [
        row.settings.task,
        figures.metric_label(row.metric, row.filter),
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
            + declared_bounds(comparison)
        )
    proven = figures.level(1 - policy.fail_alpha)
    both = " and the lower end above the negative margin" if policy.rule == "two-sided" else ""
    return text + (
        f": a task passes when the upper end is below the margin{both}, and fails when its loss is above the margin "
        f"with {proven} confidence." + declared_bounds(comparison)
    )


def declared_bounds(comparison: Comparison) -> str:
    """What the policy says that questions are worth, which margins and intervals rest on; empty where it says nothing.

    With a blank in front, for the end of a paragraph.
    """
    policy = comparison.policy
    said = {} if policy is None else {row.metric: row.bounds for row in comparison.tasks if row.metric in policy.bounds}
    names = ", ".join(
        f"{metric} between {bounds[0]:g} and {bounds[1]:g}" for metric, bounds in said.items() if bounds is not None
    )
    return "" if policy is None or not names else f" By policy '{policy.name}' a question has {names}."
