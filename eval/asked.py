"""What the model is given for each question: a digest, its length, BOS tokens, doubled special tokens, and cuts."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from halfbyte.eval.prompts import bos_count
from halfbyte.eval.sharing import Request
from halfbyte.records.record import Asked

Question = tuple[str, int]
"""Task name and doc_id, as in lm-eval's samples file."""


class Book:
    """Collects what is asked, request by request.

    Args:
        bos: The token that begins a text; None where there is none.
        special: All special tokens.
    """

    def __init__(self, bos: int | None, special: Sequence[int]) -> None:
        self.asked: dict[Question, Asked] = {}
        self.tokens = 0
        """Of all requests together."""
        self._bos = bos
        self._special = frozenset(special)
        self._digests: dict[Question, Any] = {}
        self._context: tuple[int, ...] | None = None
        self._of_context: tuple[bytes, int, int] = b"", 0, 0

    def add(self, question: Question, windows: Sequence[Request], lost: int) -> None:
        """One request of a question.

        Args:
            question: Which.
            windows: What is fed to the model: one sequence, or the windows of a document.
            lost: Tokens cut off its beginning.
        """
        digest = self._digests.setdefault(question, hashlib.sha256())
        known = self.asked.get(question) or Asked()
        counts, doubled, length = set(known.bos), known.doubled, known.tokens or 0
        for context, continuation in windows:
            if context is not self._context:  # the answers to a question follow each other with one context
                self._context = context
                self._of_context = _bytes(context), bos_count(context, self._bos), self._doubled(context)
            head, bos, twice = self._of_context
            digest.update(head + _bytes(continuation) + b"\n")
            counts.add(bos)
            doubled = max(doubled, twice + self._doubled((*context[-1:], *continuation)))
            length = max(length, len(context) + len(continuation))
            self.tokens += len(context) + len(continuation)
        self.asked[question] = Asked(
            input=digest.hexdigest(), tokens=length, bos=sorted(counts), doubled=doubled, cut=max(known.cut, lost)
        )

    def _doubled(self, tokens: Sequence[int]) -> int:
        """Special tokens that directly follow the same one."""
        if self._special.isdisjoint(tokens):
            return 0
        return sum(one == other and one in self._special for one, other in pairwise(tokens))


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
