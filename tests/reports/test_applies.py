"""Claims about what is refused before an evaluation: a policy that could not judge what the recipe evaluates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from record_factory import write_record

from halfbyte.records.errors import UserError
from halfbyte.records.noise import noise_between
from halfbyte.reports.applies import require_margins, require_tasks_of
from halfbyte.reports.policy import Policy


def policy(**fields: Any) -> Policy:
    return Policy.model_validate({"name": "ours", "description": "Ours.", "release_evidence": True, **fields})


def test_a_misspelled_primary_task_is_named_beside_what_the_recipe_evaluates() -> None:
    ours = policy(margin=0.02, primary=["refunds", "order"])
    with pytest.raises(UserError, match=r"decides on order, which the recipe does not evaluate.*refunds, orders"):
        require_tasks_of(ours, ["refunds", "orders"], fidelity=False)
    require_tasks_of(ours, ["refunds", "order"], fidelity=False)


def test_a_waiver_of_a_task_that_is_not_evaluated_is_refused() -> None:
    waiver = {
        "task": "refund",
        "reason": "known since May",
        "by": "Ann",
        "granted": "2026-05-01",
        "expires": "2027-01-01",
    }
    with pytest.raises(UserError, match="waives refund"):
        require_tasks_of(policy(margin=0.02, waivers=[waiver]), ["refunds"], fidelity=False)


def test_perplexity_decides_only_where_it_is_measured() -> None:
    ours = policy(margin=0.02, perplexity_margin=0.05)
    with pytest.raises(UserError, match="decides on perplexity, which the recipe does not measure"):
        require_tasks_of(ours, ["refunds"], fidelity=False)
    require_tasks_of(ours, ["refunds"], fidelity=True)


def test_a_metric_of_ones_own_without_a_margin_is_refused_where_it_decides(tmp_path: Path) -> None:
    known = write_record(tmp_path / "known", [1, 0] * 20, task="refunds")
    own = write_record(tmp_path / "own", [1.0, 0.0] * 20, task="orders", metric="right_order")
    with pytest.raises(UserError, match="no margin for right_order of orders") as refused:
        require_margins(policy(margin=0.02), [known, own])
    assert "exact_match" in str(refused.value.hint)
    require_margins(policy(margin=0.02, primary=["refunds"]), [known, own])
    require_margins(policy(margin=0.02, margins={"right_order": 0.05}), [known, own])
    require_margins(policy(rule="ratio", ratio=0.99), [known, own])


def test_a_noise_floor_that_was_not_measured_is_asked_for(tmp_path: Path) -> None:
    ours = policy(margin=0.02, noise_floor=2)
    first = write_record(tmp_path / "first", [1, 0] * 20, task="refunds")
    with pytest.raises(UserError, match="the baseline was evaluated once on refunds"):
        require_margins(ours, [first])
    second = write_record(tmp_path / "second", [1, 0] * 20, task="refunds")
    noise_between(first, second).save(first)
    require_margins(ours, [first])
