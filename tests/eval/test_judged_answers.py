"""The parser and the comparison agree with people: hand-judged answers to MATH-500 and AIME, and MATH-500 with itself.

judged_answers.jsonl holds [question id, verdict, text a model may write]; the reference answers come from the data.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from halfbyte.eval.answers import mathematical
from halfbyte.eval.equivalence import equal

JUDGED = [json.loads(line) for line in Path(__file__).with_name("judged_answers.jsonl").open(encoding="utf-8")]


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.open(encoding="utf-8")]


@pytest.fixture(scope="module")
def references(data_root: Path) -> dict[str, str]:
    """Reference answers by question id."""
    math = _rows(data_root / "HuggingFaceH4" / "MATH-500" / "test.jsonl")
    aime24 = _rows(data_root / "Maxwell-Jia" / "AIME_2024" / "train.jsonl")
    aime25 = _rows(data_root / "math-ai" / "aime25" / "test.jsonl")
    found = {row["unique_id"].removeprefix("test/").removesuffix(".json"): row["answer"] for row in math}
    found |= {f"aime24/{row['ID']}": str(row["Answer"]) for row in aime24}
    return found | {f"aime25/{row['id']}": row["answer"] for row in aime25}


def _verdict(reference: str, text: str) -> str:
    answer = mathematical(text)
    return "none" if answer is None else "right" if equal(reference, answer) else "wrong"


def test_at_least_200_answers_were_judged_80_of_them_wrong() -> None:
    assert len({tuple(row) for row in JUDGED}) == len(JUDGED) >= 200
    verdicts = Counter(verdict for _, verdict, _ in JUDGED)
    assert verdicts["wrong"] >= 80
    assert verdicts["none"] >= 5


@pytest.mark.real
def test_every_judged_answer_gets_the_verdict_a_person_gave_it(references: dict[str, str]) -> None:
    found = [(question, text, _verdict(references[question], text)) for question, _, text in JUDGED]
    assert found == [(question, text, verdict) for question, verdict, text in JUDGED]


@pytest.mark.real
def test_math_500s_reference_answers_equal_themselves_boxed_announced_and_bare(references: dict[str, str]) -> None:
    own = [answer for question, answer in references.items() if not question.startswith("aime")]
    assert len(own) == 500
    assert [answer for answer in own if _verdict(answer, f"So we have $\\boxed{{{answer}}}$.") != "right"] == []
    assert [answer for answer in own if _verdict(answer, f"The answer is ${answer}$") != "right"] == []
    assert [answer for answer in own if not equal(answer, answer)] == []


@pytest.mark.real
def test_math_500s_reference_answers_differ_from_one_another(references: dict[str, str]) -> None:
    own = [answer for question, answer in references.items() if not question.startswith("aime")]
    pairs = [(one, other) for one, other in pairwise(own) if one != other and equal(one, other)]
    assert pairs == [("5", "x=5")]  # the value of x where nobody asked for another letter
