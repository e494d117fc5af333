"""Digests are those of the content, whatever the cache holds."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from halfbyte.records import digests
from halfbyte.records.digests import file_digest


@pytest.mark.parametrize("damage", [b"", b"abc", b"\xff\xfe"])
def test_a_damaged_entry_of_the_cache_is_computed_again(damage: bytes, tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"content")
    expected = hashlib.sha256(b"content").hexdigest()
    assert file_digest(path) == expected
    (entry,) = (one for one in cache.rglob("*") if one.is_file())
    entry.write_bytes(damage)
    assert file_digest(path) == expected
    assert entry.read_text(encoding="ascii") == expected


def test_a_cache_of_zeros_after_a_power_cut_is_computed_again(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"content")
    expected = file_digest(path)
    (entry,) = (one for one in cache.rglob("*") if one.is_file())
    entry.write_bytes(bytes(64))
    assert file_digest(path) == expected


def test_a_digest_is_that_of_all_chunks(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr(digests, "CHUNK", 7)
    for size in (0, 1, 6, 7, 8, 21, 100):
        path = tmp_path / str(size)
        path.write_bytes(bytes(range(size)))
        assert file_digest(path) == hashlib.sha256(bytes(range(size))).hexdigest()


def test_what_is_read_ahead_is_read_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    paths = [tmp_path / str(index) for index in range(3 * digests.READERS)]
    for path in paths:
        path.write_bytes(path.name.encode())
    read, begin = [], threading.Event()
    real = digests._known_or_hashed

    def slow(path: Path) -> str:
        if threading.current_thread() is not threading.main_thread():
            assert begin.wait(20)
            read.append(path)
        return real(path)

    monkeypatch.setattr(digests, "_known_or_hashed", slow)
    digests.read_ahead(paths)
    digests.read_ahead(paths)  # as a second recipe for the same model does
    begin.set()
    assert [file_digest(path) for path in paths] == [hashlib.sha256(path.name.encode()).hexdigest() for path in paths]
    assert sorted(read) == sorted(paths)
    paths[0].write_bytes(b"changed since")
    assert file_digest(paths[0]) == hashlib.sha256(b"changed since").hexdigest()


def test_a_file_that_cannot_be_read_ahead_is_an_error_only_where_it_is_asked_for(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    digests.read_ahead([tmp_path / "missing"])
    with pytest.raises(FileNotFoundError):
        file_digest(tmp_path / "missing")


def test_a_process_that_ends_early_does_not_wait_for_what_it_reads_ahead(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "endless")
    code = "import sys, pathlib; from halfbyte.records import digests; digests.read_ahead([pathlib.Path(sys.argv[1])])"
    command = [sys.executable, "-c", code, str(tmp_path / "endless")]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
