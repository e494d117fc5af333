"""Statistics of a paired comparison: confidence intervals, exact tests, and the correction for several tests.

Every interval here is the two-sided interval of level 1 - 2 alpha, so that each of its ends is a one-sided bound at
level 1 - alpha and a verdict can be read off it. Resampling is in bootstrap.py, how many questions are enough in
power.py, and loss.py chooses what suits a metric.

Sources:
    Tango 1998, "Equivalence test and confidence interval for the difference in proportions for the paired-sample
        design", Statistics in Medicine 17, 891-908: the score test and interval for paired 0/1 outcomes.
    Owen 2001, "Empirical likelihood", chapter 2: the likelihood of a mean, which carries Tango's test to outcomes
        between 0 and 1, such as the mean of k samples.
    Miller 2024, "Adding error bars to evals", arXiv 2411.00640: analyse per-question differences, cluster by question.
    McNemar 1947, Psychometrika 12, 153-157: the test on discordant pairs.
    Holm 1979, Scandinavian Journal of Statistics 6, 65-70: several tests at one error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special  # scipy.stats and scipy.optimize take longer to import than a whole gate may take

ALPHA = 0.05
FAIL_ALPHA = 0.01
NOISE = 1e-12  # equal differences of floats still differ by their rounding
_HALVINGS = 54  # of an interval of length 2 at most, down to the precision of a float
_INSIDE = float(np.nextafter(1.0, 0.0))

Array = NDArray[np.float64]


class NoSpread(ValueError):
    """Nothing varies, so nothing can be said of the error; an interval of width zero would read as certainty."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval of the given level."""

    low: float
    high: float
    level: float
    """1 - 2 alpha: 0.9 where each end is a one-sided 95 % bound."""
    method: str


def paired(baseline: ArrayLike, candidate: ArrayLike) -> tuple[Array, Array]:
    """Two rows of finite numbers of one length, shape (n,).

    Raises:
        ValueError: for no numbers, unequal shapes, NaN and infinite values.
    """
    first, second = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    if first.ndim != 1 or first.shape != second.shape:
        raise ValueError(f"paired values must be two rows of one length, got {first.shape} and {second.shape}")
    if not first.size:
        raise ValueError("nothing to compare: no questions")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError("a value is NaN or infinite")
    return first, second


def z_quantile(alpha: float) -> float:
    """The standard normal's upper quantile of a one-sided error between 0 and 0.5."""
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha must be between 0 and 0.5, got {alpha}")
    return -float(special.ndtri(alpha))


def tango_score(lost: ArrayLike, gained: ArrayLike, questions: ArrayLike, margin: ArrayLike) -> Array:
    """Tango's score statistic of the hypothesis that the true loss equals `margin`; arguments broadcast.

    Equations 24 to 26 of Tango 1998, with the loss (lost - gained) / questions. Falls as `margin` grows; the loss is
    below `margin` at level alpha when the statistic is below -z_quantile(alpha).

    Args:
        lost: Questions right in the baseline and wrong in the candidate.
        gained: The reverse.
        questions: All questions, with those on which both agree.
        margin: A loss between -1 and 1.
    """
    b, c, n, m = (np.asarray(value, dtype=np.float64) for value in (lost, gained, questions, margin))
    numerator = b - c - n * m
    half = -b - c + (2 * n - b + c) * m
    last = -c * m * (1 - m)
    root = np.sqrt(np.maximum(half * half - 8 * n * last, 0.0))
    # the two forms are equal; each avoids the cancellation that the other has
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(half > 0, -2 * last / (root + half), (root - half) / (4 * n))
        score = numerator / np.sqrt(np.maximum(n * (2 * q + m * (1 - m)), 0.0))
    return np.where(numerator == 0, 0.0, score)


def tango_interval(lost: float, gained: float, questions: float, alpha: float = ALPHA) -> Interval:
    """Tango's score interval for the loss of paired 0/1 outcomes: all losses the score test does not reject.

    Raises:
        ValueError: when the counts are no paired table, or alpha is not in (0, 0.5).
    """
    if questions <= 0 or lost < 0 or gained < 0 or lost + gained > questions:
        raise ValueError(f"not a paired table: {lost} lost and {gained} gained of {questions} questions")
    loss = (lost - gained) / questions
    return _inverted(lambda m: tango_score(lost, gained, questions, m), loss, alpha, "Tango score")


def score_statistic(losses: ArrayLike, counts: ArrayLike, margin: ArrayLike) -> Array:
    """The score statistic of a mean loss `margin`, for losses between -1 and 1; Tango's where all are -1, 0 or 1.

    The spread is not that of the sample but that of the likeliest distribution whose mean is `margin`, which may put
    weight on losses of -1 and 1 that were not seen. A sample without a single loss is so no proof of a loss of 0, as
    it would be for a t interval.

    Args:
        losses: Distinct losses, shape (v,).
        counts: Questions with each loss, shape (..., v).
        margin: Losses between -1 and 1, exclusive; broadcast against counts' (...).

    Returns:
        The statistics, shape (...).
    """
    values, counted = np.asarray(losses, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    margins = np.asarray(margin, dtype=np.float64)
    if not (np.abs(values) <= 1 + NOISE).all():
        raise ValueError("losses must lie between -1 and 1")
    if not (np.abs(margins) < 1).all():
        raise ValueError(f"a margin must lie between -1 and 1, got {margin!r}")
    total = counted.sum(axis=-1)
    shares = counted / total[..., None]
    mean = shares @ values
    sign = np.where(mean > margins, -1.0, 1.0)  # mirrored, so that the weight to be added is always at the end 1
    offsets = sign[..., None] * np.clip(values, -1, 1) - (sign * margins)[..., None]
    room = 1 - sign * margins
    reach = offsets / room[..., None]  # 1 where the loss is the largest possible

    # the likeliest weights are shares / (1 - tilt reach), where tilt makes their mean the margin; found by halving
    low, high = np.zeros_like(room), np.ones_like(room)
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(_HALVINGS):
            tilt = (low + high) / 2
            pull = np.where(shares > 0, shares * reach / (1 - tilt[..., None] * reach), 0.0).sum(axis=-1)
            low, high = np.where(pull < 0, tilt, low), np.where(pull < 0, high, tilt)
        weights = np.where(shares > 0, shares / (1 - high[..., None] * reach), 0.0)
    added = np.maximum(1 - weights.sum(axis=-1), 0.0)
    variance = (weights * offsets**2).sum(axis=-1) + added * room**2
    with np.errstate(divide="ignore", invalid="ignore"):
        score = (mean - margins) / np.sqrt(variance / total)
    return np.asarray(np.where(np.abs(mean - margins) <= NOISE * room, 0.0, score))


def score_interval(losses: ArrayLike, alpha: float = ALPHA) -> Interval:
    """The score interval for the mean of losses between -1 and 1, shape (n,); see score_statistic."""
    values = np.asarray(losses, dtype=np.float64)
    if not values.size:
        raise ValueError("nothing to compare: no questions")
    distinct, counts = np.unique(values, return_counts=True)
    mean = float(values.mean())
    return _inverted(lambda m: score_statistic(distinct, counts, m), mean, alpha, "score over questions")


def _inverted(score: Callable[[Array], Array], loss: float, alpha: float, method: str) -> Interval:
    """The losses between -1 and 1 that a falling score statistic does not reject."""
    z = z_quantile(alpha)
    inner, outer = np.array([loss, loss]), np.array([-1.0, 1.0])
    for _ in range(_HALVINGS):  # both ends at once
        middle = (inner + outer) / 2
        kept = (np.abs(middle) < 1) & (np.abs(score(np.clip(middle, -_INSIDE, _INSIDE))) < z)
        inner, outer = np.where(kept, middle, inner), np.where(kept, outer, middle)
    return Interval(float(inner[0]), float(inner[1]), 1 - 2 * alpha, method)


def half_question_wider(found: Interval, questions: int) -> Interval:
    """A score interval of losses between -1 and 1 with half a question more at each end: a continuity correction.

    Counts of questions jump by one, and a score test without the correction passes a loss as large as the margin in up
    to 7 % of cases where 5 % are promised; with it never in more than 5 % (reports/CALIBRATION.md). The margin is
    tested at half a question less, which is the interval with its end half a question further out.
    """
    half = 0.5 / questions
    return Interval(max(-1.0, found.low - half), min(1.0, found.high + half), found.level, f"{found.method}, corrected")


def t_interval(losses: ArrayLike, alpha: float = ALPHA, questions: Sequence[Hashable] | None = None) -> Interval:
    """Student's t interval for a mean loss; with `questions`, cluster-robust over the samples of each question.

    Samples of one question are no independent evidence; the questions are (Miller 2024). Clusters may differ in size:
    the variance is G / (G - 1) times the sum of squared cluster residuals over N^2, with G - 1 degrees of freedom.

    Args:
        losses: One loss a question, or one a sample; shape (n,).
        alpha: One-sided error of each end.
        questions: The question of each loss.

    Raises:
        NoSpread: with fewer than two questions or when all losses are equal: there is nothing to estimate a
            spread from, and an interval of width zero would read as certainty.
    """
    z_quantile(alpha)  # refuses an alpha that is none
    values = np.asarray(losses, dtype=np.float64)
    mean, error, clusters = cluster_error(values, questions)
    half = float(special.stdtrit(clusters - 1, 1 - alpha)) * error
    return Interval(mean - half, mean + half, 1 - 2 * alpha, "paired t" if questions is None else "clustered t")


def cluster_error(values: Array, questions: Sequence[Hashable] | None) -> tuple[float, float, int]:
    """The mean, its cluster-robust standard error and the number of clusters; each value its own without `questions`.

    Raises:
        NoSpread: with fewer than two clusters, or when nothing varies between them.
    """
    index = np.arange(values.size) if questions is None else cluster_index(values, questions)
    clusters = int(index.max()) + 1 if index.size else 0
    if clusters < 2:
        raise NoSpread("one question alone has no spread")
    if np.ptp(values) <= NOISE * max(1.0, float(np.abs(values).max())):
        raise NoSpread("all questions differ by the same amount, so there is no spread to estimate")
    mean = float(values.mean())
    residuals = np.bincount(index, weights=values - mean)
    error = math.sqrt(clusters / (clusters - 1) * float(residuals @ residuals)) / values.size
    if error <= NOISE * max(1.0, float(np.abs(values).max())):
        raise NoSpread("all questions differ by the same amount, so there is no spread to estimate")
    return mean, error, clusters


def cluster_index(values: Array, questions: Sequence[Hashable]) -> NDArray[np.intp]:
    """The place of each value's question, in the order in which the questions first appear."""
    if values.shape != (len(questions),):
        raise ValueError(f"{len(questions)} question names for values of shape {values.shape}")
    place = {question: i for i, question in enumerate(dict.fromkeys(questions))}
    return np.array([place[question] for question in questions], dtype=np.intp)


def mcnemar_p(lost: int, gained: int) -> float:
    """Exact two-sided McNemar p: the binomial test of lost against gained; 1 when nothing flipped."""
    return min(1.0, 2 * binomial_tail(max(lost, gained), lost + gained))


def binomial_tail(successes: int, trials: int) -> float:
    """P(X >= successes) of a fair coin tossed `trials` times."""
    return float(special.bdtr(trials - successes, trials, 0.5))


def wilson_interval(successes: int, trials: int, alpha: float = ALPHA) -> Interval:
    """Wilson's score interval of one share (Wilson 1927, JASA 22, 209-212)."""
    z = z_quantile(alpha)
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"not a count: {successes} of {trials}")
    share, weight = successes / trials, z * z / trials
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return Interval(max(0.0, centre - half), min(1.0, centre + half), 1 - 2 * alpha, "Wilson score")


def holm(p_values: ArrayLike) -> Array:
    """Holm's adjusted p-values, shape (n,): those below alpha are all true but for a chance of alpha."""
    values = np.asarray(p_values, dtype=np.float64)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():  # also when one is NaN
        raise ValueError("p-values lie between 0 and 1")
    order = np.argsort(values, kind="stable")
    steps = (values.size - np.arange(values.size)) * values[order]
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted
