"""What a recipe for a model that draws will make and take, as far as it is known before anything is drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from halfbyte.eval.pipeline_parts import part_bytes
from halfbyte.eval.pipelines import STAGES, needed
from halfbyte.eval.vram import modes
from halfbyte.image_sides import images_of
from halfbyte.quant.checkpoint import torch_dtype
from halfbyte.quant.pipeline_plan import PipelinePlan
from halfbyte.quant.pipelines import TRANSFORMER
from halfbyte.recipes.prompts import load_prompts
from halfbyte.stages import described, plan_training, told

if TYPE_CHECKING:
    from halfbyte.quant.produce import Job

_WEIGHTS = "of the weights; what is computed comes on top"


def plan_images(job: Job, device: str, capacity: int | None) -> tuple[dict[str, Any], str]:
    """The plan for JSON, and its head to read. No tokens, no hours and no power: none of them is known of images.

    Memory is that of the weights that are on the device together: of the whole pipeline, or with low_vram of one part
    at a time. What is computed is not predicted.

    Args:
        job: The recipe made ready; its pipeline needs no weights.
        device: Its name.
        capacity: Bytes of its memory; None where that is not known.
    """
    spec = images_of(job.recipe.evaluate)
    parts = part_bytes(job.source.folder, torch_dtype(job.recipe.model.dtype))
    plan = cast(PipelinePlan, job.plan)
    others = sum(size for name, size in parts.items() if name != TRANSFORMER)
    if plan.copied_bytes < others:  # the configurations are here, and the weights are not
        job = replace(job, plan=replace(plan, copied_bytes=others))
    stages = {stage: sum(parts[name] for name in needed(stage, parts)) for stage in STAGES}
    ways = {mode.low_vram: mode.bytes for mode in modes(stages)}
    packed = {mode.low_vram: mode.bytes for mode in modes(stages, job.plan.tensor_bytes) if mode.packed}
    training = plan_training(job, capacity=capacity)
    memory = {
        "calibration": parts[TRANSFORMER] + parts.get("vae", 0),
        "evaluation_baseline": ways[spec.low_vram],
        "evaluation_folded": ways[spec.low_vram],
        "evaluation_packed": packed[spec.low_vram],
    }
    notes = dict.fromkeys(memory, _WEIGHTS)
    if training is not None and training.memory is not None:
        memory["training"] = training.memory.total
    count = len(load_prompts(spec.prompts, spec.limit, spec.control_images)) * len(spec.seeds)
    content = {
        **described(job, training),
        "checkpoint_bytes": job.plan.exported_bytes,
        "device": device,
        "device_bytes": capacity,
        "process_bytes": 0,
        "peak_memory_bytes": memory,
        "memory_notes": notes,
        "images": count,
        "tokens": {},
        "throughput": {},
        "hours": {"total": None},
        "hours_at_most": [],
        "hours_notes": {"total": "no speed of drawing is known"},
        "power": [],
    }
    drawn = f"images       {count} on each side, {spec.size[0]} x {spec.size[1]} pixels, {spec.steps} steps"
    return content, f"{told(job, training)}\n{drawn}"
