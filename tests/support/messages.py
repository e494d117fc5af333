"""The texts that halfbyte's source can print, as patterns: what a document quotes must be one of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("records", "recipes", "quant", "eval", "reports", "cli")
FILLED = ".*?"
FEWEST_LETTERS = 7
"""A text with fewer letters of its own would match almost anything."""
SHARE = 0.2
"""Of a quoted text's letters, so many must be the source's own."""


def _parts(node: ast.expr) -> list[str | None] | None:
    """A text as its constant parts, None for what is filled in; None for an expression that is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part.value if isinstance(part, ast.Constant) else None for part in node.values]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _parts(node.left), _parts(node.right)
        return None if left is None and right is None else [*(left or [None]), *(right or [None])]
    return None


def _texts(tree: ast.AST) -> Iterator[list[str | None]]:
    for node in ast.walk(tree):
        parts = _parts(node) if isinstance(node, ast.expr) else None
        if parts is not None and _letters("".join(part or "" for part in parts)) >= FEWEST_LETTERS:
            yield parts


def _pattern(parts: list[str | None]) -> str:
    """What is filled in is anything, as is what a log message fills in at %s and %d."""
    constant = [[None] if part is None else re.split(r"%(?:[sdr]|\.\d[fg%])", part) for part in parts]
    return "".join(
        FILLED if pieces == [None] else FILLED.join(re.escape(" ".join(piece.split("\n"))) for piece in pieces)
        for pieces in constant
    )


@cache
def patterns() -> tuple[tuple[re.Pattern[str], int], ...]:
    """All texts of the rooms' modules, each with the number of its own letters."""
    found = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for parts in _texts(ast.parse(path.read_text(encoding="utf-8"))):
                found[_pattern(parts)] = _letters("".join(part or "" for part in parts))
    return tuple((re.compile(pattern), letters) for pattern, letters in sorted(found.items()))


def is_printed(text: str) -> bool:
    """Whether the whole of this is a text of the source with something filled in, and not most of it filled in."""
    enough = SHARE * _letters(text)
    return any(letters >= enough and pattern.fullmatch(text) for pattern, letters in patterns())


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))
