"""Encodes texts that begin alike without encoding their common beginning again and again: the same tokens, sooner."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

CHUNK = 1024
"""Texts given to a tokenizer at once, which encodes them on all cores."""
MARGIN = 2
"""Pre-tokens before the end of a common beginning that may be cut otherwise by what follows it."""
MIN_SHARED = 200
"""Characters: a shorter common beginning is encoded again."""


class _Encoded(NamedTuple):
    ids: list[int]
    chars: list[int]
    """Where a new pre-token begins in the text, rising."""
    tokens: list[int]
    """And in `ids`."""


def encode_texts(tokenizer: Any, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """Token ids of each text: exactly what the tokenizer gives for it.

    A text that begins as another one is encoded from the last place where both are cut into the same pre-tokens. A
    tokenizer whose pre-tokens could depend on what lies before them is given every text whole.

    Args:
        tokenizer: Of transformers.
        texts: In any order, repetitions included.
        special: Whether the tokenizer adds the special tokens it adds by itself.
    """
    head = _head(tokenizer) if special else []
    wanted = sorted(set(texts))
    if head is None or not cuts_safely(tokenizer):
        known = dict(zip(wanted, _whole(tokenizer, wanted, special=special), strict=True))
        return [known[text] for text in texts]
    found: dict[str, _Encoded] = {}
    levels = _levels(wanted)
    for level in levels:
        starts = [_start(text, found[parent], parent) if parent else (0, 0) for text, parent in level]
        rests = [text[char:] for (text, _), (char, _) in zip(level, starts, strict=True)]
        encoded = _encode(tokenizer, rests, with_cuts=level is not levels[-1])
        for (text, parent), start, rest in zip(level, starts, encoded, strict=True):
            found[text] = _joined(found[parent], start, rest) if parent and start[0] else rest
    return [[*head, *found[text].ids] for text in texts]


def _levels(texts: Sequence[str]) -> list[list[tuple[str, str | None]]]:
    """Sorted distinct texts with the one each is encoded after, which is always of an earlier level.

    First come texts that share little with the one before, then those that begin like one of them, then those that
    begin like one of these (the answers after a question).
    """
    roots: list[tuple[str, str | None]] = []
    middle: list[tuple[str, str | None]] = []
    leaves: list[tuple[str, str | None]] = []
    root = trunk = ""
    for text in texts:
        shared = _common(root, text)
        if shared < MIN_SHARED or 2 * shared < len(text):
            roots.append((text, None))
            root = trunk = text
        elif trunk is not root and text.startswith(trunk):
            leaves.append((text, trunk))
        elif trunk is root and text.startswith(root):
            middle.append((text, root))
        else:
            middle.append((text, root))
            trunk = text
    return [level for level in (roots, middle, leaves) if level]


def _common(one: str, other: str) -> int:
    """Characters two texts have in common at their beginning, by bisection: slices are compared in C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _start(text: str, before: _Encoded, parent: str) -> tuple[int, int]:
    """The last place, in characters and tokens, where `text` and its parent are surely cut alike.

    That is two pre-tokens before they part, between characters that no normalizer joins.
    """
    at = bisect_left(before.chars, _common(parent, text)) - 1
    left = MARGIN
    while at >= 0:
        char = before.chars[at]
        left -= text[char - 1 : char + 1].isascii()
        if left < 0:
            return char, before.tokens[at]
        at -= 1
    return 0, 0


def _joined(before: _Encoded, start: tuple[int, int], rest: _Encoded) -> _Encoded:
    char, token = start
    kept = bisect_left(before.chars, char) + 1
    return _Encoded(
        before.ids[:token] + rest.ids,
        before.chars[:kept] + [char + at for at in rest.chars],
        before.tokens[:kept] + [token + at for at in rest.tokens],
    )


def _whole(tokenizer: Any, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    rows: list[list[int]] = []
    for first in range(0, len(texts), CHUNK):
        # The argument is given only where it matters: not every tokenizer written in Python takes it.
        options = {} if special else {"add_special_tokens": False}
        rows += tokenizer(list(texts[first : first + CHUNK]), **options)["input_ids"]
    return rows


def _encode(tokenizer: Any, texts: Sequence[str], *, with_cuts: bool) -> Iterator[_Encoded]:
    for first in range(0, len(texts), CHUNK):
        part = list(texts[first : first + CHUNK])
        batch = tokenizer(part, add_special_tokens=False)
        for text, ids, encoding in zip(part, batch["input_ids"], batch.encodings, strict=True):
            yield _Encoded(ids, *(_cuts(text, encoding) if with_cuts else ([], [])))


def _cuts(text: str, encoding: Any) -> tuple[list[int], list[int]]:
    chars, tokens = [], []
    words, offsets = encoding.word_ids, encoding.offsets
    for at in range(1, len(words)):
        end = offsets[at - 1][1]
        # Offsets may leave out spaces at the edges of a token; where the one before ends in none, they do not.
        if words[at] != words[at - 1] and end > 0 and not text[end - 1].isspace():
            chars.append(end)
            tokens.append(at)
    return chars, tokens


def _head(tokenizer: Any) -> list[int] | None:
    """The special tokens put before every text; None where some are put behind it, or it is not known."""
    text = "a b"
    bare, full = (_whole(tokenizer, [text], special=special)[0] for special in (False, True))
    front = full[: len(full) - len(bare)]
    return front if full == [*front, *bare] else None


def cuts_safely(tokenizer: Any) -> bool:
    """Whether a text may be encoded in two parts, cut where a pre-token begins.

    True for byte-level BPE behind patterns that are matched from left to right without looking back, and look ahead
    by one character at most: then pre-tokens that end before two texts part are those of both.
    """
    if not getattr(tokenizer, "is_fast", False) or getattr(tokenizer, "split_special_tokens", False):
        return False
    return _cuts_safely(tokenizer.backend_tokenizer.to_str())


@lru_cache(maxsize=8)
def _cuts_safely(description: str) -> bool:
    content = json.loads(description)
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in content["added_tokens"]):
        return False
    normalizer, model = content["normalizer"], content["model"]
    steps = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    if any(step["type"] != "NFC" for step in steps):
        return False
    if model["type"] != "BPE" or model.get("dropout"):
        return False
    first = content["pre_tokenizer"]
    if first is None:
        return False
    stages = first["pretokenizers"] if first["type"] == "Sequence" else [first]
    # Two stages that look ahead could move each other's cuts further than one.
    return all(map(_is_local, stages)) and sum(map(_looks_ahead, stages)) <= 1


def _is_local(stage: dict[str, Any]) -> bool:
    if stage["type"] == "ByteLevel":
        return not stage["add_prefix_space"]
    if stage["type"] == "Digits":
        return True
    pattern = stage.get("pattern", {}).get("Regex", "")
    # What is left after the one look ahead that is common, and without the ^ of [^...], must not look around at all.
    bare = pattern.replace(r"\s+(?!\S)", "").replace("[^", "[")
    return bool(
        stage["type"] == "Split"
        and stage["behavior"] == "Isolated"
        and not stage["invert"]
        and pattern
        and not any(sign in bare for sign in _LOOKING_AROUND)
    )


_LOOKING_AROUND = ("(?=", "(?!", "(?<", "^", "$", r"\b", r"\B", r"\A", r"\G", r"\z", r"\Z")


def _looks_ahead(stage: dict[str, Any]) -> bool:
    if stage["type"] == "ByteLevel":
        return bool(stage["use_regex"])
    return r"\s" in stage.get("pattern", {}).get("Regex", "")
