"""Claims about what is refused before an evaluation: a policy that could not judge what the recipe evaluates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from record_factory import write_record

from halfbyte.recipes.schema import EvaluateSpec
from halfbyte.records.errors import UserError
from halfbyte.records.noise import noise_between
from halfbyte.reports.applies import require_margins, require_tasks_of
from halfbyte.reports.policy import Policy


def policy(**fields: Any) -> Policy:
    return Policy.model_validate({"name": "ours", "description": "Ours.", "release_evidence": True, **fields})


def evaluated(*tasks: str, fidelity: bool = False) -> EvaluateSpec:
    measured = {"source": {"dataset": "unused.txt"}} if fidelity else None
    return EvaluateSpec.model_validate({"tasks": [{"task": task} for task in tasks], "fidelity": measured})


def test_a_misspelled_primary_task_is_named_beside_what_the_recipe_evaluates() -> None:
    ours = policy(margin=0.02, primary=["refunds", "order"])
    with pytest.raises(UserError, match=r"decides on order, which the recipe does not evaluate.*refunds, orders"):
        require_tasks_of(ours, evaluated("refunds", "orders"))
    require_tasks_of(ours, evaluated("refunds", "order"))


def test_a_waiver_of_a_task_that_is_not_evaluated_is_refused() -> None:
    waiver = {
        "task": "refund",
        "reason": "known since May",
        "by": "Ann",
        "granted": "2026-05-01",
        "expires": "2027-01-01",
    }
    with pytest.raises(UserError, match="waives refund"):
        require_tasks_of(policy(margin=0.02, waivers=[waiver]), evaluated("refunds"))


def test_perplexity_decides_only_where_it_is_measured() -> None:
    ours = policy(margin=0.02, perplexity_margin=0.05)
    with pytest.raises(UserError, match="decides on perplexity, which the recipe does not measure"):
        require_tasks_of(ours, evaluated("refunds"))
    require_tasks_of(ours, evaluated("refunds", fidelity=True))


def test_a_metric_of_ones_own_without_a_margin_is_refused_where_it_decides(tmp_path: Path) -> None:
    known = write_record(tmp_path / "known", [1, 0] * 20, task="refunds")
    own = write_record(tmp_path / "own", [1.0, 0.0] * 20, task="orders", metric="right_order")
    with pytest.raises(UserError, match="no margin for right_order of orders") as refused:
        require_margins(policy(margin=0.02), [known, own])
    assert "bounds: {right_order: [0, 1]}" in str(refused.value.hint)
    require_margins(policy(margin=0.02, bounds={"right_order": [0, 1]}), [known, own])
    require_margins(policy(margin=0.02, primary=["refunds"]), [known, own])
    require_margins(policy(margin=0.02, margins={"right_order": 0.05}), [known, own])
    require_margins(policy(rule="ratio", ratio=0.99), [known, own])


def test_a_metric_of_the_whole_set_that_decides_is_refused_before_the_candidate_is_made(tmp_path: Path) -> None:
    known = write_record(tmp_path / "known", [1, 0] * 20, task="refunds")
    answers = write_record(
        tmp_path / "own", [0] * 40, task="answers", metric="word_perplexity", higher_is_better=False, reported=18.5,
        edit=lambda lines: [line | {"word_perplexity": [-120.5, 31]} for line in lines],
    )  # fmt: skip
    of_set = "decides on word_perplexity of answers, which is one figure for the whole set"
    with pytest.raises(UserError, match=of_set):
        require_margins(policy(margin=0.02, primary=["refunds", "answers"]), [known, answers])
    with pytest.raises(UserError, match=of_set):
        require_margins(policy(margin=0.02, margins={"word_perplexity": 0.5}), [known, answers])
    with pytest.raises(UserError, match="has nothing to decide on: word_perplexity of answers"):
        require_margins(policy(margin=0.02), [answers])
    require_margins(policy(margin=0.02, primary=["refunds"]), [known, answers])
    require_margins(policy(margin=0.02), [known, answers])


def test_the_mean_of_a_corpus_metrics_questions_needs_a_margin_like_others(tmp_path: Path) -> None:
    own = write_record(tmp_path / "own", [12.5, 40.0] * 20, task="letters", metric="bleu")
    with pytest.raises(UserError, match="no margin for bleu of letters"):
        require_margins(policy(margin=0.02), [own])
    require_margins(policy(margins={"bleu": 2}), [own])


def test_bounds_that_the_baseline_does_not_keep_are_refused_before_the_candidate_is_made(tmp_path: Path) -> None:
    own = write_record(tmp_path / "own", [1.0, 0.0, 1.5] * 20, task="orders", metric="right_order")
    with pytest.raises(UserError, match=r"right_order of question 2 of orders in .* is 1\.5, and the policy says"):
        require_margins(policy(margin=0.02, bounds={"right_order": [0, 1]}), [own])
    with pytest.raises(UserError, match="says the bounds of right_oder, which no task was evaluated by") as refused:
        require_margins(policy(margin=0.02, bounds={"right_oder": [0, 1]}), [own])
    assert "did you mean 'right_order'" in str(refused.value.hint)


def test_a_noise_floor_that_was_not_measured_is_asked_for(tmp_path: Path) -> None:
    ours = policy(margin=0.02, noise_floor=2)
    first = write_record(tmp_path / "first", [1, 0] * 20, task="refunds")
    with pytest.raises(UserError, match="the baseline was evaluated once on refunds"):
        require_margins(ours, [first])
    second = write_record(tmp_path / "second", [1, 0] * 20, task="refunds")
    noise_between(first, second).save(first)
    require_margins(ours, [first])
