"""Host memory while a model is loaded or searched: what is freed goes back to the system, where glibc would keep it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_FIRST, _LARGEST = 128 * 1024, 32 * 2**20
"""Bytes from which a block is mapped by itself: where glibc starts, and the most it goes up to, see mallopt(3)."""


@contextmanager
def given_back() -> Iterator[None]:
    """What is freed inside goes back to the system at once, and after it all that glibc's malloc still keeps.

    glibc raises the size from which it maps a block by itself whenever such a block is freed, up to 32 MB; smaller ones
    then stay with the process after they are freed. Loading frees as much as it keeps where transformers joins the
    tensors of experts, converted one by one, into one of a layer: more than half of them stayed with the process for
    good. Afterwards the size is the largest that glibc goes up to by itself, since mapping each activation anew is
    slow. What the environment says of it is left as it is. Nothing is done where malloc is not glibc's.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    chosen = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if not chosen:
        libc.mallopt(_MMAP_THRESHOLD, _FIRST)
    try:
        yield
    finally:
        if not chosen:
            libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
            libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)  # twice the other, as glibc keeps them by itself
        libc.malloc_trim(0)
