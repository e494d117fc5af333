"""Log-probabilities of given tokens from a server, in the first of two ways that it does right.

Echoed: the server echoes a prompt with the log-probability of each token; vLLM and SGLang do. Forced: one token after
the other is asked for with a bias that no other token can beat, where a server reports log-probabilities from before
the bias; llama.cpp does. Some servers accept either request and answer with other numbers: those of the generated token
alone, or for each token those of the next. So each way is tried against what the server generates by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from halfbyte.eval.completions import Completions, choice
from halfbyte.eval.endpoint import Refused
from halfbyte.eval.sharing import Request
from halfbyte.records.errors import UserError

BIAS = 100
"""The largest bias that OpenAI's interface allows."""
PROBE = "Blue 17 zebra; north of the lamp, five quiet"
"""A text that no model expects, so that its tokens are not the most probable ones."""
PLACES = 6
"""Positions at its end that are tried."""
ENOUGH = 3
CLOSE = 0.25
"""Nats between two computations of one distribution, in whatever type an engine computes."""


class Score(NamedTuple):
    """A token where it stands."""

    value: float
    """Its log-probability in nats."""
    top: float
    """That of the most probable token there."""


Way = Callable[[Completions, Request], list[Score]]


def echoed(completions: Completions, request: Request) -> list[Score]:
    """Scores the continuation of a request by one echo of the prompt.

    Raises:
        UserError: when the answer does not hold them.
    """
    ids = [*request.context, *request.continuation]
    asked = {"max_tokens": 1, "temperature": 0.0, "logprobs": 1, "echo": True}
    found = choice(completions.ask(ids, asked), completions.served).get("logprobs")
    values = found.get("token_logprobs") if isinstance(found, dict) else None
    tops = found.get("top_logprobs") if isinstance(found, dict) else None
    # Behind the prompt's tokens there is one of the generated token, or none where that is the end token.
    if not isinstance(values, list) or not isinstance(tops, list) or min(len(values), len(tops)) < len(ids):
        count = len(values) if isinstance(values, list) else 0
        raise UserError(f"{completions.served} echoes {count} log-probabilities for {len(ids)} tokens")
    part = slice(len(request.context), len(ids))
    return [_score(completions, value, _numbers(top)) for value, top in zip(values[part], tops[part], strict=True)]


def forced(completions: Completions, request: Request) -> list[Score]:
    """Scores the continuation of a request token by token; the server's prefix cache makes that cheap.

    Raises:
        UserError: when the answer does not hold the token asked for.
    """
    return [
        _next(completions, Request((*request.context, *request.continuation[:at]), (token,)))
        for at, token in enumerate(request.continuation)
    ]


WAYS: dict[str, Way] = {"echo": echoed, "logit_bias": forced}


def _next(completions: Completions, request: Request) -> Score:
    """The score of the one token of a continuation, or of the one that the server would generate."""
    asked: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "logprobs": 1}
    if request.continuation:
        asked["logit_bias"] = {str(request.continuation[0]): BIAS}
    found = choice(completions.ask(request.context, asked), completions.served).get("logprobs")
    content = found.get("content") if isinstance(found, dict) else None
    if isinstance(content, list) and content:  # in the shape of chat completions, as llama.cpp has it
        first = content[0] if isinstance(content[0], dict) else {}
        if request.continuation and first.get("id", request.continuation[0]) != request.continuation[0]:
            raise UserError(f"{completions.served} answers with another token than the one asked for")
        told = first.get("top_logprobs")
        tops = [one.get("logprob") for one in (told if isinstance(told, list) else []) if isinstance(one, dict)]
        return _score(completions, first.get("logprob"), tops)
    values = found.get("token_logprobs") if isinstance(found, dict) else None
    most = found.get("top_logprobs") if isinstance(found, dict) else None
    if not isinstance(values, list) or not values:
        raise UserError(f"{completions.served} gives no log-probability of a generated token")
    return _score(completions, values[0], _numbers(most[0]) if isinstance(most, list) and most else [])


def _numbers(top: Any) -> list[Any]:
    return list(top.values()) if isinstance(top, dict) else []


def _score(completions: Completions, value: Any, tops: list[Any]) -> Score:
    numbers = [float(top) for top in tops if isinstance(top, (int, float))]
    if not isinstance(value, (int, float)) or not numbers:
        raise UserError(f"{completions.served} gives {value!r} as the log-probability of a token")
    return Score(float(value), max(numbers))


def find_way(completions: Completions) -> Way:
    """The first way in which a server's log-probabilities prove to be those of a prompt's tokens.

    Raises:
        UserError: when there is none; says why.
    """
    ids = completions.encode(PROBE)
    first = max(1, len(ids) - PLACES)
    known = _generated(completions, ids, first)
    reasons = []
    for name, way in WAYS.items():
        try:
            scores = way(completions, Request(tuple(ids[:first]), tuple(ids[first:])))
        except Refused as error:
            reasons.append(f"it refuses {name} ({error.status})")
            continue
        except UserError as error:
            reasons.append(error.message)
            continue
        if any(abs(scores[at].top - top) > CLOSE for at, top in known.items()):
            reasons.append(f"with {name} its numbers are not those of the tokens they stand beside")
        elif all(score.value >= score.top for score in scores):
            reasons.append(f"with {name} every token of a senseless text is the most probable one")
        else:
            return way
    raise UserError(
        f"{completions.served} gives no log-probabilities of prompts: {'; '.join(reasons)}",
        "choose tasks that generate, or a server that does: vLLM, SGLang, llama.cpp",
    )


def _generated(completions: Completions, ids: list[int], first: int) -> dict[int, float]:
    """The log-probability of the token that the server itself would put at each of the last positions of a text."""
    known = {}
    for at in range(first, len(ids)):
        try:
            known[at - first] = _next(completions, Request(tuple(ids[:at]), ())).value
        except Refused:
            raise
        except UserError:  # some servers give no number for the end token
            continue
    if len(known) < ENOUGH:
        raise UserError(
            f"{completions.served} gives no log-probabilities, not even of the tokens it generates",
            "choose tasks that generate, or a server that does: vLLM, SGLang, llama.cpp",
        )
    return known


def total(scores: list[Score]) -> tuple[float, bool]:
    """The log-likelihood (nats) of a whole continuation, and whether greedy decoding gives it."""
    return math.fsum(score.value for score in scores), all(score.value >= score.top for score in scores)
