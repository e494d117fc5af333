"""All tasks of a recipe are evaluated, each into its own folder, and those done are skipped."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from halfbyte.eval.generation import Generator
from halfbyte.eval.run import evaluate_model
from halfbyte.eval.scorer import PrefixScorer
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.errors import UserError
from halfbyte.records.record import ModelSummary, find_records

CHOICE, GENERATE = TaskSpec(task="tiny_choice"), TaskSpec(task="tiny_generate", limit=4)


def test_each_task_has_its_record(
    tiny_llama: Any,
    tiny_tokenizer: Any,
    summary: ModelSummary,
    tiny_tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tiny_tasks.is_dir()
    settings = EvaluateSpec(tasks=[CHOICE, GENERATE])
    records = evaluate_model(tiny_llama, tiny_tokenizer, summary, settings, tmp_path / "out")
    assert [record.task for record in records] == ["tiny_choice", "tiny_generate"]
    assert set(find_records(tmp_path / "out")) == {"tiny_choice", "tiny_generate"}
    monkeypatch.setattr(PrefixScorer, "score", None)
    monkeypatch.setattr(Generator, "generate", None)
    assert evaluate_model(tiny_llama, tiny_tokenizer, summary, settings, tmp_path / "out") == records


def test_a_task_named_twice_is_an_error(
    tiny_llama: Any, tiny_tokenizer: Any, summary: ModelSummary, tmp_path: Path
) -> None:
    settings = EvaluateSpec(tasks=[CHOICE, CHOICE])
    with pytest.raises(UserError, match="task 'tiny_choice' is named twice"):
        evaluate_model(tiny_llama, tiny_tokenizer, summary, settings, tmp_path / "out")


def test_a_later_task_that_is_unknown_is_named_before_the_first_is_evaluated(
    tiny_llama: Any,
    tiny_tokenizer: Any,
    summary: ModelSummary,
    tiny_tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from halfbyte.eval import resolve

    ours = resolve.task_manager(ours_only=True)
    monkeypatch.setattr(resolve, "task_manager", lambda **_: ours)  # without lm-eval's thousands of tasks
    settings = EvaluateSpec(tasks=[CHOICE, TaskSpec(task="tiny_choise")])
    with pytest.raises(UserError, match="unknown task 'tiny_choise'"):
        evaluate_model(tiny_llama, tiny_tokenizer, summary, settings, tmp_path / "out")
    assert tiny_tasks.is_dir()
    assert not (tmp_path / "out").exists()


def test_an_unknown_metric_is_named_before_anything_is_evaluated(
    tiny_llama: Any,
    tiny_tokenizer: Any,
    summary: ModelSummary,
    tiny_tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tiny_tasks.is_dir()
    monkeypatch.setattr(PrefixScorer, "score", None)
    settings = EvaluateSpec(tasks=[TaskSpec(task="tiny_choice", metric="accuracy")])
    with pytest.raises(UserError, match=r"unknown metric 'accuracy'.*known: acc,none, acc_norm,none"):
        evaluate_model(tiny_llama, tiny_tokenizer, summary, settings, tmp_path / "out")


def test_an_answer_longer_than_the_longest_input_is_refused(
    tiny_llama: Any, tiny_tokenizer: Any, summary: ModelSummary, tiny_tasks: Path, tmp_path: Path
) -> None:
    assert tiny_tasks.is_dir()
    settings = EvaluateSpec(tasks=[CHOICE], max_length=2)
    with pytest.raises(UserError, match="tokens does not fit into a max_length of 2"):
        evaluate_model(tiny_llama, tiny_tokenizer, summary, settings, tmp_path / "out")


def test_a_tokenizer_without_an_end_of_text_is_refused(
    tiny_llama: Any, tokenizer_factory: Any, summary: ModelSummary, tiny_tasks: Path, tmp_path: Path
) -> None:
    assert tiny_tasks.is_dir()
    tokenizer = tokenizer_factory()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="names no token that ends a text"):
        evaluate_model(tiny_llama, tokenizer, summary, EvaluateSpec(tasks=[CHOICE]), tmp_path / "out")


def test_a_second_process_is_kept_out_of_an_evaluation_under_way(
    tiny_llama: Any, tiny_tokenizer: Any, summary: ModelSummary, tiny_tasks: Path, tmp_path: Path
) -> None:
    assert tiny_tasks.is_dir()
    partial = tmp_path / "out" / "tiny_choice.partial"
    partial.mkdir(parents=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process evaluates into .*tiny_choice "):
            evaluate_model(tiny_llama, tiny_tokenizer, summary, EvaluateSpec(tasks=[CHOICE]), tmp_path / "out")
    finally:
        os.close(descriptor)
    evaluate_model(tiny_llama, tiny_tokenizer, summary, EvaluateSpec(tasks=[CHOICE]), tmp_path / "out")
