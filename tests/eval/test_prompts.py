"""BOS tokens are counted where they stand."""

from __future__ import annotations

from halfbyte.eval.prompts import bos_count


def test_bos_is_counted_at_the_head_alone() -> None:
    assert bos_count([0, 0, 5, 0], 0) == 2
    assert bos_count([5, 0], 0) == 0
    assert bos_count([0, 0], 0) == 2
    assert bos_count([0, 0], None) == 0
