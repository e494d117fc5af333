"""The peak memory of an evaluation: what CUDA's allocator gave out at most, or how large this process was."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from halfbyte.records.record import MemoryKind

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): sets the peak of the resident set to its present size


class PeakMemory:
    """Watches from now on what a backend takes; nothing where the model is not in this process.

    Args:
        backend: What answers; see backend.Backend.
    """

    def __init__(self, backend: Any) -> None:
        device = getattr(getattr(backend, "model", None), "device", None)
        self.kind: MemoryKind | None = None
        if backend.name != "hf" or not isinstance(device, torch.device):
            return
        if device.type == "cuda":
            self.kind = "cuda"
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)
        elif device.type == "cpu":
            self.kind = "process"
            with contextlib.suppress(OSError):  # not Linux, or forbidden: then it is the peak since the process began
                _CLEAR.write_text(_RESET_PEAK, encoding="ascii")

    def bytes(self) -> int | None:
        """The peak so far, the model's weights included; of all CUDA devices together."""
        if self.kind == "cuda":
            return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
        return _resident() if self.kind == "process" else None


class DevicePeak:
    """Watches from now on the peak of memory of one device, whatever is loaded there.

    Args:
        device: cuda or cpu, where it is the resident size of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):  # not Linux, or forbidden: then it is the peak since the process began
                _CLEAR.write_text(_RESET_PEAK, encoding="ascii")

    def bytes(self) -> int:
        """The peak so far."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _resident()


def resident() -> int:
    """The resident size of this process now; its largest so far where the system does not tell."""
    return _status("VmRSS") or _resident()


def _resident() -> int:
    """The largest resident size of this process."""
    found = _status("VmHWM")
    if found is not None:  # getrusage would count what the process that started this one had, too
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(field: str) -> int | None:
    """Bytes that Linux says of this process."""
    if not _STATUS.is_file():
        return None
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    return None if found is None else int(found[1]) * 1024
