"""Claims about the statistics, against published examples and independent implementations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from halfbyte.reports.statistics import (
    Array,
    NoSpread,
    binomial_tail,
    cluster_error,
    holm,
    mcnemar_p,
    paired,
    score_interval,
    score_statistic,
    t_interval,
    tango_interval,
    tango_score,
    wilson_interval,
    z_quantile,
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
    score = float(tango_score(lost=1, gained=0, questions=44, margin=0.1))
    assert round(-score, 3) == 1.709
    assert round(float(stats.norm.cdf(score)), 3) == 0.044
    assert round(tango_interval(1, 0, 44, alpha=0.05).high, 3) == 0.096


@pytest.mark.parametrize(
    ("lost", "gained", "questions", "alpha", "low", "high", "digits"),
    [
        (9, 3, 32, 0.025, -0.027, 0.390, 3),  # Tango 1998, the cross-over trial
        (0, 1, 44, 0.05, -0.096, 0.037, 3),  # Tango 1998, the same with its table turned
        (16, 8, 86, 0.025, -0.020, 0.207, 3),  # Agresti and Min 2005
        (1, 7, 21, 0.025, -0.517, -0.026, 3),  # Fagerland, Lydersen and Laake 2014, airway hyper-responsiveness
        (3, 1, 14, 0.025, -0.1670, 0.4327, 4),  # Tang, Li and Chan 2010
        (25, 2, 102, 0.025, 0.139, 0.321, 3),  # Chang et al. 2024
    ],
)
def test_tangos_interval_agrees_with_published_ones(
    lost: int, gained: int, questions: int, alpha: float, low: float, high: float, digits: int
) -> None:
    found = tango_interval(lost, gained, questions, alpha)
    assert (round(found.low, digits), round(found.high, digits)) == (low, high)


R_SCORECI_MP = [  # R 4.6.1, PropCIs 0.3.0: scoreci.mp(gained, lost, n, level), which searches its ends to about 1e-7
    (7, 0, 14, 0.025, 0.17703378200531006, 0.73200792074203491),
    (0, 0, 14, 0.025, -0.21531081199645996, 0.21531075239181519),
    (3, 2, 14, 0.025, -0.26107772759028841, 0.38899629882403786),
    (1, 0, 14, 0.025, -0.15926158428192136, 0.31468707748821806),
    (13, 1, 14, 0.025, 0.37062617710658474, 0.97455562864031109),
    (14, 0, 14, 0.025, 0.56937837600708008, 1.0),
    (2, 9, 20, 0.025, -0.60163156986236577, -0.027414342761039694),
    (25, 12, 200, 0.025, 0.005635504722595221, 0.12694109946489335),
    (0, 7, 14, 0.05, -0.7012181282043457, -0.25706776976585388),
    (5, 5, 16, 0.05, -0.31343936920166016, 0.31343942880630493),
    (0, 14, 14, 0.05, -1.0, -0.6760903000831604),
    (10, 3, 50, 0.05, 0.023380527496337893, 0.26074491620063783),
    (1, 1, 2, 0.05, -0.75826740264892578, 0.75826734304428101),
]


@pytest.mark.parametrize(("lost", "gained", "questions", "alpha", "low", "high"), R_SCORECI_MP)
def test_tangos_interval_agrees_with_rs_to_the_precision_of_its_search(
    lost: int, gained: int, questions: int, alpha: float, low: float, high: float
) -> None:
    found = tango_interval(lost, gained, questions, alpha)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-7)


@pytest.mark.parametrize(
    ("lost", "gained", "questions", "margin"),
    [(40, 20, 160, 0.01), (13, 3, 400, 0.02), (273, 143, 2376, 0.01), (1, 7, 50, 0.05), (3, 0, 200, 0.1)],
)
def test_tango_agrees_with_a_numerical_maximum_of_the_likelihood(
    lost: int, gained: int, questions: int, margin: float
) -> None:
    expected = likelihood_score(lost, gained, questions, margin)
    assert float(tango_score(lost, gained, questions, margin)) == pytest.approx(expected, abs=1e-9)


def test_tango_at_a_margin_of_zero_is_mcnemars_statistic() -> None:
    contingency = pytest.importorskip("statsmodels.stats.contingency_tables")
    found = contingency.mcnemar([[500, 40], [20, 100]], exact=False, correction=False)
    assert float(tango_score(40, 20, 660, 0.0)) ** 2 == pytest.approx(found.statistic, abs=1e-9)


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
        assert float(tango_score(*table, found.high)) == pytest.approx(-Z, abs=1e-5)
    if found.low > -1 + 1e-9:
        assert float(tango_score(*table, found.low)) == pytest.approx(Z, abs=1e-5)


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


@given(tables(), st.integers(-90, 90).map(lambda margin: margin / 100))
@settings(max_examples=150, deadline=None)
def test_the_score_of_losses_of_one_question_each_is_tangos(table: tuple[int, int, int], margin: float) -> None:
    lost, gained, questions = table
    expected = float(tango_score(lost, gained, questions, margin))
    found = float(score_statistic([-1, 0, 1], [gained, questions - lost - gained, lost], margin))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def empirical_likelihood(values: Array, counts: Array, margin: float) -> float:
    """The score statistic with the weights found by a general optimizer, the ends -1 and 1 among the values."""
    support = np.concatenate([values, [-1.0, 1.0]])
    seen = np.concatenate([counts, [0, 0]]) / counts.sum()

    def fall(weights: Array) -> float:
        kept = seen > 0
        return -float(seen[kept] @ np.log(np.maximum(weights[kept], 1e-300)))

    def slope(weights: Array) -> Array:
        return np.where(seen > 0, -seen / np.maximum(weights, 1e-300), 0.0)

    found = optimize.minimize(
        fall,
        np.full(support.size, 1 / support.size),
        jac=slope,
        bounds=[(1e-12, 1)] * support.size,
        constraints=[
            {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones_like(w)},
            {"type": "eq", "fun": lambda w: w @ support - margin, "jac": lambda _: support},
        ],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    variance = float(found.x @ (support - margin) ** 2)
    return float((counts @ values / counts.sum() - margin) / math.sqrt(variance / counts.sum()))


@pytest.mark.parametrize("margin", [0.01, 0.05, 0.2, -0.1])
def test_the_score_of_means_of_samples_is_that_of_the_likeliest_distribution(margin: float) -> None:
    values = np.array([-0.25, 0.0, 0.0625, 0.5])
    counts = np.array([2.0, 25.0, 2.0, 1.0])
    found = float(score_statistic(values, counts, margin))
    assert found == pytest.approx(empirical_likelihood(values, counts, margin), rel=1e-4)


def test_a_single_small_loss_among_thirty_questions_does_not_prove_a_small_loss() -> None:
    """A t interval would: its spread is that of the sample, which has not seen the question that was lost for good."""
    losses = np.array([0.0] * 29 + [1 / 16])
    assert t_interval(losses).high < 0.01
    assert score_interval(losses).high > 0.08


def test_many_equal_losses_have_a_score_interval_that_is_not_a_point() -> None:
    found = score_interval(np.full(50, 0.25))
    assert found.low < 0.2
    assert found.high > 0.27


def test_the_score_interval_approaches_the_t_interval_on_many_questions() -> None:
    losses = np.random.default_rng(5).integers(-8, 9, 20_000) / 16
    ours, theirs = score_interval(losses), t_interval(losses)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=2e-5)


def test_losses_beyond_the_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="between -1 and 1"):
        score_statistic([0.0, 1.5], [3, 1], 0.01)
    with pytest.raises(ValueError, match="margin must lie"):
        score_statistic([0.0, 0.5], [3, 1], 1.0)
    with pytest.raises(ValueError, match="no questions"):
        score_interval([])


def test_the_t_interval_agrees_with_rs_output_on_the_sleep_data() -> None:
    # R: t.test(extra ~ group, data = sleep, paired = TRUE): -2.4598858 -0.7001142 at 95 %
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = t_interval(np.array(first) - np.array(second), alpha=0.025)
    assert (round(found.low, 7), round(found.high, 7)) == (-2.4598858, -0.7001142)


def test_the_t_interval_agrees_with_statsmodels() -> None:
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    losses = np.random.default_rng(0).normal(0.1, 1, 300)
    found = t_interval(losses, alpha=0.05)
    expected = weightstats.DescrStatsW(losses).tconfint_mean(alpha=0.1)
    assert (found.low, found.high) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("sizes", [[16] * 30, [3, 1, 8, 2, 5, 5, 1, 9]])
def test_samples_of_a_question_are_clustered_as_statsmodels_clusters_them(sizes: list[int]) -> None:
    api = pytest.importorskip("statsmodels.api")
    rng = np.random.default_rng(1)
    questions = np.repeat(np.arange(len(sizes)), sizes)
    losses = rng.normal(rng.normal(0, 1, len(sizes))[questions], 1)
    found = t_interval(losses, 0.05, questions.tolist())
    fit = api.OLS(losses, np.ones(losses.size)).fit(
        cov_type="cluster", cov_kwds={"groups": questions, "df_correction": True}, use_t=True
    )
    half = stats.t.ppf(0.95, len(sizes) - 1) * fit.bse[0]
    assert (found.low, found.high) == pytest.approx((losses.mean() - half, losses.mean() + half), abs=1e-9)


@pytest.mark.parametrize(
    ("values", "questions"),
    [([0.3], None), ([0.3, 0.3, 0.3], None), ([], None), ([1, -1, 1, -1], ["a", "a", "b", "b"]), ([1, 2], ["a", "a"])],
)
def test_values_without_spread_have_no_interval_instead_of_one_of_width_zero(
    values: list[float], questions: list[str] | None
) -> None:
    with pytest.raises(NoSpread):
        cluster_error(np.array(values, dtype=float), questions)


def test_clusters_of_another_number_are_refused() -> None:
    with pytest.raises(ValueError, match="2 question names"):
        t_interval([1.0, 2.0, 3.0], questions=["a", "b"])


@given(st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_exact_mcnemar_agrees_with_statsmodels(lost: int, gained: int) -> None:
    contingency = pytest.importorskip("statsmodels.stats.contingency_tables")
    if lost + gained:
        expected = contingency.mcnemar([[5, lost], [gained, 5]], exact=True).pvalue
        assert mcnemar_p(lost, gained) == pytest.approx(expected, abs=1e-9)
    else:
        assert mcnemar_p(0, 0) == 1.0


def test_exact_mcnemar_agrees_with_a_published_example() -> None:
    # Fagerland, Lydersen and Laake 2013, airway hyper-responsiveness: 1 and 7 discordant pairs, exact p = 0.0703
    assert round(mcnemar_p(1, 7), 4) == 0.0703


@given(st.integers(0, 200), st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_the_binomial_tail_agrees_with_scipys_test(lost: int, gained: int) -> None:
    if lost + gained:
        expected = stats.binomtest(lost, lost + gained, 0.5, alternative="greater").pvalue
        assert binomial_tail(lost, lost + gained) == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 3000), st.data())
@settings(max_examples=60, deadline=None)
def test_wilsons_interval_agrees_with_statsmodels(trials: int, data: st.DataObject) -> None:
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    successes = data.draw(st.integers(0, trials))
    found = wilson_interval(successes, trials)
    low, high = proportion.proportion_confint(successes, trials, alpha=0.1, method="wilson")
    assert (found.low, found.high) == pytest.approx((max(0, low), min(1, high)), abs=1e-9)
    with pytest.raises(ValueError, match="not a count"):
        wilson_interval(trials + 1, trials)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_holm_agrees_with_statsmodels(values: list[float]) -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    expected = multitest.multipletests(values, method="holm")[1]
    assert holm(values).tolist() == pytest.approx(expected.tolist(), abs=1e-9)


def test_holm_agrees_with_rs_p_adjust() -> None:
    # R: p.adjust(c(0.01, 0.02, 0.03, 0.04, 0.05), "holm")
    assert holm([0.01, 0.02, 0.03, 0.04, 0.05]).tolist() == pytest.approx([0.05, 0.08, 0.09, 0.09, 0.09], abs=1e-9)
    with pytest.raises(ValueError, match="between 0 and 1"):
        holm([0.5, math.nan])


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
        paired(baseline, candidate)


@pytest.mark.parametrize("alpha", [0.0, 0.5, -0.1, math.nan])
def test_an_alpha_that_is_none_is_refused_everywhere(alpha: float) -> None:
    for interval in (
        lambda: tango_interval(1, 1, 5, alpha),
        lambda: score_interval([0.0, 0.5], alpha),
        lambda: t_interval([0.0, 0.5], alpha),
        lambda: wilson_interval(1, 5, alpha),
    ):
        with pytest.raises(ValueError, match="alpha must be"):
            interval()
    assert z_quantile(0.05) == pytest.approx(Z, abs=1e-12)
