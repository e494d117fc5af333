"""Questions of an evaluation as plain texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.eval.question_texts import _without_template, question_texts
from halfbyte.quant.leakage import overlap
from halfbyte.recipes.schema import EvaluateSpec
from halfbyte.recipes.sources import TextSource
from halfbyte.recipes.texts import load_texts


def test_words_that_all_questions_share_around_them_are_no_part_of_them() -> None:
    texts = [f"Question: What is {i} and\n{i}?\nAnswer:" for i in range(12)]
    assert _without_template(texts)[3] == "3 and 3?"
    assert _without_template(texts[:3]) == texts[:3]
    assert _without_template(["same words"] * 12) == [""] * 12


def test_questions_of_a_task_are_named_by_task_and_doc_id_whatever_its_limit() -> None:
    few = question_texts(EvaluateSpec.model_validate({"tasks": [{"task": "smoke", "limit": 2}]}), None)
    every = question_texts(EvaluateSpec.model_validate({"tasks": [{"task": "smoke"}]}), None)
    assert few == every
    assert list(few) == ["smoke"]
    assert "smoke/0" in few["smoke"]
    assert len(few["smoke"]) > 2


def test_the_text_of_fidelity_is_among_them(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one line\n\nanother line\n")
    block = {"tasks": [{"task": "smoke"}], "fidelity": {"source": {"dataset": str(tmp_path / "text.txt")}}}
    found = question_texts(EvaluateSpec.model_validate(block), None)
    assert list(found[f"fidelity: {tmp_path / 'text.txt'}"].values()) == ["one line", "another line"]


@pytest.mark.real
def test_data_is_looked_for_where_the_environment_says(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_DATA", str(data_root))
    assert len(question_texts(EvaluateSpec.model_validate({"tasks": [{"task": "gsm8k"}]}), None)["gsm8k"]) == 1319


@pytest.mark.real
def test_training_splits_touch_few_questions_of_real_tasks_and_dev_questions_of_mmlu_some(data_root: Path) -> None:
    tasks = [{"task": "gsm8k"}, {"task": "arc_easy"}, {"task": "mmlu_high_school_european_history"}]
    asked = question_texts(EvaluateSpec.model_validate({"tasks": tasks}), data_root)
    assert {name: len(texts) for name, texts in asked.items()} == {
        "gsm8k": 1319,
        "arc_easy": 2376,
        "mmlu_high_school_european_history": 165,
    }
    sources = {
        "gsm8k": TextSource(dataset="openai/gsm8k", name="main", field="question"),
        "arc": TextSource(dataset="allenai/ai2_arc", name="ARC-Easy", field="question"),
        "mmlu": TextSource(dataset="cais/mmlu", name="high_school_european_history", split="dev", field="question"),
    }
    texts = {name: load_texts(source, data_root=data_root, whole=True).texts for name, source in sources.items()}
    found = overlap(texts, asked)
    assert 0 < found.tasks["gsm8k"].share < 0.005
    assert 0 < found.tasks["arc_easy"].share < 0.01
    assert found.tasks["mmlu_high_school_european_history"].share > 0.02  # a passage of history has several questions
