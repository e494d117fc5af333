"""Progress on stderr, with an ETA: a bar on a terminal, else a plain line every half minute; neither with --quiet."""

from __future__ import annotations

import os
import sys
from typing import Any

import tqdm.std
from tqdm.auto import tqdm as bar

SECONDS = 30
"""Between two lines of a log."""
_LINE = (
    "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt} {unit}, {elapsed} gone, {remaining} left, {rate_fmt}{postfix}"
)


class Lines(tqdm.std.tqdm):  # type: ignore[misc]  # tqdm has no types
    """A tqdm that writes whole lines, for logs: none for what is over in less than SECONDS."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        slow = {"mininterval": SECONDS, "maxinterval": SECONDS, "delay": SECONDS, "miniters": 1, "smoothing": 0}
        super().__init__(*arguments, **{**options, **slow, "bar_format": _LINE})

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:  # noqa: ARG002  tqdm's own
        """Writes how far it is."""
        self.fp.write(f"{msg or self}\n")
        return True

    def close(self) -> None:
        """Writes how it ended, where something was written before."""
        if not self.disable and self.last_print_t >= self.start_t + self.delay:
            self.display()
        self.sp = None  # what tqdm's own close takes for "nothing to tidy up"
        super().close()


def progress_bar(**options: Any) -> Any:
    """A tqdm bar; `options` are tqdm's own.

    $TQDM_DISABLE, which --quiet sets, is only a default of tqdm's and would be overridden by disable=False.
    """
    kind = bar if sys.stderr.isatty() else Lines
    return kind(disable=bool(os.environ.get("TQDM_DISABLE")), **options)
