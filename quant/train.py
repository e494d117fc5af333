"""Training between calibration and export: what is made ready, resumed, watched, and chosen in the end."""

from __future__ import annotations

import gc
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from halfbyte.quant import ptq
from halfbyte.quant.batches import Held, InOrder, collate
from halfbyte.quant.learned_scales import fix_scales, learn_scales
from halfbyte.quant.lora import add_lora, merge_lora
from halfbyte.quant.patches import transformers_as_they_are
from halfbyte.quant.shared import share_inputs
from halfbyte.quant.teacher_logits import StoredLogits
from halfbyte.quant.training_texts import Examples
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.quant.whole import Checkpoints, Saved
from halfbyte.recipes.training import TrainSpec
from halfbyte.records.errors import UserError
from halfbyte.records.manifest import hardware, now, package_versions
from halfbyte.records.run import RunFolder
from halfbyte.records.training import MEASURES, TRAINING_FILE, OverlapFound, TrainingRecord, Validation, load_training

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from halfbyte.quant.curves import Curves
    from halfbyte.quant.trainer import QuantizedTrainer

logger = logging.getLogger(__name__)

_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
_LOGGED = 2000
"""Steps that are logged, about: the whole curve is in each checkpoint."""


@dataclass(frozen=True)
class Training:
    """All that a training needs."""

    spec: TrainSpec
    key: str
    """Digest of all that decides it."""
    device: torch.device
    model: PreTrainedModel
    """As calibrated; it is changed."""
    examples: Examples
    teacher: nn.Module | None
    teacher_name: str | None
    overlap: OverlapFound | None = None
    stored: StoredLogits | None = None
    """The teacher's logits, where they were computed before the training; there is no teacher beside the model then."""


def steps_of(spec: TrainSpec, rows: int, processes: int = 1) -> int:
    """Optimizer steps of a training.

    Args:
        spec: The train block.
        rows: Rows to train on.
        processes: Among which each step is divided.
    """
    if spec.max_steps is not None:
        return spec.max_steps
    per_step = spec.batch_size * spec.gradient_accumulation * processes
    return max(1, math.ceil(cast(float, spec.epochs) * rows / per_step))


def warmup_of(spec: TrainSpec, steps: int) -> int:
    """Optimizer steps over which the learning rate rises from 0, rounded up; the last step has the whole of it.

    Args:
        spec: The train block.
        steps: Of the training.
    """
    return min(math.ceil(spec.warmup * steps), steps - 1)


def finished(run: RunFolder, key: str) -> TrainingRecord | None:
    """The record of a training that has ended under this key; None where there is none.

    Raises:
        UserError: when it has ended by diverging, or is of another training.
    """
    if not (run.training / TRAINING_FILE).is_file():
        return None
    record = load_training(run.training)
    if record.key != key:
        raise UserError(
            f"{run.training} is of a training with another recipe, texts, model or version of the packages",
            "choose another --output, or --force to begin anew",
        )
    if record.stopped.startswith("diverged"):
        raise _diverged(record, run)
    return record


def train(training: Training, run: RunFolder) -> TrainingRecord:
    """Trains, from the last whole checkpoint where there is one, and writes run.training.

    Raises:
        UserError: when training diverges; the last good checkpoint stays on disk.
    """
    from halfbyte.quant.curves import Curves

    spec = training.spec
    arguments = _arguments(training, checkpoints_of(run, training.key).scratch)
    processes = max(1, arguments.world_size)
    began = {"texts": training.examples.digest, "processes": processes}
    checkpoints = Checkpoints(run.training / "checkpoints", training.key, began)
    rows = training.examples.train
    steps = steps_of(spec, len(rows), processes)
    arguments.max_steps = steps
    arguments.warmup_steps = warmup_of(spec, steps)
    arguments.logging_steps = max(1, steps // _LOGGED)
    per_pass = spec.batch_size * processes
    order = InOrder(rows, steps=steps, per_step=per_pass * spec.gradient_accumulation, seed=spec.seed)
    held = Held(training.examples.validation, per_batch=per_pass, first=len(rows))
    _make_trainable(training)
    with arguments.main_process_first(local=False):
        if arguments.should_save:
            checkpoints.clear()
    last = checkpoints.last()
    arguments.eval_on_start = last is None
    curves = Curves(
        run.training,
        order,
        steps,
        resumed=last.step if last else 0,
        metric="kl" if spec.method == "qad" else "loss",
        writes=arguments.should_save,
    )
    if last is not None:
        logger.info("training: goes on from step %d of %d", last.step, steps)
    with quiet_upstream(), transformers_as_they_are():
        trainer = _trainer(training, arguments, curves, checkpoints, order, held)
        share_inputs(training.model)  # now that ModelOpt has kept the quantizers' state
    if last is not None and (last.step >= steps or _out_of_patience(curves.validations, spec)):
        done, stopped = last.step, None  # a process was killed between its last checkpoint and the record
        curves.close()
    else:
        stopped = _run(trainer, curves, last)
        done = int(trainer.state.global_step)
    stopped = stopped or ("max_steps" if done >= steps else "patience")
    record = _record(training, curves, checkpoints, order, done, stopped)
    if arguments.should_save:
        record.save(run.training)
    trainer.accelerator.free_memory()
    del trainer
    gc.collect()
    if stopped.startswith("diverged"):
        raise _diverged(record, run)
    _tell(record, spec.metric)
    return record


def checkpoints_of(run: RunFolder, key: str) -> Checkpoints:
    """The checkpoints of a run's training."""
    return Checkpoints(run.training / "checkpoints", key)


def put_trained(model: PreTrainedModel, spec: TrainSpec, run: RunFolder, key: str) -> None:
    """Puts what the best checkpoint has learned into a calibrated model whose scales are shared, in place.

    Args:
        model: After ptq.share_scales().
        spec: As it was trained.
        run: Where.
        key: Digest of all that decides the training.

    Raises:
        UserError: when there is no whole checkpoint any more.
    """
    from halfbyte.quant.trainer import trained_tensors

    best = checkpoints_of(run, key).best(spec.metric)
    if best is None:
        raise UserError(f"{run.training} holds no whole checkpoint", "--force to train anew")
    parameters = dict(model.named_parameters())
    learned: dict[str, Tensor] = {}
    with torch.no_grad():
        for found in trained_tensors(best.folder):
            for name in found.keys() & parameters.keys():  # as they come: a whole model is not held twice
                parameters[name].copy_(found.pop(name))
            learned |= found
    if spec.learned_scales:
        fix_scales(model, learned)
    if spec.lora is not None:
        merge_lora(model, spec.lora, learned)
    if learned:
        raise ValueError(f"{best.folder} has trained {len(learned)} parameters more, first {next(iter(learned))}")


def _make_trainable(training: Training) -> None:
    """The calibrated model as it is trained: scales shared as in the export, in the type it is trained in."""
    model, spec = training.model, training.spec
    ptq.share_scales(model)
    if not ptq.quantizers(model):
        raise UserError("the recipe quantizes nothing of the model, so that there is nothing to train for")
    model.to(torch.float32 if spec.weights_dtype == "float32" else torch.bfloat16)  # type: ignore[arg-type]
    model.requires_grad_(True)
    if spec.learned_scales:
        learn_scales(model)
    if spec.lora is not None:
        torch.manual_seed(spec.seed)
        add_lora(model, spec.lora)


def _arguments(training: Training, scratch: Path) -> TrainingArguments:
    from transformers import TrainingArguments

    spec, device = training.spec, training.device
    if device.type == "cuda" and device.index and "WORLD_SIZE" not in os.environ:
        raise UserError(
            f"training runs on the first GPU it sees, not on {device}", f"CUDA_VISIBLE_DEVICES={device.index} and cuda"
        )
    dtype = spec.dtype if spec.dtype != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
    with quiet_upstream():
        arguments = TrainingArguments(
            output_dir=str(scratch),
            per_device_train_batch_size=spec.batch_size,
            per_device_eval_batch_size=spec.batch_size,
            gradient_accumulation_steps=spec.gradient_accumulation,
            learning_rate=spec.learning_rate,
            lr_scheduler_type=_SCHEDULES[spec.schedule],
            weight_decay=spec.weight_decay,
            max_grad_norm=spec.max_grad_norm,
            seed=spec.seed,
            gradient_checkpointing=spec.gradient_checkpointing,
            bf16=dtype == "bfloat16",
            use_cpu=device.type == "cpu",
            train_sampling_strategy="sequential",  # InOrder has shuffled
            eval_strategy="steps",
            eval_steps=spec.validation.every,
            save_strategy="steps",
            save_steps=spec.save_every or spec.validation.every,
            metric_for_best_model=spec.metric,
            greater_is_better=False,
            logging_nan_inf_filter=False,  # a loss that is no number stops the training
            remove_unused_columns=False,
            dataloader_pin_memory=device.type == "cuda",
            disable_tqdm=True,
            report_to="none",
        )
        # Several GPUs of one process would be used by torch's DataParallel, which copies the quantizers at each step.
        arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def _trainer(
    training: Training,
    arguments: TrainingArguments,
    curves: Curves,
    checkpoints: Checkpoints,
    order: InOrder,
    held: Held,
) -> QuantizedTrainer:
    from transformers import EarlyStoppingCallback, TrainerCallback

    from halfbyte.quant.trainer import DistilledTrainer, OfflineDistilledTrainer, QuantizedTrainer

    class SaveWhatIsValidated(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            control.should_save = control.should_save or control.should_evaluate

    spec = training.spec
    options: dict[str, Any] = {
        "curves": curves,
        "checkpoints": checkpoints,
        "keep": spec.validation.keep,
        "metric": spec.metric,
        "reference": training.teacher,
        "stored": training.stored,
        "model": training.model,
        "args": arguments,
        "train_dataset": order,
        "eval_dataset": held,
        "data_collator": collate,
    }
    if spec.method == "qad" and training.stored is not None:
        temperature = training.stored.facts.temperature
        trainer: QuantizedTrainer = OfflineDistilledTrainer(temperature=temperature, **options)
    elif spec.method == "qad":
        if training.teacher is None or spec.teacher is None:
            raise UserError("qad needs a teacher", "set train.teacher")
        options["teacher_apart"] = spec.teacher.device is not None
        options["distill_args"] = {"teacher_model": training.teacher, "temperature": spec.teacher.temperature}
        trainer = DistilledTrainer(**options)
    else:
        trainer = QuantizedTrainer(**options)
    trainer.add_callback(SaveWhatIsValidated())
    if spec.validation.patience is not None:
        trainer.add_callback(EarlyStoppingCallback(spec.validation.patience))
    return trainer


def _run(trainer: QuantizedTrainer, curves: Curves, last: Saved | None) -> str | None:
    """Trains to the end; what is recorded of a divergence, or None."""
    from halfbyte.quant.curves import Diverged, TeacherBroken

    try:
        with quiet_upstream():
            trainer.train(resume_from_checkpoint=str(last.folder) if last else None)
    except Diverged as error:
        if not curves.validations:
            what = "the model is broken before training"
            hint = "look at the original's weights, and at the recipe's quantize block and calibration texts"
            if isinstance(error, TeacherBroken):
                what, hint = "the teacher is broken", "look at the teacher's weights"
            raise UserError(f"{what}: {error}; nothing was exported", hint) from None
        return f"diverged: {error}"
    finally:
        curves.close()
    return None


def _out_of_patience(validations: Sequence[Validation], spec: TrainSpec) -> bool:
    """Whether the last so many validations were no better than one before: transformers' EarlyStoppingCallback."""
    values = [one.value(spec.metric) for one in validations if one.step > 0]
    known = [value for value in values if value is not None]
    if spec.validation.patience is None or not known:
        return False
    return len(known) - 1 - known.index(min(known)) >= spec.validation.patience


def _record(
    training: Training, curves: Curves, checkpoints: Checkpoints, order: InOrder, done: int, stopped: str
) -> TrainingRecord:
    spec = training.spec
    best = checkpoints.best(spec.metric)
    start = curves.validations[0]
    return TrainingRecord(
        created=now(),
        key=training.key,
        method=spec.method,
        seed=spec.seed,
        steps=done,
        best_step=best.step if best else 0,
        stopped=stopped,
        start=start,
        best=_validation(best) if best else start,
        tokens=order.tokens(done),
        seconds=round(curves.seconds, 3),
        teacher=training.teacher_name,
        data=training.examples.data,
        overlap=training.overlap,
        packages=package_versions(),
        hardware=hardware(),
    )


def _validation(saved: Saved) -> Validation:
    return Validation(step=saved.step, loss=cast(float, saved.loss), kl=saved.kl)


def _diverged(record: TrainingRecord, run: RunFolder) -> UserError:
    what = record.stopped.removeprefix("diverged: ")
    kept = f"the checkpoint of step {record.best_step} is kept in {run.training}, " if record.best_step else ""
    return UserError(
        f"training has diverged: {what}; {kept}nothing was exported",
        "lower train.learning_rate, or look at the texts, and train anew with --force or into another --output",
    )


def _tell(record: TrainingRecord, metric: str) -> None:
    start, best = (one.value(metric) for one in (record.start, record.best))
    name = MEASURES[metric]
    text = "training: validation %s %.4f before, %.4f at step %d, which is exported"
    logger.info(text, name, start, best, record.best_step)
    if start is not None and best is not None and best >= start:
        logger.warning("training has made the model worse: validation %s %.4f before, %.4f after", name, start, best)
