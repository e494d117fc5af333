"""Layers that read the same input quantize it once: q, k and v of an attention, gate and up of an MLP."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn


class _Memo:
    """The last input of a group of equal quantizers, and what it became."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None  # one name, so that no thread sees half of it

    def quantize(self, quantizer: Any, x: Tensor) -> Tensor:
        """The quantized x, computed once for all that are given the same tensor."""
        kept = self._kept
        if kept is None or kept[0] is not x:
            kept = self._kept = (x, quantizer(x))
        return kept[1]

    def forget(self, *_: Any) -> None:
        """Keeps no activation alive after the forward pass of the layers' parent."""
        self._kept = None


def share_inputs(model: nn.Module) -> int:
    """Lets sibling layers whose input quantizers are equal share their work, in place; no value changes.

    Siblings are layers below one parent module. Whether they read the same input is seen at each call: by the identity
    of the tensor, which no layer between them changes in place. For quantizers that stay as they are; gradients are the
    same bits too.

    Returns:
        How many quantizers may share another one's work.
    """
    shared = 0
    for parent in model.modules():
        groups: dict[str, list[Any]] = {}
        for child in parent.children():
            quantizer = getattr(child, "input_quantizer", None)
            if quantizer is not None and getattr(quantizer, "is_enabled", False):
                groups.setdefault(_identity(quantizer), []).append(quantizer)
        for group in groups.values():
            if len(group) > 1:
                memo = _Memo()
                for quantizer in group:
                    quantizer.forward = _through(memo, quantizer.forward)
                parent.register_forward_hook(memo.forget, always_call=True)
                shared += len(group) - 1
    return shared


def _through(memo: _Memo, forward: Any) -> Any:
    return lambda x: memo.quantize(forward, x)


_OF_NO_EFFECT = ("_parameters", "_buffers", "_modules", "_calibrator", "_bias_calibrator", "_quantizer_cache")


def _identity(quantizer: Any) -> str:
    """What two quantizers must have in common to give the same result: all settings, and every tensor bit for bit.

    A setting that upstream adds is compared too; at worst two equal quantizers are not recognised as such.
    """
    settings = {
        name: value
        for name, value in vars(quantizer).items()
        if name not in (*_OF_NO_EFFECT, "training") and "hook" not in name
    }
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype), _digest(tensor))
        for name, tensor in sorted(quantizer.named_buffers())
    ]
    return repr((sorted(settings.items(), key=lambda item: item[0]), tensors))


def _digest(tensor: Tensor) -> str:
    if tensor.is_meta:
        return ""
    content = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()
