"""The cache: what is kept between runs, under locks that let two processes share it, listed and pruned."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from halfbyte.records.digests import cache_folder
from halfbyte.records.errors import UserError, disk_full_is_a_user_error, unknown_name
from halfbyte.records.files import PARTIAL
from halfbyte.records.record import load_record

logger = logging.getLogger(__name__)

EVALUATIONS = "evaluations"
SERVERS = "servers"
KEPT = "fidelity"
IMAGES = "images"
KINDS = {
    EVALUATIONS: "evaluation",
    "canary": "canary",
    KEPT: "baseline's states",
    IMAGES: "images",
    "datasets": "data set",
    "tasks": "index of tasks",
    SERVERS: "names of servers",
    "digests": "digests of files",
}
"""What the folders in the cache hold. Of the last three only the whole is worth a line."""
_WHOLE = ("tasks", SERVERS, "digests")
_PRUNED = ".pruned"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in the cache that can be pruned by itself."""

    name: str
    """Its path in the cache, by which it is pruned."""
    kind: str
    """One of KINDS, or "unfinished evaluation"."""
    model: str
    """For people; "" where it belongs to none."""
    task: str
    bytes: int
    created: float
    """Seconds since the epoch."""
    used: float
    """The last time it was made or taken, seconds since the epoch."""

    @property
    def path(self) -> Path:
        """Where it is."""
        return cache_folder() / self.name


def evaluation_folder(digest: str, task: str, key: str) -> Path:
    """Where the cache keeps the record of a model on a task, so that a second candidate costs no baseline.

    Args:
        digest: The model's.
        task: Its name.
        key: Digest of the settings.
    """
    return cache_folder() / EVALUATIONS / digest[:16] / f"{task}@{key[:16]}"


def mark_used(path: Path) -> None:
    """Notes that an entry was taken; a cache that cannot be written keeps its old times."""
    with suppress(OSError):
        os.utime(path)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Keeps other processes from computing the same entry at the same time; a kill frees it.

    Args:
        path: The entry, which need not be there.
        wait: Whether to wait for another process to finish; it says so in the log.

    Yields:
        Whether the lock is held; always, where it waits.
    """
    lock = path.parent / f".{path.name}.lock"
    with disk_full_is_a_user_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _held(lock, path, wait=wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _held(lock: Path, path: Path, *, wait: bool) -> int | None:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                os.close(descriptor)
                return None
            logger.info("another process works on %s; waiting for it", path.name)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.stat(lock).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)  # pruned while we waited: the name now is of another file, or of none


def entries() -> list[Entry]:
    """All that is in the cache, by kind and then by the last use."""
    found = [_entry(path, kind) for kind in KINDS for path in _paths(kind)]
    order = list(KINDS.values())
    return sorted(found, key=lambda entry: (order.index(entry.kind.removeprefix("unfinished ")), entry.used))


def _paths(kind: str) -> list[Path]:
    folder = cache_folder() / kind
    if not folder.is_dir():
        return []
    if kind in _WHOLE:
        return [folder]
    inside = folder.glob("*/*" if kind in (EVALUATIONS, "canary", KEPT, IMAGES) else "*")
    return [path for path in inside if not path.name.startswith(".")]


def _entry(path: Path, kind: str) -> Entry:
    files = [file.stat() for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    status = path.stat()
    unfinished = path.name.endswith(PARTIAL)
    model, task = "", ""
    if kind == EVALUATIONS:
        model, task = path.parent.name, path.name.partition("@")[0]
        with suppress(UserError):  # unfinished or damaged: it can still be pruned
            model = load_record(path).model.name
    return Entry(
        name=str(path.relative_to(cache_folder())),
        kind=f"unfinished {KINDS[kind]}" if unfinished else KINDS[kind],
        model=model,
        task=task,
        bytes=sum(file.st_size for file in files),
        created=min((file.st_mtime for file in files), default=status.st_mtime),
        used=max([status.st_mtime, *(file.st_mtime for file in files)]),
    )


def choose(
    found: Sequence[Entry], names: Sequence[str], *, older_than: float | None, everything: bool = False
) -> list[Entry]:
    """The entries that are meant.

    Args:
        found: All entries.
        names: Names, beginnings of names or patterns with *.
        older_than: Days without use; None for any.
        everything: All of them.

    Raises:
        UserError: for a name that is in no entry's, and where nothing says what is meant.
    """
    if not (names or everything or older_than is not None):
        raise UserError("nothing says what to prune", "give names, --older-than DAYS or --all")
    chosen = list(found)
    for name in names:
        if not any(_means(name, entry) for entry in found):
            raise unknown_name("entry", name, (entry.name for entry in found))
    if names:
        chosen = [entry for entry in chosen if any(_means(name, entry) for name in names)]
    if older_than is not None:
        limit = time.time() - older_than * 24 * 3600
        chosen = [entry for entry in chosen if entry.used < limit]
    return chosen


def _means(name: str, entry: Entry) -> bool:
    return entry.name == name or entry.name.startswith(f"{name.rstrip('/')}/") or fnmatch(entry.name, name)


def prune(chosen: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Deletes entries; those another process works on stay.

    Returns:
        What was deleted, and what is in use.
    """
    gone, busy = [], []
    for entry in chosen:
        path = entry.path
        name = path.name.removesuffix(PARTIAL)  # the lock is on the entry it will become
        with locked(path.with_name(name), wait=False) as held:
            if not held:
                busy.append(entry)
                continue
            _remove(path)
            (path.parent / f".{name}.lock").unlink(missing_ok=True)
        gone.append(entry)
        with suppress(OSError):  # not empty, or the cache itself
            path.parent.rmdir()
    return gone, busy


def _remove(path: Path) -> None:
    """Deletes a file or folder in one step for all who look; a kill leaves what the next pruning finds."""
    if path.is_dir():
        gone = path.with_name(f".{path.name}{_PRUNED}")
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(path, gone)
        shutil.rmtree(gone)
    else:
        path.unlink(missing_ok=True)
