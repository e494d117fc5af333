"""A user's mistake is one line, whatever a library's message looks like, and names what cannot be written."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from halfbyte.records.errors import UserError, disk_full_is_a_user_error, unknown_name
from halfbyte.records.files import write_text


def test_a_message_of_several_lines_becomes_one() -> None:
    assert UserError("1 error:\n  limit\n    is wrong").message == "1 error: limit is wrong"


def test_a_place_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match=r"cannot write .*report\.md: File exists"):
        write_text(tmp_path / "file" / "report.md", "text")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder in which nothing can be made")
def test_a_place_where_the_system_makes_nothing_is_named() -> None:
    for path in (Path("/proc/mine/recipe.yaml"), Path("/proc/mine")):
        with pytest.raises(UserError, match=rf"cannot write {path}: nothing can be made in /proc"):
            write_text(path, "text")


def test_a_file_that_went_away_stays_an_error(tmp_path: Path) -> None:
    for gone in (tmp_path / "output" / "kept.json", tmp_path / "gone" / "kept.json"):
        with pytest.raises(FileNotFoundError), disk_full_is_a_user_error(tmp_path / "output"):
            gone.read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_that_finished_stages_are_kept(number: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no space left.*stages are kept"), disk_full_is_a_user_error(tmp_path):
        raise OSError(number, "full", str(tmp_path / "x"))


def test_an_error_about_another_place_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), disk_full_is_a_user_error(tmp_path / "output"):
        raise PermissionError(errno.EACCES, "Permission denied", "/elsewhere/data.json")


def test_a_cache_that_cannot_be_written_says_how_to_name_another(cache: Path) -> None:
    full, locked = OSError(errno.ENOSPC, "No space left"), OSError(errno.EROFS, "Read-only", str(cache / "x"))
    for error in (full, locked, OSError("Not enough disk space. Needed: Unknown size")):
        with pytest.raises(UserError) as caught, disk_full_is_a_user_error(cache / "x"):
            raise error
        assert "$HALFBYTE_CACHE" in str(caught.value.hint)
        assert "--output" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("NVFP4-AWQ", "nvfp4_awq_lite"),
        ("nvfp4 defualt", "NVFP4_DEFAULT_CFG"),
        ("fp4", "nvfp4"),
        ("quantize to lite", "nvfp4_awq_lite"),
    ],
)
def test_the_nearest_name_comes_first_whatever_its_case_and_dashes(given: str, near: str) -> None:
    known = ["NVFP4_DEFAULT_CFG", "W4A8_AWQ_BETA_CFG", "fp8", "nvfp4", "nvfp4_awq_lite"]
    hint = unknown_name("preset", given, known).hint
    assert hint is not None
    assert hint.startswith(f"did you mean '{near}'? known: ")


def test_nothing_is_suggested_for_a_name_that_is_like_none() -> None:
    assert unknown_name("preset", "xyz", ["fp8", "nvfp4"]).hint == "known: fp8, nvfp4"


@pytest.mark.parametrize("name", ["tensor.pt", "large.pt"])
def test_what_torch_says_of_a_full_disk_is_one_line(name: str, tmp_path: Path) -> None:
    import torch

    full = tmp_path / name
    full.symlink_to("/dev/full")  # each write to it fails as on a full disk
    with pytest.raises(UserError, match="no space left on the disk"), disk_full_is_a_user_error(tmp_path):
        torch.save(torch.zeros(1 if name == "tensor.pt" else 1_000_000), full)
