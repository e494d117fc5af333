"""How long the command line takes to answer before it does any work."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.bench


@pytest.mark.parametrize(
    ("arguments", "bound"), [(["--help"], 0.5), (["recipes"], 1.0), (["recipes", "demo-fp8", "--resolved"], 1.0)]
)
def test_seconds_to_an_answer(arguments: list[str], bound: float) -> None:
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "halfbyte", *arguments], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    print(f"\nhalfbyte {' '.join(arguments)}: {min(seconds):.3f} s at best, {sorted(seconds)[5]:.3f} s median")
    assert min(seconds) < bound
