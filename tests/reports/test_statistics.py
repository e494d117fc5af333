"""Claims about the statistics, against published examples and independent implementations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from halfbyte.reports.statistics import (
    mcnemar_p,
    paired_loss,
    question_means,
    questions_to_settle,
    ratio_interval,
    t_interval,
    tango_interval,
    tango_score,
)

Z = stats.norm.ppf(0.95)


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, int, int]:
    """(lost, gained, questions) of a paired table."""
    questions = draw(st.integers(2, 3000))
    lost = draw(st.integers(0, questions))
    return lost, draw(st.integers(0, questions - lost)), questions


def likelihood_score(lost: int, gained: int, questions: int, margin: float) -> float:
    """The score statistic from its definition: the multinomial's likelihood maximised under loss = margin."""

    def slope(q: float) -> float:  # derivative of the log likelihood by q = P(gained), P(lost) = q + margin
        return lost / (q + margin) + gained / q - 2 * (questions - lost - gained) / (1 - 2 * q - margin)

    low, high = max(0.0, -margin), (1 - margin) / 2
    tiny = 1e-13
    if gained == 0 and margin > 0 and slope(tiny) <= 0:
        q = 0.0
    else:
        q = optimize.brentq(slope, low + tiny, high - tiny, xtol=1e-16, rtol=1e-15)
    variance = (2 * q + margin - margin**2) / questions
    return ((lost - gained) / questions - margin) / math.sqrt(variance)


def test_tango_agrees_with_the_worked_example_of_his_paper() -> None:
    # Tango 1998, section 6.1: 44 pairs, one discordant, margin 0.1: Z = 1.709, p = .044, lower 90 % limit -.096
    # for the new treatment's gain, which is the upper limit of the loss
    score = tango_score(lost=1, gained=0, questions=44, margin=0.1)
    assert round(-score, 3) == 1.709
    assert round(stats.norm.cdf(score), 3) == 0.044
    assert round(tango_interval(1, 0, 44, alpha=0.05).high, 3) == 0.096


@pytest.mark.parametrize(
    ("lost", "gained", "questions", "margin"),
    [(40, 20, 160, 0.01), (13, 3, 400, 0.02), (273, 143, 2376, 0.01), (1, 7, 50, 0.05), (3, 0, 200, 0.1)],
)
def test_tango_agrees_with_a_numerical_maximum_of_the_likelihood(
    lost: int, gained: int, questions: int, margin: float
) -> None:
    expected = likelihood_score(lost, gained, questions, margin)
    assert tango_score(lost, gained, questions, margin) == pytest.approx(expected, abs=1e-9)


def test_tango_at_a_margin_of_zero_is_mcnemars_statistic() -> None:
    contingency = pytest.importorskip("statsmodels.stats.contingency_tables")
    found = contingency.mcnemar([[500, 40], [20, 100]], exact=False, correction=False)
    assert tango_score(40, 20, 660, 0.0) ** 2 == pytest.approx(found.statistic, abs=1e-9)


def test_tango_without_flips_has_a_closed_form() -> None:
    found = tango_interval(0, 0, 200)
    assert found.high == pytest.approx(Z**2 / (200 + Z**2), abs=1e-12)
    assert found.low == pytest.approx(-found.high, abs=1e-12)


@given(tables())
@settings(max_examples=150, deadline=None)
def test_the_ends_of_tangos_interval_solve_the_score_equation(table: tuple[int, int, int]) -> None:
    found = tango_interval(*table)
    loss = (table[0] - table[1]) / table[2]
    assert -1 <= found.low <= loss <= found.high <= 1
    if found.high < 1 - 1e-9:
        assert tango_score(*table, found.high) == pytest.approx(-Z, abs=1e-5)
    if found.low > -1 + 1e-9:
        assert tango_score(*table, found.low) == pytest.approx(Z, abs=1e-5)


@given(tables())
@settings(max_examples=100, deadline=None)
def test_swapping_the_sides_mirrors_tangos_interval(table: tuple[int, int, int]) -> None:
    lost, gained, questions = table
    one, other = tango_interval(lost, gained, questions), tango_interval(gained, lost, questions)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=1e-9)


@pytest.mark.parametrize("table", [(1, 1, 0), (-1, 0, 5), (4, 4, 7)])
def test_counts_that_are_no_table_are_refused(table: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="not a paired table"):
        tango_interval(*table)


def test_the_t_interval_agrees_with_statsmodels() -> None:
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    losses = np.random.default_rng(0).normal(0.1, 1, 300)
    found = t_interval(losses, alpha=0.05)
    expected = weightstats.DescrStatsW(losses).tconfint_mean(alpha=0.1)
    assert (found.low, found.high) == pytest.approx(expected, abs=1e-9)


def test_samples_of_a_question_are_clustered_as_statsmodels_clusters_them() -> None:
    api = pytest.importorskip("statsmodels.api")
    rng = np.random.default_rng(1)
    questions = np.repeat(np.arange(30), 16)
    baseline = rng.binomial(1, np.repeat(rng.uniform(size=30), 16)).astype(float)
    candidate = rng.binomial(1, np.repeat(rng.uniform(size=30), 16)).astype(float)
    found = paired_loss(baseline, candidate, higher_is_better=True, questions=questions.tolist())
    fit = api.OLS(baseline - candidate, np.ones(480)).fit(
        cov_type="cluster", cov_kwds={"groups": questions, "df_correction": True}, use_t=True
    )
    assert found.questions == 30
    assert found.interval is not None
    assert found.interval.high - found.loss == pytest.approx(stats.t.ppf(0.95, 29) * fit.bse[0], abs=1e-9)


def test_question_means_keep_the_order_of_the_questions() -> None:
    assert question_means([1, 0, 1, 1], ["b", "a", "b", "a"]).tolist() == [1.0, 0.5]


@given(st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_exact_mcnemar_agrees_with_statsmodels(lost: int, gained: int) -> None:
    contingency = pytest.importorskip("statsmodels.stats.contingency_tables")
    if lost + gained:
        expected = contingency.mcnemar([[5, lost], [gained, 5]], exact=True).pvalue
        assert mcnemar_p(lost, gained) == pytest.approx(expected, abs=1e-9)
    else:
        assert mcnemar_p(0, 0) == 1.0


def test_a_loss_is_positive_when_the_candidate_is_worse_in_either_direction() -> None:
    assert paired_loss([1, 1, 0], [1, 0, 0], higher_is_better=True).loss == pytest.approx(1 / 3)
    found = paired_loss([2.0, 3.0], [2.5, 4.0], higher_is_better=False)
    assert found.loss == pytest.approx(0.75)
    assert (found.lost, found.gained) == (2, 0)


@pytest.mark.parametrize(
    ("baseline", "candidate", "message"),
    [
        ([], [], "no questions"),
        ([1.0], [1.0, 0.0], "one length"),
        ([math.nan], [1.0], "NaN"),
        ([1.0], [math.inf], "infinite"),
    ],
)
def test_nothing_unequal_lengths_and_numbers_that_are_none_are_refused(
    baseline: list[float], candidate: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        paired_loss(baseline, candidate, higher_is_better=True)


@pytest.mark.parametrize("values", [([0.3], [0.3]), ([0.3, 0.4, 0.5], [0.2, 0.3, 0.4]), ([0.3, 0.7], [0.3, 0.7])])
def test_values_without_spread_have_no_interval_instead_of_one_of_width_zero(
    values: tuple[list[float], list[float]],
) -> None:
    found = paired_loss(*values, higher_is_better=True)
    assert found.interval is None
    assert found.no_interval


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


def test_a_ratio_without_variation_or_over_nothing_has_no_interval() -> None:
    assert ratio_interval([1, 1, 1], [1, 1, 1]) is None
    assert ratio_interval([1.0], [2.0]) is None
    assert ratio_interval([1, 1], [0, 0]) is None


def test_the_questions_needed_agree_with_statsmodels_sample_size() -> None:
    power = pytest.importorskip("statsmodels.stats.power")
    baseline = np.array([1.0] * 25 + [0.0] * 25 + [1.0] * 950)
    candidate = np.array([0.0] * 25 + [1.0] * 25 + [1.0] * 950)
    found = questions_to_settle(paired_loss(baseline, candidate, higher_is_better=True), margin=0.01)
    expected = power.normal_sample_size_one_tail(0.01, 0.8, 0.05, std_null=math.sqrt(0.05))
    assert found == math.ceil(expected)
    assert found == pytest.approx(3093, abs=3)  # by the t distribution


def test_the_questions_needed_do_settle_it() -> None:
    loss = paired_loss([1.0] * 100, [1.0] * 100, higher_is_better=True)
    needed = questions_to_settle(loss, margin=0.01)
    assert needed is not None
    assert tango_interval(0, 0, needed).high < 0.01
    assert tango_interval(0, 0, needed // 2).high > 0.01


def test_no_number_of_questions_settles_a_loss_on_the_margin() -> None:
    assert questions_to_settle(paired_loss([1.0] * 4, [0.0, 1, 1, 1], higher_is_better=True), margin=0.25) is None


def test_a_true_loss_at_the_margin_passes_in_at_most_five_percent() -> None:
    rng = np.random.default_rng(20261101)
    gates, margin = 4000, 0.01
    for questions, counter in ((200, 0.002), (500, 0.02), (1319, 0.0), (1319, 0.05)):
        draws = rng.multinomial(questions, [margin + counter, counter, 1 - margin - 2 * counter], size=gates)
        tables, counts = np.unique(draws[:, :2], axis=0, return_counts=True)
        passes = [tango_interval(int(lost), int(gained), questions).high < margin for lost, gained in tables]
        rate = float(np.dot(passes, counts)) / gates
        assert rate <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / gates), (questions, counter, rate)
