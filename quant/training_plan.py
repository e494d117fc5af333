"""The plan of a training: memory, tokens, steps, files and time before it begins, and what would make it fit."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch

from halfbyte.quant.backend import register
from halfbyte.quant.models import Source, empty_model
from halfbyte.quant.train import steps_of
from halfbyte.quant.training_memory import (
    KINDS,
    Memory,
    Unpredictable,
    build,
    compute_type,
    count_step,
    teacher_is_here,
)
from halfbyte.recipes.training import LoraSpec, TeacherSpec, TrainSpec
from halfbyte.records.errors import UserError

USABLE = 0.92
"""Part of a device's memory that tensors get: CUDA's context, libraries' workspaces and gaps take the rest."""
_TOP_K = 64
_MOST_DEVICES = 64


@dataclass(frozen=True)
class Change:
    """What would make a training smaller, alone."""

    setting: str
    """As given to halfbyte."""
    memory: int
    """Bytes at the peak on each device."""
    fits: bool


@dataclass(frozen=True)
class TrainingPlan:
    """What a training will take."""

    spec: TrainSpec
    devices: int
    steps: int | None
    """Optimizer steps; None where they depend on texts that were not read."""
    memory: Memory | None
    """At the peak on each device; None for a model that it cannot be predicted for."""
    capacity: int
    """Bytes of memory of a device."""
    saved: int
    """Bytes of a checkpoint to resume from: what is trained, and the optimizer."""
    exported: int
    """Bytes of the exported checkpoint."""
    seconds: float | None = None
    """Of an optimizer step, measured on the device; None where none was run."""
    changes: tuple[Change, ...] = ()
    """Where it does not fit."""
    unit: ClassVar[str] = "tokens"
    """What a row is made of."""

    @property
    def tokens(self) -> int:
        """Of an optimizer step on all devices together, where every row is full."""
        return self.spec.batch_size * self.spec.gradient_accumulation * self.devices * self.spec.length

    @property
    def fits(self) -> bool | None:
        """Whether the peak leaves the device some room; None where it is not known."""
        return None if self.memory is None else fits(self.memory, self.capacity)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "method": self.spec.method,
            "devices": self.devices,
            "steps": self.steps,
            f"{self.unit}_per_step": self.tokens,
            self.unit: None if self.steps is None else self.steps * self.tokens,
            "memory": None if self.memory is None else {**asdict(self.memory), "total": self.memory.total},
            "device_bytes": self.capacity,
            "fits": self.fits,
            "training_checkpoint_bytes": self.saved,
            "checkpoint_bytes": self.exported,
            "seconds_per_step": self.seconds,
            "changes": [asdict(change) for change in self.changes],
        }

    def __str__(self) -> str:
        spec = self.spec
        rows = f"{spec.batch_size} x {spec.gradient_accumulation} rows"
        where = "one device" if self.devices == 1 else f"each of {self.devices} devices"
        lines = [f"training     {spec.method}, {self._steps()} of {rows} on {where}, {self.tokens:,} {self.unit} each"]
        if self.memory is None:
            lines.append("memory       not predicted: what a step of this model does depends on its values")
        else:
            parts = ((kind, getattr(self.memory, kind)) for kind in KINDS)
            shown = ", ".join(f"{kind} {size / 1e9:.2f}" for kind, size in parts if size >= 5e6)
            total = f"{self.memory.total / 1e9:.2f} of {self.capacity / 1e9:.1f} GB at the peak"
            each = "" if self.devices == 1 else " on each device"
            lines.append(f"memory       {total}{each}{': ' if shown else ''}{shown}")
        lines.append(
            f"disk         {self.saved / 1e9:.2f} GB a checkpoint of the training, at most {most_kept(spec)} at once; "
            f"{self.exported / 1e9:.2f} GB exported"
        )
        lines.append(f"time         {self._time()}")
        if self.changes:
            lines.append(f"It does not fit into {USABLE:.0%} of the memory. What would change that, each alone:")
            width = max(len(change.setting) for change in self.changes)
            for change in self.changes:
                verdict = "fits" if change.fits else "does not fit"
                lines.append(f"  {change.setting:{width}}  {change.memory / 1e9:8.2f} GB, {verdict}")
        return "\n".join(lines)

    def _steps(self) -> str:
        return f"{self.spec.epochs:g} epochs" if self.steps is None else f"{self.steps:,} steps"

    def _time(self) -> str:
        if self.seconds is None:
            return "not measured"
        each = f"{self.seconds:.3g} s a step, measured without validations"
        return each if self.steps is None else f"about {_duration(self.steps * self.seconds)}: {each}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def fits(memory: Memory, capacity: int) -> bool:
    """Whether a step leaves a device the room that is not for tensors."""
    return memory.total <= USABLE * capacity


def device_memory(device: torch.device) -> int:
    """Bytes of memory of a device: a GPU's own, or the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def most_kept(spec: TrainSpec) -> int:
    """Checkpoints of a training that are on disk at once: the last few, the best, and one that is being written."""
    return spec.validation.keep + 2


def divided(spec: TrainSpec, compute: torch.dtype, devices: int) -> TrainSpec:
    """The train block as so many devices follow it: accelerate keeps weights that it divides in float32."""
    if devices > 1 and compute == torch.bfloat16:
        return spec.model_copy(update={"weights_dtype": "float32"})
    return spec


def saved_bytes(source: Source, config: dict[str, Any], spec: TrainSpec) -> int:
    """Bytes of a checkpoint of a training: what is trained, and AdamW's two moments of it; no weight is read.

    Args:
        source: The model that is trained.
        config: What configs.quant_config made.
        spec: The train block, as divided() gives it.

    Raises:
        UserError: when the quantizers are not what the train block asks for.
    """
    register()
    step = build(
        lambda dtype: empty_model(source, dtype)[1],
        config,
        spec,
        torch.device("meta"),
        compute=torch.float32,  # of no matter: nothing runs
        teacher_here=False,
    )
    return 3 * sum(parameter.numel() * parameter.element_size() for parameter in step.trained())


def training_plan(
    source: Source,
    config: dict[str, Any],
    spec: TrainSpec,
    *,
    device: torch.device,
    exported: int,
    devices: int = 1,
    rows: int | None = None,
    capacity: int | None = None,
    seconds: float | None = None,
) -> TrainingPlan:
    """Plans a training from the model's configuration: no weight is read.

    Args:
        source: The model that is trained.
        config: What configs.quant_config made.
        spec: The train block.
        device: Where it is trained.
        exported: Bytes of the exported checkpoint, of the quantization's plan.
        devices: Processes, each with a device of its own, among which FSDP divides the model.
        rows: Rows to train on; None where they were not made.
        capacity: Bytes of a device's memory; None to ask the device.
        seconds: Of an optimizer step, as measure_step() gives them.
    """
    register()

    def make_model(dtype: torch.dtype) -> Any:
        return empty_model(source, dtype)[1]

    compute = compute_type(spec, device)
    size = device_memory(device) if capacity is None else capacity
    steps = steps_of(spec, rows or 0, devices) if spec.max_steps is not None or rows is not None else None
    spec = divided(spec, compute, devices)
    saved = saved_bytes(source, config, spec)
    plan = TrainingPlan(spec, devices, steps, None, size, saved, exported, seconds)
    try:
        memory = count_step(make_model, config, spec, compute=compute, devices=devices)
        found = replace(plan, memory=memory)
        if fits(memory, size):
            return found
        changes = tuple(_changes(make_model, config, spec, compute, devices, size, saved))
        return replace(found, changes=changes)
    except Unpredictable:
        return plan


def smaller(spec: TrainSpec, changed: Callable[..., Change], *, divided: bool = False) -> Iterator[Change]:
    """What makes any training smaller, with what each would take.

    Args:
        spec: The train block.
        changed: Given the setting as the user writes it and the fields of `spec` that it changes.
        divided: Whether several devices share the training, which keeps its weights in float32.
    """
    if not spec.gradient_checkpointing:
        yield changed("--set train.gradient_checkpointing=true", gradient_checkpointing=True)
    if spec.batch_size > 1:
        accumulated = spec.gradient_accumulation * spec.batch_size
        yield changed(
            f"--set train.batch_size=1 --set train.gradient_accumulation={accumulated}",
            batch_size=1,
            gradient_accumulation=2,  # more forward passes take no more memory
        )
    if spec.weights_dtype == "float32" and not divided:
        yield changed("--set train.weights_dtype=bfloat16", weights_dtype="bfloat16")
    if spec.lora is None and not spec.learned_scales:
        lora = None
        with suppress(UserError):  # of a model whose linears have other names, or that is too narrow for it
            lora = changed("--set 'train.lora={rank: 16}'", lora=LoraSpec())
        if lora is not None:
            yield lora


def _changes(
    make_model: Callable[[torch.dtype], Any],
    config: dict[str, Any],
    spec: TrainSpec,
    compute: torch.dtype,
    devices: int,
    capacity: int,
    saved: int,
) -> Iterator[Change]:
    """What can be changed of a training that does not fit, with what each would take."""

    def changed(setting: str, number: int = devices, **fields: Any) -> Change:
        if number > 1 and compute == torch.bfloat16:
            fields["weights_dtype"] = "float32"
        memory = count_step(make_model, config, spec.model_copy(update=fields), compute=compute, devices=number)
        return Change(setting, memory.total, fits(memory, capacity))

    yield from smaller(spec, changed, divided=devices > 1)
    if teacher_is_here(spec):
        teacher = (spec.teacher or TeacherSpec()).model_copy(update={"offline_top_k": _TOP_K})
        yield changed(f"--set train.teacher.offline_top_k={_TOP_K}", teacher=teacher)
    number = 2 * devices
    while number < _MOST_DEVICES and saved / number > USABLE * capacity:
        number *= 2  # optimizer and weights alone would not fit
    while number <= _MOST_DEVICES:
        change = changed(f"FSDP over {number} devices", number)
        if change.fits or number == _MOST_DEVICES:
            yield change
            return
        number *= 2


def measure_step(
    source: Source, config: dict[str, Any], spec: TrainSpec, device: torch.device, *, steps: int = 3
) -> tuple[float, int | None]:
    """Runs a few optimizer steps on the device, with random weights and tokens, and measures them.

    Args:
        source: The model that is trained.
        config: What configs.quant_config made.
        spec: The train block.
        device: Where it is trained.
        steps: How many are timed, after one that is not.

    Returns:
        Seconds of a step (the median), and on CUDA the bytes of tensors at the peak.
    """
    from transformers import AutoModelForCausalLM

    register()
    loaded, _ = empty_model(source)

    def make_model(dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_config(loaded, dtype=dtype)  # type: ignore[no-untyped-call]

    here = teacher_is_here(spec)
    step = build(make_model, config, spec, device, compute=compute_type(spec, device), teacher_here=here)
    optimizer = step.make_optimizer()
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    found = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        step.run(optimizer)
        if on_cuda:
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    peak = int(torch.cuda.max_memory_allocated(device)) if on_cuda else None
    return statistics.median(found[1:]), peak
