"""A GPU that is too small: the message says what the chosen way takes and which other fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drawing import asked, opened, summary, write_prompts

from halfbyte.eval.images import Drawing
from halfbyte.eval.pipeline_parts import Parts
from halfbyte.eval.pipelines import STAGES, Pipeline
from halfbyte.eval.vram import modes, too_little
from halfbyte.records.errors import UserError

FULL = dict(zip(STAGES, (9_800, 23_800, 200), strict=True))
PACKED = 6_900


def test_what_each_mode_holds_together() -> None:
    found = [(mode.low_vram, mode.packed, mode.bytes) for mode in modes(FULL, PACKED)]
    assert found == [
        (False, False, 33_800), (False, True, 16_900), (True, False, 23_800), (True, True, 9_800),
    ]  # fmt: skip
    assert [mode.bytes for mode in modes(FULL)] == [33_800, 23_800]


def _pipeline(folder: Path, *, low_vram: bool = False, packed: int | None = PACKED) -> Pipeline:
    whole = opened(folder).parts
    sizes = {"text_encoder": 300, "text_encoder_2": 9_500, "transformer": 23_800, "vae": 200}
    pipeline = Pipeline(Parts(whole.skeleton, whole.openers, sizes, packed), torch.device("cpu"), low_vram)
    pipeline.plain_transformer_bytes = lambda: 23_800  # type: ignore[method-assign]
    return pipeline


def test_the_modes_that_fit_are_named(tiny_flux: Path) -> None:
    error = too_little(_pipeline(tiny_flux), 25_000, failed=False)
    assert "its weights take 0.0 GB" in error.message
    assert error.hint is not None
    assert error.hint.count("evaluate.images.low_vram=true") == 2
    assert error.hint.count("evaluate.weights=packed") == 2
    assert too_little(_pipeline(tiny_flux), 10_000, failed=False).hint == (
        "by their weights these fit: evaluate.images.low_vram=true evaluate.weights=packed (0.0 GB)"
    )


def test_where_no_mode_fits_the_smallest_is_named(tiny_flux: Path) -> None:
    hint = too_little(_pipeline(tiny_flux), 5_000, failed=False).hint or ""
    assert hint.startswith("no mode fits; the smallest is evaluate.images.low_vram=true evaluate.weights=packed")


def test_a_mode_that_has_failed_is_not_offered_again(tiny_flux: Path) -> None:
    hint = too_little(_pipeline(tiny_flux, low_vram=True), 90_000, failed=True).hint or ""
    assert "low_vram=true evaluate.weights=folded" not in hint
    assert "low_vram=true evaluate.weights=packed" in hint
    assert "low_vram=false evaluate.weights=packed" in hint  # 16.9 of which the transformer's 23.8 ran out


def test_running_out_of_memory_is_one_line(tiny_flux: Path, tmp_path: Path) -> None:
    pipeline = opened(tiny_flux)

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pipeline.denoise = full  # type: ignore[method-assign]
    drawing = Drawing(pipeline, asked(write_prompts(tmp_path)), summary(), dtype="float32")
    with pytest.raises(UserError, match="FluxPipeline ran out of cpu's memory"):
        drawing.draw(tmp_path / "images")
