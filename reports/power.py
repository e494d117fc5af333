"""How much evidence is enough: the losses that so many questions can show, and the questions that a margin needs.

Normal approximations of the tests in statistics.py, as statsmodels' normal_power_het and normal_sample_size_one_tail
with a deviation of its own under the null, with the half question by which their intervals are corrected, and never
below what they need where nothing flips.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from halfbyte.reports.loss import PairedLoss
from halfbyte.reports.statistics import ALPHA, FAIL_ALPHA, paired, tango_score, z_quantile

POWER = 0.8
_TOO_MANY = 1e9  # no evaluation will ever have as many questions


def fewest_questions(margin: float, alpha: float = ALPHA, width: float = 1.0) -> int:
    """The number of questions below which not even a candidate without a single flip passes.

    Without flips the upper end of the corrected score interval is z^2 / (n + z^2) + 1 / (2 n).

    Args:
        margin: The largest tolerable loss, in units of the metric.
        alpha: The one-sided error.
        width: The distance between the metric's bounds.
    """
    z, share = z_quantile(alpha), margin / width
    if not share > 0:
        raise ValueError(f"a margin must be positive, got {margin}")
    if share >= 1:
        return 1
    half = (z * z * (1 - share) + 0.5) / 2  # the root of share n^2 - 2 half n - z^2 / 2, which is where they are equal
    return math.floor((half + math.sqrt(half * half + share * z * z / 2)) / share) + 1


def flip_deviation(lost: float, gained: float) -> float:
    """The standard deviation of the loss of one 0/1 question that is lost and gained with these probabilities."""
    if min(lost, gained) < 0 or lost + gained > 1:
        raise ValueError(f"not two probabilities: {lost} and {gained}")
    return math.sqrt(lost + gained - (lost - gained) ** 2)


def null_deviation(loss: float, deviation: float, margin: float, width: float = 1.0) -> float:
    """The standard deviation that the score test reckons with: that of a loss which is the margin.

    Tango's, for the rates of lost and gained that have this loss and deviation; `deviation` itself for a metric without
    bounds (width 0), which has no score test.
    """
    if width == 0 or not 0 < margin < width:
        return deviation
    m, d = margin / width, loss / width
    flips = (deviation / width) ** 2 + d * d
    gained = max(0.0, (flips - d) / 2)
    half = -flips + (2 - d) * m
    root = math.sqrt(half * half + 8 * gained * m * (1 - m))
    return width * math.sqrt((root - half) / 2 + m * (1 - m))


def chance_to_pass(
    loss: float, deviation: float, questions: float, margin: float, alpha: float = ALPHA, width: float = 1.0
) -> float:
    """The probability that a candidate with this true loss is proven to lose less than `margin`."""
    if questions < fewest_questions(margin, alpha, width):
        return 0.0
    room = margin - loss - width / (2 * questions)
    if deviation == 0:
        return float(room > 0)
    assumed = null_deviation(loss, deviation, margin - width / (2 * questions), width)
    return float(special.ndtr((room * math.sqrt(questions) - z_quantile(alpha) * assumed) / deviation))


def detectable_loss(
    deviation: float, questions: float, alpha: float = ALPHA, power: float = POWER, width: float = 1.0
) -> float:
    """The minimum detectable loss: the smallest true loss that so many questions prove with probability `power`.

    It is also the smallest margin that a candidate which lost nothing passes with that probability. Never below the
    upper end of the interval without flips.
    """
    z, more = z_quantile(alpha), float(special.ndtri(power)) * deviation
    low, high = 0.0, width
    for _ in range(60):
        middle = (low + high) / 2
        seen = middle * math.sqrt(questions) >= z * null_deviation(0.0, deviation, middle, width) + more
        low, high = (low, middle) if seen else (middle, high)
    return high + 0.5 * width / questions


def questions_needed(
    deviation: float, distance: float, margin: float, alpha: float = ALPHA, power: float = POWER, width: float = 1.0
) -> int | None:
    """How many questions tell a loss at `distance` from the margin apart from it; None when no number would."""
    if not distance > 0:
        return None
    needed = max(
        _questions(margin - distance, deviation, margin, alpha, power, width), fewest_questions(margin, alpha, width)
    )
    return math.ceil(needed) if needed <= _TOO_MANY else None


def _questions(loss: float, deviation: float, margin: float, alpha: float, power: float, width: float) -> float:
    """The n with (z_alpha null deviation + z_power deviation) / sqrt(n) + width / (2 n) = |margin - loss|."""
    distance, side = abs(margin - loss), math.copysign(width / 2, margin - loss)
    found = math.inf
    for _ in range(20):  # the null deviation depends on n a little
        assumed = null_deviation(loss, deviation, margin - side / found, width)
        sum_ = z_quantile(alpha) * assumed + float(special.ndtri(power)) * deviation
        found = ((sum_ + math.sqrt(sum_ * sum_ + 2 * width * distance)) / (2 * distance)) ** 2
        if not 0 < found < math.inf:
            break
    return found


def questions_to_settle(
    loss: PairedLoss,
    margin: float,
    alpha: float = ALPHA,
    fail_alpha: float = FAIL_ALPHA,
    power: float = POWER,
    width: float = 1.0,
) -> int | None:
    """How many questions would turn an inconclusive loss into a verdict, with probability `power`.

    Takes the measured loss and spread as the truth, and for 0/1 outcomes at least as many as Tango's interval needs at
    the same rates of lost and gained. None when no number would (the loss lies on the margin) or nothing is known of
    the spread.

    Args:
        loss: As measured.
        margin: The largest tolerable loss, in units of the metric.
        alpha: The error of a pass, which a loss below the margin is on the way to.
        fail_alpha: The error of a fail, for a loss above it.
        power: The probability that the verdict then comes.
        width: The distance between the metric's bounds; 0 where it has none.
    """
    distance = abs(margin - loss.loss)
    if distance == 0 or (loss.deviation == 0 and loss.mcnemar_p is None):
        return None
    passes = loss.loss < margin
    error = alpha if passes else fail_alpha
    needed = _questions(loss.loss, loss.deviation, margin, error, power, width)
    if loss.mcnemar_p is not None:
        rates = loss.lost / loss.questions, loss.gained / loss.questions
        sign, z = (1 if passes else -1), z_quantile(error)

        def undecided(n: float) -> bool:
            tested = min(max(margin - sign * 0.5 / n, -1.0), 1.0)
            return sign * float(tango_score(rates[0] * n, rates[1] * n, n, tested)) > -z

        while undecided(max(needed, 1.0)):
            needed = 1.1 * max(needed, 1.0)
            if needed > _TOO_MANY:
                return None
    return math.ceil(needed) if needed <= _TOO_MANY else None


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the spread of per-question losses comes from, when each question is sampled k times."""

    between: float
    """Variance of the true losses of questions: more samples do not lower it."""
    within: float
    """Variance of one question's loss with a single sample on each side: k samples divide it by k."""
    samples: int

    def deviation(self, samples: int) -> float:
        """The standard deviation of a question's mean loss over so many samples."""
        return math.sqrt(self.between + self.within / samples)


def spread(baseline: ArrayLike, candidate: ArrayLike, samples: int) -> Spread:
    """Splits the spread of question means of 0/1 samples into its two parts.

    A question with mean p over k samples of 0 or 1 has an unbiased estimate k p (1 - p) / (k - 1) of the variance of
    one sample; `within` is its mean, both sides added. What is left of the losses' variance is `between`.

    Args:
        baseline: Means over k samples, shape (n,), between 0 and 1.
        candidate: The same of the other side.
        samples: k, at least 2.

    Raises:
        ValueError: for one sample a question, which cannot be split, and values that are no means of 0/1 samples.
    """
    first, second = paired(baseline, candidate)
    if samples < 2:
        raise ValueError("one sample a question cannot tell the two apart")
    if min(first.min(), second.min()) < 0 or max(first.max(), second.max()) > 1:
        raise ValueError("means of 0/1 samples lie between 0 and 1")
    within = float((first * (1 - first) + second * (1 - second)).mean()) * samples / (samples - 1)
    variance = float(np.var(first - second, ddof=1)) if first.size > 1 else 0.0
    return Spread(max(0.0, variance - within / samples), within, samples)


def samples_needed(
    found: Spread,
    questions: int,
    distance: float,
    margin: float,
    alpha: float = ALPHA,
    power: float = POWER,
    width: float = 1.0,
) -> int | None:
    """How many samples of each of these questions would settle it; None when only more questions would."""
    if not distance > 0 or questions < fewest_questions(margin, alpha, width):
        return None

    def enough(samples: int) -> bool:
        return chance_to_pass(margin - distance, found.deviation(samples), questions, margin, alpha, width) >= power

    high = 1
    while not enough(high):
        high *= 2
        if high > _TOO_MANY:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
