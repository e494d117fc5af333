"""Claims about `halfbyte power`: known tasks have their sizes, and the table agrees with the gate's own tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from record_factory import flipped, write_record

from halfbyte.main import main
from halfbyte.records.errors import UserError
from halfbyte.reports.compare import compare
from halfbyte.reports.plan import (
    PlannedTask,
    how_to_read_plan,
    measured_plan,
    not_planned,
    one_metric,
    outlook,
    parse_tasks,
    plan,
)
from halfbyte.reports.policy import Policy, load_policy
from halfbyte.reports.power import fewest_questions

RELEASE = load_policy("release")


def test_tasks_are_named_with_their_questions_and_samples() -> None:
    assert parse_tasks("mmlu, gsm8kx4,mine=500,aime=30x64,orders/right_order=500x2,mmlu/acc") == [
        PlannedTask("mmlu", 14_042),
        PlannedTask("gsm8k", 1319, 4),
        PlannedTask("mine", 500),
        PlannedTask("aime", 30, 64),
        PlannedTask("orders", 500, 2, "right_order"),
        PlannedTask("mmlu", 14_042, 1, "acc"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mmul", "did you mean 'mmlu'"),
        ("", "no task"),
        ("mine=0", "no questions"),
        ("mine/=5", "not a task and its metric"),
        ("/acc=5", "not a task and its metric"),
        ("mine/acc", "unknown task 'mine'"),
        ("mine=5x0", "no questions"),
        ("mine=" + 400 * "9", "more than anybody evaluates"),
        ("mine=5x" + 400 * "9", "more than anybody evaluates"),
    ],
)
def test_what_is_no_task_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_tasks(text)


def test_a_policy_without_a_margin_for_shares_plans_for_no_share() -> None:
    with pytest.raises(UserError, match=r"policy 'image' has no margin for shares between 0 and 1.*margins: \{mmlu"):
        plan([PlannedTask("mmlu", 14_042)], load_policy("image"))


def test_a_plan_under_a_ratio_says_that_it_is_of_a_proof() -> None:
    assert "by its point estimate" in how_to_read_plan(load_policy("mlperf-99"))
    assert "by its point estimate" not in how_to_read_plan(load_policy("release"))


def test_gsm8k_alone_cannot_certify_one_point_unless_few_answers_flip() -> None:
    task = PlannedTask("gsm8k", 1319)
    assert outlook(task, 0.02, RELEASE).passes == pytest.approx(0.752, abs=0.01)
    assert outlook(task, 0.05, RELEASE).passes == pytest.approx(0.466, abs=0.01)
    assert outlook(task, 0.05, RELEASE).needed == pytest.approx(3260, abs=3)


def test_thirty_questions_cannot_certify_one_point_however_often_they_are_asked() -> None:
    found = outlook(PlannedTask("aime", 30, 64), 0.05, RELEASE)
    assert (found.passes, found.samples_needed) == (0.0, None)
    assert found.needed is not None
    assert found.needed >= fewest_questions(0.01)


def test_the_measured_rate_is_that_of_the_records(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    ours, theirs = flipped(2000, 1200, 50, 50)
    write_record(tmp_path / "b", ours)
    write_record(tmp_path / "c", theirs, format="NVFP4")
    (row,), left_out = measured_plan(compare(tmp_path / "b", tmp_path / "c"), RELEASE)
    assert (row.questions, row.flips) == (2000, pytest.approx(0.05))
    assert left_out == {}


def declaring(**fields: Any) -> Policy:
    return RELEASE.model_copy(update=fields)


def test_a_metric_of_ones_own_is_planned_within_the_bounds_that_the_policy_declares() -> None:
    share = outlook(PlannedTask("orders", 2000, 2, "acc"), 0.05, declaring(margin=0.02))
    marks = declaring(margins={"marks": 0.2}, bounds={"marks": (-5.0, 5.0)})
    found = outlook(PlannedTask("orders", 2000, 2, "marks"), 0.05, marks)
    assert (found.passes, found.needed) == (pytest.approx(share.passes), share.needed)
    assert (found.samples_needed, found.bounds) == (share.samples_needed, (-5, 5))
    assert (found.margin, found.visible) == (pytest.approx(0.2), pytest.approx(10 * share.visible))
    assert "A question of orders/marks is worth -5 to 5" in how_to_read_plan(marks, [found])
    assert outlook(PlannedTask("orders", 300, 1, "marks"), 0.0, marks).passes == 1
    assert outlook(PlannedTask("orders", 100, 1, "marks"), 0.0, marks).passes == 0
    assert fewest_questions(0.2, width=10.0) in range(101, 301)


def test_bounds_that_are_not_known_are_not_taken_for_those_of_a_share() -> None:
    own = PlannedTask("orders", 2000, metric="marks")
    with pytest.raises(UserError, match=r"orders: the bounds of marks are not known.*bounds: \{marks: \[lowest"):
        plan([own], RELEASE)
    assert "the bounds of marks are not known" in str(not_planned(own, RELEASE))
    assert not_planned(own, declaring(bounds={"marks": (0.0, 1.0)})) is None
    assert "come nowhere near its ends" in str(not_planned(PlannedTask("images", 50, metric="clip_score"), RELEASE))
    advisory = declaring(primary=["mmlu"], bounds={"marks": (0.0, 2.0)})
    assert "does not decide, and policy 'release' has no margin for marks" in str(not_planned(own, advisory))


def test_a_task_whose_metric_is_not_named_is_said_to_be_taken_for_a_share() -> None:
    rows = plan(parse_tasks("mmlu,mine=500,orders/acc=40"), RELEASE, rates=[0.05])
    assert "no metric was named: mine; another metric is named as mine/METRIC" in how_to_read_plan(RELEASE, rows)


def test_one_metric_stands_for_those_with_its_bounds_and_its_margin() -> None:
    assert one_metric(["acc", "acc_norm"], RELEASE) == "acc"
    assert one_metric(["exact_match", "in_brackets"], RELEASE) is None
    assert one_metric(["exact_match", "in_brackets"], declaring(bounds={"in_brackets": (0.0, 1.0)})) == "exact_match"
    assert one_metric(["acc", "acc_norm"], declaring(margins={"acc_norm": 0.02})) is None


def test_records_of_a_metric_without_bounds_are_left_out_with_the_reason(
    tmp_path: Path,
    cache: Path,  # noqa: ARG001
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = flipped(2000, 1200, 50, 50)
    for task, metric in (("refunds", "acc"), ("orders", "marks")):
        write_record(tmp_path / "b" / task, ours, task=task, metric=metric)
        write_record(tmp_path / "c" / task, theirs, task=task, metric=metric, format="NVFP4")
    found = compare(tmp_path / "b", tmp_path / "c")
    rows, left_out = measured_plan(found, RELEASE)
    assert [row.task for row in rows] == ["refunds"]
    assert "the bounds of marks are not known" in left_out["orders"]
    declared = declaring(margins={"marks": 0.02}, bounds={"marks": (0.0, 2.0)})
    rows, left_out = measured_plan(found, declared)
    assert ({row.task: row.flips for row in rows}, left_out) == (
        {"orders": pytest.approx(0.0125), "refunds": pytest.approx(0.05)},
        {},
    )
    assert main(["power", "--policy", "release", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    assert "orders is left out: the bounds of marks are not known" in caplog.text
    with pytest.raises(UserError, match="no task of these records can be planned for: orders: the bounds of marks"):
        measured_plan(compare(tmp_path / "b", tmp_path / "c", tasks=["orders"]), RELEASE)


def test_the_command_plans_for_tasks_and_for_records(
    tmp_path: Path,
    cache: Path,  # noqa: ARG001
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["power", "--policy", "release", "--tasks", "mmlu,mine=500", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["task"] for row in rows} == {"mmlu", "mine"}
    ours, theirs = flipped(2000, 1200, 50, 50)
    write_record(tmp_path / "b", ours)
    write_record(tmp_path / "c", theirs, format="NVFP4")
    assert main(["power", "--policy", "release", str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    assert "5.0%" in capsys.readouterr().out
    assert main(["power", "--policy", "release"]) == 2
    assert main(["power", "--policy", "release", str(tmp_path / "b")]) == 2
