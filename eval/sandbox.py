"""The sandbox: runs generated code against its tests where it can do no harm and cannot judge itself."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from halfbyte.records.errors import UserError
from halfbyte.records.progress import progress_bar

Status = Literal["passed", "failed", "timeout", "killed"]
_TICK = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use up."""

    seconds: int = 10
    """CPU time."""
    wall_seconds: float = 60.0
    """Time in all: larger, since a program that waits for a processor is not slow."""
    memory: int = 2**30
    """Bytes of address space."""
    file_size: int = 2**24
    """Bytes a file."""
    folder_size: int = 2**26
    """Bytes in its folder, in which it can make no folders."""
    threads: int = 64
    """Threads; other processes it can start none."""


@dataclass(frozen=True, slots=True)
class Job:
    """A program and its tests."""

    program: str
    """The generated code."""
    test: str
    """Trusted code that raises where the program is wrong; it sees the program's names."""
    prelude: str = ""
    """Trusted code before the tests: imports and helpers, which the program cannot replace."""
    entries: tuple[str, ...] = ()
    """The functions under test: taken from the program even where the prelude or Python has one of this name."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a program."""

    status: Status
    detail: str = ""
    """Of one that did not pass: the exception, or the limit."""

    def __str__(self) -> str:
        return f"{self.status}: {self.detail}" if self.detail else self.status


_PROBE = """
import os, socket, threading
def attempts(folder):
    tries = [
        lambda: socket.socket(),
        lambda: os.fork(),
        lambda: open(folder + "/outside", "w"),
        lambda: open("/proc/self/environ"),
        lambda: os.kill(os.getppid(), 0),
    ]
    found = []
    for attempt in tries:
        try:
            attempt()
            found.append("done")
        except OSError:
            found.append("refused")
    open("inside", "w").close()
    return found + [sorted(os.environ)]
"""


@cache
def require_isolation() -> None:
    """Tries the sandbox out, once a process.

    Raises:
        UserError: where this machine cannot isolate a program; says what it lacks.
    """
    with tempfile.TemporaryDirectory() as outside:
        expected = ["refused"] * 5 + [["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]]
        outcome = run_job(Job(_PROBE, f"found = attempts({outside!r})\nassert found == {expected!r}, found"))
    if outcome.status != "passed":
        raise _no_isolation(f"a trial was not stopped everywhere ({outcome})")


def _no_isolation(reason: str) -> UserError:
    return UserError(
        f"generated code cannot be isolated on this machine, and is not run without that: {reason}",
        "run this task on Linux 5.13 or later with Landlock switched on, or leave it out",
    )


def run_jobs(jobs: Sequence[Job], limits: Limits | None = None) -> list[Outcome]:
    """Runs each program against its tests, as many at once as there are processors."""
    with ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)))) as pool:
        outcomes = pool.map(lambda job: run_job(job, limits), jobs)
        return list(progress_bar(iterable=outcomes, total=len(jobs), desc="sandbox", unit="program"))


def run_job(job: Job, limits: Limits | None = None) -> Outcome:
    """Runs one program against its tests.

    Raises:
        UserError: where this machine cannot isolate it.
    """
    limits = limits or Limits()
    shared: dict[str, Any] = {"seconds": limits.seconds, "memory": limits.memory, "file_size": limits.file_size}
    with tempfile.TemporaryDirectory(prefix="halfbyte-sandbox-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        homes = [folder / "program", folder / "tests"]
        for home in homes:
            home.mkdir()
        ends = socket.socketpair()
        reading, writing = os.pipe()
        try:
            program = _start(
                {**shared, "part": "program", "program": job.program, "folder": str(homes[0])}, ends[0].fileno()
            )
            tests = _start(
                {
                    **shared,
                    "part": "tests",
                    "prelude": job.prelude,
                    "test": job.test,
                    "entries": job.entries,
                    "folder": str(homes[1]),
                    "verdict": writing,
                },
                ends[1].fileno(),
                writing,
            )
        finally:
            for end in ends:
                end.close()
            os.close(writing)
        try:
            return _watch(program, reading, limits, homes[0])
        finally:
            os.close(reading)
            for process in (program, tests):
                process.kill()
                process.wait()


def _start(job: dict[str, Any], channel: int, *descriptors: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-B", "-s", "-P", "-m", "halfbyte.eval.isolated"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(channel, *descriptors),
        # Sets in the same order each time. PYTHONPATH is where this halfbyte may have come from.
        env={"PYTHONHASHSEED": "0", **{key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}},
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps({**job, "channel": channel}).encode("ascii"))
        process.stdin.close()
    except BrokenPipeError:
        pass  # it ended before it read: that is seen as the end of its pipe
    return process


def _watch(program: subprocess.Popen[bytes], reading: int, limits: Limits, folder: Path) -> Outcome:
    """Waits for the verdict of the tests and stops what goes beyond a limit."""
    end = time.monotonic() + limits.wall_seconds
    content = b""
    while time.monotonic() < end:
        ready, _, _ = select.select([reading], [], [], _TICK)
        if ready:
            part = os.read(reading, 65536)
            content += part
            if not part:
                return _verdict(content, program)
        if _threads(program.pid) > limits.threads:
            return Outcome("killed", f"more than {limits.threads} threads")
        if _size(folder) > limits.folder_size:
            return Outcome("killed", f"more than {limits.folder_size} bytes of files")
    return Outcome("timeout", f"{limits.wall_seconds:g} s")


def _verdict(content: bytes, program: subprocess.Popen[bytes]) -> Outcome:
    if not content:
        return Outcome("killed", "the tests did not come to an end")
    passed, detail = json.loads(content)
    detail = detail.encode("ascii", "backslashreplace").decode("ascii")  # a program's half of an emoji is no text
    if passed is None:
        raise _no_isolation(detail)
    if passed:
        return Outcome("passed")
    if detail.endswith("the program has ended"):
        try:
            code = program.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = 0
        if code < 0:
            name = signal.Signals(-code).name
            return Outcome("timeout", "CPU time") if name == "SIGXCPU" else Outcome("killed", name)
    return Outcome("failed", detail)


def _threads(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(fields[17])


def _size(folder: Path) -> int:
    """Bytes, at least a block for each file; there are no folders in it."""
    total = 0
    for name in os.listdir(folder):
        try:
            total += max(4096, os.lstat(folder / name).st_size)
        except FileNotFoundError:
            continue  # it was removed in between
    return total
