"""The cache lists what it holds, deletes what is named and no more, and two processes share it."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "reports"))

from record_factory import model, write_record

from halfbyte.records.cache import choose, entries, evaluation_folder, locked, mark_used, prune
from halfbyte.records.errors import UserError
from halfbyte.records.record import load_record

DAY = 24 * 3600


@pytest.fixture
def filled(cache: Path) -> Path:
    """A baseline on two tasks, one evaluation cut short, a canary, digests and a data set."""
    digest = model().digest
    for task, key in (("colours", "a" * 64), ("shapes", "b" * 64)):
        write_record(evaluation_folder(digest, task, key), [1.0, 0.0], task=task)
    unfinished = evaluation_folder(digest, "mmlu", "c" * 64)
    partial = unfinished.with_name(unfinished.name + ".partial")
    others = ("digests/ab/abc", "datasets/x/y", f"canary/{digest[:16]}/k.safetensors")
    for path in (partial / "journal-loglikelihood.jsonl", *(cache / name for name in others)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("0123456789", encoding="utf-8")
    return cache


def test_everything_in_the_cache_is_listed_with_what_it_is(filled: Path) -> None:
    found = {entry.name: entry for entry in entries()}
    digest = model().digest[:16]
    colours = found[f"evaluations/{digest}/colours@{'a' * 16}"]
    assert (colours.kind, colours.task, colours.model) == ("evaluation", "colours", "models/bfloat16")
    assert colours.bytes == sum(path.stat().st_size for path in colours.path.iterdir())
    assert colours.path.parent.parent.parent == filled
    kinds = sorted(entry.kind for entry in found.values())
    assert kinds == ["canary", "data set", "digests of files", "evaluation", "evaluation", "unfinished evaluation"]
    assert found[f"canary/{digest}/k.safetensors"].bytes == 10


def test_an_empty_cache_lists_nothing(cache: Path) -> None:
    assert not cache.exists()
    assert entries() == []


def test_a_name_its_beginning_and_a_pattern_choose(filled: Path) -> None:
    assert filled.is_dir()
    digest = model().digest[:16]
    found = entries()

    def names(*given: str) -> list[str]:
        return sorted(entry.task or entry.kind for entry in choose(found, given, older_than=None))

    assert names(f"evaluations/{digest}/colours@{'a' * 16}") == ["colours"]
    assert names(f"evaluations/{digest}") == names("evaluations") == ["colours", "mmlu", "shapes"]
    assert names("*shapes*", "datasets") == ["data set", "shapes"]
    with pytest.raises(UserError, match="unknown entry 'evaluation'"):
        names("evaluation")
    with pytest.raises(UserError, match="nothing says what to prune"):
        choose(found, [], older_than=None)


def test_what_was_not_used_for_days_is_pruned_and_what_was_stays(filled: Path) -> None:
    assert filled.is_dir()
    old = time.time() - 40 * DAY
    for path in [*filled.rglob("*"), filled]:
        os.utime(path, (old, old))
    colours, shapes = (entry.path for entry in entries() if entry.kind == "evaluation")
    mark_used(colours)
    gone, busy = prune(choose(entries(), [], older_than=30))
    assert (len(gone), busy) == (5, [])
    assert [entry.path for entry in entries()] == [colours]
    assert load_record(colours).task in ("colours", "shapes")
    assert not shapes.exists()


def test_all_goes_and_leaves_no_litter(filled: Path) -> None:
    chosen = choose(entries(), [], older_than=None, everything=True)
    gone, _ = prune(chosen)
    assert sum(entry.bytes for entry in gone) == sum(entry.bytes for entry in chosen) > 0
    assert entries() == []
    assert [path for path in filled.rglob("*") if path.is_file()] == []


def _hold(folder: Path, cache: Path, ready: object, leave: object) -> None:
    os.environ["HALFBYTE_CACHE"] = str(cache)
    with locked(folder):
        ready.set()  # type: ignore[attr-defined]
        leave.wait(60)  # type: ignore[attr-defined]


def test_what_another_process_works_on_is_not_pruned(filled: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, leave = context.Event(), context.Event()
    (colours,) = (entry for entry in entries() if entry.task == "colours")
    process = context.Process(target=_hold, args=(colours.path, filled, ready, leave))
    process.start()
    try:
        assert ready.wait(60)
        gone, busy = prune([colours])
        assert (gone, busy) == ([], [colours])
        assert load_record(colours.path).task == "colours"
    finally:
        leave.set()
        process.join(60)
    assert prune([colours]) == ([colours], [])


def _count(folder: Path, counter: Path, start: object) -> None:
    start.wait(60)  # type: ignore[attr-defined]
    for _ in range(25):
        with locked(folder):
            number = int(counter.read_text(encoding="ascii"))
            time.sleep(0.001)
            counter.write_text(str(number + 1), encoding="ascii")


def test_a_lock_holds_while_its_file_is_pruned_again_and_again(tmp_path: Path, cache: Path) -> None:
    assert not cache.exists()
    counter = tmp_path / "counter"
    counter.write_text("0", encoding="ascii")
    folder = tmp_path / "entry"
    context = multiprocessing.get_context("spawn")
    start = context.Event()
    processes = [context.Process(target=_count, args=(folder, counter, start)) for _ in range(3)]
    for process in processes:
        process.start()
    start.set()
    lock = tmp_path / ".entry.lock"
    while any(process.is_alive() for process in processes):
        with locked(folder, wait=False) as held:
            if held:
                lock.unlink()
        time.sleep(0.002)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert counter.read_text(encoding="ascii") == "75"
