"""Files and folders appear whole or not at all, and digests tell contents apart."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest

from halfbyte.records import files
from halfbyte.records.digests import file_digest, model_digest, value_digest
from halfbyte.records.errors import UserError, disk_full_is_a_user_error
from halfbyte.records.run import RunFolder


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"old": 1})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="no space left"):
        files.write_json(path, {"new": 2})
    assert files.read_json(path) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_nan_is_no_json() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        files.dumps({"loss": math.nan})


def test_a_folder_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint"
    with files.atomic_folder(final) as partial:
        (partial / "a").write_text("old")

    def fail() -> None:
        with files.atomic_folder(final) as partial:
            (partial / "a").write_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (final / "a").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_what_a_killed_attempt_left_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.partial").mkdir()
    (tmp_path / "checkpoint.partial" / "torn").write_text("x")
    with files.atomic_folder(tmp_path / "checkpoint") as partial:
        (partial / "a").write_text("y")
    assert [entry.name for entry in (tmp_path / "checkpoint").iterdir()] == ["a"]


def test_safetensors_own_error_of_a_full_disk_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no space left"), disk_full_is_a_user_error(tmp_path):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_other_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), disk_full_is_a_user_error(tmp_path):
        raise ZeroDivisionError


def test_a_changed_file_has_another_digest_though_digests_are_cached(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "x"
    path.write_text("one")
    first = file_digest(path)
    assert file_digest(path) == first
    assert list((cache / "digests").rglob("*"))
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    assert file_digest(path) != first


def test_a_models_digest_covers_what_decides_its_answers(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    first = model_digest(tmp_path)
    (tmp_path / "README.md").write_text("notes")
    assert model_digest(tmp_path) == first
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert model_digest(tmp_path) != first


def test_an_empty_folder_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no model"):
        model_digest(tmp_path)


def test_the_order_of_keys_decides_no_digest() -> None:
    assert value_digest({"a": 1, "b": 2}) == value_digest({"b": 2, "a": 1})


def test_two_processes_cannot_work_in_one_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with run.lock(), pytest.raises(UserError, match="another process works in"), run.lock():
        pass
    with run.lock():
        pass
