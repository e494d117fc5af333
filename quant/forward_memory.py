"""The memory of forward passes, counted on tensors without values: of a model as it is, calibrated, or read back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfbyte.quant.fake_quantize import CHUNK
from halfbyte.quant.layers import Layer
from halfbyte.quant.plan import Plan
from halfbyte.quant.shared import share_inputs
from halfbyte.quant.training_memory import Counter, Unpredictable, without_values
from halfbyte.quant.upstream import quiet_upstream

T = TypeVar("T")
_INSIDE = 8.5
"""Bytes beside its result for each value that fake_quantize works on at once: magnitudes and codes, and a copy."""
State = Literal["original", "calibrating", "searching", "folded", "packed"]
"""A model as it is, one that is calibrated, or whose smoothing scales AWQ searches too, or a checkpoint read back."""
_UNCHANGED = ("original", "calibrating", "searching")


@dataclass(frozen=True)
class PassMemory:
    """Bytes at the highest total of a pass."""

    weights: int
    """Of the model, the same before and after."""
    working: int
    """All that a pass has beside them at one moment: activations, logits, keys and values, weights dequantized."""

    @property
    def total(self) -> int:
        """Bytes altogether."""
        return self.weights + self.working


def weight_bytes(plan: Plan, state: State, dtype: torch.dtype) -> int:
    """Bytes of a model's weights where it computes.

    packed: what is quantized as the checkpoint stores it, and the rest in `dtype`. Otherwise all weights in `dtype`. A
    tied weight counts once; low-rank factors and smoothing scales are in `dtype`.

    Args:
        plan: Of the quantization.
        state: How the weights are held.
        dtype: The type to compute in.
    """
    whole = plan.weights * dtype.itemsize
    if state in _UNCHANGED:
        return whole
    changed = sum(layer.stored_bytes(dtype.itemsize) - layer.weights * dtype.itemsize for layer in plan.quantized)
    if state == "packed":
        return whole + changed
    return whole + sum(layer.rank * sum(layer.shape) * dtype.itemsize for layer in plan.quantized)


def loading_bytes(plan: Plan, stored: torch.dtype, compute: torch.dtype) -> int:
    """What loading an original on a CPU takes at most beside its weights.

    That is the pages of its mapped safetensors files, all of which were read when the last tensor is: weights that are
    not converted are these pages. Where each expert's linears are stored alone and joined into one tensor of a layer,
    the parts of one such tensor are still there when it is made, and nothing of them is a part of the file any more.

    Args:
        plan: Of any quantization of the model.
        stored: The type of its files.
        compute: The type it computes in.
    """
    joined: dict[tuple[str, bool], int] = {}
    for layer in plan.layers:
        if layer.kind == "Expert":
            key = layer.owner, layer.name.endswith(("gate_proj", "up_proj"))
            joined[key] = joined.get(key, 0) + layer.weights
    if stored == compute:
        return sum(joined.values()) * stored.itemsize
    return plan.weights * stored.itemsize + max(joined.values(), default=0) * compute.itemsize


def build(
    make_model: Callable[[torch.dtype], Any],
    config: dict[str, Any],
    plan: Plan,
    state: State,
    dtype: torch.dtype,
    device: str = "meta",
) -> Any:
    """The model of a state, with the quantizers that work in a forward pass.

    A packed weight is dequantized when its layer runs, as in quant.packed: one tensor of its shape in `dtype`, which is
    gone when the layer has run.

    Args:
        make_model: Makes the model from its configuration in a type, on the device that is torch's default.
        config: What configs.quant_config made.
        plan: Its plan.
        state: How the weights are held.
        dtype: The type to compute in.
        device: Where it is; on another than meta it is one that can be timed.
    """
    from modelopt.torch.quantization.conversion import replace_quant_module, set_quantizer_by_cfg
    from modelopt.torch.quantization.nn import TensorQuantizer

    with torch.device(device), quiet_upstream():
        model = make_model(dtype).eval().requires_grad_(False)
        if state in ("original", "calibrating"):
            return model
        quantized = {layer.name: layer for layer in plan.quantized}
        replace_quant_module(model)
        set_quantizer_by_cfg(model, config["quant_cfg"])
        for name, module in model.named_modules():
            if isinstance(module, TensorQuantizer) and module.is_enabled:
                if "weight_quantizer" in name:
                    module.disable()
                elif not module.is_mx_format:
                    module.amax = torch.ones((), device=device)
        if state != "searching":
            share_inputs(model)
        for name, module in model.named_modules():
            layer = quantized.get(name)
            if layer is None or not isinstance(getattr(module, "weight", None), nn.Parameter):
                continue
            if state == "searching":
                module.forward = _searching(module)
                continue
            if layer.smoothing and not layer.rank:
                module.input_quantizer.pre_quant_scale = torch.ones(layer.shape[-1], dtype=dtype)
            module.forward = _reading_back(module, layer, packed=state == "packed")
    return model


def _reading_back(module: Any, layer: Layer, *, packed: bool) -> Callable[[Tensor], Tensor]:
    """What packed.QuantizedLinear does."""

    def forward(x: Tensor) -> Tensor:
        weight = module.weight
        if packed:
            weight = torch.empty_like(weight)
            torch.empty(min(CHUNK, weight.numel()), dtype=torch.float32)  # looked up, before it is rounded
        if not layer.rank:
            return F.linear(module.input_quantizer(x), weight, module.bias)
        rows, columns = layer.shape
        x = x * torch.empty(columns, dtype=x.dtype)
        branch = F.linear(F.linear(x, x.new_empty(layer.rank, columns)), x.new_empty(rows, layer.rank))
        x = module.input_quantizer(x)
        return F.linear(x, weight, module.bias) + branch

    return forward


def _searching(module: Any) -> Callable[[Tensor], Tensor]:
    """One step of AWQ's search over scales, as modelopt's awq_lite computes it."""

    def forward(x: Tensor) -> Tensor:
        actual = F.linear(x, module.weight, module.bias)
        smooth = x * torch.empty(x.shape[-1], dtype=x.dtype)
        scaled = module.weight * torch.empty(x.shape[-1], dtype=x.dtype)
        rounded = torch.empty_like(scaled)
        del scaled
        found = F.linear(smooth, rounded, module.bias)
        del smooth, rounded
        (found - actual).float().pow(2)
        return actual

    return forward


def _stand_in(module: Any, packed: Collection[str]) -> Callable[..., Tensor]:
    """One expert given all tokens: the most that transformers' loop over experts can need.

    For each of them it takes the tokens that were sent there, both halves of the first product, their product, the
    second product and its weighted form; of packed weights one expert's are dequantized at a time.
    """

    def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
        first, second = module.gate_up_proj, module.down_proj
        inner = second.numel() // len(second) // x.shape[-1]
        found, rows = torch.zeros_like(x), x.reshape(-1, x.shape[-1])
        taken = torch.empty_like(rows)
        weight = first.new_empty(first.shape[1:]) if "gate_up_proj" in packed else None
        both = taken.new_empty(len(rows), first.numel() // len(first) // x.shape[-1])
        del weight
        product = taken.new_empty(len(rows), inner)
        del both
        weight = second.new_empty(second.shape[1:]) if "down_proj" in packed else None
        given = torch.empty_like(rows)
        del weight, product
        weighted = torch.empty_like(given)
        del given
        return found.add_(weighted.view_as(x))

    return forward


def _biased_stand_in(module: Any, packed: Collection[str], *, turned: bool) -> Callable[..., Tensor]:
    """Two of gpt-oss's experts given all tokens, where the second finds the names of the first still in use.

    Its products and their sums with a bias are tensors of their own, and so is each step of its gate. While it is
    calibrated, ModelOpt holds a copy of both weights, turned around.
    """

    def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
        first, second = module.gate_up_proj, module.down_proj
        copies = [torch.empty_like(weight) for weight in (first, second)] if turned else []
        found, rows = torch.zeros_like(x), x.reshape(-1, x.shape[-1])
        inner = second.shape[1]
        both = gated = out = weighted = None
        for _expert in range(2):
            taken = torch.empty_like(rows)
            weight = first.new_empty(first.shape[1:]) if "gate_up_proj" in packed else None
            product = taken.new_empty(len(rows), 2 * inner)
            del weight
            both = torch.empty_like(product)
            del product
            gate, up, sigmoid, scaled = (both.new_empty(len(rows), inner) for _part in range(4))
            del scaled
            glu = torch.empty_like(gate)
            del sigmoid
            raised = torch.empty_like(up)
            gated = torch.empty_like(up)
            del gate, up, glu, raised
            weight = second.new_empty(second.shape[1:]) if "down_proj" in packed else None
            product = torch.empty_like(rows)
            del weight
            out = torch.empty_like(product)
            del product
            weighted = torch.empty_like(out)
            found.add_(weighted.view_as(x))
            del taken
        del both, gated, out, weighted, copies
        return found

    return forward


def _turning(module: Any) -> Callable[[Tensor], Tensor]:
    """Llama 4's experts while ModelOpt calibrates them: each product is by a copy of the weight, turned around."""

    def forward(x: Tensor) -> Tensor:
        first, second = module.gate_up_proj, module.down_proj
        gate, up = torch.bmm(x.view(len(first), -1, x.shape[-1]), first.mT.contiguous().mT).chunk(2, dim=-1)
        return torch.bmm(up * module.act_fn(gate), second.mT.contiguous().mT).view(-1, x.shape[-1])

    return forward


def _with_stand_ins(model: nn.Module, plan: Plan, state: State) -> None:
    """Replaces what sends tokens to experts by their router's choice, which tensors without values do not make."""
    quantized = {layer.owner for layer in plan.quantized if layer.of_experts}
    for name, module in model.named_modules():
        parts = [getattr(module, part, None) for part in ("gate_up_proj", "down_proj")]
        if all(isinstance(part, nn.Parameter) and part.dim() == 3 for part in parts):
            turned = state == "calibrating" and name in quantized
            if len(inspect.signature(type(module).forward).parameters) < 3:
                if turned:  # without the router's choice: all experts see all tokens
                    module.forward = _turning(module)
                continue
            packed = ("gate_up_proj", "down_proj") if state == "packed" and name in quantized else ()
            if hasattr(module, "gate_up_proj_bias"):
                module.forward = _biased_stand_in(module, packed, turned=turned)
            else:
                module.forward = _stand_in(module, packed)


@contextmanager
def counting(
    make_model: Callable[[torch.dtype], Any], config: dict[str, Any], plan: Plan, state: State, dtype: torch.dtype
) -> Iterator[tuple[Any, Callable[[Callable[[], T]], tuple[PassMemory, T]]]]:
    """A model without values, and what counts a pass over it.

    Attention is counted as torch's fused kernels do it, and an operation without what it allocates and frees inside,
    but for quantizers as they are on a CPU, which is too much by a few MB on a GPU.

    Args:
        make_model: See build.
        config: See build.
        plan: See build.
        state: See build.
        dtype: See build.

    Yields:
        The model, on a CPU as far as it knows, and a function that runs another one: the memory at its peak, and what
        it gives.

    Raises:
        Unpredictable: for a model whose operations depend on values.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    model = build(make_model, config, plan, state, dtype)
    _with_stand_ins(model, plan, state)
    shapes = (parameter.shape for parameter in model.parameters())
    vocabulary = int(model.config.get_text_config().vocab_size)
    held = weight_bytes(plan, state, dtype)
    try:
        with FakeTensorMode(), torch.inference_mode():
            without_values(model)

            def count(run: Callable[[], T]) -> tuple[PassMemory, T]:
                counter = Counter(vocabulary, shapes, {})
                counter.inside = _INSIDE, CHUNK
                for tensor in (*model.parameters(), *model.buffers()):
                    counter.hold(tensor, "weights")
                with counter:
                    found = run()
                peak = dict(counter.peak)
                return PassMemory(held, sum(peak.values()) - peak["weights"]), found

            yield model, count
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise Unpredictable(f"the pass depends on values ({error.func})") from error
