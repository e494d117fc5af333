"""The hours of each stage of a recipe: its tokens at speeds that were measured or stated, and else none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfbyte.eval.passes import Shape, seconds_of_score, seconds_of_step
from halfbyte.plan_tokens import TaskTokens
from halfbyte.quant import calibration
from halfbyte.quant.attach import prepare
from halfbyte.quant.checkpoint import torch_dtype
from halfbyte.quant.configs import methods
from halfbyte.quant.forward_memory import build
from halfbyte.quant.models import compute_dtype, empty_model, has_tokenizer, open_tokenizer
from halfbyte.recipes.data import NotAtHand
from halfbyte.recipes.texts import load_texts
from halfbyte.recipes.throughput import Rate, Throughput

if TYPE_CHECKING:
    from halfbyte.quant.produce import Job
    from halfbyte.quant.training_plan import TrainingPlan

_HERE = "measured on this machine just now, with random weights"
_PROMPT = 512
"""Tokens of a prompt whose length is not known."""


@dataclass(frozen=True, slots=True)
class StageHours:
    """One stage; None is what is not known."""

    stage: str
    hours: float | None
    at_most: bool = False
    note: str = ""
    """Why it is not known, or what it leaves out."""


def shown(speeds: Throughput) -> dict[str, dict[str, Any]]:
    """The speeds that a plan reckons with, for JSON."""
    return {
        kind: {"tokens_per_second": rate.tokens_per_second, "source": rate.source, "at_least": rate.at_least}
        for kind, rate in speeds.rates.items()
    }


def token_weights(job: Job) -> float:
    """Weights of the layers that a token passes through: of experts, as many as the router chooses for each token."""
    config: Any = empty_model(job.source)[0]
    text = config.get_text_config()
    counts = [getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    experts = next((int(one) for one in counts if one), 1)
    share = min(1.0, int(getattr(text, "num_experts_per_tok", None) or experts) / experts)
    head = {"lm_head", "embed_out", "output"}
    layers = [
        layer for layer in job.plan.layers if layer.kind != "Embedding" and layer.name.rsplit(".", 1)[-1] not in head
    ]
    routed = sum(layer.weights for layer in layers if layer.of_experts)
    return sum(layer.weights for layer in layers) - (1 - share) * routed


def calibration_tokens(job: Job, data_root: Path | None) -> tuple[int, bool]:
    """Tokens of the calibration, and whether that is the most there can be, since texts or tokenizer are not here."""
    spec = job.recipe.quantize.calibration
    most = sum(entry.samples for entry in spec.sources) * spec.length
    if not has_tokenizer(job.source):
        return most, True
    try:
        texts = [text for entry in spec.sources for text in load_texts(entry, spec.seed, data_root).texts]
    except NotAtHand:
        return most, True
    return sum(map(len, calibration.tokenize(texts, open_tokenizer(job.source), spec.length))), False


def plan_hours(
    job: Job,
    tasks: Sequence[TaskTokens],
    training: TrainingPlan | None,
    speeds: Throughput,
    calibrated: tuple[int, bool],
) -> list[StageHours]:
    """Tokens over tokens a second, stage by stage; loading, exporting, verifying and reports are not in it.

    The texts of an evaluation go on to their limit, so that its hours are at most these. Where the speed of generating
    was measured without prompts, theirs are scored. A checkpoint is slower than the original where that was measured.

    Args:
        job: The recipe made ready.
        tasks: Of plan_tokens.count_tokens.
        training: The plan of its training; the seconds of a step are used where they were measured.
        speeds: What is known.
        calibrated: Of calibration_tokens.
    """
    found = [_calibration(job, speeds, calibrated)]
    for side in ("baseline", "candidate"):
        held = job.recipe.evaluate.weights
        slower = 1.0 if side == "baseline" else speeds.slower.get(held)
        one = _evaluation(tasks, f"evaluation_{side}", speeds, slower or 1.0)
        if slower is None and one.hours is not None and job.recipe.evaluate.backend == "hf":
            one = replace(one, note=f"as the original takes: how much longer {held} weights take is not known here")
        found.append(one)
    if training is not None:
        found.append(_training(training, speeds))
    return found


def _unknown(what: str, kind: str) -> str:
    return f"no speed of {what} is known; state it (--throughput {kind}=N, tokens a second) or --measure"


def _calibration(job: Job, speeds: Throughput, calibrated: tuple[int, bool]) -> StageHours:
    rate = speeds.rates.get("calibrated")
    more = sorted({str(one) for one in methods(job.config)} - {"max", "None"})
    if more:
        return StageHours("calibration", None, note=f"how long {', '.join(more)} takes is not known")
    if rate is None:
        return StageHours("calibration", None, note=_unknown("calibrating", "calibrated"))
    tokens, most = calibrated
    return StageHours("calibration", tokens / rate.tokens_per_second / 3600, most or rate.at_least)


def _evaluation(tasks: Sequence[TaskTokens], stage: str, speeds: Throughput, slower: float) -> StageHours:
    seconds, at_most = 0.0, False
    for task in tasks:
        if task.prompts is None or task.generated is None:
            return StageHours(stage, None, note=f"the tokens of {task.task} are not known")
        with_prompts = bool(task.generated) and speeds.prompts_included
        parts = [("generated", task.generated), ("scored", 0 if with_prompts else task.prompts)]
        for kind, tokens in parts:
            if tokens:
                rate: Rate | None = speeds.rates.get(kind)
                if rate is None:
                    return StageHours(stage, None, note=_unknown(f"tokens {kind}", kind))
                seconds += tokens / rate.tokens_per_second
                at_most = at_most or rate.at_least or kind == "generated"
    return StageHours(stage, seconds * slower / 3600, at_most)


def _training(training: TrainingPlan, speeds: Throughput) -> StageHours:
    if training.steps is None:
        return StageHours("training", None, note="its steps depend on texts that were not read")
    if training.seconds is not None:
        return StageHours("training", training.steps * training.seconds / 3600)
    rate = speeds.rates.get("trained")
    if rate is None:
        return StageHours("training", None, note=_unknown("training", "trained"))
    return StageHours("training", training.steps * training.tokens / rate.tokens_per_second / 3600, rate.at_least)


def measure(job: Job, tasks: Sequence[TaskTokens]) -> Throughput:
    """Runs a few passes of this recipe's own sizes on the device, with random weights, and measures them.

    Scoring: the largest pass of the tasks, its prefix kept; on a CPU once more with the quantizers of a checkpoint
    whose weights are folded, which may take as long as all else. Generating: texts at once as the tasks have, of
    prompts of mean length. Calibrating: a batch of full length.

    Args:
        job: The recipe made ready, for a device of this machine.
        tasks: Of plan_tokens.count_tokens.
    """
    from transformers import AutoModelForCausalLM

    config = empty_model(job.source)[0]
    own = torch_dtype(job.recipe.model.dtype)
    compute = torch_dtype(job.dtype)

    def opened(dtype: torch.dtype) -> Any:
        with torch.device(job.device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()  # type: ignore[no-untyped-call]

    model = opened(compute)
    rates, slower = {}, {}
    shapes = [shape for task in tasks for shape in task.passes]
    shape = max(shapes, key=lambda one: (bool(one.scored), one.sequences * one.tokens), default=None)
    if shape is not None:
        scored = Shape(shape.sequences, shape.tokens, shape.prefix, max(1, shape.scored), shape.masked)
        seconds = seconds_of_score(model, scored)
        rates["scored"] = Rate(scored.sequences * scored.tokens / seconds, _HERE)
        if job.device.type == "cpu":
            slower["folded"] = max(1.0, seconds_of_score(_folded(job, opened, compute), scored) / seconds)
    texts = max((task for task in tasks if task.slots), key=lambda one: one.generated or 0, default=None)
    if texts is not None:
        prompt = _PROMPT if texts.prompts is None or not texts.questions else texts.prompts // texts.questions
        rates["generated"] = Rate(texts.slots / seconds_of_step(model, texts.slots, max(1, prompt)), _HERE)
    spec = job.recipe.quantize.calibration
    if compute_dtype("auto", job.device, own) != compute:
        model = opened(compute_dtype("auto", job.device, own))
    rows = Shape(spec.batch_size, spec.length, 0, 1)
    rates["calibrated"] = Rate(rows.sequences * rows.tokens / seconds_of_score(model, rows), _HERE)
    return Throughput(rates, slower)


def _folded(job: Job, opened: Callable[[torch.dtype], Any], compute: torch.dtype) -> Any:
    """The model as the checkpoint read back computes on a CPU, with random weights."""
    prepare(job.device)
    return build(opened, job.config, job.plan, "folded", compute, device=str(job.device))
