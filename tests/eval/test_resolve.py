"""A task's name leads to its questions, or to one line that says what to do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from halfbyte.eval import resolve
from halfbyte.eval.resolve import TASKS, find_manager, load_task, require_tasks
from halfbyte.recipes import data
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.errors import UserError

HUB_TASK = """
task: tiny_hub
dataset_path: owner/questions
test_split: test
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
"""


@pytest.fixture(scope="module")
def smoke() -> list[dict[str, object]]:
    return [json.loads(line) for line in (TASKS / "smoke.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_smoke_test_has_200_different_questions_of_four_choices(smoke: list[dict[str, object]]) -> None:
    assert len(smoke) == 200
    assert len({str(row["question"]).lower() for row in smoke}) == 200
    for row in smoke:
        assert set(row) == {"question", "choices", "answer"}
        choices = row["choices"]
        assert isinstance(choices, list)
        assert len({choice.lower() for choice in choices}) == len(choices) == 4
        assert all(choice == choice.strip() != "" for choice in choices)
        assert row["answer"] in range(4)


def test_the_smoke_tests_right_answers_are_spread_over_the_positions(smoke: list[dict[str, object]]) -> None:
    assert Counter(row["answer"] for row in smoke) == {0: 50, 1: 50, 2: 50, 3: 50}


def test_the_smoke_test_loads_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (task,) = load_task("smoke", None)
    assert len(task.eval_docs) == 200
    doc = task.eval_docs[0]
    assert task.doc_to_text(doc) == f"Question: {doc['question']}\nAnswer:"
    assert task.doc_to_choice(doc) == doc["choices"]


def test_an_unknown_task_names_the_nearest(tiny_tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny_tasks.is_dir()
    manager = resolve.task_manager
    monkeypatch.setattr(resolve, "task_manager", lambda **_: manager(ours_only=True))
    with pytest.raises(UserError, match=r"unknown task 'tiny_choise' \(did you mean 'tiny_choice'\? .*tiny_rolling"):
        find_manager("tiny_choise")


def test_an_unknown_task_near_one_of_lm_evals_names_that() -> None:
    with pytest.raises(UserError, match=r"unknown task 'arc_eazy' \(did you mean 'arc_easy'\? .*ours: .*smoke"):
        load_task("arc_eazy", None)


@pytest.fixture
def hub_task(tiny_tasks: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """tiny_hub, whose data is owner/questions on the hub; returns an empty data root."""
    (tiny_tasks / "tiny_hub.yaml").write_text(HUB_TASK, encoding="utf-8")
    monkeypatch.setattr(data, "hub_is_reachable", lambda: False)
    root = tiny_tasks.parent / "root"
    (root / "owner" / "questions").mkdir(parents=True)
    return root


def test_data_is_taken_from_the_data_root(hub_task: Path) -> None:
    row = {"question": "1 + 1", "answer": " 2"}
    (hub_task / "owner" / "questions" / "test.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (task,) = load_task("tiny_hub", hub_task)
    assert task.eval_docs[0] == row
    assert task.config.dataset_path == "owner/questions"  # and no path of this machine


def test_data_that_is_not_to_be_had_says_where_to_put_it(hub_task: Path) -> None:
    with pytest.raises(UserError, match=r"'owner/questions'.*cannot be reached.*put its files into .*empty/owner/que"):
        load_task("tiny_hub", hub_task / "empty")


def test_a_missing_split_is_named(hub_task: Path) -> None:
    row = json.dumps({"question": "1 + 1", "answer": " 2"}) + "\n"
    (hub_task / "owner" / "questions" / "train.jsonl").write_text(row, encoding="utf-8")
    with pytest.raises(UserError, match="task 'tiny_hub' needs 'test' of data set 'owner/questions', which has: train"):
        load_task("tiny_hub", hub_task)


def test_a_task_without_a_question_is_an_error(tiny_tasks: Path) -> None:
    (tiny_tasks / "tiny_choice.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="data set 'json' holds no data: its file is empty"):
        load_task("tiny_choice", None)


def test_a_group_is_one_object_and_its_tasks_are_in_it(tiny_tasks: Path) -> None:
    assert tiny_tasks.is_dir()
    (group,) = load_task("tiny_group", None)
    assert sorted(task.task_name for task in group.get_all_tasks()) == ["tiny_choice", "tiny_other"]


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "tasks", "questions"),
    [
        ("arc_easy", 1, 2376),
        ("mmlu", 57, 14042),
        ("mmlu_continuation", 57, 14042),
        ("gsm8k", 1, 1319),
        ("hendrycks_math500", 1, 500),
        ("aime24", 1, 30),
        ("aime25", 1, 30),
    ],
)
def test_the_real_tasks_load_from_the_data_root(data_root: Path, name: str, tasks: int, questions: int) -> None:
    from halfbyte.eval.questions import leaves as find_leaves

    leaves = find_leaves(load_task(name, data_root))
    assert len(leaves) == tasks
    assert sum(len(task.eval_docs) for task in leaves.values()) == questions


def test_a_task_named_twice_is_an_error() -> None:
    with pytest.raises(UserError, match="task 'smoke' is named twice"):
        require_tasks(EvaluateSpec(tasks=[TaskSpec(task="smoke"), TaskSpec(task="smoke")]))


def test_a_later_task_that_is_unknown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = resolve.task_manager(ours_only=True)
    monkeypatch.setattr(resolve, "task_manager", lambda **_: ours)  # without lm-eval's thousands of tasks
    with pytest.raises(UserError, match="unknown task 'smock'"):
        require_tasks(EvaluateSpec(tasks=[TaskSpec(task="smoke"), TaskSpec(task="smock")]))
