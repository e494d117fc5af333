"""ModelOpt's trainers for QAT and QAD with our validation, checkpoints and data; everything else is theirs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import save_torch_state_dict
from modelopt.torch.quantization.plugins.transformers_trainer import QADTrainer, QATTrainer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from halfbyte.quant.curves import Curves, Diverged
from halfbyte.quant.learned_scales import scales_fault
from halfbyte.quant.sharding import is_sharded, sharded_tensors
from halfbyte.quant.teacher_logits import StoredLogits
from halfbyte.quant.top_k import TopK, top_k_divergence
from halfbyte.quant.training_rows import IGNORED
from halfbyte.quant.whole import Checkpoints
from halfbyte.records.errors import UserError, disk_full_is_a_user_error

TRAINED_FILES = "trained{suffix}.safetensors"
"""What has been trained: the parameters that have a gradient, by name. The rest is the original's."""
_ROWS = 1024
"""Tokens whose logits are compared at once in a validation."""


class QuantizedTrainer(QATTrainer):  # type: ignore[misc]
    """ModelOpt's QATTrainer on a model that is calibrated already.

    Args:
        curves: Gets each validation.
        checkpoints: Where checkpoints go.
        keep: Last checkpoints kept.
        metric: What the best is chosen by, loss or kl.
        reference: The teacher for the validation's KL divergence, where there is one; QADTrainer has its own.
        stored: The teacher's logits in its place, by the rows' index.
        arguments: As transformers' Trainer takes them.
    """

    def __init__(
        self,
        *,
        curves: Curves,
        checkpoints: Checkpoints,
        keep: int,
        metric: str,
        reference: nn.Module | None = None,
        stored: StoredLogits | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(callbacks=[curves], **arguments)
        self.curves, self.checkpoints, self.keep, self.metric = curves, checkpoints, keep, metric
        self.reference, self.stored = reference, stored
        self._index: Tensor | None = None
        from transformers import PrinterCallback

        self.remove_callback(PrinterCallback)  # it prints on stdout, which is for results

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """A step without ModelOpt's garbage collection before each, which takes longer than a small model's step."""
        return cast(Tensor, super(QATTrainer, self).training_step(*args, **kwargs))

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Their loss; the rows' index is not the model's to see."""
        self._index = inputs.pop("index", None)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        # All processes have the same norm, and a loss that is no number has such a gradient.
        if norm is not None and not math.isfinite(float(norm)):
            raise Diverged(f"the gradient is {float(norm)} at step {self.state.global_step + 1}")
        return norm

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Validates: the mean loss and, with a teacher, the mean KL divergence of the labels' tokens.

        Raises:
            Diverged: when one is no number or far above its start, or a quantizer's range does not fit its weight.
        """
        step = int(self.state.global_step)
        fault = scales_fault(self.accelerator.unwrap_model(self.model))
        if fault is not None:
            raise Diverged(f"{fault} at step {step}")
        totals = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            for batch in self.get_eval_dataloader():
                totals += self._validated(self._prepare_inputs(batch))
        self.model.train(was_training)
        loss, kl, tokens = cast(Tensor, self.accelerator.reduce(totals, "sum")).tolist()
        found = {"eval_loss": loss / tokens}
        if self.reference is not None or self.stored is not None:
            found["eval_kl"] = kl / tokens
        self.curves.validated(step, found["eval_loss"], found.get("eval_kl"))
        base: Any = self  # transformers is typed, and ModelOpt's trainers between it and this one are not
        base.control = base.callback_handler.on_evaluate(self.args, self.state, base.control, found)
        return found

    def _validated(self, batch: dict[str, Tensor]) -> Tensor:
        """Sums over a batch's labels: loss, KL divergence, tokens."""
        labels, self._index = batch.pop("labels")[:, 1:], batch.pop("index")
        counted = labels != IGNORED
        logits = self.model(**batch).logits[:, :-1][counted]
        reference = self.teacher_logits(batch, counted) if self.reference is not None else None
        known = self.stored_logits(counted, 1.0) if self.stored is not None else None
        targets = labels[counted]
        sums = torch.zeros(3, dtype=torch.float64, device=targets.device)
        for first in range(0, len(targets), _ROWS):
            rows = slice(first, first + _ROWS)
            scores = functional.log_softmax(logits[rows].float(), dim=-1)
            sums[0] += functional.nll_loss(scores, targets[rows], reduction="sum")
            if reference is not None:
                sums[1] += divergence(scores, reference[rows])
            elif known is not None:
                width = cast(StoredLogits, self.stored).facts.vocabulary
                sums[1] += top_k_divergence(logits[rows, :width], TopK(*(part[rows] for part in known))).sum()
        sums[2] = len(targets)
        return sums

    def teacher_logits(self, inputs: dict[str, Tensor], counted: Tensor) -> Tensor:
        """The teacher's logits of the tokens before the labels that count, [tokens, vocabulary]."""
        reference = cast(nn.Module, self.reference)
        device = next(reference.parameters()).device
        with torch.no_grad():
            logits: Tensor = reference(
                **{name: value.to(device) for name, value in inputs.items()}, use_cache=False
            ).logits
        return logits[:, :-1][counted.to(device)].to(counted.device)

    def stored_logits(self, counted: Tensor, temperature: float) -> TopK:
        """What is stored of the tokens before the labels that count; rows that only fill a batch have none."""
        index = cast(Tensor, self._index)[counted.any(1).to(cast(Tensor, self._index).device)]
        return cast(StoredLogits, self.stored).read(index.tolist(), temperature).to(counted.device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes what is trained; where FSDP shards the model, transformers saves the shards with the optimizer."""
        if self.is_fsdp_enabled or not self.args.should_save or output_dir is None:
            return
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        trained = {name: tensor.detach() for name, tensor in trained_parameters(self.unwrapped()).items()}
        save_torch_state_dict(trained, folder, filename_pattern=TRAINED_FILES, max_shard_size="2GB")

    def unwrapped(self) -> nn.Module:
        """The model itself."""
        return cast(nn.Module, self.accelerator.unwrap_model(self.model))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        load_trained(self.unwrapped(), Path(resume_from_checkpoint))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Theirs, which is given its name once it is whole."""
        step = int(self.state.global_step)
        with disk_full_is_a_user_error(self.checkpoints.folder):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.curves.flush()
                last = self.curves.validations[-1] if self.curves.validations else None
                known = last if last is not None and last.step == step else None
                written = Path(self.args.output_dir) / f"checkpoint-{step}"
                self.checkpoints.add(written, step, loss=known.loss if known else None, kl=known.kl if known else None)
                self.checkpoints.thin(self.metric, self.keep)
        self.accelerator.wait_for_everyone()


class DistilledTrainer(QuantizedTrainer, QADTrainer):  # type: ignore[misc]
    """ModelOpt's QADTrainer: the loss is the KL divergence from the teacher.

    Args:
        teacher_apart: Whether the teacher stays on a device of its own.
        arguments: As for QuantizedTrainer.
    """

    def __init__(self, *, teacher_apart: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._teacher_prepared = teacher_apart  # preparing it would move it beside the model

    def teacher_logits(self, inputs: dict[str, Tensor], counted: Tensor) -> Tensor:
        """As in QuantizedTrainer, from the teacher that is trained after."""
        self._ensure_teacher_prepared()
        self.reference = self._teacher_model
        self._teacher_model.eval()
        return super().teacher_logits(inputs, counted)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **kwargs: Any) -> Tensor:
        """ModelOpt's distillation loss as the mean over the labels of the whole optimizer step.

        ModelOpt takes the mean of each forward pass, which transformers then adds up without dividing; and it widens
        the logits of all tokens to float32, those that count in no loss among them.
        """
        self._index = inputs.pop("index", None)
        labels = inputs.pop("labels")[:, 1:]
        counted = labels != IGNORED
        student = model(**inputs).logits[:, :-1][counted]
        teacher = self.teacher_logits(inputs, counted)
        width = min(student.shape[-1], teacher.shape[-1])
        each = self._kd_criterion(student[:, :width].float(), teacher[:, :width].float())
        total = kwargs.get("num_items_in_batch")
        if total is None:
            return cast(Tensor, each.sum() / counted.sum().clamp(min=1))
        return cast(Tensor, each.sum() / total * self.accelerator.num_processes)


class OfflineDistilledTrainer(QuantizedTrainer):
    """QAD from a teacher whose largest logits were stored before: see quant.top_k for the loss.

    Args:
        temperature: Of both distributions.
        arguments: As for QuantizedTrainer.
    """

    def __init__(self, *, temperature: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.temperature = temperature

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **kwargs: Any) -> Tensor:
        """As DistilledTrainer's, over k + 1 events a token."""
        self._index = inputs.pop("index")
        counted = inputs.pop("labels")[:, 1:] != IGNORED
        width = cast(StoredLogits, self.stored).facts.vocabulary
        student = model(**inputs).logits[:, :-1][counted][:, :width]
        each = top_k_divergence(student, self.stored_logits(counted, self.temperature), self.temperature)
        each = each * self.temperature**2
        total = kwargs.get("num_items_in_batch")
        if total is None:
            return cast(Tensor, each.sum() / counted.sum().clamp(min=1))
        return cast(Tensor, each.sum() / total * self.accelerator.num_processes)


def divergence(scores: Tensor, reference: Tensor) -> Tensor:
    """Sum over tokens of the KL divergence of scores from a teacher's distribution, in nats.

    Args:
        scores: Log-probabilities [tokens, vocabulary].
        reference: The teacher's logits [tokens, vocabulary]; of two vocabularies padded differently the common part.
    """
    width = min(scores.shape[-1], reference.shape[-1])
    wanted = functional.log_softmax(reference[:, :width].float(), dim=-1)
    return functional.kl_div(scores[:, :width], wanted, reduction="sum", log_target=True)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; a tied one once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_trained(model: nn.Module, folder: Path) -> None:
    """Puts what a checkpoint has trained into a model.

    Raises:
        ValueError: when the model has other trained parameters.
    """
    wanted = trained_parameters(model)
    with torch.no_grad():
        for found in trained_tensors(folder):
            for name, tensor in found.items():
                wanted.pop(name).copy_(tensor)
    if wanted:
        raise ValueError(f"{folder} lacks {len(wanted)} trained parameters, first {next(iter(wanted))}")


def trained_tensors(folder: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a checkpoint by name, a file at a time; of a sharded one each by itself."""
    if is_sharded(folder):
        yield from sharded_tensors(folder)
    for path in sorted(folder.glob(TRAINED_FILES.format(suffix="*"))):
        try:
            yield load_file(path)
        except SafetensorError as error:
            raise UserError(
                f"{path} is damaged: {error}",
                f"delete {folder}, and repeat the command: it goes on with the checkpoints that are left",
            ) from None
