"""The step summary: the Markdown report, appended where a CI system shows it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from halfbyte.records.errors import UserError, disk_full_is_a_user_error
from halfbyte.reports.comparison import Comparison
from halfbyte.reports.text import render_markdown

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


def write_step_summary(comparisons: Sequence[Comparison]) -> Path | None:
    """Appends the Markdown report to the file that a CI system names in $GITHUB_STEP_SUMMARY; None where it names none.

    Raises:
        UserError: when that file cannot be written.
    """
    named = os.environ.get(STEP_SUMMARY)
    if not named:
        return None
    path = Path(named)
    if not path.parent.is_dir():
        raise UserError(f"${STEP_SUMMARY} names {path}, and there is no such folder", "unset it, or make the folder")
    with disk_full_is_a_user_error(path), path.open("a", encoding="utf-8") as file:
        file.write(render_markdown(comparisons) + "\n")
    return path
