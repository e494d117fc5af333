"""The journal keeps whole entries of the same job and nothing else."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from halfbyte.records.errors import UserError
from halfbyte.records.journal import Journal

VALUES = [0.1, 1 / 3, -1e-310, 2.0**60, float("-inf")]


def write(path: Path, key: str = "job") -> bytes:
    with Journal(path, key) as journal:
        for value in VALUES:
            journal.append({"answers": [value, "ü\u2028"]})
    return path.read_bytes()


def test_entries_come_back_bit_for_bit(tmp_path: Path) -> None:
    write(tmp_path / "folder" / "journal.jsonl")
    with Journal(tmp_path / "folder" / "journal.jsonl", "job") as journal:
        assert [entry["answers"] for entry in journal.entries] == [[value, "ü\u2028"] for value in VALUES]


def test_a_torn_last_line_is_dropped_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = write(path)
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        with Journal(path, "job") as journal:
            assert len(journal.entries) == len(VALUES) - 1
            journal.append({"answers": [VALUES[-1], "ü\u2028"]})
        assert path.read_bytes() == whole


def test_zeros_after_a_power_cut_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = write(path)
    path.write_bytes(whole + b"\0" * 100 + b"\n")
    with Journal(path, "job") as journal:
        assert len(journal.entries) == len(VALUES)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", [b"", b"garbage\n", b'{"key": "jo', b'["no header"]\n{"answers": [1]}\n'])
def test_a_file_without_a_header_is_started_afresh(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    with Journal(path, "job") as journal:
        assert journal.entries == []
        journal.append({"answers": [1]})
    with Journal(path, "job") as journal:
        assert journal.entries == [{"answers": [1]}]


def test_a_journal_of_another_job_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path)
    with Journal(path, "another job") as journal:
        assert journal.entries == []
    with Journal(path, "job") as journal:
        assert journal.entries == []


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(tmp_path / "journal.jsonl", "job") as journal:

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, f"No space left on device: {descriptor}")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(UserError, match="no space left"):
            journal.append({"answers": [1]})
        assert journal.entries == []
