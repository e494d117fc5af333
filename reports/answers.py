"""What a model answered: a line of lm-eval's samples file cut to the question, the right answer and the one given."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

QUESTION_LENGTH = 600
ANSWER_LENGTH = 400
_QUESTION_FIELDS = ("question", "problem", "Question", "query", "prompt")


@dataclass(frozen=True, slots=True)
class Answer:
    """One model's answer to one question, for people to read."""

    question: str
    target: str
    given: str


def read_answer(raw: dict[str, Any], metric: str) -> Answer:
    """The answer in a sample line, as the metric saw it.

    Args:
        raw: A line of samples_*.jsonl.
        metric: acc takes the likeliest choice and acc_norm the likeliest per character, as lm-eval does.
    """
    requests = _requests(raw.get("arguments"))
    choices = [str(request[1]) for request in requests] if all(len(request) > 1 for request in requests) else []
    if len(choices) > 1 and len(set(choices)) == 1:  # tasks such as winogrande vary the context instead
        choices = [f"choice {i}" for i in range(len(choices))]
    responses = raw.get("filtered_resps") or []
    scores = [_score(response) for response in responses]
    if len(choices) > 1 and len(scores) >= len(choices) and all(score is not None for score in scores):
        # lm-eval measures a choice without the space that joins it to the prompt
        lengths = [max(1, len(choice.removeprefix(" "))) if metric == "acc_norm" else 1 for choice in choices]
        values = [(score or 0.0) / length for score, length in zip(scores, lengths, strict=False)]
        given = choices[max(range(len(choices)), key=values.__getitem__)]
    else:
        choices = []
        given = _first(responses) if responses else _first(raw.get("resps") or [])
    target = _target(raw.get("target"), choices)
    return Answer(_question(raw, requests), _cut(target, ANSWER_LENGTH), _cut(given, ANSWER_LENGTH))


def _requests(arguments: Any) -> list[list[Any]]:
    """The arguments of each request: lm-eval writes {"gen_args_0": {"arg_0": ..., "arg_1": ...}, ...}, or lists."""
    if isinstance(arguments, dict):
        ordered = sorted(arguments.items(), key=lambda item: _number(item[0]))
        return [list(value.values()) if isinstance(value, dict) else [value] for _, value in ordered]
    requests = arguments if isinstance(arguments, list) else []
    return [list(one) if isinstance(one, (list, tuple)) else [one] for one in requests]


def _number(name: str) -> int:
    found = re.search(r"[0-9]+$", name)
    return int(found[0]) if found else 0


def _score(response: Any) -> float | None:
    head = response[0] if isinstance(response, (list, tuple)) and response else None
    try:
        return float(head)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _first(responses: Any) -> str:
    while isinstance(responses, (list, tuple)):
        if not responses:
            return ""
        responses = responses[0]
    return str(responses)


def _target(target: Any, choices: list[str]) -> str:
    text = str(target).strip()
    if choices and text.isdecimal() and int(text) < len(choices):
        return choices[int(text)]
    return text


def _question(raw: dict[str, Any], requests: list[list[Any]]) -> str:
    doc = raw.get("doc")
    if isinstance(doc, dict):
        for field in _QUESTION_FIELDS:
            if isinstance(doc.get(field), str):
                return _cut(doc[field], QUESTION_LENGTH) + _options(doc.get("choices"), requests)
    # the question is the end of the prompt; few-shot examples come before it
    prompt = str(requests[0][0]).strip() if requests and requests[0] else ""
    prompt = prompt[-QUESTION_LENGTH - 1 :].encode("utf-8", "replace").decode("utf-8")
    return prompt if len(prompt) <= QUESTION_LENGTH else f"...{prompt[-QUESTION_LENGTH:]}"


def _options(texts: Any, requests: list[list[Any]]) -> str:
    """The choices a letter stands for, where the model was asked for a letter (mmlu)."""
    letters = [str(request[1]).strip() for request in requests if len(request) > 1]
    if not isinstance(texts, list) or len(texts) < 2 or letters != [chr(65 + i) for i in range(len(texts))]:
        return ""
    return "".join(f"\n{letter}. {_cut(str(text), ANSWER_LENGTH)}" for letter, text in zip(letters, texts, strict=True))


def _cut(text: str, length: int) -> str:
    text = text.strip()[: length + 1].encode("utf-8", "replace").decode("utf-8")  # half a pair is no text to write
    return text if len(text) <= length else f"{text[:length]}..."
