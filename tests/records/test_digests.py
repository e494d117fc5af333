"""Digests are those of the content, whatever the cache holds."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

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
