"""The bar counts questions once all of their requests are answered, and shared prompts once."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from tqdm import tqdm

from halfbyte.eval import bar as module
from halfbyte.eval.bar import Bar, work_of
from halfbyte.eval.sharing import Request, plan


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    made: list[Any] = []

    def bar(**options: Any) -> Any:
        made.append(tqdm(file=io.StringIO(), **options))
        return made[-1]

    monkeypatch.setattr(module, "progress_bar", bar)
    yield made
    for one in made:
        one.close()


def test_what_is_shared_is_work_once() -> None:
    shots = tuple(range(200))
    requests = [Request((*shots, 300 + number), (1, 2)) for number in range(40)]
    sizes = [len(context) + len(continuation) for context, continuation in requests]
    shared = plan(requests, 64)
    assert len(shared) > 1
    # Each row still computes its own context token and the first token of its answer; the shots are computed once.
    assert sum(work_of(shared, sizes)) == 200 + 40 * 2
    alone = plan(requests, 64, share=False)
    assert sum(work_of(alone, sizes)) == 40 * 202


def test_batches_without_rows_are_work_as_they_are() -> None:
    class Chunk:
        def __init__(self, members: list[int]) -> None:
            self.members = members

    assert work_of([Chunk([0, 2]), Chunk([1])], [5, 6, 7]) == [12, 6]


def test_a_question_is_done_when_all_of_its_requests_are(bars: list[Any]) -> None:
    with Bar("task", ["a", "a", "b", "b"], [[0, 2], [1, 3]], [10, 30]) as bar:
        bar.answered(0, 10)
        assert (bar.done, bars[0].n, bars[0].total) == (0, 10, 40)
        bar.answered(1, 30)
        assert (bar.done, bars[0].n) == (2, 40)
        assert "2/2 questions" in bars[0].postfix


def test_what_an_earlier_process_did_is_no_part_of_the_eta(bars: list[Any]) -> None:
    with Bar("task", ["a", "b"], [[0], [1]], [10, 30]) as bar:
        bar.known(0)
        assert (bars[0].n, bars[0].initial) == (10, 10)
        bar.answered(1, 30)
        assert bar.done == 2


def test_texts_are_counted_as_they_end_and_not_twice(bars: list[Any]) -> None:
    with Bar("task", ["a", "a", "b", "b"], [[0, 1], [2, 3]], None) as bar:
        bar.ended()
        assert bars[0].n == 1
        bar.ended()
        bar.answered(0, 50)
        assert (bars[0].n, bar.done) == (2, 1)
        assert "tok/s" in bars[0].postfix
        bar.answered(1, 50)
        assert (bars[0].n, bars[0].total) == (4, 4)
