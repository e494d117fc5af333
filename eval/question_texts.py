"""The questions of a recipe's evaluation as plain texts, for the guard against training on them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from halfbyte.eval.questions import Questions
from halfbyte.recipes.data import data_root
from halfbyte.recipes.schema import EvaluateSpec
from halfbyte.recipes.texts import load_texts
from halfbyte.records.training import FIDELITY

ENOUGH = 10
"""Questions from which on words that all of them share are a template and not a question's own."""


def question_texts(settings: EvaluateSpec, root: Path | None) -> dict[str, dict[str, str]]:
    """The text of every question by task, as task/doc_id, and the texts that fidelity is measured on.

    A question is what its task renders of its document, without few-shot examples and without the words around it that
    are the same for all ("Question:", "Answer:"); where a whole document is scored, the document. A task's limit is not
    regarded: the next evaluation may have none.

    Args:
        settings: The recipe's evaluate block.
        root: The data root, see recipes.data.data_root.

    Raises:
        UserError: for an unknown task, or data that is not to be had.
    """
    root = data_root(root)
    found: dict[str, dict[str, str]] = {}
    for spec in settings.tasks:
        asked = found[spec.task] = {}
        for name, task in Questions(spec, settings, root).tasks.items():
            texts = _without_template([_render(task, doc) for doc in task.eval_docs])
            asked.update({f"{name}/{doc_id}": text for doc_id, text in enumerate(texts)})
    if settings.fidelity is not None:
        source = settings.fidelity.source
        texts = load_texts(source, data_root=root, whole=True).texts
        found[f"{FIDELITY} {source.dataset}"] = {str(at): text for at, text in enumerate(texts) if text.strip()}
    return found


def _render(task: Any, doc: Any) -> str:
    text = task.doc_to_target(doc) if task.OUTPUT_TYPE == "loglikelihood_rolling" else task.doc_to_text(doc)
    if isinstance(text, int):  # a task of the kind of Winogrande: the texts are its choices, and one is right
        return str(task.doc_to_choice(doc)[text])
    return str(text)


def _without_template(texts: Sequence[str]) -> list[str]:
    split = [text.split() for text in texts]
    if len(split) < ENOUGH:
        return list(texts)
    head = _shared(split)
    tail = _shared([row[head:][::-1] for row in split])
    return [" ".join(row[head : len(row) - tail]) for row in split]


def _shared(rows: Sequence[Sequence[str]]) -> int:
    """Words that all rows begin with."""
    return len(list(takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))))
