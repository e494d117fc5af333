"""A task's name leads to its questions, or to one line that says what to do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import lm_eval.api.metrics
import pytest

from halfbyte.eval import resolve
from halfbyte.eval.evaluate import data_digests
from halfbyte.eval.resolve import TASKS, find_manager, load_task, origin, quiet_lm_eval, require_tasks
from halfbyte.recipes import data
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.errors import UserError
from halfbyte.records.record import OUR_TASKS, OWN_TASKS

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


def test_an_unknown_task_like_none_of_lm_evals_says_where_ones_own_are_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        find_manager("shop_refund")
    assert "did you mean" not in str(refused.value)
    assert "name the folder of your own: evaluate.include_path" in str(refused.value)
    folder = own_folder(tmp_path / "tasks")
    with pytest.raises(UserError, match=r"unknown task 'shop_refund'.*in .*tasks: mine\)"):
        find_manager("shop_refund", str(folder))


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


OWN_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: own.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [{choices}]
doc_to_target: answer
process_results: !function own.score
metric_list:
  - {{metric: points, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
OWN_METRIC = """
def score(doc, results):
    chosen = max(range(len(results)), key=lambda index: results[index][0])
    return {"points": 1.0 if chosen == doc["answer"] else 0.5}
"""


def own_folder(folder: Path, name: str = "mine", choices: str = "a, b") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "mine.yaml").write_text(OWN_TASK.format(name=name, choices=choices), encoding="utf-8")
    (folder / "own.py").write_text(OWN_METRIC, encoding="utf-8")
    rows = [{"question": "which", "answer": answer} for answer in (0, 1, 1)]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_a_users_own_task_comes_with_its_data_and_its_metric(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "tasks")
    (task,) = load_task("mine", None, include_path=str(folder))
    assert [doc["answer"] for doc in task.eval_docs] == [0, 1, 1]
    assert task.process_results(task.eval_docs[0], [(-1.0, False), (-2.0, False)]) == {"points": 1.0}
    assert origin("mine", str(folder)) == [OWN_TASKS]
    assert origin("smoke", str(folder)) == [OUR_TASKS]
    require_tasks(EvaluateSpec(tasks=[TaskSpec(task="mine"), TaskSpec(task="smoke")], include_path=str(folder)))


def test_an_own_task_that_was_edited_is_read_again_and_comes_before_one_of_the_same_name(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "tasks")
    assert load_task("mine", None, include_path=str(folder))[0].doc_to_choice({}) == ["a", "b"]
    own_folder(folder, name="smoke", choices="c, d")
    assert load_task("smoke", None, include_path=str(folder))[0].doc_to_choice({}) == ["c", "d"]
    assert len(load_task("smoke", None)[0].eval_docs) == 200


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no folder"):
        find_manager("mine", str(tmp_path / "absent"))
    with pytest.raises(UserError, match="holds no task"):
        find_manager("mine", str(tmp_path))


def test_a_record_of_an_own_task_is_that_of_its_files(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "tasks")
    first = data_digests([OWN_TASKS], None, str(folder))
    assert first[OWN_TASKS]
    own_folder(folder, choices="c, d")
    assert data_digests([OWN_TASKS], None, str(folder)) != first


def test_lm_eval_prints_nothing_of_its_bootstrap(capsys: pytest.CaptureFixture[str]) -> None:
    bootstrap = lm_eval.api.metrics._bootstrap_internal_no_mp
    bootstrap(max, [1.0, 2.0], 2)
    assert "bootstrapping" in capsys.readouterr().out  # where it does not any more, quiet_lm_eval has less to do
    with quiet_lm_eval():
        bootstrap(max, [1.0, 2.0], 2)
    assert capsys.readouterr().out == ""
