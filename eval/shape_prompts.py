"""Prompts that ask for coloured shapes: what such a prompt wants, read word by word, so that it can be checked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from halfbyte.records.errors import UserError

COLOURS = {
    "red": (214, 40, 40),
    "orange": (244, 140, 20),
    "yellow": (250, 220, 40),
    "green": (40, 160, 70),
    "blue": (40, 80, 220),
    "purple": (140, 50, 170),
}
"""RGB in 0..255 by the word for it."""
BACKGROUNDS = {"white": (255, 255, 255), "black": (0, 0, 0)}
SHAPES = ("circle", "square", "triangle")
SIZES = {"small": ("small", "little", "tiny"), "large": ("large", "big", "huge")}
COUNTS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "1": 1, "2": 2, "3": 3, "4": 4}
RELATIONS = {
    "left": ("to the left of", "left of"),
    "right": ("to the right of", "right of"),
    "above": ("above",),
    "below": ("below", "under"),
}
"""Where the first of two is, seen from the second."""

_ROWS = {"top": "top|upper", "bottom": "bottom|lower", "middle": "middle|cent(?:er|re)"}
_FILLERS = {
    *("there", "is", "are", "draw", "paint", "show", "me", "please", "i", "want"),
    *("picture", "image", "drawing", "photo", "of", "with", "and"),
}
_WORDS = {word: size for size, words in SIZES.items() for word in words}
_THING = re.compile(
    rf"(?:\b(?P<count>{'|'.join(COUNTS)})\s+)?(?:\b(?P<size>{'|'.join(_WORDS)})\s+)?"
    rf"(?:\b(?P<colour>{'|'.join(COLOURS)})\s+)?\b(?P<shape>{'|'.join(SHAPES)})(?P<many>s?)\b"
)
_BACKGROUND = re.compile(rf"\b(?:on|against|over)\s+a\s+(?P<colour>{'|'.join(BACKGROUNDS)})\s+background\b")
_PLACE = re.compile(
    rf"\b(?:in|at|on)\s+the\s+(?:(?P<row>{'|'.join(_ROWS.values())})(?:\s+(?P<column>left|right))?"
    r"|(?P<side>left|right))(?:\s+(?:corner|half|side|edge))?\b"
)
_RELATION = re.compile(rf"\b(?P<words>{'|'.join(words for group in RELATIONS.values() for words in group)})\b")


@dataclass(frozen=True)
class Group:
    """Equal things: "two small red circles at the top". None for what the prompt leaves open."""

    count: int
    shape: str
    colour: str | None = None
    size: str | None = None
    row: str | None = None
    """top, middle or bottom."""
    column: str | None = None
    """left, middle or right."""


@dataclass(frozen=True)
class Wanted:
    """What a prompt asks for."""

    groups: tuple[Group, ...]
    """One or two."""
    relation: str | None = None
    """Where the first group is, seen from the second: left, right, above, below."""
    background: str | None = None


def read_prompt(prompt: str) -> Wanted:
    """What a prompt asks for, provided that every word of it is understood.

    Args:
        prompt: Such as "Two small red circles at the top." or "a big blue square left of a green triangle".

    Raises:
        UserError: for a prompt that asks for anything else too, whose fulfilment could not be judged exactly.
    """
    text = re.sub(r"\s+", " ", re.sub(r"[.,!?;:]", " ", prompt.lower())).strip()
    text = re.sub(rf"\bon (?={'|'.join(BACKGROUNDS)}\b)", "on a ", text)
    text, background = _take(_BACKGROUND, text, prompt)
    text, relation = _take(_RELATION, text, prompt)
    groups: list[Group] = []
    spans = list(_THING.finditer(text))
    ends = [*(found.start() for found in spans[1:]), len(text)][: len(spans)]
    rest = text[: spans[0].start()] if spans else text
    for found, end in zip(spans, ends, strict=True):
        tail, place = _take(_PLACE, text[found.end() : end], prompt)
        rest += " " + tail
        groups.append(_group(found, place, prompt))
    unknown = [word for word in rest.split() if word not in _FILLERS and word not in ("a", "an", "|")]
    if unknown or not 1 <= len(groups) <= 2 or (relation is not None and len(groups) != 2):
        what = f"the word {unknown[0]!r}" if unknown else f"{len(groups)} kinds of shapes"
        raise UserError(
            f"fulfilment cannot be judged of the prompt {prompt!r}: {what}",
            'it reads prompts such as "two small red circles at the top" or "a large blue square above a red triangle"',
        )
    words = relation["words"] if relation else None
    return Wanted(
        tuple(groups),
        next((name for name, group in RELATIONS.items() if words in group), None),
        background["colour"] if background else None,
    )


def _take(pattern: re.Pattern[str], text: str, prompt: str) -> tuple[str, re.Match[str] | None]:
    """The text without the one place where the pattern is found."""
    found = list(pattern.finditer(text))
    if len(found) > 1:
        raise UserError(f"the prompt {prompt!r} says two things of one: {found[0].group()!r}, {found[1].group()!r}")
    if not found:
        return text, None
    return f"{text[: found[0].start()]} | {text[found[0].end() :]}", found[0]


def _group(found: re.Match[str], place: re.Match[str] | None, prompt: str) -> Group:
    count = COUNTS.get(found["count"] or "a", 1)
    if found["many"] and found["count"] is None:
        raise UserError(f"the prompt {prompt!r} does not say how many {found['shape']}s", "write a number: two circles")
    row = column = None
    if place is not None:
        row = next((name for name, words in _ROWS.items() if re.fullmatch(words, place["row"] or "")), None)
        column = place["column"] or place["side"]
        if row == "middle" and column is None:
            column = "middle"
    size = _WORDS[found["size"]] if found["size"] else None
    return Group(count, found["shape"], found["colour"], size, row, column)
