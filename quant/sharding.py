"""A model divided among processes by FSDP2, over NCCL on GPUs and gloo on CPUs, and its checkpoints read by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

import halfbyte.recipes

CONFIGURATION = Path(halfbyte.recipes.__file__).parent / "accelerate" / "fsdp2.yaml"
"""The shipped configuration of accelerate."""
_MODEL = "pytorch_model_fsdp_0"
_OPTIMIZER = "optimizer_0"
"""accelerate's names of the folders in a checkpoint."""
_CHOICES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")


def shard_by_default() -> None:
    """Has accelerate divide the model by the shipped configuration, where the launcher was given no other.

    To be called before transformers' TrainingArguments are made, in each of several processes.
    """
    _let_cpus_shard()
    if any(name in os.environ for name in _CHOICES):
        return
    settings: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))["fsdp_config"]
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    for name, value in settings.items():
        os.environ.setdefault(name.upper(), str(value).lower() if isinstance(value, bool) else str(value))


def _let_cpus_shard() -> None:
    """Lets accelerate use FSDP2 on CPUs: asked for it there, it copies the model to each process and says nothing."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    state: Any = AcceleratorState
    if hasattr(state, "_halfbyte_init"):
        return
    state._halfbyte_init = original = state.__init__

    @wraps(original)
    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # from where each state is made anew

    state.__init__ = init


def is_sharded(folder: Path) -> bool:
    """Whether a checkpoint of a training was written by several processes, each its part."""
    return (folder / _MODEL).is_dir()


def sharded_tensors(folder: Path) -> Iterator[dict[str, Tensor]]:
    """What has been trained of a sharded checkpoint, whole, one tensor at a time: by one process, no others needed.

    What is trained is what the optimizer keeps states of.

    Args:
        folder: Of the checkpoint.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    trained = {
        name.removeprefix("optimizer.").removeprefix("state.").removesuffix(".exp_avg")
        for name in FileSystemReader(folder / _OPTIMIZER).read_metadata().state_dict_metadata
        if name.endswith(".exp_avg")
    }
    reader = FileSystemReader(folder / _MODEL)
    for key, found in reader.read_metadata().state_dict_metadata.items():
        name = key.removeprefix("model.")  # what accelerate wraps the state in
        if name in trained:
            known: Any = found
            target = {key: torch.empty(known.size, dtype=known.properties.dtype)}
            load(target, storage_reader=FileSystemReader(folder / _MODEL), no_dist=True)
            yield {name: target[key]}
