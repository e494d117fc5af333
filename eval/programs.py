"""What our task files for generated code call: the program is cut out of a text and runs in the sandbox."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import Any

from halfbyte.eval.answers import NO_ANSWER
from halfbyte.eval.protocols import averaged
from halfbyte.eval.sandbox import Job, require_isolation, run_jobs

Doc = dict[str, Any]
Texts = Iterable[Sequence[str]]
_FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
MBPP_EXAMPLES = (2, 3, 4)
"""The task_ids of the three examples in the paper's prompt."""


def isolated(dataset: Any) -> Any:
    """The questions as they are; refuses the task where generated code cannot be isolated, before anything is asked."""
    require_isolation()
    return dataset


def code_block(text: str) -> str | None:
    """The last block of Python code in a text, after its thinking; None where there is none."""
    blocks: list[str] = _FENCE.findall(text.rpartition("</think>")[2])
    return next((block for block in reversed(blocks) if block.strip()), None)


def humaneval_completions(texts: Texts, docs: Sequence[Doc]) -> list[list[str]]:
    """What became of each text as the continuation of its question's function."""
    return _outcomes(texts, docs, lambda text, doc: _humaneval(doc["prompt"] + text, doc) if text.strip() else None)


def humaneval_blocks(texts: Texts, docs: Sequence[Doc]) -> list[list[str]]:
    """What became of each text's block of code, after the imports and helpers of its question."""

    def job(text: str, doc: Doc) -> Job | None:
        block = code_block(text)
        return None if block is None else _humaneval(f"{doc['prompt']}\n\n{block}", doc)

    return _outcomes(texts, docs, job)


def _humaneval(program: str, doc: Doc) -> Job:
    test = f"{doc['test']}\ncheck({doc['entry_point']})"
    return Job(program, test, prelude=doc["prompt"], entries=(doc["entry_point"],))


def mbpp_completions(texts: Texts, docs: Sequence[Doc]) -> list[list[str]]:
    """What became of each text, which is a program from its first line on."""
    return _outcomes(texts, docs, lambda text, doc: _mbpp(text, doc) if text.strip() else None)


def mbpp_blocks(texts: Texts, docs: Sequence[Doc]) -> list[list[str]]:
    """What became of each text's block of code."""

    def job(text: str, doc: Doc) -> Job | None:
        block = code_block(text)
        return None if block is None else _mbpp(block, doc)

    return _outcomes(texts, docs, job)


def _mbpp(program: str, doc: Doc) -> Job:
    names = (getattr(node, "name", None) for node in ast.parse(doc["code"]).body)
    return Job(
        f"{program}\n{doc.get('test_setup_code') or ''}",
        "\n".join(doc["test_list"]),
        entries=tuple(name for name in names if name),
    )


def _outcomes(texts: Texts, docs: Sequence[Doc], job: Any) -> list[list[str]]:
    rows = [[job(text, doc) for text in row] for row, doc in zip(texts, docs, strict=True)]
    outcomes = iter(run_jobs([entry for row in rows for entry in row if entry is not None]))
    return [[NO_ANSWER if entry is None else str(next(outcomes)) for entry in row] for row in rows]


def judge_program(doc: Doc, results: Sequence[Sequence[str]]) -> dict[str, Any]:  # noqa: ARG001  lm-eval hands over both
    """Right is what passed its tests."""
    return averaged([outcome == "passed" for outcome in results[0]])


def paper_examples(dataset: Any) -> Any:
    """The examples of MBPP's paper, from its `prompt` split."""
    return dataset.filter(lambda doc: doc["task_id"] in MBPP_EXAMPLES)
