"""What QAD wins back of what NVFP4 took from the trained small Flux: at least half, on the mean of three seeds.

On a CPU it is only tried out: eight images of a training of four steps say nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("diffusers")

from small_flux.qad import MODEL, mean, measure, report

pytestmark = pytest.mark.bench
TRIED_OUT = [
    "quantize.calibration.sources.0.samples=2", "train.max_steps=4", "train.batch_size=4", "train.validation.every=4",
    "train.drawn.prompts.samples=4",
]  # fmt: skip


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def test_qad_wins_back_half_of_what_nvfp4_took(device: str, tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    if not MODEL.is_dir():
        pytest.skip(f"{MODEL} is missing: tests/small_flux/train.py trains it on a GPU")
    whole = device == "cuda"
    result = measure(
        tmp_path, MODEL, [1, 2, 3] if whole else [1], 2048 if whole else 8, device, [] if whole else TRIED_OUT
    )
    print(f"\n{report(result)}")
    if whole:
        found = [mean(result, name) for name in ("fulfilment", "psnr")]
        assert all(one is not None and one >= 0.5 for one in found)
