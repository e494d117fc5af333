"""Statistics of a paired comparison: loss with a confidence interval, exact tests, and how many questions are enough.

Every interval here is the two-sided interval of level 1 - 2 alpha, so that each of its ends is a one-sided bound at
level 1 - alpha and a verdict can be read off the interval: a loss is acceptable when the upper end is below the
margin, and proven too large when the lower end is above it.

Sources:
    Tango 1998, "Equivalence test and confidence interval for the difference in proportions for the paired-sample
        design", Statistics in Medicine 17, 891-908: the score test and interval for paired 0/1 outcomes.
    Miller 2024, "Adding error bars to evals", arXiv 2411.00640: analyse per-question differences, cluster by question.
    McNemar 1947, Psychometrika 12, 153-157: the test on discordant pairs.
    Efron and Tibshirani 1993, "An introduction to the bootstrap": percentile interval of a ratio of paired means.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

ALPHA = 0.05
POWER = 0.8
RESAMPLES = 2000
SEED = 1234
_TOO_MANY = 1e9  # no evaluation will ever have as many questions
_NOISE = 1e-12  # equal differences of floats still differ by their rounding
_BATCH = 2_000_000  # resampled values held at a time, to bound the bootstrap's memory

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval of the given level."""

    low: float
    high: float
    level: float
    """1 - 2 alpha: 0.9 where each end is a one-sided 95 % bound."""
    method: str


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
    no_interval: str | None
    """Why there is no interval; None where there is one."""
    lost: int
    """Questions on which the candidate is worse."""
    gained: int
    """Questions on which the candidate is better."""
    mcnemar_p: float | None
    """Exact two-sided McNemar p of lost against gained; None where outcomes are not 0/1."""


def _paired(baseline: ArrayLike, candidate: ArrayLike) -> tuple[Array, Array]:
    first, second = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    if first.ndim != 1 or first.shape != second.shape:
        raise ValueError(f"paired values must be two rows of one length, got {first.shape} and {second.shape}")
    if not first.size:
        raise ValueError("nothing to compare: no questions")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError("a value is NaN or infinite")
    return first, second


def _quantile(alpha: float) -> float:
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha must be between 0 and 0.5, got {alpha}")
    return float(stats.norm.ppf(1 - alpha))


def tango_score(lost: float, gained: float, questions: float, margin: float) -> float:
    """Tango's score statistic of the hypothesis that the true loss equals `margin`.

    Equations 24 to 26 of Tango 1998, with the loss (lost - gained) / questions. Falls as `margin` grows; the loss is
    below `margin` at level alpha when the statistic is below -norm.ppf(1 - alpha).

    Args:
        lost: Questions right in the baseline and wrong in the candidate.
        gained: The reverse.
        questions: All questions, with those on which both agree.
        margin: A loss between -1 and 1.
    """
    numerator = lost - gained - questions * margin
    if numerator == 0:
        return 0.0
    a = 2 * questions
    b = -lost - gained + (2 * questions - lost + gained) * margin
    c = -gained * margin * (1 - margin)
    root = math.sqrt(max(b * b - 4 * a * c, 0.0))
    # the two forms are equal; each avoids the cancellation that the other has
    q = -2 * c / (root + b) if b > 0 else (root - b) / (2 * a)
    variance = questions * (2 * q + margin * (1 - margin))
    return numerator / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, numerator)


def tango_interval(lost: float, gained: float, questions: float, alpha: float = ALPHA) -> Interval:
    """Tango's score interval for the loss of paired 0/1 outcomes: all losses the score test does not reject.

    Raises:
        ValueError: when the counts are no paired table, or alpha is not in (0, 0.5).
    """
    if questions <= 0 or lost < 0 or gained < 0 or lost + gained > questions:
        raise ValueError(f"not a paired table: {lost} lost and {gained} gained of {questions} questions")
    z = _quantile(alpha)
    loss = (lost - gained) / questions

    def bound(end: float, target: float) -> float:
        if loss == end:
            return end
        # the arc tangent keeps the ends finite, where the score itself is infinite
        distance = lambda m: math.atan(tango_score(lost, gained, questions, m)) - math.atan(target)  # noqa: E731
        return float(optimize.brentq(distance, min(loss, end), max(loss, end), xtol=1e-14))

    return Interval(bound(-1.0, z), bound(1.0, -z), 1 - 2 * alpha, "Tango score")


def t_interval(losses: ArrayLike, alpha: float = ALPHA) -> Interval:
    """Student's t interval for the mean of per-question losses.

    Raises:
        ValueError: with fewer than two questions or when all losses are equal: there is nothing to estimate a
            spread from, and an interval of width zero would read as certainty.
    """
    values = np.asarray(losses, dtype=np.float64)
    if values.size < 2:
        raise ValueError("one question alone has no spread")
    if np.ptp(values) <= _NOISE * max(1.0, float(np.abs(values).max())):
        raise ValueError("all questions differ by the same amount, so there is no spread to estimate")
    level = 1 - 2 * alpha
    _quantile(alpha)
    found = stats.ttest_1samp(values, popmean=0.0).confidence_interval(level)
    return Interval(float(found.low), float(found.high), level, "paired t")


def mcnemar_p(lost: int, gained: int) -> float:
    """Exact two-sided McNemar p: the binomial test of lost against gained; 1 when nothing flipped."""
    return float(stats.binomtest(lost, lost + gained, 0.5).pvalue) if lost + gained else 1.0


def question_means(values: ArrayLike, questions: Sequence[Hashable]) -> Array:
    """The mean of each question's samples, in the order in which the questions first appear.

    With k samples a question the samples are no independent evidence; the questions are (Miller 2024, clustered
    standard errors). With equally many samples each this equals the cluster-robust analysis.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.shape != (len(questions),):
        raise ValueError(f"{len(questions)} question names for values of shape {data.shape}")
    place = {question: i for i, question in enumerate(dict.fromkeys(questions))}
    index = np.array([place[question] for question in questions], dtype=np.intp)
    sums = np.bincount(index, weights=data, minlength=len(place))
    return np.asarray(sums / np.bincount(index, minlength=len(place)), dtype=np.float64)


def paired_loss(
    baseline: ArrayLike,
    candidate: ArrayLike,
    *,
    higher_is_better: bool,
    alpha: float = ALPHA,
    questions: Sequence[Hashable] | None = None,
) -> PairedLoss:
    """The loss of a candidate on the questions of its baseline, with its interval.

    0/1 outcomes get Tango's score interval, all others the t interval over questions.

    Args:
        baseline: One value a question, shape (n,); with `questions`, one a sample.
        candidate: The same questions in the same order.
        higher_is_better: The metric's direction.
        alpha: One-sided error of each end of the interval.
        questions: The question of each value, where a question has several samples.

    Raises:
        ValueError: for no questions, unequal shapes, NaN and infinite values.
    """
    first, second = _paired(baseline, candidate)
    if questions is not None:
        first, second = question_means(first, questions), question_means(second, questions)
    losses = first - second if higher_is_better else second - first
    lost, gained = int((losses > 0).sum()), int((losses < 0).sum())
    binary = bool(np.isin(first, (0, 1)).all() and np.isin(second, (0, 1)).all())
    interval, reason = None, None
    try:
        interval = tango_interval(lost, gained, losses.size, alpha) if binary else t_interval(losses, alpha)
    except ValueError as error:
        reason = str(error)
    return PairedLoss(
        questions=int(losses.size),
        baseline=float(first.mean()),
        candidate=float(second.mean()),
        loss=float(losses.mean()),
        deviation=float(losses.std()),
        interval=interval,
        no_interval=reason,
        lost=lost,
        gained=gained,
        mcnemar_p=mcnemar_p(lost, gained) if binary else None,
    )


def ratio_interval(
    numerator: ArrayLike, denominator: ArrayLike, alpha: float = ALPHA, seed: int = SEED
) -> Interval | None:
    """Paired bootstrap percentile interval of mean(numerator) / mean(denominator), shapes (n,); seeded.

    None when the data cannot carry one: fewer than two pairs, a resample whose denominator is not positive, or
    nothing that varies.
    """
    top, bottom = _paired(numerator, denominator)
    _quantile(alpha)
    if top.size < 2 or bottom.mean() <= 0:
        return None

    def ratio(x: Array, y: Array, axis: int) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            return x.mean(axis=axis) / y.mean(axis=axis)

    level = 1 - 2 * alpha
    with warnings.catch_warnings():
        # resamples without a positive denominator give no interval, which is checked below
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        found = stats.bootstrap(
            (top, bottom),
            ratio,
            paired=True,
            vectorized=True,
            method="percentile",
            confidence_level=level,
            n_resamples=RESAMPLES,
            batch=max(1, _BATCH // top.size),
            rng=np.random.default_rng(seed),
        )
    low, high = float(found.confidence_interval.low), float(found.confidence_interval.high)
    if not (math.isfinite(low) and math.isfinite(high)) or low == high:
        return None
    return Interval(low, high, level, "paired bootstrap")


def questions_to_settle(loss: PairedLoss, margin: float, alpha: float = ALPHA, power: float = POWER) -> int | None:
    """How many questions would turn an inconclusive loss into a verdict, with probability `power`.

    Takes the measured loss and spread as the truth: n = ((z_alpha + z_power) deviation / (margin - loss))^2, and for
    0/1 outcomes at least as many as Tango's interval needs at the same rates of lost and gained. None when no number
    would (the loss lies on the margin) or nothing is known of the spread.
    """
    distance = abs(margin - loss.loss)
    z = _quantile(alpha)
    if distance == 0 or (loss.deviation == 0 and loss.mcnemar_p is None):
        return None
    needed = ((z + float(stats.norm.ppf(power))) * loss.deviation / distance) ** 2
    if loss.mcnemar_p is not None:
        rates = loss.lost / loss.questions, loss.gained / loss.questions
        sign = 1 if loss.loss < margin else -1

        def undecided(n: float) -> bool:
            return sign * tango_score(rates[0] * n, rates[1] * n, n, margin) > -z

        while undecided(max(needed, 1.0)):
            needed = 1.1 * max(needed, 1.0)
            if needed > _TOO_MANY:
                return None
    return math.ceil(needed) if needed <= _TOO_MANY else None
