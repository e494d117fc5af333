"""What a recipe for a model that draws will make and take, as far as it is known before anything is drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from halfbyte.eval.pipeline_parts import part_bytes
from halfbyte.eval.pipelines import STAGES, needed
from halfbyte.eval.vram import modes
from halfbyte.image_sides import images_of
from halfbyte.plan_hours import shown
from halfbyte.quant.checkpoint import torch_dtype
from halfbyte.quant.configs import methods
from halfbyte.quant.drawing_plan import asked_of
from halfbyte.quant.pipeline_calibration import calibration_prompts
from halfbyte.quant.pipeline_plan import PipelinePlan
from halfbyte.quant.pipelines import CONTROL, TRANSFORMER, PipelineSource
from halfbyte.recipes.data import NotAtHand
from halfbyte.recipes.images import DrawnSpec
from halfbyte.recipes.prompts import load_prompts
from halfbyte.recipes.throughput import DRAWN, Throughput
from halfbyte.stages import described, plan_training, told

if TYPE_CHECKING:
    from pathlib import Path

    from halfbyte.quant.produce import Job
    from halfbyte.quant.training_plan import TrainingPlan

_WEIGHTS = "of the weights; what is computed comes on top"


def plan_images(
    job: Job, device: str, capacity: int | None, speeds: Throughput, data_root: Path | None
) -> tuple[dict[str, Any], str]:
    """The plan for JSON, and its head to read. No tokens and no power: neither is known of images.

    Memory is that of the weights that are on the device together: of the whole pipeline, or with low_vram of one part
    at a time. What is computed is not predicted.

    Args:
        job: The recipe made ready; its pipeline needs no weights.
        device: Its name.
        capacity: Bytes of its memory; None where that is not known.
        speeds: What is known of drawing.
        data_root: See recipes.data.data_root.
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
    hours, hours_notes, most = _hours(job, count, training, speeds, data_root)
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
        "throughput": shown(speeds),
        "hours": hours,
        "hours_at_most": most,
        "hours_notes": hours_notes,
        "power": [],
        "power_notes": {},
    }
    drawn = f"images       {count} on each side, {spec.size[0]} x {spec.size[1]} pixels, {spec.steps} steps"
    return content, f"{told(job, training)}\n{drawn}"


def _hours(
    job: Job, count: int, training: TrainingPlan | None, speeds: Throughput, data_root: Path | None
) -> tuple[dict[str, float | None], dict[str, str], list[str]]:
    """Hours of each stage, notes on them, and those that are at most: steps of all images at the speed of drawing.

    The calibration draws as the original does. Scoring images, loading parts and moving them are not in it.
    """
    stages = [
        "calibration",
        "evaluation_baseline",
        "evaluation_candidate",
        *(["training"] if training else []),
        "total",
    ]
    rate = speeds.rates.get(DRAWN)
    if rate is None:
        return dict.fromkeys(stages), dict.fromkeys(stages, "no speed of drawing is known"), []
    source = cast(PipelineSource, job.source)
    spec, block = images_of(job.recipe.evaluate), job.recipe.quantize.calibration

    def hours(images: int, drawn: DrawnSpec) -> float:
        asked = asked_of(source, drawn)
        return images * drawn.steps * (asked.patches + asked.length) / rate.tokens_per_second / 3600

    slower = speeds.slower.get(job.recipe.evaluate.weights)
    found: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    more = sorted({str(one) for one in methods(job.config)} - {"max", "None"})
    try:
        prompts = len(calibration_prompts(block, control=source.class_name == CONTROL, data_root=data_root)[0])
    except NotAtHand:
        prompts = sum(entry.samples for entry in block.sources)
    found["calibration"] = None if more or block.images is None else hours(prompts, block.images)
    if more:
        notes["calibration"] = f"how long {', '.join(more)} takes is not known"
    found["evaluation_baseline"] = hours(count, spec)
    found["evaluation_candidate"] = hours(count, spec) * (slower or 1.0)
    if slower is None:
        notes["evaluation_candidate"] = (
            "as the original takes: how much longer quantized weights take is not known here"
        )
    if training is not None:
        found["training"], notes["training"] = None, "no speed of training is known"
    known = [one for one in found.values() if one is not None]
    most = [stage for stage, one in found.items() if one is not None and rate.at_least]
    return found | {"total": sum(known) if len(known) == len(found) else None}, notes, most
