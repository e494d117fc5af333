"""Log-probabilities of given tokens from a server, in the first of two ways that it does right.

Echoed: the server echoes a prompt with the log-probability of each token; vLLM and SGLang do. Forced: one token after
the other is asked for with a bias that no other token can beat, where a server reports log-probabilities from before
the bias; llama.cpp does. Some servers accept either request and answer with other numbers: those of the generated token
alone, or of each token as the next one's. So each way must first find a server's own greedy text to be greedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from halfbyte.eval.completions import Completions, choice
from halfbyte.eval.endpoint import Refused
from halfbyte.eval.sharing import Request
from halfbyte.records.errors import UserError

Scores = list[tuple[float, bool]]
"""For each token its log-probability in nats, and whether it is the most probable one."""

BIAS = 100
"""The largest bias that OpenAI's interface allows."""
PROBES = ("The days of the week are Monday,", "1 2 3 4 5 6", "Once upon a time, there was")
PROBE_TOKENS = 8
ENOUGH = 3
"""Tokens of a greedy text that say something."""
AGREE = 0.75
"""Part of the greedy tokens that must be found greedy: near ties may turn with the batch."""


def echoed(completions: Completions, request: Request) -> Scores:
    """Scores the continuation of a request by one echo of the prompt.

    Raises:
        UserError: when the answer does not hold them.
    """
    ids = [*request.context, *request.continuation]
    asked = {"max_tokens": 1, "temperature": 0.0, "logprobs": 1, "echo": True}
    found = choice(completions.ask(ids, asked), completions.engine).get("logprobs")
    values = found.get("token_logprobs") if isinstance(found, dict) else None
    tops = found.get("top_logprobs") if isinstance(found, dict) else None
    # Behind the prompt's tokens there is one of the generated token, or none where that is the end token.
    if not isinstance(values, list) or not isinstance(tops, list) or min(len(values), len(tops)) < len(ids):
        count = len(values) if isinstance(values, list) else 0
        raise UserError(f"{completions.engine} echoes {count} log-probabilities for {len(ids)} tokens")
    part = slice(len(request.context), len(ids))
    return [_score(completions, value, _most(top)) for value, top in zip(values[part], tops[part], strict=True)]


def forced(completions: Completions, request: Request) -> Scores:
    """Scores the continuation of a request token by token; the server's prefix cache makes that cheap.

    Raises:
        UserError: when the answer does not hold the token asked for.
    """
    scores: Scores = []
    for at, token in enumerate(request.continuation):
        asked = {"max_tokens": 1, "temperature": 0.0, "logprobs": 1, "logit_bias": {str(token): BIAS}}
        reply = completions.ask([*request.context, *request.continuation[:at]], asked)
        found = choice(reply, completions.engine).get("logprobs")
        content = found.get("content") if isinstance(found, dict) else None
        if isinstance(content, list) and content:  # in the shape of chat completions, as llama.cpp has it
            first = content[0]
            if first.get("id", token) != token:
                raise UserError(f"{completions.engine} answers with token {first['id']} where {token} was asked for")
            tops = [entry.get("logprob") for entry in first.get("top_logprobs") or []]
            scores.append(_score(completions, first.get("logprob"), tops))
        elif isinstance(found, dict) and found.get("token_logprobs"):
            scores.append(
                _score(completions, found["token_logprobs"][0], _most((found.get("top_logprobs") or [{}])[0]))
            )
        else:
            raise UserError(f"{completions.engine} gives no log-probability of a generated token")
    return scores


def _most(top: Any) -> list[Any]:
    return list(top.values()) if isinstance(top, dict) else []


def _score(completions: Completions, value: Any, tops: Sequence[Any]) -> tuple[float, bool]:
    numbers = [top for top in tops if isinstance(top, (int, float))]
    if not isinstance(value, (int, float)) or not numbers:
        raise UserError(f"{completions.engine} gives {value!r} as the log-probability of a token")
    return float(value), value >= max(numbers)


WAYS: dict[str, Callable[[Completions, Request], Scores]] = {"echo": echoed, "logit_bias": forced}


def find_way(completions: Completions) -> Callable[[Completions, Request], Scores]:
    """The first way in which a server's log-probabilities prove right on its own greedy text.

    Raises:
        UserError: when there is none; says why.
    """
    request = _greedy(completions)
    reasons = []
    for name, way in WAYS.items():
        try:
            hits = sum(greedy for _, greedy in way(completions, request))
            # A forced token that looks greedy wherever it stands got the bias into its number.
            repeated = Request(request.context, (request.context[-1],))
            reasons.append(f"with {name} {hits} of its own {len(request.continuation)} greedy tokens look greedy")
            if hits >= AGREE * len(request.continuation):
                if not all(greedy for _, greedy in way(completions, repeated)):
                    return way
                reasons[-1] = f"with {name} any token looks greedy"
        except Refused as error:
            reasons.append(f"it refuses {name} ({error.status})")
        except UserError as error:
            reasons.append(error.message)
    raise UserError(
        f"{completions.engine} gives no log-probabilities of prompts: {'; '.join(reasons)}",
        "choose tasks that generate, or a server that does: vLLM, SGLang, llama.cpp",
    )


def _greedy(completions: Completions) -> Request:
    """A prompt with the server's own greedy continuation."""
    for text in PROBES:
        context = completions.encode(text)
        reply = completions.ask(context, {"max_tokens": PROBE_TOKENS, "temperature": 0.0})
        said = choice(reply, completions.engine).get("text")
        ids = completions.encode(text + said) if isinstance(said, str) else []
        if ids[: len(context)] == context and len(ids) - len(context) >= ENOUGH:
            return Request(tuple(context), tuple(ids[len(context) :]))
    raise UserError(
        f"{completions.engine} gives hardly a token after {PROBES[0]!r}", "try the model by hand, then look at its log"
    )


def total(scores: Scores) -> tuple[float, bool]:
    """The log-likelihood (nats) of a whole continuation, and whether greedy decoding gives it."""
    return math.fsum(value for value, _ in scores), all(greedy for _, greedy in scores)
