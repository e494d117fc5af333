"""The completions of a server: asked for with tokens that are known here, and checked to be answers to just those."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from halfbyte.eval.dialects import Served
from halfbyte.eval.endpoint import Endpoint, Refused
from halfbyte.records.errors import UserError

NO_TOKENS = (400, 422, 500)
"""What servers say to a prompt of tokens where they take text alone."""


class Completions:
    """Completions of one model.

    Prompts are sent as tokens, or as text where a server takes no tokens. Either way the number of prompt tokens that
    it reports must be ours, so that no prompt is cut and no BOS added or lost without a word.

    Args:
        endpoint: Where it is.
        served: What it says of itself.
        tokenizer: The model's own.
    """

    def __init__(self, endpoint: Endpoint, served: Served, tokenizer: Any) -> None:
        self.endpoint = endpoint
        self.served = served
        self.tokenizer = tokenizer

    def ask(self, ids: Sequence[int], settings: dict[str, Any]) -> dict[str, Any]:
        """The server's answer to a prompt.

        Args:
            ids: The prompt.
            settings: All but the prompt and the model.

        Raises:
            UserError: when there is none, or the server read another number of tokens.
        """
        reply = self._post(self._written(ids) if self._as_text else list(ids), settings)
        require_length(reply, len(ids), self.served)
        return reply

    def _written(self, ids: Sequence[int]) -> str:
        """A prompt as text, without the tokens that the server adds."""
        rest = list(ids)[self._added :]
        text = str(self.tokenizer.decode(rest))
        if self.tokenizer(text, add_special_tokens=False)["input_ids"] != rest:
            raise UserError(
                f"{self.served} takes prompts as text alone, and {text[-60:]!r} has other tokens as text",
                "use a server that takes tokens: vLLM, SGLang, llama.cpp",
            )
        return text

    def encode(self, text: str) -> list[int]:
        """Its tokens with the special tokens that the tokenizer adds."""
        return [int(token) for token in self.tokenizer(text)["input_ids"]]

    def settle(self) -> None:
        """Finds out how prompts are sent, before several threads would."""
        _ = self._as_text and self._added

    def _post(self, prompt: list[int] | str, settings: dict[str, Any], *, once: bool = False) -> dict[str, Any]:
        return self.endpoint.post("completions", {"model": self.served.model, "prompt": prompt, **settings}, once=once)

    @cached_property
    def _as_text(self) -> bool:
        try:
            self._post(self.encode("a b"), {"max_tokens": 1, "temperature": 0.0}, once=True)
        except Refused as error:
            if error.status not in NO_TOKENS:
                raise
            return True
        return False

    @cached_property
    def _added(self) -> int:
        """Tokens that the server puts before a text by itself: 1 where it adds BOS as the tokenizer here does."""
        text = "a b"
        bare = len(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        reply = self._post(text, {"max_tokens": 1, "temperature": 0.0})
        counted = usage(reply, "prompt_tokens", self.served)
        return counted - bare if counted == len(self.encode(text)) else 0


def choice(reply: dict[str, Any], served: Served) -> dict[str, Any]:
    """The one choice of an answer.

    Raises:
        UserError: when there is not exactly one.
    """
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise UserError(
            f"the answer of {served} holds no choice: {json.dumps(reply)[:200]}",
            "is evaluate.server.base_url that of an OpenAI-compatible server?",
        )
    return choices[0]


def usage(reply: dict[str, Any], name: str, served: Served) -> int:
    """A count of tokens that an answer reports.

    Raises:
        UserError: when it does not.
    """
    counts = reply.get("usage")
    count = counts.get(name) if isinstance(counts, dict) else None
    if not isinstance(count, int) or count < 0:
        raise UserError(
            f"{served} does not report usage.{name}, without which nobody sees whether it cuts prompts",
            "use a server that reports usage",
        )
    return count


def require_length(reply: dict[str, Any], length: int, served: Served) -> None:
    """Refuses an answer to another prompt than the one sent.

    Raises:
        UserError: when the server counts another number of tokens in it.
    """
    counted = usage(reply, "prompt_tokens", served)
    if counted == length:
        return
    if counted < length - 1:
        why, hint = "it cuts prompts", "start it with a larger context, or lower evaluate.max_length"
    else:
        why = "it adds or drops special tokens, or has another tokenizer or chat template"
        hint = "check that it serves the model that is evaluated"
    raise UserError(f"{served} counts {counted} tokens in a prompt of {length}: {why}", hint)
