"""Claims about bounds that a policy declares: a metric of a user's own is judged within them, and by nothing else."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_factory import flipped, write_record

from halfbyte.main import main
from halfbyte.records.errors import UserError
from halfbyte.reports.compare import compare
from halfbyte.reports.comparison import Comparison, load_comparisons
from halfbyte.reports.gate import AT_THE_FLOOR, judge
from halfbyte.reports.html import render_html
from halfbyte.reports.junit import junit
from halfbyte.reports.policy import Policy
from halfbyte.reports.text import render_markdown, render_text
from halfbyte.reports.write import write_reports

ROOT = Path(__file__).resolve().parent.parent.parent
SIMULATION: dict[str, Any] = runpy.run_path(str(ROOT / "tests" / "gate_calibration.py"))


def policy(**fields: Any) -> Policy:
    start = {"name": "ours", "description": "Ours.", "release_evidence": True, "margin": 0.02}
    return Policy.model_validate(start | fields)


def both(
    folder: Path, ours: Sequence[float], theirs: Sequence[float], judged: Policy | None, metric: str, **record: Any
) -> Comparison:
    write_record(folder / "b", ours, metric=metric, task="orders", **record)
    write_record(folder / "c", theirs, metric=metric, task="orders", format="NVFP4", **record)
    return compare(folder / "b", folder / "c", judged)


def word(comparison: Comparison) -> str:
    assert comparison.verdict is not None
    return comparison.verdict.verdict


@pytest.mark.parametrize(
    ("lost", "gained", "expected"), [(0, 0, "pass"), (6, 5, "pass"), (30, 5, "inconclusive"), (90, 5, "fail")]
)
def test_outcomes_of_a_metric_declared_between_0_and_1_are_judged_as_those_of_acc(
    tmp_path: Path, cache: Path, lost: int, gained: int, expected: str
) -> None:
    assert not cache.exists()
    sides = flipped(1000, 700, lost, gained)
    known = both(tmp_path / "acc", *sides, policy(), "acc")
    own = both(tmp_path / "own", *sides, policy(bounds={"right_order": [0, 1]}), "right_order")
    (first,), (second,) = known.tasks, own.tasks
    assert second.model_copy(update={"metric": "acc", "flips": first.flips}) == first
    assert word(own) == word(known) == expected


def test_values_between_declared_bounds_are_judged_alike_on_any_scale(tmp_path: Path, cache: Path) -> None:
    assert not cache.exists()
    rng = np.random.default_rng(3)
    ours = rng.choice([0.25, 0.5, 1.0], 400)
    theirs = np.where(rng.random(400) < 0.05, 0.5, ours)
    share = both(tmp_path / "share", ours.tolist(), theirs.tolist(), policy(bounds={"worth": [0, 1]}), "worth")
    shifted = [(10 * row - 5).tolist() for row in (ours, theirs)]
    marks = both(tmp_path / "marks", *shifted, policy(margins={"worth": 0.2}, bounds={"worth": [-5, 5]}), "worth")
    one, other = share.tasks[0].result.interval, marks.tasks[0].result.interval
    assert one is not None
    assert other is not None
    assert "score over questions" in one.method
    assert (other.low, other.high) == (pytest.approx(10 * one.low), pytest.approx(10 * one.high))
    assert word(share) == word(marks)


def test_a_margin_that_no_loss_within_the_bounds_exceeds_is_refused(tmp_path: Path, cache: Path) -> None:
    assert not cache.exists()
    sides = flipped(1000, 700, 0, 0)
    with pytest.raises(UserError, match="tolerates a loss of 1 marks of orders, which lies between 0 and 2"):
        both(tmp_path, *sides, policy(margins={"marks": 1}, bounds={"marks": [0, 2]}), "marks")
    with pytest.raises(UserError, match="no margin for marks of orders, which lies between 0 and 2"):
        both(tmp_path, *sides, policy(bounds={"marks": [0, 2]}), "marks")


@pytest.mark.parametrize(("side", "value"), [(0, 1.25), (1, -0.5)])
def test_a_value_out_of_the_declared_bounds_is_refused_by_task_question_and_value(
    tmp_path: Path, side: int, value: float
) -> None:
    sides = flipped(40, 20, 0, 0)
    sides[side][7] = value
    with pytest.raises(UserError, match=rf"worth of question 7 of orders in .*{'bc'[side]} is {value}, and the policy"):
        both(tmp_path, *sides, policy(bounds={"worth": [0, 1]}), "worth")


def test_bounds_of_a_metric_that_no_task_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="says the bounds of wort, which no task was evaluated by") as refused:
        both(tmp_path, *flipped(40, 20, 0, 0), policy(margins={"worth": 0.1}, bounds={"wort": [0, 1]}), "worth")
    assert "did you mean 'worth'" in str(refused.value.hint)


def test_a_comparison_made_for_other_bounds_is_not_judged(tmp_path: Path, cache: Path) -> None:
    assert not cache.exists()
    found = both(tmp_path, *flipped(1000, 700, 0, 0), None, "worth")
    assert found.tasks[0].bounds is None
    with pytest.raises(UserError, match="was made for other bounds of worth"):
        judge(found, policy(bounds={"worth": [0, 1]}))
    with pytest.raises(UserError, match="was made for other bounds of worth"):
        judge(compare(tmp_path / "b", tmp_path / "c", policy(bounds={"worth": [0, 1]})), policy(margins={"worth": 0.1}))


@pytest.mark.parametrize(
    ("values", "higher", "bounds", "margin"),
    [(0.0, True, [0, 1], 0.02), (1.0, False, [0, 1], 0.02), (1.0, True, [1, 5], 0.1), (10.0, False, [0, 10], 0.2)],
)
def test_a_baseline_at_the_worst_end_of_its_bounds_shows_no_loss(
    tmp_path: Path, cache: Path, values: float, higher: bool, bounds: list[float], margin: float
) -> None:
    assert not cache.exists()
    rules = policy(margins={"worth": margin}, bounds={"worth": bounds})
    found = both(tmp_path, [values] * 1000, [values] * 1000, rules, "worth", higher_is_better=higher)
    judgement = found.tasks[0].judgement
    assert judgement is not None
    assert (judgement.verdict, judgement.reason) == ("inconclusive", AT_THE_FLOOR)


def test_what_is_declared_is_in_each_report(tmp_path: Path, cache: Path) -> None:
    assert not cache.exists()
    rules = policy(margins={"worth": 0.2}, bounds={"worth": [-1, 4]})
    found = both(tmp_path, *flipped(1000, 700, 3, 3), rules, "worth")
    write_reports([found], tmp_path / "out")
    (row,) = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))["comparisons"][0]["tasks"]
    assert row["bounds"] == [-1, 4]
    (again,) = load_comparisons(tmp_path / "out")
    assert again == found
    assert again.policy is not None
    assert again.policy.bounds == {"worth": (-1, 4)}
    for text in (render_text([found]), render_markdown([found]), render_html([found])):
        assert "By policy 'ours' a question has worth between -1 and 4." in " ".join(text.replace("&#39;", "'").split())
    failed = both(tmp_path / "failed", *flipped(1000, 700, 300, 3), rules, "worth")
    assert "by the policy between -1 and 4" in junit([failed])


def test_bounds_from_a_file_release_a_metric_of_ones_own_without_a_flip(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not cache.exists()
    both(tmp_path, *flipped(1000, 700, 0, 0), None, "right_order")
    path = tmp_path / "ours.yaml"
    text = "name: ours\ndescription: Ours.\nrelease_evidence: true\nmargins: {right_order: 0.02}\n"
    path.write_text(text, encoding="utf-8")
    gate = ["gate", str(tmp_path / "b"), str(tmp_path / "c"), "--policy", str(path)]
    assert main(gate) == 3
    assert "`bounds: {right_order: [0, 1]}`" in " ".join(capsys.readouterr().out.split())
    path.write_text(text + "bounds: {right_order: [0, 1]}\n", encoding="utf-8")
    assert main(gate) == 0


@pytest.mark.parametrize(
    ("name", "values", "chances"),
    [
        ("three values", [-1, -0.5, 0, 0.5, 1], [0.01, 0.02, 0.87, 0.05, 0.05]),
        ("a tenth of the bounds", [-0.1, -0.02, 0, 0.05, 0.1], [0.01, 0.1, 0.6, 0.2, 0.09]),
        ("a tenth, and hardly ever more", [-0.1, 0, 0.1, 1], [0.02, 0.93, 0.04, 0.01]),
        ("a tenth, never gained", [0, 0.1], [0.7, 0.3]),
    ],
)
@pytest.mark.parametrize("questions", [40, 198, 500, 1319, 5000])
def test_a_loss_at_the_margin_passes_in_at_most_five_percent_however_wide_the_bounds_are(
    name: str, values: list[float], chances: list[float], questions: int
) -> None:
    gates = 4000
    losses, odds = np.array(values, dtype=float), np.array(chances)
    kind = SIMULATION["Kind"](name, losses, lambda _lost, _gained: odds)
    margin = float(losses @ odds)
    counts = np.random.default_rng(questions).multinomial(questions, odds, size=gates).astype(float)
    passed, failed = SIMULATION["decisions"](kind, counts, margin)
    assert passed.mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / gates)
    assert failed.mean() <= 0.01 + 4 * math.sqrt(0.01 * 0.99 / gates)
