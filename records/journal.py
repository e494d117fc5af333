"""The journal: answers appended batch by batch, so that work cut short goes on from its last whole batch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from halfbyte.records.errors import disk_full_is_a_user_error


class Journal:
    """A JSON-lines file of the entries of one job, tied to the key of that job.

    What an earlier process wrote under the same key is in `entries`; a journal of another key, and a last line that
    a killed process left torn, are dropped. Numbers come back bit for bit (Python writes the shortest decimal that
    reads back as the same double).

    Args:
        path: The file; its folder is created.
        key: What decides the entries: a digest of settings and inputs.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        with disk_full_is_a_user_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            self._file.seek(0)
            good = self._read(key)
            self._file.truncate(good)
            self._file.seek(good)
        if good == 0:
            self._write({"key": key})

    def _read(self, key: str) -> int:
        """Fills `entries` and returns the length of the usable part in bytes."""
        good = 0
        header = True
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                value = json.loads(line)
            except ValueError:  # bytes that never reached the disk read as zeros after a power cut
                break
            if header:
                if value != {"key": key}:
                    return 0
                header = False
            else:
                self.entries.append(value)
            good += len(line)
        return good

    def _write(self, value: dict[str, Any]) -> None:
        with disk_full_is_a_user_error(self.path):
            self._file.write(json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode("ascii") + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def append(self, entry: dict[str, Any]) -> None:
        """Adds an entry; it is on disk when this returns."""
        self._write(entry)
        self.entries.append(entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
