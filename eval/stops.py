"""Where a generated text ends: stop sequences that no token need hold whole, cut as lm-eval cuts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.models.utils import postprocess_generated_text

from halfbyte.eval.backend import Stop


class Ending:
    """Decides after each token whether a text has ended, and how.

    Args:
        tokenizer: A tokenizer of transformers.
        until: Stop sequences, in the task's order.
        end_tokens: Tokens that end a text.
        max_gen_toks: Most tokens.
    """

    def __init__(self, tokenizer: Any, until: Sequence[str], end_tokens: frozenset[int], max_gen_toks: int) -> None:
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        self.max_gen_toks = max_gen_toks
        end = tokenizer.decode([tokenizer.eos_token_id]) if tokenizer.eos_token_id is not None else ""
        self.until = [text for text in dict.fromkeys([*until, end]) if text]
        self._back = max((len(text.encode()) for text in self.until), default=0) + 8
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._can_end: dict[int, bool] = {}

    def of(self, tokens: Sequence[int]) -> Stop | None:
        """Why a text ends with its last token; None: it goes on. Asked after every token."""
        if tokens[-1] in self.end_tokens:
            return "end_token"
        if self._may_end(tokens[-1]):
            # A token has at least one byte, a few have none: so many tokens hold any stop sequence whole.
            tail = self.tokenizer.decode(tokens[-self._back :])
            if any(text in tail for text in self.until):
                return "stop_string"
        return "length" if len(tokens) >= self.max_gen_toks else None

    def text(self, tokens: Sequence[int]) -> str:
        """The text, cut at the first stop sequence."""
        whole = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return str(postprocess_generated_text(generation=whole, stop=self.until, think_end_token=None))

    def _may_end(self, token: int) -> bool:
        """Whether a stop sequence can end in a token: it holds one, or begins with the end of one."""
        known = self._can_end.get(token)
        if known is None:
            behind = self.tokenizer.decode([*self._anchor, token])[len(self.tokenizer.decode(self._anchor)) :]
            texts = {self.tokenizer.decode([token]), behind}  # some tokenizers drop a space at the beginning
            known = any(_ends_in(stop, text) for stop in self.until for text in texts)
            self._can_end[token] = known
        return known


def _ends_in(stop: str, text: str) -> bool:
    if stop in text or "�" in text or not text:  # a part of a character, or a token that shows only beside others
        return True
    return any(text.startswith(stop[at:]) for at in range(1, len(stop)))
