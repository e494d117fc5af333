"""From a checkpoint's tensors to the modules that compute with them: linears and stacks of experts, with quantizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from halfbyte.quant.attach import input_quantizer
from halfbyte.quant.checkpoint import QuantFormat, Tensors
from halfbyte.quant.elements import E8M0_NAN
from halfbyte.quant.layouts import FORMATS, Activations, StoredLayer
from halfbyte.quant.packed import ExpertStack, Packed, QuantizedLinear
from halfbyte.quant.places import Part, Places
from halfbyte.records.errors import UserError

Weights = Literal["folded", "packed"]
"""Whether weights are dequantized once, or stay in 4 or 8 bits and are dequantized while they run."""


def checked(tensors: Tensors, name: str) -> Tensor:
    """A scale or offset as stored, known to be usable.

    A block's scale may be zero, which makes a block of zeros; a scale of a whole tensor may not.

    Raises:
        UserError: when it is not finite, negative, or zero where that cannot be.
    """
    scale = tensors[name]
    if scale.dtype == torch.uint8:
        bad = bool((scale == E8M0_NAN).any())
    elif scale.dtype == torch.float8_e4m3fn:  # by its codes: there may be a billion
        codes = scale.reshape(-1).view(torch.uint8)
        bad = bool(((codes & 0x7F) == 0x7F).any() or (codes > 0x80).any())
    else:
        values = scale.float()
        offset = name.endswith(("_bias", "_lora_a", "_lora_b"))
        bad = not bool(torch.isfinite(values).all())
        bad = bad or (not offset and bool((values < 0).any() if values.numel() > 1 else (values <= 0).any()))
    if bad:
        raise UserError(f"{name} is zero, negative or not finite", "the checkpoint is damaged; export the model again")
    return scale


def logical_shape(tensors: Tensors, layer: StoredLayer) -> tuple[int, ...]:
    """The shape of a layer's values, with the dimensions in the order in which they are stored."""
    shape = list(tensors.shape(layer.codes))
    if layer.codes.endswith("_blocks"):
        *shape, blocks, size = shape
        return (*shape, blocks * size * 2)
    if layer.storage in ("nvfp4", "mxfp4"):
        shape[-2 if layer.blocks_first else -1] *= 2
    return tuple(shape)


def require_fitting(tensors: Tensors, places: Places, model: Any) -> None:
    """Compares the shapes of all quantized weights with the model's.

    Raises:
        UserError: when one does not fit, or an expert is missing.
    """
    for name, layer in places.linears.items():
        _require_shape(layer.codes, logical_shape(tensors, layer), tuple(model.get_submodule(name).weight.shape))
    for stack, parts in places.stacks.items():
        count, rows, columns = getattr(model.get_submodule(stack.module), stack.parameter).shape
        halves = 2 if stack.parameter == "gate_up_proj" else 1
        for expert in range(count):
            for part in range(halves):
                found = parts.get((expert, part))
                if found is None:
                    raise UserError(
                        f"{stack.module}: part {part} of {stack.parameter} of expert {expert} is missing",
                        "the checkpoint is incomplete; export the model again",
                    )
                name = found if isinstance(found, str) else found.codes
                shape = tensors.shape(name) if isinstance(found, str) else logical_shape(tensors, found)
                _require_shape(name, shape, (rows // halves, columns))
        if len(parts) != count * halves:
            raise UserError(
                f"{stack.module} holds more experts than the model", "its configuration is of another model"
            )
    for stack, layer in places.whole.items():
        experts = model.get_submodule(stack.module)
        count, *matrix = getattr(experts, stack.parameter).shape
        if layer.transposed != transposes(experts):
            matrix.reverse()
        _require_shape(layer.codes, logical_shape(tensors, layer), (count, *matrix))


def _require_shape(name: str, stored: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if stored != expected:
        raise UserError(
            f"{name} is mismatched: it holds {stored}, the model has {expected}",
            "the checkpoint does not fit its configuration",
        )


def transposes(experts: Any) -> bool:
    """Whether a model multiplies by its stacked experts as [in, out]."""
    return bool(getattr(experts, "is_transposed", type(experts).__name__ in ("GptOssExperts", "Llama4TextExperts")))


class Builder:
    """Makes the modules of one checkpoint."""

    def __init__(self, tensors: Tensors, declared: QuantFormat, dtype: torch.dtype, device: torch.device) -> None:
        self.tensors = tensors
        self.declared = declared
        self.dtype = dtype
        self.device = device

    def values(self, layer: StoredLayer, dtype: torch.dtype | None = None) -> Tensor:
        """A weight's values in the computing type or another, where the checkpoint's files are."""
        values: Tensor = self._packed(layer)(dtype or self.dtype)
        return values

    def stacked_values(self, layer: StoredLayer) -> Tensor:
        """The values of experts that are stored in one tensor, [experts, in, out], filled expert by expert."""
        return self.whole(layer, transposed=True).all_values()

    def linear(self, layer: StoredLayer, bias: Tensor | None) -> QuantizedLinear:
        """The module for one linear layer."""
        factors = [self._checked(name) for name in (layer.lora_a, layer.lora_b) if name is not None]
        return QuantizedLinear(
            self._packed(layer),
            bias,
            self.dtype,
            input_quantizer=self._quantizer([layer]),
            low_rank=(factors[0], factors[1]) if len(factors) == 2 else None,
        ).to(self.device)

    def stack(self, parts: dict[Part, StoredLayer | str], *, transposed: bool) -> ExpertStack:
        """The module for experts that are stored one by one."""
        ordered = [found for _, found in sorted(parts.items(), key=lambda item: item[0])]
        halves = len({part for _, part in parts})
        grouped = [ordered[first : first + halves] for first in range(0, len(ordered), halves)]
        quantized = [[part for part in group if isinstance(part, StoredLayer)] for group in grouped]
        modules = [
            [
                self._packed(part) if isinstance(part, StoredLayer) else Packed(None, self.tensors[part])
                for part in group
            ]
            for group in grouped
        ]
        return self._stack(modules, [self._quantizer(layers) for layers in quantized], transposed)

    def whole(self, layer: StoredLayer, *, transposed: bool) -> ExpertStack:
        """The module for experts that are stored in one tensor, of which each expert's is a view."""
        codes, scale = self.tensors[layer.codes], self._checked(layer.scale)
        if layer.codes.endswith("_blocks"):
            codes = codes.flatten(-2)
        scale_2 = None if layer.scale_2 is None else self._checked(layer.scale_2)
        modules = [
            [
                Packed(
                    layer.storage,
                    codes[expert],
                    _of_expert(scale, expert),
                    None if scale_2 is None else _of_expert(scale_2, expert),
                    transposed=layer.transposed,
                    blocks_first=layer.blocks_first,
                )
            ]
            for expert in range(codes.shape[0])
        ]
        return self._stack(modules, [self._quantizer([layer])], transposed)

    def _stack(
        self, modules: Sequence[Sequence[Packed]], quantizers: Sequence[Any | None], transposed: bool
    ) -> ExpertStack:
        every: list[Any] = [quantizer for quantizer in quantizers if quantizer is not None]
        if len(every) < len(quantizers):
            every = []
        elif len({float(one.amax) for one in every if one.amax is not None}) <= 1:
            every = every[:1] if all(one.pre_quant_scale is None for one in every) else every
        return ExpertStack(modules, self.dtype, transposed=transposed, input_quantizers=every).to(self.device)

    def _packed(self, layer: StoredLayer) -> Packed:
        scale_2 = None if layer.scale_2 is None else self._checked(layer.scale_2)
        return Packed(layer.storage, self.tensors[layer.codes], self._checked(layer.scale), scale_2)

    def _quantizer(self, layers: Sequence[StoredLayer]) -> Any | None:
        """The quantizer of an input that several weights share; of several stored scales the largest, as loaders do."""
        if not layers:
            return None
        scales = [self._checked(layer.input_scale).float().amax() for layer in layers if layer.input_scale is not None]
        smooth = [self._checked(layer.pre_quant_scale) for layer in layers if layer.pre_quant_scale is not None]
        if any(not torch.equal(smooth[0], other) for other in smooth[1:]):
            raise UserError(
                f"{layers[0].module} and {layers[1].module} differ in pre_quant_scale, but share their input",
                "export the model again",
            )
        return input_quantizer(
            self._activations(layers[0]),
            torch.stack(scales).amax() if scales else None,
            smooth[0].flatten() if smooth else None,
            dtype=self.dtype,
            device=self.device,
        )

    def _activations(self, layer: StoredLayer) -> Activations | None:
        declared = self.declared.format_of(layer.module)
        return None if declared is None else FORMATS[declared].activations

    def _checked(self, name: str) -> Tensor:
        return checked(self.tensors, name)


def _of_expert(scale: Tensor, expert: int) -> Tensor:
    return scale[expert] if scale.dim() > 0 and scale.numel() > 1 else scale.reshape(())
