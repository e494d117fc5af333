"""PTQ, QAT and QAD beside each other: one row a method with its seeds behind it, and what training changed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from halfbyte.records.errors import UserError
from halfbyte.records.manifest import CALIBRATION
from halfbyte.reports.bootstrap import ratio_interval
from halfbyte.reports.compare import Folders, record_folders
from halfbyte.reports.comparison import (
    EXIT_CODES,
    Comparison,
    ComparisonFile,
    FidelityGain,
    FidelityResult,
    Gain,
    Method,
    MethodSummary,
    ScoreOfSeeds,
    SeedFigure,
    Training,
)
from halfbyte.reports.gate import worst
from halfbyte.reports.loss import paired_loss
from halfbyte.reports.pairing import Pairs, pair_all
from halfbyte.reports.statistics import ALPHA, Interval, holm

_ORDER: tuple[Method, ...] = ("ptq", "qat", "qad")
_CHANGED_ALPHA = 0.05


def comparison_file(comparisons: Sequence[Comparison]) -> ComparisonFile:
    """What comparison.json holds of several comparisons: the worst verdict first, and the rows of all methods."""
    verdicts = [one.verdict for one in comparisons if one.verdict is not None]
    word = worst([one.verdict for one in verdicts]) if len(verdicts) == len(comparisons) else None
    return ComparisonFile(
        verdict=word,
        exit_code=None if word is None else EXIT_CODES[word],
        sentence=next((one.sentence for one in verdicts if one.verdict == word), None),
        comparisons=list(comparisons),
        methods=summaries(comparisons),
    )


def grouped(comparisons: Sequence[Comparison]) -> list[list[Comparison]]:
    """The comparisons as rows of a table: the seeds of one training together, PTQ before QAT before QAD.

    Seeds that were evaluated on other tasks are rows of their own: their means would be of different things.

    Without a trained candidate each is a row, in the order given.
    """
    if not any(one.training for one in comparisons):
        return [[one] for one in comparisons]
    formats = list(dict.fromkeys(one.candidate.format for one in comparisons))
    rows: list[list[Comparison]] = []
    for one in sorted(comparisons, key=lambda one: (formats.index(one.candidate.format), _ORDER.index(one.method))):
        row = next((row for row in rows if _another_seed(one, row)), None)
        if row is None:
            rows.append([one])
        else:
            row.append(one)
    return [sorted(row, key=_seed) for row in rows]


def _another_seed(one: Comparison, row: Sequence[Comparison]) -> bool:
    """Whether a candidate is of a row's training and tasks, with another seed than all that are in the row."""
    if one.training is None or row[0].training is None or _seed(one) in map(_seed, row):
        return False
    return _kind(one, one.training) == _kind(row[0], row[0].training)


def _kind(one: Comparison, training: Training) -> tuple[str, Method, str, list[tuple[str, str]]]:
    return (one.candidate.format, one.method, training.settings, [(row.task, row.metric) for row in one.tasks])


def _seed(one: Comparison) -> int:
    return one.training.record.seed if one.training else 0


def summaries(comparisons: Sequence[Comparison]) -> list[MethodSummary]:
    """The rows of the table PTQ, QAT, QAD; empty without a trained candidate."""
    if not any(one.training for one in comparisons):
        return []
    return [_summary(row) for row in grouped(comparisons)]


def _summary(row: list[Comparison]) -> MethodSummary:
    first = row[0]
    columns = [(task.task, task.metric) for task in first.tasks]

    def distance(of: Callable[[FidelityResult], float]) -> SeedFigure | None:
        found = [of(one.fidelity) for one in row if one.fidelity is not None]
        return _figure(found) if len(found) == len(row) else None

    scores = []
    for task, metric in columns:
        values = [
            one.result.candidate for side in row for one in side.tasks if (one.task, one.metric) == (task, metric)
        ]
        if len(values) == len(row):
            scores.append(ScoreOfSeeds(task=task, metric=metric, **_figure(values).model_dump()))
    return MethodSummary(
        label=first.label if first.training else f"{first.label} PTQ",
        format=first.candidate.format,
        method=first.method,
        seeds=[one.training.record.seed for one in row if one.training],
        candidates=[one.candidate.digest for one in row],
        scores=scores,
        kl=distance(lambda one: one.kl),
        top1_agreement=distance(lambda one: one.top1_agreement),
        perplexity=distance(lambda one: one.candidate_perplexity),
        flips=_figure([flips(one) for one in row]),
    )


def flips(comparison: Comparison) -> float:
    """Questions of all tasks on which the two sides differ."""
    return float(sum(row.result.lost + row.result.gained for row in comparison.tasks))


def _figure(values: list[float]) -> SeedFigure:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return SeedFigure(mean=statistics.fmean(values), deviation=deviation, values=values)


def with_gains(comparisons: Sequence[Comparison], folders: Sequence[Folders]) -> list[Comparison]:
    """The comparisons, each trained one with its scores beside those of PTQ, question by question.

    Nothing is added where no candidate of the same format is untrained, or several are and none can be told to be
    where training began.

    Args:
        comparisons: Several candidates of one baseline.
        folders: The records of each candidate.

    Raises:
        UserError: when two candidates' records are not comparable.
    """
    if len(folders) != len(comparisons):
        raise ValueError(f"{len(folders)} folders for {len(comparisons)} comparisons")
    found = []
    for one, theirs in zip(comparisons, folders, strict=True):
        plain = [
            place
            for place, other in enumerate(comparisons)
            if other.training is None and other.candidate.format == one.candidate.format
        ]
        began = [place for place in plain if _same_calibration(comparisons[place].manifest, one.manifest)]
        changes: dict[str, Any] = {}
        if one.training is not None and len(began) == 1:
            ptq, before = comparisons[began[0]], folders[began[0]]
            changes = {"gains": _gains(one, before, theirs), "fidelity_gain": _fidelity_gain(ptq, one)}
        elif one.training is not None and plain and not began:
            note = f"{one.label} was calibrated on other texts than PTQ, and is not shown beside it"
            changes = {"notes": [*one.notes, note]}
        found.append(one.model_copy(update=changes) if changes else one)
    return found


def _same_calibration(ptq: dict[str, Any] | None, trained: dict[str, Any] | None) -> bool:
    """Whether a training can have begun at this PTQ: by the texts of calibration; True where nothing says otherwise."""
    if ptq is None or trained is None:
        return True
    ours, theirs = (
        {name: digest for name, digest in one["data"].items() if name.startswith(CALIBRATION)} for one in (ptq, trained)
    )
    return ours == theirs


def _fidelity_gain(ptq: Comparison, trained: Comparison) -> FidelityGain | None:
    before, after = ptq.fidelity, trained.fidelity
    if before is None or after is None or not before.sums:
        return None
    asked = [
        (one.text_digest, one.window, one.dtype, [window.tokens for window in one.sums]) for one in (before, after)
    ]
    if asked[0] != asked[1]:
        return None
    alpha = trained.policy.alpha if trained.policy else ALPHA
    pairs = list(zip(before.sums, after.sums, strict=True))
    tokens = [float(one.tokens) for one, _ in pairs]
    kl = ratio_interval([two.kl - one.kl for one, two in pairs], tokens, alpha)
    nll = ratio_interval([two.candidate_nll - one.candidate_nll for one, two in pairs], tokens, alpha)
    method = "paired bootstrap over windows"
    return FidelityGain(
        text=after.text,
        windows=len(pairs),
        ptq_kl=before.kl,
        trained_kl=after.kl,
        kl_share=after.kl / before.kl if before.kl > 0 else None,
        kl_change=after.kl - before.kl,
        kl_interval=kl and Interval(kl.low, kl.high, kl.level, method),
        perplexity_ratio=after.candidate_perplexity / before.candidate_perplexity,
        perplexity_interval=nll and Interval(math.exp(nll.low), math.exp(nll.high), nll.level, method),
    )


def _gains(trained: Comparison, before: Folders, after: Folders) -> list[Gain]:
    policy = trained.policy
    allow, unknown = (policy.allow, policy.allow_unknown) if policy else ((), ())
    bounds = policy.bounds if policy else None
    alpha = policy.alpha if policy else ALPHA
    ours, theirs = record_folders(before), record_folders(after)
    rows = []
    for task in dict.fromkeys(row.settings.task for row in trained.tasks):
        if task not in ours:
            raise UserError(f"PTQ has no record of {task}, and the trained candidate has", "evaluate it there too")
        found = pair_all(ours[task], theirs[task], allow, unknown, bounds=bounds)
        rows += [(pairs, _gain(pairs, alpha)) for pairs in found if isinstance(pairs, Pairs)]
    known = [gain.p for _, gain in rows if gain.p is not None]
    adjusted = iter(holm(known).tolist() if known else [])
    return [gain if gain.p is None else _said(gain, next(adjusted)) for _, gain in rows]


def _gain(pairs: Pairs, alpha: float) -> Gain:
    result = paired_loss(
        pairs.baseline_values,
        pairs.candidate_values,
        higher_is_better=pairs.higher_is_better,
        bounds=pairs.bounds,
        alpha=alpha,
    )
    found, p = result.interval, None
    if result.p_worse is not None and result.p_better is not None:
        p = min(1.0, 2 * min(result.p_worse, result.p_better))
    return Gain(
        task=pairs.row,
        metric=pairs.metric,
        filter=pairs.filter,
        questions=result.questions,
        ptq=result.baseline,
        trained=result.candidate,
        gain=-result.loss,
        interval=found and Interval(-found.high, -found.low, found.level, found.method),
        gained=result.gained,
        lost=result.lost,
        p=p,
        says="no difference shown",
    )


def _said(gain: Gain, p: float) -> Gain:
    if p >= _CHANGED_ALPHA:
        return gain.model_copy(update={"p": p})
    return gain.model_copy(update={"p": p, "says": "better" if gain.gain > 0 else "worse"})
