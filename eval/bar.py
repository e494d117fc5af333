"""One bar a task: questions and tokens a second, and an ETA that counts shared prompts once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Sequence
from types import TracebackType
from typing import Any, Self

from halfbyte.records.progress import progress_bar


def work_of(batches: Sequence[Any], sizes: Sequence[int]) -> list[int]:
    """Tokens that each batch of requests makes the model compute: its rows, and a prefix with the first that has it.

    Args:
        batches: As planned by a backend: of eval.sharing, or any others, which compute each request whole.
        sizes: Tokens of each request.
    """
    work, known = [], None
    for batch in batches:
        if not hasattr(batch, "rows"):
            work.append(sum(sizes[at] for at in batch.members))
            continue
        prefix = batch.rows[0].context[: batch.prefix]
        work.append(batch.tokens + (batch.prefix if prefix != known else 0))
        known = prefix
    return work


class Bar:
    """A bar over fixed batches of requests.

    Args:
        label: The task's name.
        questions: The question that each request belongs to.
        batches: The requests of each batch.
        work: Tokens that each batch computes; None where it is not known before, and texts are counted.
    """

    def __init__(
        self, label: str, questions: Sequence[Hashable], batches: Sequence[Sequence[int]], work: Sequence[int] | None
    ) -> None:
        self._questions = questions
        self._batches = batches
        self._work = work
        self._left = Counter(questions)
        self._total = len(self._left)
        self.done = self._earlier = self._tokens = self._ended = 0
        self._start = time.perf_counter()
        total = sum(map(len, batches)) if work is None else sum(work)
        self._bar = progress_bar(total=total, desc=label, unit="text" if work is None else "tok", unit_scale=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def ended(self, count: int = 1) -> None:
        """So many texts of the batch under way have ended; a batch of long ones takes its time."""
        if self._work is None:
            self._ended += count
            self._bar.update(count)

    def known(self, index: int) -> None:
        """Batch `index` was answered by an earlier process: what it took has no part in the ETA."""
        self._take(index)
        self._earlier = self.done
        self._bar.initial = self._bar.n

    def answered(self, index: int, tokens: int) -> None:
        """Batch `index` is answered now.

        Args:
            index: Which.
            tokens: Computed while scoring, or generated.
        """
        self._tokens += tokens
        self._take(index)
        seconds = max(time.perf_counter() - self._start, 1e-9)
        rates = f"{self.done}/{self._total} questions, {(self.done - self._earlier) / seconds:.1f}/s"
        if self._work is None:
            rates += f", {self._tokens / seconds:.0f} tok/s"
        self._bar.set_postfix_str(rates, refresh=False)

    def _take(self, index: int) -> None:
        batch = self._batches[index]
        for at in batch:
            question = self._questions[at]
            self._left[question] -= 1
            self.done += self._left[question] == 0
        self._bar.update(len(batch) - self._ended if self._work is None else self._work[index])
        self._ended = 0
