"""Our NVFP4 numerics as a ModelOpt quantization backend, for where ModelOpt's kernel needs CUDA and there is none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from halfbyte.quant.numerics import NVFP4_BLOCK, nvfp4_fake_quantize
from halfbyte.records.errors import UserError

BACKEND = "halfbyte"


class _StraightThrough(torch.autograd.Function):
    """Fake quantization whose gradient is the identity, as ModelOpt's dynamic block quantizers have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor) -> Tensor:  # noqa: ARG004
        return nvfp4_fake_quantize(x, amax)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradients[0], None


def fake_quantize(inputs: Tensor, quantizer: Any) -> Tensor:
    """The backend's entry point (ModelOpt's QuantBackendEntrypoint): inputs through the quantizer's format and back.

    Args:
        inputs: Weights or activations; blocks run along the last dimension.
        quantizer: A modelopt TensorQuantizer with dynamic NVFP4 blocks of 16.
    """
    amax = quantizer.amax if quantizer.amax is not None else inputs.detach().abs().amax()
    return _StraightThrough.apply(inputs, amax.float())  # type: ignore[no-any-return,no-untyped-call]


def register() -> None:
    """Makes the backend known to ModelOpt under the name "halfbyte"; calling it again changes nothing."""
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    if not tensor_quantizer.is_registered_quant_backend(BACKEND):
        tensor_quantizer.register_quant_backend(BACKEND, fake_quantize)


def is_nvfp4(attributes: dict[str, Any]) -> bool:
    """Whether a quantizer's attributes say dynamic NVFP4 in blocks of 16."""
    blocks = attributes.get("block_sizes") or {}
    size = blocks.get(-1, blocks.get("-1"))
    return (
        tuple(attributes.get("num_bits") or ()) == (2, 1)
        and tuple(blocks.get("scale_bits") or ()) == (4, 3)
        and blocks.get("type") == "dynamic"
        and size == NVFP4_BLOCK
    )


def _attributes(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in config["quant_cfg"]:
        cfg = entry.get("cfg")
        yield from [cfg] if isinstance(cfg, dict) else cfg or []


def use_cpu_backend(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of a ModelOpt configuration whose NVFP4 quantizers run on our numerics.

    Raises:
        UserError: for block formats that need CUDA and have no CPU implementation here yet.
    """
    register()
    config = copy.deepcopy(config)
    for attributes in _attributes(config):
        if is_nvfp4(attributes):
            attributes["backend"] = BACKEND
        elif _needs_cuda(attributes):
            blocks = {str(key): value for key, value in attributes["block_sizes"].items()}
            raise UserError(
                f"num_bits {attributes['num_bits']} with block_sizes {blocks} has no CPU implementation",
                "run it with --device cuda, or use NVFP4 with dynamic blocks of 16, or FP8",
            )
    return config


def _needs_cuda(attributes: dict[str, Any]) -> bool:
    blocks = attributes.get("block_sizes") or {}
    return isinstance(attributes.get("num_bits"), (tuple, list)) and bool(blocks.get("scale_bits"))
