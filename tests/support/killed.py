"""One evaluation through the command line in a child process that says when it begins and can be killed at any time."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

from line import PRELOADED

PAUSE = 0.004
"""Seconds before each batch is put on disk, so that there are moments to be killed at."""


def write_tiny_tasks(folder: Path) -> None:
    """The tiny tasks of tests/eval."""
    path = Path(__file__).parent.parent / "eval" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tiny_tasks", path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write_tasks(folder)


def _child(argv: list[str], tasks: Path, cache: Path, begins: Connection) -> None:
    os.environ["HALFBYTE_CACHE"] = str(cache)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    import lm_eval.evaluator
    import torch

    from halfbyte.eval import evaluate, hf, resolve, scorer
    from halfbyte.main import main
    from halfbyte.records.journal import Journal

    torch.set_num_threads(1)
    resolve.TASKS = evaluate.TASKS = tasks
    scorer.BUDGETS["cpu"] = 64
    hf.ROUNDS = 1
    lm_eval.evaluator.add_env_info = lambda _results: None  # asks compilers for their versions
    append = Journal.append

    def slowly(self: Journal, entry: dict[str, object]) -> None:
        time.sleep(PAUSE)
        append(self, entry)

    Journal.append = slowly  # type: ignore[method-assign]
    begins.send(True)
    os._exit(main(argv))


def evaluate(argv: list[str], tasks: Path, cache: Path, kill_after: float | None) -> int:
    """Runs a command with the tiny tasks, and kills it some time after it has begun.

    Args:
        argv: The arguments after `halfbyte`.
        tasks: The folder of task files.
        cache: The cache folder.
        kill_after: Seconds; None to let it end.

    Returns:
        The exit code, -9 when it was killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(argv, tasks, cache, theirs))
    process.start()
    theirs.close()
    ours.recv()
    if kill_after is not None:
        process.join(kill_after)
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
    process.join(120)
    if process.exitcode is None:
        raise AssertionError("the evaluation hangs")
    return process.exitcode
