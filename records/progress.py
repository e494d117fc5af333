"""Progress bars on stderr, with an ETA: off where stderr is no terminal, and with --quiet."""

from __future__ import annotations

import os
from typing import Any

from tqdm.auto import tqdm


def progress_bar(**options: Any) -> Any:
    """A tqdm bar; `options` are tqdm's own.

    $TQDM_DISABLE, which --quiet sets, is only a default of tqdm's and would be overridden by disable=None.
    """
    return tqdm(disable=True if os.environ.get("TQDM_DISABLE") else None, **options)
