"""Layers that read the same input quantize it once: q, k and v of an attention, gate and up of an MLP."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class _Memo:
    """The last input of a group of equal quantizers, and what it became."""

    def __init__(self, members: int) -> None:
        self.members = members
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._served = 0

    def quantize(self, quantizer: Any, x: Tensor) -> Tensor:
        """The quantized x, computed at most once for the group."""
        if self._input is not x or self._output is None:
            self._input, self._served = x, 0
            self._output = quantizer(x)
        self._served += 1
        output = self._output
        if self._served >= self.members:  # an activation is not kept alive after its last reader
            self._input = self._output = None
        return output


def share_inputs(model: nn.Module) -> int:
    """Lets sibling layers whose input quantizers are equal share their work, in place; no value changes.

    Siblings are layers below one parent module. Whether they read the same input is seen at each call: by the identity
    of the tensor, which no layer between them changes in place. For inference only: the shared tensor is one node of
    the graph, but a quantizer that is changed later on stops being equal.

    Returns:
        How many quantizers share another one's work.
    """
    shared = 0
    for parent in model.modules():
        groups: dict[Any, list[Any]] = {}
        for child in parent.children():
            quantizer = getattr(child, "input_quantizer", None)
            if quantizer is not None and getattr(quantizer, "is_enabled", False):
                groups.setdefault(_identity(quantizer), []).append(quantizer)
        for group in groups.values():
            if len(group) > 1:
                memo = _Memo(len(group))
                for quantizer in group:
                    quantizer.forward = _through(memo, quantizer.forward)
                shared += len(group) - 1
    return shared


def _through(memo: _Memo, forward: Any) -> Any:
    return lambda x: memo.quantize(forward, x)


_OF_NO_EFFECT = ("_parameters", "_buffers", "_modules", "_calibrator", "_bias_calibrator", "_quantizer_cache")


def _identity(quantizer: Any) -> Any:
    """What two quantizers must have in common to give the same result: all settings, and every tensor bit for bit.

    A setting that upstream adds is compared too; at worst two equal quantizers are not recognised as such.
    """
    settings = {
        name: value
        for name, value in vars(quantizer).items()
        if name not in (*_OF_NO_EFFECT, "training") and "hook" not in name
    }
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.detach().double().flatten().tolist())
        for name, tensor in sorted(quantizer.named_buffers())
    ]
    return repr((sorted(settings.items(), key=lambda item: item[0]), tensors))
