"""Requests as tokens: texts, continuations with their contexts, and windows of documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfbyte.eval.encoding import encode_texts
from halfbyte.eval.sharing import Request
from halfbyte.records.errors import UserError


def bos_count(ids: Sequence[int], bos: int | None) -> int:
    """The number of BOS tokens at the head."""
    count = 0
    while bos is not None and count < len(ids) and ids[count] == bos:
        count += 1
    return count


class Encoder:
    """Requests as tokens, by the rules of lm-eval's hf backend.

    Args:
        tokenizer: A tokenizer of transformers that has an end token.
        max_length: Longest input in tokens.
    """

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        begin = tokenizer.bos_token_id
        self.prefix = int(tokenizer.eos_token_id if begin is None else begin)
        """The token that stands for an empty context."""

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, with the special tokens lm-eval's hf backend would add to it.

        It leaves them to the tokenizer, except that a text that starts with BOS already gets none.
        """
        start = self.tokenizer.decode(self.prefix)
        plain = [bool(start) and text.startswith(start) for text in texts]
        encoded: list[list[int]] = [[]] * len(texts)
        for bare in (False, True):
            where = [at for at, flag in enumerate(plain) if flag is bare]
            rows = encode_texts(self.tokenizer, [texts[at] for at in where], special=not bare)
            for at, row in zip(where, rows, strict=True):
                encoded[at] = row
        return encoded

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Request]:
        """(context, continuation) pairs; each text goes through the tokenizer once.

        An empty context stands for the prefix token. Spaces at the end of a context belong to the continuation. Both
        are encoded together, and what follows as many tokens as the context alone has is the continuation: a tokenizer
        that merges across the boundary changes the continuation and never the context.

        Raises:
            UserError: for a continuation without a token.
        """
        moved = []
        for context, continuation in pairs:
            kept = context.rstrip()
            moved.append((kept, context[len(kept) :] + continuation))
        texts = {text for context, continuation in moved if context for text in (context, context + continuation)}
        known = dict(zip(texts, self.texts(list(texts)), strict=True))
        heads = {context: tuple(known[context]) for context, _ in moved if context}  # one for all answers to a question
        requests = []
        for kept, continuation in moved:
            if kept:
                head = heads[kept]
                request = Request(head, tuple(known[kept + continuation][len(head) :]))
            else:
                ids = list(self.tokenizer.encode(continuation, add_special_tokens=False))
                ids = ids if ids[:1] == [self.prefix] else [self.prefix, *ids]
                request = Request(tuple(ids[:1]), tuple(ids[1:]))
            if not request.context or not request.continuation:
                raise UserError(f"the answer {continuation[:40]!r} has no token after its context", "mend the task")
            requests.append(request)
        return requests

    def documents(self, texts: Sequence[str]) -> list[list[Request]]:
        """Whole documents as windows of max_length tokens, each token scored once, as lm-eval cuts them."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        return [
            [
                Request(tuple(context), tuple(continuation))
                for context, continuation in map(
                    make_disjoint_window,
                    get_rolling_token_windows(ids, self.prefix, max_seq_len=self.max_length, context_len=1),
                )
            ]
            for ids in self.texts(texts)
        ]
