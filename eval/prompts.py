"""Requests as tokens: how long each is, how many BOS tokens it starts with, and the fixed batches they are put in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

CHUNK = 1024


class Prompt(NamedTuple):
    """One request as the model is fed with it."""

    length: int
    """Tokens, the continuation included where there is one."""
    bos: int
    """BOS tokens at its head."""
    group: str
    """Requests of one group (a context, or generation settings) are answered next to each other."""
    forward: int
    """Requests with the same number share one forward pass: they differ in their last token alone."""


def encode(inner: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, with the special tokens lm-eval's hf backend would add to it.

    It leaves them to the tokenizer, except that a text that starts with BOS already gets none. The texts go to the
    tokenizer in chunks, which encodes a chunk on all cores.
    """
    start = inner.tokenizer.decode(inner.prefix_token_id)
    plain = [bool(start) and text.startswith(start) for text in texts]
    encoded: list[list[int]] = [[]] * len(texts)
    for bare in (False, True):
        where = [at for at, flag in enumerate(plain) if flag is bare]
        for chunk in (where[at : at + CHUNK] for at in range(0, len(where), CHUNK)):
            special = {"add_special_tokens": False} if bare else {}
            rows = inner.tokenizer([texts[at] for at in chunk], **special)["input_ids"]
            for at, row in zip(chunk, rows, strict=True):
                encoded[at] = row
    return encoded


def bos_count(ids: Sequence[int], bos: int | None) -> int:
    """The number of BOS tokens at the head."""
    count = 0
    while bos is not None and count < len(ids) and ids[count] == bos:
        count += 1
    return count


def encode_pairs(inner: Any, pairs: Sequence[tuple[str, str]]) -> list[Prompt]:
    """(context, continuation) pairs; an empty context stands for the prefix token, as in lm-eval."""
    bos = inner.tokenizer.bos_token_id
    prompts: list[Prompt] = []
    for first in range(0, len(pairs), CHUNK):
        chunk = pairs[first : first + CHUNK]
        rows = encode(inner, [context + continuation for context, continuation in chunk])
        for (context, continuation), row in zip(chunk, rows, strict=True):
            ids = row
            if not context:
                ids = inner.tok_encode(continuation, add_special_tokens=False)
                ids = ids if ids[:1] == [inner.prefix_token_id] else [inner.prefix_token_id, *ids]
            prompts.append(Prompt(len(ids), bos_count(ids, bos), context, hash(tuple(ids[:-1]))))
    return prompts


def encode_documents(inner: Any, texts: Sequence[str]) -> list[Prompt]:
    """Whole documents, scored in windows behind the prefix token."""
    bos = inner.tokenizer.bos_token_id
    head = 1 if inner.prefix_token_id == bos else 0
    return [Prompt(len(ids), bos_count(ids, bos) + head, "", number) for number, ids in enumerate(encode(inner, texts))]


def encode_contexts(inner: Any, texts: Sequence[str], settings: Sequence[str]) -> list[Prompt]:
    """Prompts to generate from; only those of equal settings share a batch."""
    bos = inner.tokenizer.bos_token_id
    return [
        Prompt(len(ids), bos_count(ids, bos), group, number)
        for number, (ids, group) in enumerate(zip(encode(inner, texts), settings, strict=True))
    ]


def plan(prompts: Sequence[Prompt], size: int, *, mixed: bool = True) -> list[list[int]]:
    """Fixed batches of the positions of `prompts`, the longest first, so that a lack of memory shows at once.

    A batch takes `size` forward passes; requests that share one count once. The requests of a group are neighbours.

    Args:
        prompts: The requests, in lm-eval's order.
        size: Sequences a batch.
        mixed: Whether requests of two groups may share a batch.
    """
    groups: dict[str, list[int]] = {}
    for at, prompt in enumerate(prompts):
        groups.setdefault(prompt.group, []).append(at)
    longest = {group: max(prompts[at].length for at in members) for group, members in groups.items()}
    batches: list[list[int]] = []
    room = 0
    for group in sorted(groups, key=lambda group: -longest[group]):  # sorted() is stable: ties keep their order
        if not mixed:
            room = 0
        shared: dict[int, list[int]] = {}
        for at in sorted(groups[group], key=lambda at: -prompts[at].length):
            shared.setdefault(prompts[at].forward, []).append(at)
        for members in shared.values():
            if room == 0:
                batches.append([])
                room = size
            batches[-1].extend(members)
            room -= 1
    return batches
