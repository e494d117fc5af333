"""The loss of one task: the interval that suits its metric's outcomes, with the tests and counts that go with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from halfbyte.reports.bootstrap import mean_interval
from halfbyte.reports.statistics import (
    ALPHA,
    FAIL_ALPHA,
    NOISE,
    Array,
    Interval,
    NoSpread,
    binomial_tail,
    cluster_error,
    half_question_wider,
    mcnemar_p,
    paired,
    score_interval,
    tango_interval,
)


@dataclass(frozen=True, slots=True)
class PairedLoss:
    """What a candidate lost against its baseline on the same questions, in the metric's own units."""

    questions: int
    baseline: float
    candidate: float
    loss: float
    """Positive when the candidate is worse, whichever direction the metric has."""
    deviation: float
    """Standard deviation of the per-question losses (divisor n)."""
    interval: Interval | None
    """A pass is read off its upper end."""
    wide: Interval | None
    """The interval of the smaller error at which a loss is called proven: a fail is read off its lower end."""
    no_interval: str | None
    """Why there is no interval; None where there is one."""
    lost: int
    """Questions on which the candidate is worse."""
    gained: int
    """Questions on which the candidate is better."""
    mcnemar_p: float | None
    """Exact two-sided McNemar p of lost against gained; None where outcomes are not 0/1."""
    p_worse: float | None
    """One-sided p of the hypothesis that the candidate is no worse; None where nothing varies."""
    p_better: float | None
    """One-sided p of the hypothesis that the candidate is no better."""


def paired_loss(
    baseline: ArrayLike,
    candidate: ArrayLike,
    *,
    higher_is_better: bool,
    bounds: tuple[float, float] | None,
    alpha: float = ALPHA,
    fail_alpha: float = FAIL_ALPHA,
) -> PairedLoss:
    """The loss of a candidate on the questions of its baseline, with its intervals.

    Outcomes of 0 and 1 get Tango's score interval, others between known bounds (such as means of k samples) the score
    interval that extends it, both with half a question's correction at each end, and those of a metric without bounds
    the bootstrap over questions.

    Args:
        baseline: One value a question, shape (n,).
        candidate: The same questions in the same order.
        higher_is_better: The metric's direction.
        bounds: The metric's smallest and largest possible value; None where it has none.
        alpha: One-sided error of each end of `interval`.
        fail_alpha: The same of `wide`.

    Raises:
        ValueError: for no questions, unequal shapes, NaN, infinite values, and values out of bounds.
    """
    first, second = paired(baseline, candidate)
    losses = first - second if higher_is_better else second - first
    if bounds is not None:
        values = np.concatenate([first, second])
        if values.min() < bounds[0] or values.max() > bounds[1]:
            raise ValueError(f"a value lies outside of the metric's bounds, {bounds[0]:g} and {bounds[1]:g}")
    binary = bounds == (0, 1) and bool(np.isin(first, (0, 1)).all() and np.isin(second, (0, 1)).all())
    lost, gained = int((losses > NOISE).sum()), int((losses < -NOISE).sum())
    found: list[Interval] = []
    reason = None
    try:
        for error in (alpha, fail_alpha):
            if binary:
                found.append(half_question_wider(tango_interval(lost, gained, losses.size, error), losses.size))
            elif bounds is not None:
                width = bounds[1] - bounds[0]
                one = half_question_wider(score_interval(losses / width, error), losses.size)
                found.append(Interval(width * one.low, width * one.high, one.level, one.method))
            else:
                found.append(mean_interval(losses, error))
    except NoSpread as error:
        reason = str(error)
    p_worse, p_better = _tails(losses, lost, gained, binary)
    return PairedLoss(
        questions=int(losses.size),
        baseline=float(first.mean()),
        candidate=float(second.mean()),
        loss=float(losses.mean()),
        deviation=float(losses.std()),
        interval=found[0] if found else None,
        wide=found[1] if found else None,
        no_interval=reason,
        lost=lost,
        gained=gained,
        mcnemar_p=mcnemar_p(lost, gained) if binary else None,
        p_worse=p_worse,
        p_better=p_better,
    )


def _tails(losses: Array, lost: int, gained: int, binary: bool) -> tuple[float | None, float | None]:
    """One-sided p-values of being worse and of being better: exact for 0/1 outcomes, of Student's t for others."""
    if binary:
        return binomial_tail(lost, lost + gained), binomial_tail(gained, lost + gained)
    try:
        mean, error, clusters = cluster_error(losses, None)
    except NoSpread:
        return None, None
    t = mean / error
    return float(special.stdtr(clusters - 1, -t)), float(special.stdtr(clusters - 1, t))
