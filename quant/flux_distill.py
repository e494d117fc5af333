"""QAD for models that draw: the quantized transformer learns the unquantized one's velocity at each step it drew."""

from __future__ import annotations

import gc
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn

from halfbyte.quant import ptq
from halfbyte.quant.learned_scales import learn_scales, scales_fault
from halfbyte.quant.lora import add_lora
from halfbyte.quant.shared import share_inputs
from halfbyte.quant.train import checkpoints_of, finished, put_trained, steps_of, warmup_of
from halfbyte.quant.trajectories import VELOCITY, Row, Trajectories, collate, draw_trajectories
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.quant.whole import Checkpoints, Saved
from halfbyte.recipes.drawn import DrawnTrajectories
from halfbyte.recipes.training import LoraSpec, TrainSpec
from halfbyte.records.errors import UserError, disk_full_is_a_user_error
from halfbyte.records.manifest import hardware, now, package_versions
from halfbyte.records.run import RunFolder
from halfbyte.records.training import TrainingRecord, Validation

if TYPE_CHECKING:
    from halfbyte.quant.curves import Curves
    from halfbyte.quant.pipeline_making import PipelineMaking

logger = logging.getLogger(__name__)

FLUX_LINEARS = [
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp"),
]
"""Where factors are put when the recipe names no targets of its own; single blocks' proj_out is called as the last
projection is, so that it must be named in full."""
_OPTIMIZER = "optimizer.pt"
_VALIDATED = "loss"


@dataclass(frozen=True)
class FluxTraining:
    """All that a distillation needs."""

    spec: TrainSpec
    key: str
    """Digest of all that decides it."""
    device: torch.device
    model: nn.Module
    """The transformer as calibrated; it is changed."""
    trajectories: Trajectories
    teacher_name: str
    data: dict[str, str] = field(default_factory=dict)
    """Digest of the prompts, by the name of their source."""


def held_prompts(spec: TrainSpec, count: int) -> int:
    """Prompts of so many that are held out for validation."""
    return min(max(1, round(spec.validation.share * count)), spec.validation.samples or count, count - 1)


class Steps:
    """Which rows each optimizer step sees, and which are held out, by the seed alone.

    Whole prompts are held out, so that nothing of their images is trained on.

    Args:
        trajectories: All that was recorded.
        spec: The train block.

    Raises:
        UserError: for fewer than two prompts.
    """

    def __init__(self, trajectories: Trajectories, spec: TrainSpec) -> None:
        count, each = trajectories.count, trajectories.steps
        if count < 2:
            raise UserError(
                "train.drawn.prompts holds one prompt, and one must be held out for validation", "give two at least"
            )
        held = held_prompts(spec, count)
        self._generator = torch.Generator().manual_seed(spec.seed)
        prompts = torch.randperm(count, generator=self._generator).tolist()
        self.held = [prompt * each + step for prompt in sorted(prompts[:held]) for step in range(each)]
        self.rows = torch.tensor([prompt * each + step for prompt in sorted(prompts[held:]) for step in range(each)])
        self.per_step = spec.batch_size * spec.gradient_accumulation
        self.total = steps_of(spec, len(self.rows))
        epochs = math.ceil(self.total * self.per_step / len(self.rows))
        order = [self.rows[torch.randperm(len(self.rows), generator=self._generator)] for _ in range(epochs)]
        self._order = torch.cat(order)
        self._patches = trajectories.tokens

    def of(self, step: int) -> list[int]:
        """The rows of a step, counted from 0."""
        return cast(list[int], self._order[step * self.per_step : (step + 1) * self.per_step].tolist())

    def tokens(self, step: int) -> int:
        """Patches seen after so many steps."""
        return step * self.per_step * self._patches


def trained(made: PipelineMaking) -> Any:
    """The calibrated transformer of a recipe that trains, with what training has learned, ready to be settled.

    The teacher draws alone on the device, is let go of, and only then the student is trained. What is trained is put
    into a transformer that is opened and calibrated anew, so that nothing else of the training is left in it.

    Args:
        made: Of a job with a train block; its seconds, data and seeds get those of the training.
    """
    from halfbyte.quant.making import timed

    job, run, spec = made.job, made.run, cast(TrainSpec, made.job.recipe.train)
    model, record = made.calibrated(), finished(run, job.key)
    if record is None:
        checkpoints_of(run, job.key).found()  # refuses those of another training before the teacher draws
        device = made.processes.device
        model.cpu()
        with timed(made.seconds, "teacher"):
            trajectories, data = draw_trajectories(
                made.source, cast(DrawnTrajectories, spec.drawn), run.training / "teacher",
                weights=made.own, compute=made.computed, device=device, data_root=made.data_root,
            )  # fmt: skip
        _free(device)
        with timed(made.seconds, "train"):
            model.to(device)
            training = FluxTraining(spec, job.key, device, model, trajectories, made.source.name, data)
            record = distill(training, run)
        del training, model  # nobody else holds it: two would not fit
        _free(device)
        model = made.open()
        ptq.load_calibration(model, run.calibration)
    else:
        logger.info("training: done already")
        made.seconds["train"] = record.seconds
    made.data |= {f"training: {name}": digest for name, digest in record.data.items()}
    made.seeds["training"] = record.seed
    ptq.share_scales(model)
    put_trained(model, spec, run, job.key)
    return model


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def distill(training: FluxTraining, run: RunFolder) -> TrainingRecord:
    """Trains, from the last whole checkpoint where there is one, and writes run.training.

    Raises:
        UserError: when training diverges; the last good checkpoint stays on disk.
    """
    from halfbyte.quant.curves import Curves, Diverged

    spec = training.spec
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("the distillation of a model that draws runs in one process", "start it without a launcher")
    steps = Steps(training.trajectories, spec)
    checkpoints = checkpoints_of(run, training.key)
    checkpoints.clear()
    last = checkpoints.last()
    _make_trainable(training)
    resumed = last.step if last else 0
    curves = Curves(run.training, cast(Any, steps), steps.total, resumed=resumed, metric=_VALIDATED)
    loop = _Loop(training, steps, curves, checkpoints)
    if last is not None:
        logger.info("training: goes on from step %d of %d", last.step, steps.total)
        loop.resume(last)
    stopped = "max_steps"
    try:
        with quiet_upstream(), attention_with_gradients():
            stopped = loop.run(resumed)
    except Diverged as error:
        stopped = f"diverged: {error}"
    finally:
        curves.close()
    if not curves.validations:
        raise UserError(f"the model is broken before training: {stopped}", "look at the recipe's quantize block")
    record = _record(training, curves, checkpoints, steps, loop.done, stopped)
    record.save(run.training)
    finished(run, training.key)  # says it where training has diverged
    logger.info(
        "training: validation loss %.5f before, %.5f at step %d, which is exported",
        record.start.loss, record.best.loss, record.best_step,
    )  # fmt: skip
    if record.best.loss >= record.start.loss:
        logger.warning("training has made the model worse")
    return record


def flux_lora(spec: LoraSpec) -> LoraSpec:
    """LoRA with a transformer's own linears as targets, where the recipe leaves those of language models."""
    if spec.targets != LoraSpec.model_fields["targets"].default:
        return spec
    return spec.model_copy(update={"targets": FLUX_LINEARS})


def _make_trainable(training: FluxTraining) -> None:
    """The calibrated transformer as it is trained: scales shared as in the export, in the type it is trained in."""
    model, spec = training.model, training.spec
    ptq.share_scales(cast(Any, model))
    if not ptq.quantizers(model):
        raise UserError("the recipe quantizes nothing of the model, so that there is nothing to train for")
    model.to(torch.float32 if spec.weights_dtype == "float32" else torch.bfloat16)
    model.requires_grad_(True)
    if spec.learned_scales:
        learn_scales(model)
    if spec.lora is not None:
        torch.manual_seed(spec.seed)
        add_lora(cast(Any, model), flux_lora(spec.lora))
    share_inputs(model)
    if spec.gradient_checkpointing:
        cast(Any, model).enable_gradient_checkpointing()


@contextmanager
def attention_with_gradients() -> Iterator[None]:
    """Gives the attention of ModelOpt's quantized transformers a gradient, with the same values, within the block.

    ModelOpt passes it through an autograd.Function that is there for ONNX and has no backward (FP8SDPA, 0.47); the
    quantizers of its operands are outside of that and have theirs.
    """
    from modelopt.torch.quantization.plugins.diffusion import diffusers as upstream

    class Plain:
        @staticmethod
        def apply(*arguments: Any) -> Any:
            query, key, value, mask, dropout, causal, scale = arguments[:7]
            return upstream.original_scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale
            )

    kept, upstream.FP8SDPA = upstream.FP8SDPA, Plain
    try:
        yield
    finally:
        upstream.FP8SDPA = kept


class _Loop:
    """The optimizer steps of a distillation with their validations and checkpoints."""

    def __init__(self, training: FluxTraining, steps: Steps, curves: Curves, checkpoints: Checkpoints) -> None:
        from transformers import get_scheduler

        from halfbyte.quant.trainer import trained_parameters

        spec = training.spec
        self.training, self.steps, self.curves, self.checkpoints = training, steps, curves, checkpoints
        self.spec, self.model, self.done = spec, training.model, 0
        self.parameters = trained_parameters(self.model)
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=spec.learning_rate, weight_decay=spec.weight_decay, fused=True
        )
        self.schedule = get_scheduler(
            "constant_with_warmup" if spec.schedule == "constant" else spec.schedule,
            self.optimizer,
            num_warmup_steps=warmup_of(spec, steps.total),
            num_training_steps=steps.total,
        )

    def resume(self, saved: Saved) -> None:
        """Goes back to where a checkpoint was written."""
        from halfbyte.quant.trainer import load_trained

        load_trained(self.model, saved.folder)
        kept = torch.load(saved.folder / _OPTIMIZER, weights_only=True, map_location=self.training.device)
        self.optimizer.load_state_dict(kept["optimizer"])
        self.schedule.load_state_dict(kept["schedule"])
        self.done = saved.step

    def run(self, first: int) -> str:
        """Trains to the end; why it ended."""
        if first == 0:
            self._validate(0)
        while self.done < self.steps.total:
            if self._out_of_patience():
                return "patience"
            self._step()
            validates = self.done % self.spec.validation.every == 0 or self.done == self.steps.total
            loss = self._validate(self.done) if validates else None
            if validates or (self.spec.save_every is not None and self.done % self.spec.save_every == 0):
                self._save(loss)
        return "max_steps"

    def _step(self) -> None:
        from halfbyte.quant.curves import Diverged

        self.model.train()
        rate, total = float(self.schedule.get_last_lr()[0]), 0.0
        parts = list(_cut(self.steps.of(self.done), self.spec.batch_size))
        for part in parts:
            loss = self._loss(part) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), self.spec.max_grad_norm))
        if not math.isfinite(norm):
            raise Diverged(f"the gradient is {norm} at step {self.done + 1}")
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        logs = {"loss": total, "learning_rate": rate, "grad_norm": norm}
        self.curves.on_log(None, SimpleNamespace(global_step=self.done), None, logs=logs)

    def _loss(self, rows: Sequence[int]) -> Tensor:
        """Mean squared difference of the velocities."""
        inputs = self._batch(rows)
        wanted = inputs.pop(VELOCITY)
        with self._autocast():
            found = self.model(**inputs, return_dict=False)[0]
        return nn.functional.mse_loss(found.float(), wanted.float())

    def _batch(self, rows: Sequence[int]) -> Row:
        device, kind = self.training.device, next(iter(self.parameters.values())).dtype
        found = collate([self.training.trajectories[row] for row in rows])
        return {name: value.to(device, kind if name != VELOCITY else None) for name, value in found.items()}

    def _autocast(self) -> AbstractContextManager[Any]:
        device, dtype = self.training.device.type, self.spec.dtype
        if (dtype if dtype != "auto" else {"cuda": "bfloat16"}.get(device, "float32")) == "float32":
            return nullcontext()
        return torch.autocast(device, torch.bfloat16)

    @torch.no_grad()
    def _validate(self, step: int) -> float:
        from halfbyte.quant.curves import Diverged

        fault = scales_fault(self.model)
        if fault is not None:
            raise Diverged(f"{fault} at step {step}")
        self.model.eval()
        sums = [float(self._loss(part)) * len(part) for part in _cut(self.steps.held, self.spec.batch_size)]
        loss = sum(sums) / len(self.steps.held)
        self.curves.validated(step, loss, None)
        return loss

    def _out_of_patience(self) -> bool:
        patience = self.spec.validation.patience
        losses = [one.loss for one in self.curves.validations if one.step > 0]
        return patience is not None and bool(losses) and len(losses) - 1 - losses.index(min(losses)) >= patience

    def _save(self, loss: float | None) -> None:
        from halfbyte.quant.trainer import TRAINED_FILES

        scratch = self.checkpoints.scratch
        with disk_full_is_a_user_error(scratch):
            scratch.mkdir(parents=True, exist_ok=True)
            trained = {name: value.detach() for name, value in self.parameters.items()}
            save_torch_state_dict(trained, scratch, filename_pattern=TRAINED_FILES, max_shard_size="2GB")
            kept = {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
            torch.save(kept, Path(scratch) / _OPTIMIZER)
            self.curves.flush()
            self.checkpoints.add(scratch, self.done, loss=loss, kl=None)
            self.checkpoints.thin(_VALIDATED, self.spec.validation.keep)


def _cut(rows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def _record(
    training: FluxTraining, curves: Curves, checkpoints: Checkpoints, steps: Steps, done: int, stopped: str
) -> TrainingRecord:
    best, start = checkpoints.best(_VALIDATED), curves.validations[0]
    return TrainingRecord(
        created=now(),
        key=training.key,
        method="qad",
        learned="velocities",
        seed=training.spec.seed,
        steps=done,
        best_step=best.step if best else 0,
        stopped=stopped,
        start=start,
        best=Validation(step=best.step, loss=cast(float, best.loss)) if best else start,
        tokens=steps.tokens(done),
        seconds=round(curves.seconds, 3),
        teacher=training.teacher_name,
        data=training.data,
        packages=package_versions(),
        hardware=hardware(),
    )
