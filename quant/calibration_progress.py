"""What a calibration has found after each prompt, on disk, so that a kill costs one prompt and not hours.

An algorithm draws all prompts once or several times; each of these passes adds to numbers that lie in ModelOpt's
calibrators and, while AWQ's scales are searched, in its helpers. They are written after each prompt of each pass. A
later process puts those of the finished passes back without drawing anything, and goes on with the next prompt.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.records.errors import UserError
from halfbyte.records.files import write_bytes

_CALIBRATOR = "_calib_amax"
_AMAX = "_amax"
_HELPER = ("act_scale", "num_cache_steps", "num_search_steps", "num_tokens", "loss")
"""What AWQ's helper of a linear adds up. Source: AWQLiteHelper in modelopt/torch/quantization/model_calib.py, 0.47."""


class Progress:
    """The passes of one calibration.

    Args:
        folder: A file a pass.
        key: Digest of all that shapes the calibration; what was found under another is not used.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key

    def _file(self, index: int) -> Path:
        return self.folder / f"pass-{index}.pt"

    def save(self, index: int, done: int, model: nn.Module) -> None:
        """Keeps what pass `index` has found in its first `done` prompts."""
        content = io.BytesIO()
        torch.save({"key": self.key, "done": done, "found": found(model)}, content)
        write_bytes(self._file(index), content.getvalue())

    def resume(self, index: int, model: nn.Module) -> int:
        """Puts back, in place, what pass `index` has found; how many prompts of it are done.

        Raises:
            UserError: when its file is damaged.
        """
        path = self._file(index)
        if not path.is_file():
            return 0
        try:
            kept: Any = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise UserError(f"{path} is damaged", f"delete {self.folder} to calibrate again") from error
        if kept["key"] != self.key:
            return 0
        put_back(model, kept["found"])
        return int(kept["done"])


def found(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What calibrators and helpers have added up, by module."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    everything: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        one: dict[str, Any] = {}
        if isinstance(module, TensorQuantizer):
            calibrated = getattr(getattr(module, "_calibrator", None), _CALIBRATOR, None)
            one |= {} if calibrated is None else {_CALIBRATOR: calibrated.detach().cpu()}
            amax = getattr(module, _AMAX, None)
            one |= {} if amax is None else {_AMAX: amax.detach().cpu()}
        helper = getattr(module, "awq_lite", None)
        if helper is not None:
            one |= {entry: _on_cpu(getattr(helper, entry)) for entry in _HELPER}
        if one:
            everything[name] = one
    return everything


def put_back(model: nn.Module, everything: dict[str, dict[str, Any]]) -> None:
    """Gives calibrators and helpers, in place, what found() saw."""
    modules = dict(model.named_modules())
    device = next(model.parameters()).device
    for name, one in everything.items():
        module: Any = modules[name]
        for entry, value in one.items():
            moved = _moved(value, device)
            if entry == _CALIBRATOR:
                module._calibrator._calib_amax = moved
            elif entry == _AMAX:
                module.amax = moved
            else:
                setattr(module.awq_lite, entry, moved)


def _on_cpu(value: Any) -> Any:
    return _moved(value, torch.device("cpu"))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    return {key: _moved(one, device) for key, one in value.items()} if isinstance(value, dict) else value
