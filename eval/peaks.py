"""Measures what a pipeline takes of memory at most, stage by stage, and lays it out with all parts loaded and one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfbyte.eval.pipelines import STAGES, Pipeline, Request
from halfbyte.eval.vram import enough_memory
from halfbyte.records.memory import MemoryRow

STEPS = 2
"""As many as show all that a step takes: the first and another."""
HEAD = ("transformer", "weights", *STAGES, "normal", "low VRAM", "saved")


def peaks_of(pipeline: Pipeline, request: Request) -> dict[str, int]:
    """Peak bytes of each stage while one image is drawn; the pipeline is loaded for it and freed after.

    With all parts loaded it is drawn twice and the second time counts; low VRAM is best measured after that, when all
    kernels are compiled.

    Args:
        pipeline: With nothing loaded yet.
        request: The image; of its steps, STEPS are enough.

    Raises:
        UserError: when the GPU is too small, with what would fit.
    """
    with enough_memory(pipeline):
        for _ in range(1 if pipeline.low_vram else 2):  # loading, and compiling kernels, are not what running takes
            pipeline.peaks.clear()
            with pipeline.stage(STAGES[0]):
                encoded = pipeline.encode(request)
            with pipeline.stage(STAGES[1]):
                latents = pipeline.denoise(request, encoded)
            with pipeline.stage(STAGES[2]):
                pipeline.decode(request, latents)
        pipeline.free()
    return dict(pipeline.peaks)


def memory_table(rows: Sequence[MemoryRow]) -> list[list[str]]:
    """The table, with its head: a row a model, the peaks of low-VRAM stages, and of both ways, in GB of 10^9 bytes.

    What a way saves is told beside the first model's in the same way: 2.1x.
    """
    found: list[list[str]] = [list(HEAD)]
    models = list(dict.fromkeys((row.model, row.format, row.weights) for row in rows))
    first = {row.low_vram: row.peak for row in reversed(rows) if (row.model, row.format, row.weights) == models[0]}
    for model in models:
        sides = {row.low_vram: row for row in rows if (row.model, row.format, row.weights) == model}
        low = sides.get(True)
        stages = [_gb(low.stages.get(stage)) if low else "–" for stage in STAGES]
        saved = [
            f"{first[way] / sides[way].peak:.2f}x" if way in sides and way in first else "–" for way in (False, True)
        ]
        peaks = [_gb(sides[way].peak) if way in sides else "–" for way in (False, True)]
        weights: Any = next(iter(sides.values()))
        found.append([model[1], f"{_gb(weights.transformer_bytes)} {model[2]}", *stages, *peaks, " / ".join(saved)])
    return found


def _gb(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e9:.2f} GB"
