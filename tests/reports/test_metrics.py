"""Claims about metrics: direction and scale come from the definition, and a record may not contradict it."""

from __future__ import annotations

import pytest

from halfbyte.records.errors import UserError
from halfbyte.reports.metrics import KNOWN, definition


@pytest.mark.parametrize("metric", ["acc", "acc_norm", "exact_match", "pass@1", "pass@16", "maj@64", "pass_at_1", "f1"])
def test_shares_lie_between_0_and_1(metric: str) -> None:
    found = definition(metric, True)
    assert (found.higher_is_better, found.bounds) == (True, (0.0, 1.0))


@pytest.mark.parametrize("metric", ["word_perplexity", "byte_perplexity", "bits_per_byte", "fid", "lpips"])
def test_less_is_better_where_the_definition_says_so(metric: str) -> None:
    assert not definition(metric, False).higher_is_better
    with pytest.raises(UserError, match=f"of {metric} that higher is better, and by its definition lower is"):
        definition(metric, True)


def test_an_unknown_metric_has_its_tasks_direction_and_no_scale() -> None:
    for direction in (True, False):
        found = definition("my_score", direction)
        assert (found.higher_is_better, found.bounds) == (direction, None)


def test_directions_agree_with_lm_evals() -> None:
    registry = pytest.importorskip("lm_eval.api.registry")
    pytest.importorskip("lm_eval.api.metrics")  # registers them
    shared = [name for name in KNOWN if registry.is_higher_better(name) is not None]
    assert {"acc", "exact_match", "word_perplexity", "brier_score", "f1"} <= set(shared)
    assert [name for name in shared if registry.is_higher_better(name) != KNOWN[name].higher_is_better] == []
