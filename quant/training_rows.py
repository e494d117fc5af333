"""Rows of training data: one text or several packed into one, kept small and made when they are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""The label of a token that counts in no loss."""


@dataclass(frozen=True, slots=True)
class Row:
    """One text, or several packed into one row."""

    input_ids: list[int]
    labels: list[int]
    """The same tokens, IGNORED where one counts in no loss: the first of each text, and what is masked."""
    position_ids: list[int] | None
    """Each token's place in its text; None where texts are not packed."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text as tokens."""

    tokens: NDArray[np.int32]
    """[tokens]"""
    learned: NDArray[np.bool_]
    """[tokens]: whether each counts in the loss; the first never does."""
    source: str
    key: bytes
    """What makes two texts the same."""


class Rows(Sequence[Row]):
    """Rows made out of texts when they are asked for; the texts are kept in five bytes a token."""

    def __init__(self, texts: Sequence[Text], rows: Sequence[Sequence[int]], *, packed: bool) -> None:
        self._texts, self._rows, self._packed = texts, rows, packed
        self.texts = len(texts)
        self.tokens = sum(len(text.tokens) for text in texts)
        """Of all rows."""
        self.learned = sum(int(text.learned.sum()) for text in texts)
        """Those of them that count in a loss."""

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        texts = [self._texts[at] for at in self._rows[index]]
        ids = np.concatenate([text.tokens for text in texts])
        labels = np.where(np.concatenate([text.learned for text in texts]), ids, IGNORED)
        places = [place for text in texts for place in range(len(text.tokens))] if self._packed else None
        return Row(ids.tolist(), labels.tolist(), places)

    def update(self, digest: hashlib._Hash) -> None:
        """Adds all rows in their order to a digest."""
        for row in self._rows:
            for at in row:
                digest.update(self._texts[at].tokens.astype("<i4").tobytes() + self._texts[at].learned.tobytes())
            digest.update(b"row")
