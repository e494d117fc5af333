"""The memory that calibrating and settling a language model take, from its configuration: no weight is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from halfbyte.quant.configs import methods
from halfbyte.quant.forward_memory import PassMemory, counting, weight_bytes
from halfbyte.quant.layers import Layer, fused_groups
from halfbyte.quant.layouts import FP8, FP8_CHANNEL, NVFP4, W4A16_NVFP4
from halfbyte.quant.plan import Plan
from halfbyte.quant.rounding import AT_ONCE
from halfbyte.quant.training_memory import Unpredictable
from halfbyte.recipes.schema import CalibrationSpec

_KNOWN = (None, "max", "awq_lite", "svdquant")
_BYTES_OF_A_VALUE = 12
"""That settling takes for each value that is rounded together: float32 copies, and what is compared."""
_PACKING = {FP8: 5.0, FP8_CHANNEL: 5.0, NVFP4: 14.4, W4A16_NVFP4: 14.4}
"""That ModelOpt's export takes for each value of experts in one tensor, which it packs at once; measured."""


def calibration_memory(
    make_model: Callable[[torch.dtype], Any],
    config: dict[str, Any],
    plan: Plan,
    spec: CalibrationSpec,
    *,
    compute: torch.dtype,
    own: torch.dtype,
    device: str,
) -> PassMemory:
    """The peak of calibrating, settling and exporting: the weights, and the most that one of these adds at a time.

    - calibrating, where the algorithm has anything to measure: a forward pass over batch_size x length tokens that
      computes one logit row, counted on tensors without values. AWQ and SVDQuant search: each linear beside it holds
      its input smoothed, its weight scaled, that weight rounded, and a second output.
    - SVDQuant decomposes each weight [m, n] in float64: 8 (m n + k (m + n)) bytes with k = min(m, n), and once more
      those that are fused when served, put together in float32: 8 m n more. Its factors stay: rank (m + n) values each.
    - settling: `_BYTES_OF_A_VALUE` for each value of a chunk; where a layer's experts are in one tensor, a copy of it,
      turned around, for the pass that finds which layers share their input.
    - exporting: the largest weight in the checkpoint's type, before the float32 one is let go of; then, when all are in
      that type, `_PACKING` for each value of such a tensor.

    What LAPACK and cuSOLVER take inside is not known and not counted. Loading is not part of it: it holds no more than
    the weights and, on a CPU, what forward_memory.loading_bytes says.

    Args:
        make_model: See forward_memory.build.
        config: What configs.quant_config made.
        plan: Its plan.
        spec: The calibration block.
        compute: The type it computes in.
        own: The type of what the checkpoint keeps.
        device: Kind of device: cpu or cuda.

    Raises:
        Unpredictable: for other algorithms than max, AWQ lite and SVDQuant, and models that do not run without values.
    """
    found = set(methods(config))
    if not found <= set(_KNOWN):
        raise Unpredictable(f"what {', '.join(sorted(str(one) for one in found - set(_KNOWN)))} takes is not known")
    searches = bool(found & {"awq_lite", "svdquant"})
    working = 0
    if found != {None}:
        with counting(make_model, config, plan, "searching" if searches else "calibrating", compute) as (model, count):
            ids = torch.zeros(spec.batch_size, spec.length, dtype=torch.long)
            working = count(lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1))[0].working
    values = max((layer.weights for layer in plan.layers), default=0)
    rounded = max((math.prod(layer.shape[-2:]) for layer in plan.quantized), default=0)
    settling = max(_BYTES_OF_A_VALUE * min(AT_ONCE[device], rounded), compute.itemsize * _turned(plan))
    exporting = max(values * own.itemsize if compute != own else 0, _packed(plan, compute.itemsize - own.itemsize))
    factors = decomposing = 0
    if "svdquant" in found:
        factors = sum(layer.rank * sum(layer.shape) for layer in plan.quantized) * compute.itemsize
        decomposing = max(_decomposed(group) for group in _together(plan))
    weights = weight_bytes(plan, "original", compute)
    return PassMemory(weights, factors + max(working, decomposing, settling, exporting))


def _turned(plan: Plan) -> int:
    """Values of all experts of a layer that are in one tensor each, in the largest layer."""
    found: Counter[str] = Counter()
    for layer in plan.quantized:
        if layer.kind == "Experts":
            found[layer.owner] += layer.weights
    return max(found.values(), default=0)


def _packed(plan: Plan, freed: int) -> int:
    """Bytes beside the weights while experts in one tensor are packed, less those that went with another type.

    Args:
        plan: Of the quantization.
        freed: Bytes of each value.
    """
    stacks = [layer for layer in plan.quantized if layer.kind == "Experts"]
    most = max((_PACKING.get(str(layer.format), 0.0) * layer.weights for layer in stacks), default=0.0)
    return max(int(most) - freed * plan.weights, 0)


def _together(plan: Plan) -> list[list[Layer]]:
    """The layers that SVDQuant decomposes, each alone and those together that are fused when served."""
    by_name = {layer.name: layer for layer in plan.quantized if layer.rank}
    groups = [[by_name[name] for name in group if name in by_name] for group in fused_groups(plan.layers)]
    return [*([layer] for layer in by_name.values()), *(group for group in groups if len(group) > 1)]


def _decomposed(group: list[Layer]) -> int:
    rows, columns = sum(layer.shape[0] for layer in group), group[0].shape[1]
    alone = 8 * (rows * columns + min(rows, columns) * (rows + columns))
    return alone if len(group) == 1 else alone + 8 * rows * columns
