"""Weights on their way from mapped files to a GPU, through memory that the GPU reads by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BUFFER = 16 * 2**20
"""Bytes of pinned memory that each thread has."""


class Staging:
    """Copies host tensors to a GPU; safe for several threads, each with a buffer of its own.

    A copy straight from a mapped file goes through the driver's own buffer, one page after the other and one thread at
    a time: on an H200's host 16 GB then took 2.3 s in any number of threads, and 0.5 s through pinned memory.
    """

    def __init__(self) -> None:
        self._threads = threading.local()

    def __call__(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor's values on the device, in the order of the stream that is current there."""
        with torch.cuda.device(device):
            if not hasattr(self._threads, "buffer"):
                self._threads.buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True)
            found = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            copy_through(self._threads.buffer, tensor.contiguous(), found, torch.cuda.current_stream().synchronize)
        return found


def copy_through(buffer: Tensor, source: Tensor, target: Tensor, wait: Callable[[], Any]) -> None:
    """Copies all bytes of a tensor to another of its shape and type, a bufferful at a time.

    Args:
        buffer: uint8 [n].
        source: Contiguous; of any type.
        target: Contiguous; on any device.
        wait: Called after each part: once it returns, the buffer may be written over.
    """
    given, taken = (tensor.reshape(-1).view(torch.uint8) for tensor in (source, target))
    parts = (torch.split(tensor, len(buffer)) for tensor in (given, taken))
    for part, place in zip(*parts, strict=True):
        place.copy_(buffer[: len(part)].copy_(part), non_blocking=True)
        wait()
