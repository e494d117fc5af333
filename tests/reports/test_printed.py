"""Claims about the printed page: what is folded away on the screen is on paper."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from record_factory import flipped, model, write_record, write_run, write_training

from halfbyte.reports.compare import compare
from halfbyte.reports.evidence import compare_folders
from halfbyte.reports.write import write_reports

CHROMIUM, TO_TEXT = shutil.which("chromium"), shutil.which("pdftotext")
printing = pytest.mark.skipif(CHROMIUM is None or TO_TEXT is None, reason="needs chromium and pdftotext")


def printed(page: Path, folder: Path) -> str:
    """The page's text as Chromium prints it."""
    assert CHROMIUM is not None
    assert TO_TEXT is not None
    paper = folder / "page.pdf"
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    subprocess.run(
        [CHROMIUM, *options, "--no-pdf-header-footer", f"--print-to-pdf={paper}", page.as_uri()],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return subprocess.run([TO_TEXT, "-layout", paper, "-"], check=True, capture_output=True, text=True).stdout


@printing
def test_flips_that_are_folded_away_on_the_screen_are_printed(tmp_path: Path) -> None:
    for side, values in zip(("b", "c"), flipped(100, 60, 9, 4), strict=True):
        format = {"b": "bfloat16", "c": "NVFP4"}[side]
        write_record(tmp_path / side, values, format=format, questions=lambda i: f"Is this question number {i:03}?")
    write_reports([compare(tmp_path / "b", tmp_path / "c")], tmp_path / "out")
    text = printed(tmp_path / "out" / "report.html", tmp_path)
    assert "9 lost, 4 gained" in text
    assert [i for i in range(100) if f"Is this question number {i:03}?" in text] == [*range(9), *range(60, 64)]


@printing
def test_training_curves_and_manifest_are_printed(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    ours, theirs = flipped(100, 60, 9, 4)
    of = model("NVFP4", "qad")
    run = write_run(tmp_path / "qad", theirs, of=of, baseline_values=ours)
    write_training(run.training)
    found = compare_folders(run.evaluations(model().digest), run.evaluations(of.digest), None)
    write_reports([found], tmp_path / "out")
    text = printed(tmp_path / "out" / "report.html", tmp_path)
    assert "KL divergence from the teacher, nats a token" in text
    assert "Manifest" in text
    assert "models/bfloat16" in text[text.index("Manifest") :]
