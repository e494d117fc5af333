"""Claims about resampling: seeded, equal to scipy's and to all resamples, and silent where nothing can be said."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from halfbyte.reports.bootstrap import RESAMPLES, SEED, mean_interval, ratio_interval, recovery
from halfbyte.reports.statistics import NoSpread

Z = stats.norm.ppf(0.95)


def test_the_bootstrap_of_a_ratio_is_seeded_and_close_to_the_delta_method() -> None:
    rng = np.random.default_rng(2)
    below = rng.uniform(0.5, 1.5, 800)
    above = 0.97 * below + rng.normal(0, 0.1, 800)
    found = ratio_interval(above, below)
    assert found is not None
    assert found == ratio_interval(above, below)
    ratio = above.mean() / below.mean()
    error = np.std(above - ratio * below) / math.sqrt(800) / below.mean()
    assert found.low == pytest.approx(ratio - Z * error, abs=0.1 * error * Z)
    assert found.high == pytest.approx(ratio + Z * error, abs=0.1 * error * Z)


def test_the_bootstrap_of_a_ratio_is_scipys() -> None:
    rng = np.random.default_rng(2)
    below = rng.uniform(0.5, 1.5, 200)
    above = 0.97 * below + rng.normal(0, 0.1, 200)
    expected = stats.bootstrap(
        (above, below),
        lambda x, y, axis: x.mean(axis=axis) / y.mean(axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        confidence_level=0.9,
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    found = ratio_interval(above, below)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_drawing_counts_of_few_distinct_pairs_is_drawing_questions() -> None:
    baseline = np.array([1, 1, 1, 1, 0, 1, 1])
    candidate = np.array([1, 0, 1, 1, 1, 1, 1])
    ratios = sorted(
        candidate[list(drawn)].mean() / baseline[list(drawn)].mean()
        for drawn in itertools.combinations_with_replacement(range(7), 7)
        if baseline[list(drawn)].any()
    )
    # each multiset of questions with the number of orders in which it can be drawn
    weights, values = [], []
    for drawn in itertools.combinations_with_replacement(range(7), 7):
        if baseline[list(drawn)].any():
            counts = np.bincount(drawn, minlength=7)
            weights.append(math.factorial(7) / math.prod(math.factorial(int(count)) for count in counts))
            values.append(candidate[list(drawn)].mean() / baseline[list(drawn)].mean())
    order = np.argsort(values)
    cumulated = np.cumsum(np.array(weights)[order]) / sum(weights)
    low = np.array(values)[order][np.searchsorted(cumulated, 0.05)]
    high = np.array(values)[order][np.searchsorted(cumulated, 0.95)]
    found = ratio_interval(candidate, baseline)
    assert found is not None
    assert ratios[0] < 1 < ratios[-1]
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)


def test_a_ratio_without_variation_or_over_nothing_has_no_interval() -> None:
    assert ratio_interval([1, 1, 1], [1, 1, 1]) is None
    assert ratio_interval([1.0], [2.0]) is None
    assert ratio_interval([1, 1], [0, 0]) is None
    assert ratio_interval([1, 0], [0, 1]) is None  # some resamples have nothing below
    with pytest.raises(ValueError, match="no questions"):
        ratio_interval([], [])


def test_the_interval_of_a_mean_reaches_as_far_as_scipys_bca_and_as_students_t() -> None:
    losses = np.random.default_rng(4).exponential(1, 300)
    expected = stats.bootstrap(
        (losses,),
        np.mean,
        vectorized=True,
        method="BCa",
        confidence_level=0.9,
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    found = mean_interval(losses)
    student = stats.ttest_1samp(losses, 0).confidence_interval(0.9)
    ends = min(expected.low, student.low), max(expected.high, student.high)
    assert (found.low, found.high) == pytest.approx(ends, abs=1e-9)
    for few in ([], [1.0], [0.5] * 40, list(range(19))):
        with pytest.raises(NoSpread):
            mean_interval(few)


def test_recovery_is_percent_of_the_baseline_in_the_metrics_direction() -> None:
    value, interval = recovery([1, 1, 1, 0] * 50, [1, 1, 0, 0] * 50, higher_is_better=True)
    assert value == pytest.approx(200 / 3)
    assert interval is not None
    assert interval.low < 200 / 3 < interval.high
    assert recovery([2.0, 3.0], [4.0, 6.0], higher_is_better=False)[0] == pytest.approx(50.0)
    assert recovery([1.0, -0.5], [1.0, 0.5], higher_is_better=True) == (None, None)
    assert recovery([0, 0], [1, 0], higher_is_better=True) == (None, None)
