r"""What our task files call: how answers are read out of generated texts, judged and averaged over k samples.

A filter turns the k texts of each question into k answers, NO_ANSWER where a text holds none: they are the
`filtered_resps` of a sample line. The judgement of each sample is in its `correct`.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from halfbyte.eval import answers
from halfbyte.eval.answers import NO_ANSWER
from halfbyte.eval.equivalence import equal
from halfbyte.records.errors import UserError

Doc = dict[str, Any]
Texts = Iterable[Sequence[str]]
MEND = "mend it in the data set, or take it out; the same command goes on with the answers that are there"
WRONG_CHOICES = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def boxed(texts: Texts, docs: Sequence[Doc]) -> list[list[str]]:  # noqa: ARG001  lm-eval hands over both
    """The mathematical answer of each text."""
    return [[answers.mathematical(text) or NO_ANSWER for text in row] for row in texts]


def gsm8k(texts: Texts, docs: Sequence[Doc]) -> list[list[str]]:  # noqa: ARG001
    """The answer of each text to a question of GSM8K."""
    return [[answers.gsm8k(text) or NO_ANSWER for text in row] for row in texts]


def letters(texts: Texts, docs: Sequence[Doc]) -> list[list[str]]:
    """The letter of the choice that each text names."""
    rows = zip(texts, docs, strict=True)
    return [[answers.letter(text, doc["choices"]) or NO_ANSWER for text in row] for row, doc in rows]


def judge_mathematical(doc: Doc, results: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Compares each answer with the question's `answer`, as mathematics."""
    return _judged(results[0], _reference(doc, "answer" if "answer" in doc else "Answer"), equal)


def judge_gsm8k(doc: Doc, results: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Compares each answer with what follows #### in the question's solution."""
    reference = answers.gsm8k(_reference(doc, "answer"))
    if reference is None:
        raise UserError(f"the solution of the question '{_beginning(doc)}' has no answer behind ####", MEND)
    return _judged(results[0], reference, equal)


def judge_letter(doc: Doc, results: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Compares each letter with the question's `answer`."""
    return _judged(results[0], doc["answer"], str.__eq__)


def _reference(doc: Doc, name: str) -> str:
    """The right answer.

    Raises:
        UserError: where a question has none.
    """
    value = doc.get(name)
    if value is None or not str(value).strip():
        raise UserError(f"the question '{_beginning(doc)}' has no reference answer: its {name} is {value!r}", MEND)
    return str(value)


def _beginning(doc: Doc) -> str:
    """Enough of a question to find it."""
    text = next((str(doc[name]) for name in ("question", "problem", "Problem", "Question") if doc.get(name)), "")
    return textwrap.shorten(text, 80, placeholder=" ...")


def _judged(found: Sequence[str], reference: str, same: Callable[[str, str], bool]) -> dict[str, Any]:
    right = [answer != NO_ANSWER and same(reference, answer) for answer in found]
    votes = _votes(found, same)
    return {**averaged(right), "maj@k": float(bool(votes) and right[max(votes, key=len)[0]])}


def averaged(right: Sequence[bool]) -> dict[str, Any]:
    """The metrics of one question from its k samples: their mean, and each."""
    return {"pass@1": sum(right) / len(right), "correct": [int(value) for value in right]}


def _votes(found: Sequence[str], same: Callable[[str, str], bool]) -> list[list[int]]:
    """The samples that gave the same answer, by answer; those without one have no vote. The first wins a tie."""
    groups: list[list[int]] = []
    for at, answer in enumerate(found):
        if answer == NO_ANSWER:
            continue
        group = next((group for group in groups if same(found[group[0]], answer)), None)
        if group is None:
            groups.append([at])
        else:
            group.append(at)
    return groups


def share_of_samples(rows: Sequence[Sequence[int]]) -> float:
    """The share of right samples among those of all questions."""
    every = [value for row in rows for value in row]
    return sum(every) / len(every)


def keyed_choices(dataset: Any) -> Any:
    """GPQA's questions with `choices` in an order of their own and the letter of the right one as `answer`.

    The order is that of a hash of the question with the choice: it does not depend on a seed, on other tasks, on the
    order of the questions or on a limit.
    """

    def with_choices(doc: Doc) -> Doc:
        question = doc["Question"].strip()
        right = doc["Correct Answer"].strip()
        choices = sorted(
            (right, *(doc[name].strip() for name in WRONG_CHOICES)),
            key=lambda choice: hashlib.sha256(f"{question}\0{choice}".encode()).digest(),
        )
        return {"choices": choices, "answer": chr(ord("A") + choices.index(right))}

    return dataset.map(with_choices)
