"""Claims about how much evidence is enough, against statsmodels and against the tests themselves."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import numpy as np
import pytest

from halfbyte.reports.loss import PairedLoss, paired_loss
from halfbyte.reports.power import (
    Spread,
    chance_to_pass,
    detectable_loss,
    fewest_questions,
    flip_deviation,
    null_deviation,
    questions_needed,
    questions_to_settle,
    samples_needed,
    spread,
)
from halfbyte.reports.statistics import Interval, half_question_wider, score_interval, tango_interval, tango_score

SHARE = (0.0, 1.0)


def gate_interval(lost: int, gained: int, questions: int) -> Interval:
    return half_question_wider(tango_interval(lost, gained, questions), questions)


def loss_of(baseline: list[float], candidate: list[float]) -> PairedLoss:
    return paired_loss(baseline, candidate, higher_is_better=True, bounds=SHARE)


@pytest.mark.parametrize("margin", [0.002, 0.01, 0.02, 0.05, 0.3])
def test_the_fewest_questions_are_those_at_which_no_flip_passes(margin: float) -> None:
    fewest = fewest_questions(margin)
    assert gate_interval(0, 0, fewest).high < margin <= gate_interval(0, 0, fewest - 1).high
    assert fewest_questions(100 * margin, width=100) == fewest
    assert fewest_questions(2.0) == 1
    with pytest.raises(ValueError, match="positive"):
        fewest_questions(0.0)


@pytest.mark.parametrize(("loss", "lost", "gained", "n"), [(0.0, 0.02, 0.02, 3000), (0.005, 0.03, 0.025, 1319)])
def test_the_chance_to_pass_agrees_with_statsmodels(loss: float, lost: float, gained: float, n: int) -> None:
    power = pytest.importorskip("statsmodels.stats.power")
    deviation = flip_deviation(lost, gained)
    room = 0.01 - 0.5 / n
    expected = power.normal_power_het(
        room - loss, n, 0.05, std_null=null_deviation(loss, deviation, room), std_alternative=deviation,
        alternative="larger",
    )  # fmt: skip
    assert chance_to_pass(loss, deviation, n, 0.01) == pytest.approx(expected, abs=1e-9)


def test_the_chance_to_pass_is_that_of_the_test() -> None:
    rng = np.random.default_rng(11)
    drawn = rng.multinomial(1319, [0.015, 0.015, 0.97], size=3000)
    tables, counts = np.unique(drawn[:, :2], axis=0, return_counts=True)
    passes = [gate_interval(int(lost), int(gained), 1319).high < 0.01 for lost, gained in tables]
    assert float(np.dot(passes, counts)) / 3000 == pytest.approx(
        chance_to_pass(0.0, flip_deviation(0.015, 0.015), 1319, 0.01), abs=0.04
    )
    assert chance_to_pass(0.0, 0.0, 5000, 0.01) == 1.0
    assert chance_to_pass(0.02, 0.0, 5000, 0.01) == 0.0
    assert chance_to_pass(0.0, 0.1, 100, 0.01) == 0.0  # too few for any candidate


def test_the_questions_needed_agree_with_statsmodels_sample_size() -> None:
    power = pytest.importorskip("statsmodels.stats.power")
    needed = questions_needed(math.sqrt(0.05), 0.01, 0.01)
    assert needed is not None
    room = 0.01 - 0.5 / needed
    assumed = null_deviation(0.0, math.sqrt(0.05), room)
    expected = power.normal_sample_size_one_tail(room, 0.8, 0.05, std_null=assumed, std_alternative=math.sqrt(0.05))
    assert needed == pytest.approx(expected, abs=1)
    found = questions_to_settle(loss_of([1.0] * 25 + [0.0] * 25 + [1.0] * 950, [0.0] * 25 + [1.0] * 975), 0.01)
    assert found == needed
    assert questions_needed(0.3, 0.0, 0.01) is None
    assert questions_needed(0.0, 0.01, 0.01) == fewest_questions(0.01)


def test_the_detectable_loss_is_what_the_questions_needed_turn_around() -> None:
    deviation = flip_deviation(0.04, 0.04)
    needed = questions_needed(deviation, 0.013, 0.013)
    assert needed is not None
    assert detectable_loss(deviation, needed) == pytest.approx(0.013, rel=1e-3)
    assert detectable_loss(0.0, 200) == pytest.approx(gate_interval(0, 0, 200).high, abs=1e-12)


def test_the_questions_needed_do_settle_it() -> None:
    needed = questions_to_settle(loss_of([1.0] * 100, [1.0] * 100), margin=0.01)
    assert needed is not None
    assert gate_interval(0, 0, needed).high < 0.01
    assert gate_interval(0, 0, needed // 2).high > 0.01


def test_a_loss_above_the_margin_needs_as_many_questions_as_its_fail_does() -> None:
    """The error of a fail is smaller than that of a pass."""
    loss = loss_of([1.0] * 20 + [0.0] * 5 + [1.0] * 475, [0.0] * 20 + [1.0] * 480)
    needed = questions_to_settle(loss, margin=0.01)
    assert needed is not None
    rates = np.array([20, 5]) / 500
    at = half_question_wider(tango_interval(*(rates * needed), needed, alpha=0.01), needed)
    assert at.low > 0.01
    assert needed > 1.3 * (questions_to_settle(loss, margin=0.01, fail_alpha=0.05) or 0)


def test_no_number_of_questions_settles_a_loss_on_the_margin() -> None:
    assert questions_to_settle(loss_of([1.0] * 4, [0.0, 1, 1, 1]), margin=0.25) is None


def test_rates_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="not two probabilities"):
        flip_deviation(0.7, 0.7)


def test_the_spread_of_samples_is_split_into_questions_and_samples() -> None:
    rng = np.random.default_rng(12)
    k, n = 16, 4000
    p = rng.uniform(0.2, 0.8, n)
    q = np.clip(p + rng.normal(0, 0.1, n), 0, 1)
    found = spread(rng.binomial(k, p, n) / k, rng.binomial(k, q, n) / k, k)
    assert found.within == pytest.approx(float((p * (1 - p) + q * (1 - q)).mean()), rel=0.03)
    assert found.between == pytest.approx(float(np.var(p - q)), rel=0.2)
    with pytest.raises(ValueError, match="one sample"):
        spread([0.5], [0.5], 1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        spread([1.5], [0.5], 4)


def test_more_samples_settle_what_is_noise_within_questions_and_nothing_else() -> None:
    noisy = Spread(between=0.0, within=0.3, samples=4)
    needed = samples_needed(noisy, 500, 0.02, 0.02)
    assert needed is not None
    assert 4 < needed < 50
    assert chance_to_pass(0.0, noisy.deviation(needed), 500, 0.02) >= 0.8
    assert chance_to_pass(0.0, noisy.deviation(needed - 1), 500, 0.02) < 0.8
    assert samples_needed(Spread(0.2, 0.0, 4), 500, 0.02, 0.02) is None
    assert samples_needed(noisy, 30, 0.02, 0.02) is None  # too few questions for any candidate
    assert samples_needed(noisy, 500, 0.0, 0.02) is None


def test_the_samples_needed_do_settle_it() -> None:
    rng = np.random.default_rng(13)
    p = rng.uniform(0.1, 0.9, 500)
    needed = samples_needed(Spread(0.0, float(2 * (p * (1 - p)).mean()), 1), 500, 0.03, 0.03)
    assert needed is not None
    passed = 0
    for _ in range(60):
        first, second = (rng.binomial(needed, p) / needed for _ in range(2))
        passed += half_question_wider(score_interval(first - second), 500).high < 0.03
    assert passed / 60 > 0.65


@pytest.mark.parametrize("questions", [500, 1319, 14_042])
@pytest.mark.parametrize("lost", [0.002, 0.005, 0.01, 0.025, 0.05])
def test_the_chance_to_pass_never_promises_more_than_the_gate_keeps(questions: int, lost: float) -> None:
    """Of candidates that lost nothing, against the exact rate; with few flips the approximation is at its worst."""
    script = runpy.run_path(str(Path(__file__).resolve().parent.parent / "gate_calibration.py"))
    exact = script["exact_rate"](questions, lost, lost, 0.01)
    found = chance_to_pass(0.0, flip_deviation(lost, lost), questions, 0.01)
    assert exact - (0.05 if lost * questions > 2 else 0.12) < found < exact + 0.01


def test_the_null_deviation_is_tangos() -> None:
    for lost, gained, margin in ((0.03, 0.01, 0.01), (0.2, 0.0, 0.05), (0.0, 0.0, 0.02)):
        loss = lost - gained
        score = float(tango_score(1000 * lost, 1000 * gained, 1000, margin))
        found = null_deviation(loss, flip_deviation(lost, gained), margin)
        assert (loss - margin) * math.sqrt(1000) / found == pytest.approx(score, abs=1e-9)
    assert null_deviation(0.0, 0.3, 0.1, width=0) == 0.3
