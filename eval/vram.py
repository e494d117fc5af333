"""Which way of running a pipeline fits into a GPU: what its weights take in each, before and after it has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from halfbyte.eval.pipelines import STAGES, Pipeline
from halfbyte.records.errors import UserError


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of running a pipeline."""

    low_vram: bool
    packed: bool
    """Whether the transformer's weights stay as they are stored, in 4 or 8 bits."""
    bytes: int
    """Of the weights that are in memory together, at most; what is computed comes on top."""

    def __str__(self) -> str:
        settings = f"evaluate.images.low_vram={str(self.low_vram).lower()}"
        return f"{settings} evaluate.weights={'packed' if self.packed else 'folded'} ({self.bytes / 1e9:.1f} GB)"


def modes(stages: dict[str, int], packed: int | None = None) -> list[Mode]:
    """All ways, the fastest first.

    Args:
        stages: Bytes of the weights of each stage, the transformer's in bfloat16 or another plain type.
        packed: Of the transformer's weights as stored; None where they are not quantized.
    """
    found = []
    for low_vram in (False, True):
        for transformer in [stages[STAGES[1]], *([] if packed is None else [packed])]:
            each = [stages[STAGES[0]], transformer, stages[STAGES[2]]]
            needed = max(each) if low_vram else sum(each)
            found.append(Mode(low_vram, packed is not None and transformer == packed, needed))
    return found


def too_little(pipeline: Pipeline, there: int, *, failed: bool) -> UserError:
    """The error for a GPU that is too small: says what the chosen way takes and which other would fit.

    Args:
        pipeline: As it was to run.
        there: Bytes of the GPU that are there for it.
        failed: Whether it has run out of memory; else its weights alone are known not to fit.
    """
    stages = pipeline.stage_bytes()
    needed = max(stages.values()) if pipeline.low_vram else sum(stages.values())
    plain = {**stages, STAGES[1]: pipeline.plain_transformer_bytes()}
    every = modes(plain, pipeline.parts.packed_bytes)
    fitting = [mode for mode in every if mode.bytes < there and (mode.bytes < needed or not failed)]
    what = "ran out of" if failed else "needs more than there is of"
    message = (
        f"{pipeline.kind} {what} {pipeline.device}'s memory: its weights take {needed / 1e9:.1f} GB in this mode, and "
        f"{there / 1e9:.1f} GB are free"
    )
    if not fitting:
        least = min(every, key=lambda mode: mode.bytes)
        return UserError(message, f"no mode fits; the smallest is {least}: take a larger GPU, or --device cpu")
    return UserError(message, f"by their weights these fit: {', '.join(map(str, fitting))}")


@contextmanager
def enough_memory(pipeline: Pipeline) -> Iterator[None]:
    """Refuses a GPU that has no room for the weights, and says what would fit where it runs out of memory.

    Raises:
        UserError: see too_little.
    """
    there = None
    if pipeline.device.type == "cuda":
        there = torch.cuda.mem_get_info(pipeline.device)[0]
        stages = pipeline.stage_bytes().values()
        if not pipeline.loaded and (max(stages) if pipeline.low_vram else sum(stages)) > there:
            raise too_little(pipeline, there, failed=False)
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise too_little(pipeline, there or 0, failed=True) from error
