"""halfbyte cache: what is kept between runs, and how to get rid of it."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import asdict

from halfbyte.records.cache import Entry, choose, entries, prune
from halfbyte.records.digests import cache_folder
from halfbyte.records.files import dumps

UNITS = (("d", 24 * 3600), ("h", 3600), ("min", 60))


def run(args: Namespace) -> int:
    """Lists what is in the cache, or deletes what is named and says what that freed."""
    found = entries()
    if args.action == "prune":
        return _prune(choose(found, args.name, older_than=args.older_than, everything=args.all), as_json=args.json)
    if args.name or args.older_than is not None:
        found = choose(found, args.name, older_than=args.older_than)
    if args.json:
        print(dumps([asdict(entry) for entry in found]), end="")
        return 0
    for line in _table(found):
        print(line)
    print(f"{len(found)} entries, {_size(sum(entry.bytes for entry in found))} in {cache_folder()}")
    return 0


def _prune(chosen: list[Entry], *, as_json: bool) -> int:
    gone, busy = prune(chosen)
    freed = sum(entry.bytes for entry in gone)
    if as_json:
        names = {"pruned": [entry.name for entry in gone], "in_use": [entry.name for entry in busy]}
        print(dumps({**names, "bytes": freed}), end="")
        return 0
    for entry in gone:
        print(f"pruned {entry.name} ({_size(entry.bytes)})")
    for entry in busy:
        print(f"in use {entry.name}: another process works on it")
    print(f"freed {_size(freed)}")
    return 0


def _table(found: list[Entry]) -> list[str]:
    rows = [("what", "model", "task", "size", "age", "used", "name")]
    now = time.time()
    rows += [
        (
            entry.kind,
            entry.model or "–",
            entry.task or "–",
            _size(entry.bytes),
            _ago(now - entry.created),
            f"{_ago(now - entry.used)} ago",
            entry.name,
        )
        for entry in found
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    right = (3, 4, 5)
    return [
        "  ".join(cell.rjust(width) if at in right else cell.ljust(width) for at, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
        if found
    ]


def _size(count: int) -> str:
    """Bytes for people, in powers of 1000 as disks are sold.

    >>> _size(0), _size(1999), _size(269_060_552)
    ('0.0 kB', '2.0 kB', '269.1 MB')
    """
    value, unit = count / 1e3, "kB"
    for larger in ("MB", "GB", "TB"):
        if value < 999.95:
            break
        value, unit = value / 1e3, larger
    return f"{value:.1f} {unit}"


def _ago(seconds: float) -> str:
    """A time span for people, rounded down.

    >>> _ago(3), _ago(61), _ago(7300), _ago(3 * 86400 + 5)
    ('0 min', '1 min', '2 h', '3 d')
    """
    for unit, length in UNITS:
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "0 min"
