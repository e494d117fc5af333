"""The processes that train one model together, as accelerate launch or torchrun started them; usually there is one."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch

logger = logging.getLogger(__name__)

_PATIENCE = timedelta(days=2)
"""How long the others wait for the one that calibrates."""


class Processes:
    """This process among those that were started together.

    Args:
        device: What the user asked for; each process has a GPU of its own where it is CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = device
        self._state: Any = None
        if self.count > 1:
            from accelerate import PartialState

            from halfbyte.quant.sharding import shard_by_default

            shard_by_default()
            self._state = PartialState(cpu=device.type == "cpu", timeout=_PATIENCE)
            self.device = self._state.device

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes what all share."""
        return self._state is None or bool(self._state.is_main_process)

    def wait(self) -> None:
        """Returns when all processes are here."""
        if self._state is not None:
            torch.distributed.barrier()

    def part(self) -> None:
        """Ends a process whose work is done, when it is not the one that leads."""
        if not self.leads:
            torch.distributed.destroy_process_group()
            raise SystemExit(0)
