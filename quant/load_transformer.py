"""Read-back of a pipeline's transformer: an original or an exported one, from its files alone, to be drawn with.

diffusers cannot reload ModelOpt's export. The pipeline around it stays diffusers' own: put what load_transformer gives
into FluxPipeline.from_pretrained(folder, transformer=...).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.quant.attach import prepare
from halfbyte.quant.attention import amax_names, attach_attention
from halfbyte.quant.build import Builder, Weights, require_fitting
from halfbyte.quant.checkpoint import QuantFormat, Tensors, plain_dtype, quant_format, torch_dtype
from halfbyte.quant.models import compute_dtype
from halfbyte.quant.pipelines import (
    configuration,
    empty_transformer,
    open_transformer,
    opening,
    transformer_class,
)
from halfbyte.quant.places import Places, find_places
from halfbyte.records.errors import UserError


def load_transformer(
    folder: Path,
    *,
    own: str | None = None,
    dtype: str = "auto",
    device: torch.device,
    weights: Weights = "folded",
) -> Any:
    """Opens the transformer of a pipeline, original or exported, as diffusers' model in evaluation mode.

    Args:
        folder: The pipeline's folder transformer.
        own: The type an original's weights have; None for that of its files.
        dtype: To compute in: bfloat16, float16, float32, or auto: its own type on CUDA and float32 on a CPU.
        device: Where it is put.
        weights: "packed" keeps quantized weights in 4 or 8 bits and dequantizes each layer while it runs; "folded"
            dequantizes them once. The images are the same.

    Raises:
        UserError: when it is damaged, or in a format that cannot be read back.
    """
    declared = quant_format(folder)
    stored = torch_dtype(own if own and declared is None else plain_dtype(folder))
    computed = compute_dtype(dtype, device, stored)
    if declared is None:
        return open_transformer(folder, weights=stored, compute=computed, device=device)
    return _exported(folder, declared, computed, device, weights)


def _exported(folder: Path, declared: QuantFormat, dtype: torch.dtype, device: torch.device, weights: Weights) -> Any:
    prepare(device)
    with Tensors(folder) as tensors:
        amaxes = amax_names(tensors)
        empty: Any = empty_transformer(folder)
        places = find_places(tensors, declared, empty)
        require_fitting(tensors, places, empty)
        model = _without_quantized(folder, tensors, places, {n for at in amaxes.values() for n in at.values()}, dtype)
        model.to(device)
        build = Builder(tensors, declared, dtype, device)
        for name, layer in places.linears.items():
            linear = build.linear(layer, getattr(model.get_submodule(name), "bias", None))
            if weights == "folded":
                linear.fold()
            model.set_submodule(name, linear)
        stored = {name: {side: tensors[at] for side, at in found.items()} for name, found in amaxes.items()}
    if bool(stored) != (declared.kv_cache is not None):
        raise UserError(
            f"{folder} declares {'no ' if stored else ''}FP8 attention and {'has' if stored else 'lacks'} its scales",
            "the checkpoint is damaged; export the model again",
        )
    attach_attention(model, stored, device)
    return model.eval().requires_grad_(False)


def _without_quantized(
    folder: Path, tensors: Tensors, places: Places, amaxes: set[str], dtype: torch.dtype
) -> nn.Module:
    """The model with everything loaded that is not quantized, and gaps in the place of what is.

    It is made without memory for its weights; the few tensors that are no part of a checkpoint are made for real.
    """
    from accelerate import init_empty_weights

    if places.others or places.stacks or places.whole:
        raise UserError(f"{folder} has quantized weights of other layers than linears, which cannot be read back")
    with opening(folder), init_empty_weights(include_buffers=False):
        model: nn.Module = transformer_class(folder).from_config(configuration(folder))
    for name in places.linears:
        gap = nn.Module()
        gap.register_parameter("bias", model.get_submodule(name).bias)  # type: ignore[arg-type]
        model.set_submodule(name, gap)
    state = {name: _as(tensors[name], dtype) for name in places.plain if name not in amaxes}
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name, value in state.items():
        if expected.get(name) != tuple(value.shape):
            raise UserError(
                f"{folder}: {name} {'has another shape' if name in expected else 'belongs to no layer of the model'}",
                "the checkpoint does not fit its configuration",
            )
    missing = sorted(expected.keys() - state.keys())
    if missing:
        raise UserError(f"{folder} lacks {missing[0]}", "copy the checkpoint again, whole, or export it again")
    model.load_state_dict(state, assign=True)
    return model


def _as(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value
