"""Overlap of training texts with evaluation questions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.quant.leakage import COMMON, LEAST, NGRAM, overlap, words
from halfbyte.records.errors import UserError

QUESTION = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
SHORT = "Which of these animals lays its eggs in water?"


def _touched(texts: list[str], questions: list[str], n: int = NGRAM) -> list[int]:
    found = overlap({"train": texts}, {"task": {str(at): text for at, text in enumerate(questions)}}, n)
    return [int(question.question) for question in found.touched]


def test_thirteen_words_in_a_row_touch_and_twelve_do_not() -> None:
    split = QUESTION.split()
    assert _touched(["so " + " ".join(split[2:15]) + " it went"], [QUESTION]) == [0]
    assert _touched([" ".join(split[2:14]) + " it went"], [QUESTION]) == []


def test_case_punctuation_and_whitespace_do_not_hide_a_question() -> None:
    disguised = (
        "NATALIA sold -- clips to\n48 of her ``friends'' in April and then: she sold half (as many) clips in May"
    )
    assert _touched([disguised], [QUESTION]) == [0]
    assert words("Ｄon't  well_known @-@ 1,000") == ["don", "t", "well", "known", "1", "000"]


def test_a_run_does_not_go_over_from_one_text_to_the_next() -> None:
    split = QUESTION.split()
    assert _touched([" ".join(split[:10]), " ".join(split[10:])], [QUESTION]) == []


def test_a_short_question_is_looked_for_whole() -> None:
    assert len(words(SHORT)) == 9
    assert _touched([f"Question: {SHORT} Answer: frogs"], [SHORT]) == [0]
    assert _touched([SHORT.replace("water", "sand")], [SHORT]) == []


def test_a_question_below_the_least_is_unchecked_and_in_no_share() -> None:
    tiny = "What is two plus two?"
    assert len(words(tiny)) < LEAST
    found = overlap({"train": [tiny, QUESTION]}, {"task": {"0": tiny, "1": QUESTION}})
    assert (found.tasks["task"].questions, found.tasks["task"].checked, found.tasks["task"].touched) == (2, 1, 1)
    assert found.share == 1.0
    assert "1 too short" in found.describe()[0]
    assert found.unchecked == []


def test_a_task_whose_questions_are_all_too_short_is_named_as_unchecked() -> None:
    found = overlap({"train": [QUESTION]}, {"short": {"0": "two plus two?"}, "long": {"0": QUESTION}, "none": {}})
    assert found.unchecked == ["short"]


def test_wording_that_many_questions_share_is_passed_over() -> None:
    wording = "for which of these two scenarios does the main character do something that is clearly wrong"
    asked = [f"{wording} {i} {i * 7} {i * 11}" for i in range(COMMON + 1)]
    assert _touched([wording], asked) == []
    assert _touched([wording], asked[:COMMON]) == list(range(COMMON))
    assert _touched([asked[3]], asked) == [3]


def test_sources_and_questions_are_named_and_no_text_is_told() -> None:
    questions = {"gsm8k": {"0": QUESTION}, "arc": {"7": SHORT, "8": QUESTION + " More?"}}
    found = overlap({"a": ["nothing here"], "b": [QUESTION], "c": [SHORT, QUESTION]}, questions)
    assert [(q.task, q.question, q.sources) for q in found.touched] == [
        ("gsm8k", "0", ("b", "c")),
        ("arc", "7", ("c",)),
        ("arc", "8", ("b", "c")),
    ]
    assert (found.sources["c"].texts, found.sources["c"].touching, found.sources["c"].questions) == (2, 2, 3)
    assert "Natalia" not in json.dumps(found.to_json())


def test_a_small_task_that_leaked_is_refused_beside_a_large_one() -> None:
    random_words = random.Random(0)
    large = {str(i): " ".join(f"w{random_words.randrange(10**6)}" for _ in range(20)) for i in range(1000)}
    found = overlap({"train": [QUESTION]}, {"large": large, "small": {"0": QUESTION, "1": SHORT}})
    assert found.share == 0.5
    found.require_at_most(0.5)
    with pytest.raises(UserError, match=r"1 of 2 questions of 'small' \(50.0%, allowed 1.0%\), most in train") as error:
        found.require_at_most(0.01)
    assert "max_overlap" in str(error.value)


def test_comparing_nothing_is_an_error() -> None:
    with pytest.raises(UserError, match="no evaluation question"):
        overlap({"train": [QUESTION]}, {"task": {}})
    with pytest.raises(UserError, match="no training text"):
        overlap({"train": []}, {"task": {"0": QUESTION}})
    with pytest.raises(ValueError, match="fewer than 8"):
        overlap({"train": [QUESTION]}, {"task": {"0": QUESTION}}, n=3)


def test_chinese_is_compared_by_characters() -> None:
    question = "小明有三个苹果他又买了五个苹果请问他现在一共有几个"
    assert _touched([f"题目。{question}？答案"], [question]) == [0]


def test_texts_are_read_once() -> None:
    def stream() -> Iterator[str]:
        yield from ["one", QUESTION, "two"] * 200

    found = overlap({"train": stream()}, {"task": {"0": QUESTION}})
    assert (found.sources["train"].texts, found.sources["train"].touching) == (600, 200)


def _by_sets(texts: list[str], questions: list[str], n: int) -> list[int]:
    """The definition, word by word."""
    asked = [[tuple(split[i : i + size]) for i in range(len(split) - size + 1)] for q in questions
             if (split := words(q)) is not None and (size := min(n, len(split))) >= 0]  # fmt: skip
    count: dict[Any, int] = {}
    for grams in asked:
        for gram in set(grams):
            count[gram] = count.get(gram, 0) + 1
    seen = {tuple(split[i : i + m]) for t in texts for split in [words(t)] for m in range(LEAST, n + 1)
            for i in range(len(split) - m + 1)}  # fmt: skip
    return [
        at
        for at, grams in enumerate(asked)
        if any(len(gram) >= LEAST and gram in seen and count[gram] <= COMMON for gram in grams)
    ]


_TEXT = st.lists(st.sampled_from("abc"), max_size=22).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(_TEXT, min_size=1, max_size=6), st.lists(_TEXT, min_size=1, max_size=14), st.sampled_from([8, 10, 13]))
def test_hashes_find_what_sets_of_words_find(texts: list[str], questions: list[str], n: int) -> None:
    assert _touched(texts, questions, n) == _by_sets(texts, questions, n)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open(encoding="utf-8") if line.strip()]


@pytest.mark.real
@pytest.mark.parametrize(
    ("folder", "most"),
    [("openai/gsm8k", 0.005), ("allenai/ai2_arc/ARC-Easy", 0.01), ("allenai/ai2_arc/ARC-Challenge", 0.01)],
)
def test_official_training_splits_hold_few_test_questions(data_root: Path, folder: str, most: float) -> None:
    train, test = (_rows(next((data_root / folder).rglob(f"{split}.jsonl"))) for split in ("train", "test"))
    asked = {"test": {str(at): row["question"] for at, row in enumerate(test)}}
    clean = overlap({"train": [row["question"] for row in train]}, asked)
    assert 0 < clean.share <= most  # each has a few questions that differ from one of the training split by a number
    leaked = overlap({"train": [row["question"] for row in [*train, *test[:100]]]}, asked)
    assert leaked.tasks["test"].touched >= clean.tasks["test"].touched + 85  # of 100, some are too short
