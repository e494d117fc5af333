"""Claims about `halfbyte power`: known tasks have their sizes, and the table agrees with the gate's own tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from record_factory import flipped, write_record

from halfbyte.main import main
from halfbyte.records.errors import UserError
from halfbyte.reports.compare import compare
from halfbyte.reports.plan import PlannedTask, how_to_read_plan, measured_plan, outlook, parse_tasks, plan
from halfbyte.reports.policy import load_policy
from halfbyte.reports.power import fewest_questions

RELEASE = load_policy("release")


def test_tasks_are_named_with_their_questions_and_samples() -> None:
    assert parse_tasks("mmlu, gsm8kx4,mine=500,aime=30x64") == [
        PlannedTask("mmlu", 14_042),
        PlannedTask("gsm8k", 1319, 4),
        PlannedTask("mine", 500),
        PlannedTask("aime", 30, 64),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mmul", "did you mean 'mmlu'"),
        ("", "no task"),
        ("mine=0", "no questions"),
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
    (row,) = measured_plan(compare(tmp_path / "b", tmp_path / "c"), RELEASE)
    assert (row.questions, row.flips) == (2000, pytest.approx(0.05))


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
