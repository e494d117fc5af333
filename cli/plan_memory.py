"""The peak memory of each stage of a recipe for a language model, from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from halfbyte.eval.fidelity import SLICE
from halfbyte.eval.generation import OF_MEMORY
from halfbyte.eval.passes import Shape, begin, largest, score
from halfbyte.eval.scorer import BUDGETS
from halfbyte.plan_tokens import TaskTokens
from halfbyte.quant.calibration_memory import calibration_memory
from halfbyte.quant.checkpoint import plain_dtype, torch_dtype
from halfbyte.quant.forward_memory import State, counting, loading_bytes, weight_bytes
from halfbyte.quant.models import compute_dtype, empty_model
from halfbyte.quant.training_memory import Unpredictable

if TYPE_CHECKING:
    from halfbyte.quant.produce import Job
    from halfbyte.quant.training_plan import TrainingPlan

_SOME = Shape(1, 16, 0)
"""Texts whose prompts are not known still tell what a token's keys and values take."""
_FIDELITY = 25
"""Bytes of a logit while two distributions are compared: log p, log q, p, their difference, product and choice in
float32, and a mask."""
_LOADING = "while it is loaded, with the pages of its files, which the system takes back when it is short of memory"


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One stage; None is what is not predicted."""

    stage: str
    weights: int
    peak: int | None
    note: str = ""
    """What the number leaves out, or why there is none."""


def plan_memory(
    job: Job, tasks: Sequence[TaskTokens], training: TrainingPlan | None, *, process: int, capacity: int | None
) -> list[StageMemory]:
    """The peak of each stage on its device, with what the process itself takes on a CPU.

    - calibration: see quant.calibration_memory; on a CPU at least what loading takes, see forward_memory.loading_bytes.
    - evaluation, from when it is loaded, of the original and of the checkpoint folded and packed: its weights
      (forward_memory.weight_bytes), and the most of: the largest pass that scores; the largest pass over prompts of
      texts that are generated, with the keys and values of all texts at once beside it, each with room for the longest.
      On a GPU these get at most three quarters of what the weights leave. On a CPU packed weights are views of the
      mapped file, of which the pages of what is not quantized stay as well after they were converted to another type.
    - fidelity: the candidate's logits of a window and the baseline's, with the baseline's output embedding where it is
      kept on disk, and `_FIDELITY` bytes for each logit of a slice.
    - training: see quant.training_memory; loading and calibrating take no more than calibration.

    Args:
        job: The recipe made ready; its model needs no weights.
        tasks: Of plan_tokens.count_tokens.
        training: The plan of its training.
        process: Bytes that a process on a CPU has before a model is opened; 0 where a GPU's memory is meant.
        capacity: Bytes of a GPU's memory; None on a CPU, and where it is not known.
    """
    recipe = job.recipe
    own = torch_dtype(recipe.model.dtype)
    compute = torch_dtype(job.dtype)
    found = [_calibration(job, own, compute_dtype("auto", job.device, own))]
    names: dict[str, State] = {
        "evaluation_baseline": "original", "evaluation_folded": "folded", "evaluation_packed": "packed",
    }  # fmt: skip
    for name, state in names.items():
        found.append(_evaluation(job, tasks, name, state, compute, capacity))
    fidelity = recipe.evaluate.fidelity
    if fidelity is not None:
        vocabulary, hidden = _embedding(job)
        logits = 2 * fidelity.window * vocabulary * compute.itemsize
        logits += _FIDELITY * min(SLICE, fidelity.window) * vocabulary
        weights = weight_bytes(job.plan, recipe.evaluate.weights, compute)
        head = vocabulary * hidden * compute.itemsize
        found.append(StageMemory("fidelity", weights, weights + head + logits))
    if training is not None:
        total = None if training.memory is None else training.memory.total
        note = "" if total is not None else "what a step of this model does depends on its values"
        found.append(StageMemory("training", 0 if training.memory is None else training.memory.weights, total, note))
    return [
        one if one.peak is None else StageMemory(one.stage, one.weights, one.peak + process, one.note) for one in found
    ]


def _make(job: Job) -> Any:
    return lambda dtype: empty_model(job.source, dtype)[1]


def _embedding(job: Job) -> tuple[int, int]:
    config: Any = empty_model(job.source)[0]
    text = config.get_text_config()
    return int(text.vocab_size), int(text.hidden_size)


def _calibration(job: Job, own: torch.dtype, compute: torch.dtype) -> StageMemory:
    spec = job.recipe.quantize.calibration
    try:
        memory = calibration_memory(
            _make(job), job.config, job.plan, spec, compute=compute, own=own, device=job.device.type
        )
    except Unpredictable as error:
        weights = weight_bytes(job.plan, "original", compute)
        return StageMemory("calibration", weights, None, f"not predicted: {error}")
    if job.device.type != "cpu" or job.source.gguf_file is not None:
        return StageMemory("calibration", memory.weights, memory.total)
    loading = memory.weights + loading_bytes(job.plan, torch_dtype(plain_dtype(job.source.folder)), compute)
    note = _LOADING if loading > memory.total else ""
    return StageMemory("calibration", memory.weights, max(memory.total, loading), note)


def _evaluation(
    job: Job, tasks: Sequence[TaskTokens], name: str, state: State, compute: torch.dtype, capacity: int | None
) -> StageMemory:
    settings, kind = job.recipe.evaluate, job.device.type
    weights = weight_bytes(job.plan, state, compute)
    if settings.backend != "hf":
        return StageMemory(name, weights, None, f"not predicted: backend {settings.backend} takes what it is given")
    budget = settings.batch_tokens or BUDGETS[kind]
    shapes = [shape for task in tasks for shape in task.passes]
    note = ""
    unknown = [task for task in tasks if not task.passes]
    if unknown:
        note = f"at most: {', '.join(task.task for task in unknown)} as a full pass of {budget:,} tokens"
        scores = any(not task.generated for task in unknown)
        shapes.append(Shape(1, budget, 0, budget if scores else 0))
        lacking = [task.task for task in unknown if task.generated is None or (task.generated and not task.slots)]
        note += f"; without keys and values of {', '.join(lacking)}" if lacking else ""
    slots = max((task.slots * task.slot_tokens for task in tasks), default=0)
    scored = largest(shape for shape in shapes if shape.scored)
    begun = largest(shape for shape in shapes if not shape.scored) or ([_SOME] if slots else [])
    peaks = []
    try:
        with counting(_make(job), job.config, job.plan, state, compute) as (model, count):
            for shape in scored:
                peaks.append(count(partial(score, model, shape))[0].working)
            for shape in begun:
                memory, bytes_a_token = count(partial(begin, model, shape))
                peaks.append(memory.working + _slots(slots, bytes_a_token, capacity, weights))
    except Unpredictable as error:
        return StageMemory(name, weights, None, f"not predicted: {error}")
    mapped = 0
    own = torch_dtype(job.recipe.model.dtype)
    if state == "packed" and kind == "cpu" and compute != own:
        mapped = job.plan.tensor_bytes - sum(layer.stored_bytes(own.itemsize) for layer in job.plan.quantized)
    return StageMemory(name, weights, weights + mapped + max(peaks), note)


def _slots(tokens: int, bytes_a_token: int, capacity: int | None, weights: int) -> int:
    """Bytes of the keys and values of all texts that are generated at once."""
    wanted = tokens * bytes_a_token
    return wanted if capacity is None else min(wanted, max(0, int(OF_MEMORY * (capacity - weights))))
