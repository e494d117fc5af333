"""A log gets a plain line now and then; a terminal a bar; --quiet neither."""

from __future__ import annotations

import io
from typing import Any

import pytest

from halfbyte.records import progress
from halfbyte.records.progress import progress_bar


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(monkeypatch: pytest.MonkeyPatch, seconds: float, *, steps: int = 12, terminal: bool = False) -> str:
    """What is written by so many steps of so many seconds each."""
    clock = Clock()
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("tqdm.std.time", clock)
    options: dict[str, Any] = {"total": steps, "desc": "mmlu", "unit": "batch", "file": stream}
    with progress_bar(**options) as bar:
        for _ in range(steps):
            clock.now += seconds
            bar.update()
    return stream.getvalue()


@pytest.fixture(autouse=True)
def _not_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)  # which --quiet of a test before leaves in this process


def test_a_log_gets_a_line_every_half_minute_and_one_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(monkeypatch, 10.0).splitlines()
    assert [line.split(",")[0] for line in lines] == [f"mmlu: {share}%" for share in (25, 50, 75, 100, 100)]
    assert lines[1] == "mmlu: 50%, 6 of 12 batch, 01:00 gone, 01:00 left, 10.00s/batch"
    assert progress.SECONDS == 30


def test_a_short_task_writes_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, 1.0) == ""


def test_quiet_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert run(monkeypatch, 60.0) == ""
    assert run(monkeypatch, 60.0, terminal=True) == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    written = run(monkeypatch, 60.0, terminal=True)
    assert "\r" in written
    assert "100%|" in written
