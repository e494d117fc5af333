"""The plan of a distillation of a model that draws: memory, steps and files before it, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from halfbyte.quant.backend import register
from halfbyte.quant.checkpoint import torch_dtype
from halfbyte.quant.flux_distill import attention_with_gradients, flux_lora, held_prompts
from halfbyte.quant.lora import add_lora
from halfbyte.quant.models import compute_dtype
from halfbyte.quant.pipeline_calibration import calibration_prompts
from halfbyte.quant.pipelines import CONTROL, PipelineSource, empty_transformer
from halfbyte.quant.shared import share_inputs
from halfbyte.quant.train import steps_of
from halfbyte.quant.training_memory import Memory, Step, compute_type, count, kept_type, put_quantizers, without_values
from halfbyte.quant.training_plan import Change, TrainingPlan, device_memory, fits, most_kept, smaller
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.recipes.drawn import DrawnTrajectories
from halfbyte.recipes.images import DrawnSpec
from halfbyte.recipes.schema import CalibrationSpec
from halfbyte.recipes.training import TrainSpec
from halfbyte.records.files import read_json

_PATCH = 2
"""Side of a patch of latents, which is a token of the transformer."""


@dataclass(frozen=True)
class DrawingTrainingPlan(TrainingPlan):
    """What a distillation of a model that draws will take."""

    prompts: int = 0
    """That the teacher draws before."""
    patches: int = 0
    """Of an image."""
    drawn: int = 0
    """Bytes of what the teacher's drawing leaves on disk for the training."""
    unit: ClassVar[str] = "patches"

    @property
    def tokens(self) -> int:
        """Patches of an optimizer step."""
        return self.spec.batch_size * self.spec.gradient_accumulation * self.patches

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**super().as_dict(), "teacher_prompts": self.prompts, "teacher_bytes": self.drawn}

    def __str__(self) -> str:
        drawn = cast(DrawnTrajectories, self.spec.drawn)
        teacher = f"teacher      draws {self.prompts:,} prompts of {drawn.images.steps} steps before the training"
        return f"{super().__str__()}\n{teacher}, {self.drawn / 1e9:.2f} GB on disk"


@dataclass(frozen=True)
class Asked:
    """What a transformer is asked with, by shapes."""

    config: dict[str, Any]
    """The transformer's."""
    patches: int
    length: int
    """Of the prompt, in tokens."""

    def inputs(self, batch: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Random inputs of so many images."""
        known = self.config
        made = {
            "hidden_states": torch.randn(batch, self.patches, known["in_channels"], device=device, dtype=dtype),
            "timestep": torch.ones(batch, device=device, dtype=dtype),
            "encoder_hidden_states": torch.randn(
                batch, self.length, known["joint_attention_dim"], device=device, dtype=dtype
            ),
            "pooled_projections": torch.randn(batch, known["pooled_projection_dim"], device=device, dtype=dtype),
            "img_ids": torch.zeros(self.patches, 3, device=device, dtype=dtype),
            "txt_ids": torch.zeros(self.length, 3, device=device, dtype=dtype),
        }
        if known.get("guidance_embeds"):
            made["guidance"] = torch.ones(batch, device=device, dtype=dtype)
        return made

    def bytes(self, steps: int, size: int) -> int:
        """Of what is recorded of one prompt, values of `size` bytes each."""
        known = self.config
        answered = known.get("out_channels") or known["in_channels"]
        each = self.patches * (known["in_channels"] + answered) + 1
        once = self.length * known["joint_attention_dim"] + known["pooled_projection_dim"]
        places = 3 * (self.patches + self.length)
        return int(size * (steps * each + once + places + bool(known.get("guidance_embeds"))))


@dataclass(frozen=True)
class DrawingStep(Step):
    """A transformer, with values or without, and what one optimizer step of its distillation is."""

    asked: Asked

    def loss(self) -> Tensor:
        """A forward pass on random latents, as flux_distill makes it."""
        kept = kept_type(self.spec)
        inputs = self.asked.inputs(self.spec.batch_size, self.device, kept)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute == torch.bfloat16):
            found = self.model(**inputs, return_dict=False)[0]
        return nn.functional.mse_loss(found.float(), torch.zeros_like(found, dtype=torch.float32))


def asked_of(source: PipelineSource, spec: DrawnSpec) -> Asked:
    """How the transformer of a pipeline is asked for an image of a size."""
    latent = 2 ** (len(read_json(source.folder / "vae" / "config.json")["block_out_channels"]) - 1)
    patches = spec.size[0] // (latent * _PATCH) * (spec.size[1] // (latent * _PATCH))
    model = empty_transformer(source.transformer)
    return Asked(dict(cast(Any, model).config), patches, spec.max_sequence_length)


def build(
    source: PipelineSource, config: dict[str, Any], spec: TrainSpec, device: torch.device, compute: torch.dtype
) -> DrawingStep:
    """What is needed for a step: the transformer with random weights, or none on the meta device, and quantizers.

    Args:
        source: The original pipeline.
        config: What configs.quant_config made.
        spec: The train block.
        device: Where all of it is.
        compute: The type that matrices are multiplied in.
    """
    register()
    asked = asked_of(source, cast(DrawnTrajectories, spec.drawn).images)
    model: Any = empty_transformer(source.transformer, kept_type(spec))
    if device.type != "meta":
        model = model.to_empty(device=device)
    with torch.device(device), quiet_upstream():
        put_quantizers(model, config, spec, device)
        if spec.lora is not None:
            add_lora(model, flux_lora(spec.lora))
        share_inputs(model)
        if spec.gradient_checkpointing:
            model.enable_gradient_checkpointing()
    return DrawingStep(spec, model.train(), None, device, compute, 0, asked)


def count_step(source: PipelineSource, config: dict[str, Any], spec: TrainSpec, compute: torch.dtype) -> Memory:
    """The memory of an optimizer step, on tensors without values; attention as torch's fused kernels do it."""
    step = build(source, config, spec, torch.device("meta"), compute)
    with FakeTensorMode(), quiet_upstream(), attention_with_gradients():
        without_values(step.model)
        return count(replace(step, device=torch.device("cpu")))


def saved_bytes(source: PipelineSource, config: dict[str, Any], spec: TrainSpec) -> int:
    """Bytes of a checkpoint of a training: what is trained, and AdamW's two moments of it; no weight is read."""
    step = build(source, config, spec, torch.device("meta"), torch.float32)
    return 3 * sum(parameter.numel() * parameter.element_size() for parameter in step.trained())


def teacher_bytes(
    source: PipelineSource, drawn: DrawnTrajectories, device: torch.device, dtype: str
) -> tuple[int, int]:
    """Prompts that the teacher draws, and bytes of what its drawing leaves on disk for the training.

    Args:
        source: The original pipeline.
        drawn: The block.
        device: Where the teacher draws.
        dtype: The type of its weights.

    Raises:
        UserError: for prompts that cannot be read.
    """
    block = CalibrationSpec(sources=[drawn.prompts], images=drawn.images, seed=drawn.seed)
    prompts = len(calibration_prompts(block, control=source.class_name == CONTROL)[0])
    stored = compute_dtype("auto", device, torch_dtype(dtype)).itemsize
    return prompts, prompts * asked_of(source, drawn.images).bytes(drawn.images.steps, stored)


def training_bytes(
    source: PipelineSource, config: dict[str, Any], spec: TrainSpec, *, device: torch.device, dtype: str
) -> int:
    """Bytes on disk at most until the trained checkpoint is exported; arguments as for drawing_training_plan."""
    drawn = teacher_bytes(source, cast(DrawnTrajectories, spec.drawn), device, dtype)[1]
    return drawn + most_kept(spec) * saved_bytes(source, config, spec)


def drawing_training_plan(
    source: PipelineSource,
    config: dict[str, Any],
    spec: TrainSpec,
    *,
    device: torch.device,
    exported: int,
    dtype: str = "bfloat16",
    capacity: int | None = None,
) -> DrawingTrainingPlan:
    """Plans a distillation from configurations and the prompt file: no weight is read.

    Args:
        source: The original pipeline.
        config: What configs.quant_config made.
        spec: The train block.
        device: Where it is trained.
        exported: Bytes of the exported pipeline, of the quantization's plan.
        dtype: The type of the original's weights.
        capacity: Bytes of the device's memory; None to ask it.

    Raises:
        UserError: for prompts that cannot be read.
    """
    drawn = cast(DrawnTrajectories, spec.drawn)
    size = device_memory(device) if capacity is None else capacity
    compute = compute_type(spec, device)
    prompts, kept = teacher_bytes(source, drawn, device, dtype)
    rows = (prompts - held_prompts(spec, prompts)) * drawn.images.steps
    memory = count_step(source, config, spec, compute)
    plan = DrawingTrainingPlan(
        spec, 1, steps_of(spec, rows), memory, size, saved_bytes(source, config, spec), exported, prompts=prompts,
        patches=asked_of(source, drawn.images).patches, drawn=kept,
    )  # fmt: skip
    return plan if plan.fits else replace(plan, changes=tuple(_changes(source, config, spec, compute, size)))


def _changes(
    source: PipelineSource, config: dict[str, Any], spec: TrainSpec, compute: torch.dtype, capacity: int
) -> Iterator[Change]:
    """What can be changed of a training that does not fit, with what each would take."""

    def changed(setting: str, **fields: Any) -> Change:
        memory = count_step(source, config, spec.model_copy(update=fields), compute)
        return Change(setting, memory.total, fits(memory, capacity))

    yield from smaller(spec, changed)
