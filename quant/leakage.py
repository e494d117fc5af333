"""The leakage guard: which evaluation questions share a run of 13 words with the texts a model is trained on.

After Brown et al. 2020, "Language Models are Few-Shot Learners", appendix C: texts are compared as words without case,
punctuation and whitespace; one shared run of 13 words makes a question touched. What differs, and why:

- A question of 8 to 12 words is looked for whole. A shorter one is not looked for, since such a phrase is found
  everywhere (8 is their least too); it is counted as unchecked and is not part of a share.
- A run that stands in more than 10 questions is a task's wording and not a question ("For which of these two scenarios
  does the main character ..."); it is passed over. They pass over what is in more than 10 training texts; but a
  question that was leaked 11 times is leaked all the same.
- Scripts without spaces (Chinese, Japanese, Thai) count each character as a word.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfbyte.records.digests import text_digest
from halfbyte.records.errors import UserError
from halfbyte.records.training import FIDELITY

NGRAM = 13
LEAST = 8
"""Words of the shortest question that is looked for."""
COMMON = 10
"""A run of words in more questions than these is wording."""

_BATCH = 256
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no word drops out of a product modulo 2^64
_UNSPACED = r"\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff"  # Thai, kana, Han
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")

Hashes = NDArray[np.uint64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Touched:
    """A question that shares words with a training text; its text is not told, only what finds it."""

    task: str
    question: str
    """Its id."""
    digest: str
    """The first 12 digits of the SHA-256 of its text."""
    sources: tuple[str, ...]
    """Where the words were found."""


@dataclass(frozen=True)
class TaskOverlap:
    """The questions of one task."""

    questions: int
    checked: int
    """Those long enough to be looked for."""
    touched: int

    @property
    def share(self) -> float:
        """Touched ones of those checked, 0 to 1; 0 where none could be checked."""
        return self.touched / self.checked if self.checked else 0.0


@dataclass(frozen=True)
class SourceOverlap:
    """The training texts of one source."""

    texts: int
    touching: int
    """Texts that hold words of a question."""
    questions: int
    """Questions they touch."""


@dataclass(frozen=True)
class Overlap:
    """What training texts and evaluation questions have in common."""

    ngram: int
    """Words of a run."""
    tasks: dict[str, TaskOverlap]
    sources: dict[str, SourceOverlap]
    touched: list[Touched]

    @property
    def share(self) -> float:
        """The share of the task that is touched most, 0 to 1: a small one that leaked is not hidden by a large one."""
        return max((task.share for task in self.tasks.values()), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """What a record keeps: the counts, the shares and which questions."""
        tasks = {name: {**asdict(task), "share": task.share} for name, task in self.tasks.items()}
        return {**asdict(self), "tasks": tasks, "share": self.share}

    def describe(self) -> list[str]:
        """A line for each task: its share, and the source that touches most of it."""
        lines = []
        for name, task in self.tasks.items():
            unchecked = task.questions - task.checked
            short = f"; {unchecked} too short or without wording of their own" if unchecked else ""
            where = f", most in {worst}" if (worst := self._worst_source(name)) else ""
            lines.append(f"{name}: {task.touched} of {task.checked} questions touched, {task.share:.1%}{where}{short}")
        return lines

    @property
    def unchecked(self) -> list[str]:
        """The tasks of which no question can be looked for, so that nothing is known of their leakage."""
        return [name for name, task in self.tasks.items() if task.questions and not task.checked]

    def require_at_most(self, bound: float) -> None:
        """Refuses texts that touch more than the share `bound` of any task's questions.

        Raises:
            UserError: naming the task and the source.
        """
        over = {name: task for name, task in self.tasks.items() if task.share > bound}
        if not over:
            return
        name, task = max(over.items(), key=lambda item: item[1].share)
        fidelity = name.startswith(FIDELITY)
        without = "give evaluate.fidelity another source" if fidelity else "leave the task out of evaluate.tasks"
        raise UserError(
            f"the training texts hold {self.ngram} words in a row of {task.touched} of {task.checked} questions of "
            f"'{name}' ({task.share:.1%}, allowed {bound:.1%}), most in {self._worst_source(name)}",
            f"train on another source or split, {without}, or raise train.max_overlap",
        )

    def _worst_source(self, task: str) -> str | None:
        counts = Counter(source for found in self.touched if found.task == task for source in found.sources)
        return max(counts, key=lambda name: (counts[name], name)) if counts else None


def words(text: str) -> list[str]:
    """A text as words: Unicode compatibility forms and case folded, punctuation and whitespace dropped."""
    return _WORD.findall((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold())


def overlap(texts: Mapping[str, Iterable[str]], questions: Mapping[str, Mapping[str, str]], n: int = NGRAM) -> Overlap:
    """Which questions share a run of `n` words with a text.

    Runs are compared by 64-bit hashes: among 10^8 runs of texts and 10^6 of questions, a false match has a chance of
    1 in 10^5. Memory goes with the questions; texts are read once, and not kept.

    Args:
        texts: Training texts by source. A run does not go over from one text to the next.
        questions: By task, the texts of its questions by their ids.
        n: Words of a run, at least LEAST.

    Raises:
        UserError: when there is no text or no question.
        ValueError: for a smaller n.
    """
    if n < LEAST:
        raise ValueError(f"n is {n}: runs of fewer than {LEAST} words are found everywhere")
    names = [(task, name) for task, asked in questions.items() for name in asked]
    if not names:
        raise UserError("there is no evaluation question to compare the training texts with", "check evaluate.tasks")
    index = _Index([text for asked in questions.values() for text in asked.values()], n)
    found: dict[int, set[str]] = {}
    sources: dict[str, SourceOverlap] = {}
    for source, entries in texts.items():
        count = touching = 0
        hit: set[int] = set()
        for batch in _batches(entries):
            count += len(batch)
            owners, matched = index.matches(batch)
            touching += len(set(owners.tolist()))
            hit.update(matched.tolist())
        sources[source] = SourceOverlap(count, touching, len(hit))
        for at in hit:
            found.setdefault(at, set()).add(source)
    if not any(source.texts for source in sources.values()):
        raise UserError("there is no training text to compare the evaluation questions with", "check train.sources")
    which = [
        Touched(task, name, text_digest(questions[task][name])[:12], tuple(sorted(found[at])))
        for at, (task, name) in enumerate(names)
        if at in found
    ]
    checked = Counter(task for at, (task, _) in enumerate(names) if index.checked[at])
    touched = Counter(question.task for question in which)
    tasks = {task: TaskOverlap(len(asked), checked[task], touched[task]) for task, asked in questions.items()}
    return Overlap(n, tasks, sources, which)


class _Index:
    """The runs of words of all questions, by length, with the questions that hold each."""

    def __init__(self, questions: Sequence[str], n: int) -> None:
        self._runs: dict[int, tuple[Hashes, Indices, Indices]] = {}
        """By words a run: sorted distinct hashes, where each one's questions begin, and the questions."""
        self.checked = np.zeros(len(questions), dtype=bool)
        """bool [questions]: whether there is anything to look for."""
        by_length: dict[int, list[tuple[int, list[str]]]] = {}
        for at, text in enumerate(questions):
            split = words(text)
            if len(split) >= LEAST:
                by_length.setdefault(min(n, len(split)), []).append((at, split))
        for length, entries in by_length.items():
            hashed, owners = _hashes([split for _, split in entries], [length])[length]
            pairs = np.stack([hashed, np.array([at for at, _ in entries], dtype=np.uint64)[owners]], axis=1)
            pairs = np.unique(pairs, axis=0)
            runs, starts, counts = np.unique(pairs[:, 0], return_index=True, return_counts=True)
            own = np.repeat(counts <= COMMON, counts)
            runs, starts, counts = np.unique(pairs[own, 0], return_index=True, return_counts=True)
            holders = pairs[own, 1].astype(np.int64)
            self.checked[holders] = True
            self._runs[length] = runs, np.append(starts, len(holders)), holders

    def matches(self, texts: Sequence[str]) -> tuple[Indices, Indices]:
        """(texts that hold a run of a question, questions of which one is held), each with repetitions."""
        owners, questions = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for length, (hashed, owner) in _hashes([words(text) for text in texts], list(self._runs)).items():
            runs, starts, holders = self._runs[length]
            if not len(runs):
                continue
            at = np.minimum(np.searchsorted(runs, hashed), len(runs) - 1)
            hit = runs[at] == hashed
            owners.append(owner[hit])
            questions += [holders[starts[run] : starts[run + 1]] for run in np.unique(at[hit]).tolist()]
        return np.concatenate(owners), np.concatenate(questions)


def _hashes(texts: Sequence[Sequence[str]], lengths: Sequence[int]) -> dict[int, tuple[Hashes, Indices]]:
    """For each length, the hashes of all runs of so many words within a text, and the text each is in.

    A run's hash is a polynomial in the hashes of its words. Python's hash of a word differs from process to process:
    nothing of it is kept.
    """
    sizes = np.array([len(text) for text in texts], dtype=np.int64)
    total = int(sizes.sum())
    ids = np.fromiter((hash(word) for text in texts for word in text), dtype=np.int64, count=total).view(np.uint64)
    left = np.repeat(np.cumsum(sizes), sizes) - np.arange(total)  # words from here to the end of the text
    owner = np.repeat(np.arange(len(texts)), sizes)
    running = np.zeros(total, dtype=np.uint64)
    found: dict[int, tuple[Hashes, Indices]] = {}
    for offset in range(max(lengths, default=0)):
        running *= _BASE
        running[: max(total - offset, 0)] += ids[offset:]
        if offset + 1 in lengths:
            whole = left > offset
            found[offset + 1] = running[whole], owner[whole]
    return found


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(texts)
    while batch := list(islice(iterator, _BATCH)):
        yield batch
