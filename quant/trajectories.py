"""What the teacher does while it draws: latents, timesteps and velocities of each prompt, kept on disk for a training.

The teacher draws once, before the training, so that it need not be in memory beside the student. A prompt is one file,
and a call that was killed goes on after the last whole batch of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils.data import Dataset

from halfbyte.quant.pipeline_calibration import DrawingLoop, calibration_prompts, encoded
from halfbyte.quant.pipelines import CONTROL, PipelineSource, open_parts, open_transformer
from halfbyte.recipes.drawn import DrawnTrajectories
from halfbyte.recipes.schema import CalibrationSpec
from halfbyte.records.digests import value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.files import write_bytes

logger = logging.getLogger(__name__)

Row = dict[str, Tensor]

VELOCITY = "velocity"
"""What the teacher answered, by the name of the tensor beside its inputs."""
_EACH_STEP = ("hidden_states", "timestep", VELOCITY)
_SHARED = ("img_ids", "txt_ids")
"""Inputs without a batch, the same for all prompts of one size."""
_ONCE = ("encoder_hidden_states", "pooled_projections", "guidance", *_SHARED)
"""Inputs that stay the same from step to step; guidance only where the model takes it."""


class Trajectories(Dataset[Row]):
    """Recorded trajectories: a row is one step of one prompt.

    Args:
        folder: Where they are.
        count: Prompts.
        steps: Steps of each.
    """

    def __init__(self, folder: Path, count: int, steps: int) -> None:
        self.folder, self.count, self.steps = folder, count, steps

    def __len__(self) -> int:
        return self.count * self.steps

    def __getitem__(self, index: int) -> Row:
        """Inputs of the transformer and its answer at one step, without a batch dimension."""
        prompt, step = divmod(index, self.steps)
        with safe_open(_file(self.folder, prompt), "pt") as tensors:
            row = {name: tensors.get_slice(name)[step] for name in _EACH_STEP}
            return row | {name: tensors.get_tensor(name) for name in _ONCE if name in tensors.keys()}  # noqa: SIM118

    @property
    def tokens(self) -> int:
        """Patches of an image."""
        return int(self[0]["hidden_states"].shape[0])


def collate(rows: Sequence[Row]) -> Row:
    """Rows as one batch: what they share stays without a batch dimension, all else gets one in front."""
    return {name: rows[0][name] if name in _SHARED else torch.stack([row[name] for row in rows]) for name in rows[0]}


def are_recorded(folder: Path, prompts: int, steps: int, key: str) -> Trajectories | None:
    """The trajectories of an earlier call under the same key; None where one is missing.

    Raises:
        UserError: when a file is damaged.
    """
    if all(_key(_file(folder, number)) == key for number in range(prompts)):
        return Trajectories(folder, prompts, steps)
    return None


def draw_trajectories(
    source: PipelineSource,
    spec: DrawnTrajectories,
    folder: Path,
    *,
    weights: torch.dtype,
    compute: torch.dtype,
    device: torch.device,
    data_root: Path | None = None,
) -> tuple[Trajectories, dict[str, str]]:
    """The unquantized pipeline's trajectories of a recipe's prompts: an earlier call's, or drawn now.

    Args:
        source: The original pipeline.
        spec: What to draw and how.
        folder: Where they are kept.
        weights: The type the transformer's weights are rounded to.
        compute: The type it computes in.
        device: Where.
        data_root: See recipes.data.data_root.

    Returns:
        The trajectories, and the digest of the prompts by the name of their source.

    Raises:
        UserError: for prompts that cannot be read or lack a control image, and whatever record() raises.
    """
    block = CalibrationSpec(sources=[spec.prompts], images=spec.images, seed=spec.seed)
    control = source.class_name == CONTROL
    prompts, named = calibration_prompts(block, control=control, data_root=data_root)
    data = {name.removeprefix("calibration: "): digest for name, digest in named.items()}
    how = [spec.images.model_dump(mode="json"), spec.seed, spec.batch_size, str(weights), str(compute), device.type]
    key = value_digest([source.digest, [one.text for one in prompts], named, how])
    found = are_recorded(folder, len(prompts), spec.images.steps, key)
    if found is not None:
        logger.info("teacher: %d prompts are drawn already", len(prompts))
        return found, data
    pipeline: Any = open_parts(source, compute)
    calls = encoded(pipeline, prompts, spec.images, device)
    teacher = open_transformer(source.transformer, weights=weights, compute=compute, device=device)
    return record(pipeline.to(device), teacher, calls, spec, folder, key), data


def record(
    pipeline: Any, teacher: nn.Module, calls: Sequence[dict[str, Any]], spec: DrawnTrajectories, folder: Path, key: str
) -> Trajectories:
    """Draws each prompt up to its last latent, and keeps what the transformer was asked and answered.

    Args:
        pipeline: Of diffusers, without text encoders and transformer, where it computes.
        teacher: The unquantized transformer.
        calls: What pipeline_calibration.encoded made of the prompts.
        spec: How to draw.
        folder: Where; files of another key in it are written anew.
        key: Digest of what decides the trajectories.

    Raises:
        UserError: for answers that are no numbers, and when the disk is full.
    """
    asked: list[Row] = []
    kept: Any = _Kept(asked, folder, key)
    loop = DrawingLoop(pipeline, calls, spec.images, seed=spec.seed, progress=kept, batch=spec.batch_size)
    hook = teacher.register_forward_hook(_remember(asked), with_kwargs=True)
    try:
        loop(teacher)
    finally:
        hook.remove()
    return Trajectories(folder, len(calls), spec.images.steps)


class _Kept:
    """Keeps the prompts of each batch once it is drawn; what a calibration's progress is to the loop that draws."""

    def __init__(self, asked: list[Row], folder: Path, key: str) -> None:
        self.asked, self.folder, self.key = asked, folder, key

    def resume(self, _: int, __: nn.Module) -> int:
        """How many prompts are drawn already."""
        return next(number for number in count() if _key(_file(self.folder, number)) != self.key)

    def save(self, _: int, done: int, __: nn.Module) -> None:
        """The batch of prompts before `done` is drawn."""
        together = len(self.asked[0][VELOCITY])
        for at in range(together):
            _keep([_one(row, at) for row in self.asked], _file(self.folder, done - together + at), self.key)
        self.asked.clear()


def _remember(asked: list[Row]) -> Any:
    def remember(_: nn.Module, __: Any, inputs: dict[str, Any], output: Any) -> None:
        row = {name: value.detach().cpu() for name, value in inputs.items() if isinstance(value, Tensor)}
        answer = output[0] if isinstance(output, tuple) else output.sample
        asked.append({**row, VELOCITY: answer.detach().cpu()})

    return remember


def _one(row: Row, at: int) -> Row:
    """What was asked and answered of one prompt of a batch, with a batch dimension of 1."""
    return {name: value if name in _SHARED else value[at : at + 1] for name, value in row.items()}


def _keep(asked: Sequence[Row], path: Path, key: str) -> None:
    if not all(bool(torch.isfinite(row[VELOCITY]).all()) for row in asked):
        raise UserError(
            f"the teacher's answers to prompt {int(path.stem) + 1} are no numbers", "look at the original's weights"
        )
    tensors = {name: torch.cat([row[name] for row in asked]) for name in _EACH_STEP}
    for name in _ONCE:
        if asked[0].get(name) is not None:
            tensors[name] = asked[0][name] if name in _SHARED else asked[0][name][0]
    write_bytes(path, save({name: value.contiguous() for name, value in tensors.items()}, metadata={"key": key}))


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.safetensors"


def _key(path: Path) -> str | None:
    """The key a file was recorded under; None where it is missing."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as tensors:
            return str((tensors.metadata() or {}).get("key"))
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: {error}", "delete it to have it drawn again") from None
