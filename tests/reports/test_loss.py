"""Claims about the loss of a task: every kind of metric gets the interval that suits it, or the reason why none."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from halfbyte.reports.loss import paired_loss
from halfbyte.reports.statistics import tango_interval

SHARE = (0.0, 1.0)


def test_a_loss_is_positive_when_the_candidate_is_worse_in_either_direction() -> None:
    assert paired_loss([1, 1, 0], [1, 0, 0], higher_is_better=True, bounds=SHARE).loss == pytest.approx(1 / 3)
    found = paired_loss([2.0, 3.0], [2.5, 4.0], higher_is_better=False, bounds=None)
    assert found.loss == pytest.approx(0.75)
    assert (found.lost, found.gained) == (2, 0)


def test_outcomes_of_0_and_1_get_tango_and_mcnemar_and_others_between_bounds_the_score() -> None:
    binary = paired_loss([1, 1, 0, 1], [1, 0, 0, 1], higher_is_better=True, bounds=SHARE)
    assert binary.interval is not None
    assert binary.wide is not None
    assert (binary.interval.method, binary.mcnemar_p) == ("Tango score, corrected", 1.0)
    plain = tango_interval(1, 0, 4)
    assert (binary.interval.low, binary.interval.high) == (plain.low - 1 / 8, plain.high + 1 / 8)
    assert binary.wide.low < binary.interval.low
    means = paired_loss([1, 0.5, 0, 1], [1, 0.25, 0, 1], higher_is_better=True, bounds=SHARE)
    assert means.interval is not None
    assert (means.interval.method, means.mcnemar_p) == ("score over questions, corrected", None)


def test_bounds_scale_the_score_interval() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.integers(0, 17, 40) / 16, rng.integers(0, 17, 40) / 16
    one = paired_loss(first, second, higher_is_better=True, bounds=SHARE)
    other = paired_loss(100 * first, 100 * second, higher_is_better=True, bounds=(0.0, 100.0))
    assert one.interval is not None
    assert other.interval is not None
    assert (other.interval.low, other.interval.high) == pytest.approx(
        (100 * one.interval.low, 100 * one.interval.high), abs=1e-9
    )


def test_a_metric_without_bounds_is_not_taken_for_binary_and_gets_the_bootstrap() -> None:
    found = paired_loss([1.0, 0.0] * 20, [1.0, 1.0] * 20, higher_is_better=False, bounds=None)
    assert found.interval is not None
    assert "bootstrap" in found.interval.method
    assert found.mcnemar_p is None


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ([0.3] * 30, [0.3] * 30, "same amount"),
        (np.linspace(0, 1, 30), np.linspace(0, 1, 30) - 0.1, "same amount"),
        ([0.3, 0.9], [0.4, 0.1], "too few"),
    ],
)
def test_what_carries_no_interval_says_why(first: list[float], second: list[float], why: str) -> None:
    found = paired_loss(first, second, higher_is_better=True, bounds=None)
    assert (found.interval, found.wide) == (None, None)
    assert why in str(found.no_interval)


def test_values_beyond_the_metrics_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="outside of the metric's bounds"):
        paired_loss([0.5, 1.2], [0.5, 0.5], higher_is_better=True, bounds=SHARE)


def test_the_one_sided_p_values_agree_with_scipy() -> None:
    rng = np.random.default_rng(8)
    first, second = rng.normal(0, 1, 60), rng.normal(0.2, 1, 60)
    found = paired_loss(first, second, higher_is_better=True, bounds=None)
    for p, side in ((found.p_worse, "greater"), (found.p_better, "less")):
        assert p == pytest.approx(stats.ttest_rel(first, second, alternative=side).pvalue, abs=1e-9)
    binary = paired_loss([1] * 9 + [0] * 3, [0] * 9 + [1] * 3, higher_is_better=True, bounds=SHARE)
    assert binary.p_worse == pytest.approx(stats.binomtest(9, 12, alternative="greater").pvalue, abs=1e-9)
    assert binary.p_better == pytest.approx(stats.binomtest(3, 12, alternative="greater").pvalue, abs=1e-9)
