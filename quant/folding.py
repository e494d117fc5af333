"""Where the smoothing scales of AWQ and SVDQuant go: folded into the layer before, or stored in the checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from halfbyte.quant.configs import SMOOTHING
from halfbyte.quant.layouts import NVFP4
from halfbyte.quant.rounding import fused_experts, stacked_experts
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.records.errors import UserError


def require_smoothable(layers: Iterable[Any], model: nn.Module, config: dict[str, Any]) -> tuple[int, set[str]]:
    """The rank of SVDQuant's low-rank branch, 0 for AWQ, and the names of the layers that are smoothed.

    Args:
        layers: plan.Layer of the model.
        model: The model, with quantizers.
        config: A ModelOpt configuration.

    Raises:
        UserError: when a layer or the model does not allow it.
    """
    algorithm = config.get("algorithm")
    entries = algorithm if isinstance(algorithm, list) else [algorithm]
    for entry in entries:
        options: dict[str, Any] = entry if isinstance(entry, dict) else {"method": entry}
        if options["method"] not in SMOOTHING:
            continue
        skip = options.get("skip_layers") or []
        chosen = {
            layer.name: layer
            for layer in layers
            if layer.format and layer.kind == "Linear" and not any(fnmatch(layer.name, pattern) for pattern in skip)
        }
        for name, layer in chosen.items():
            if layer.format != NVFP4:
                raise UserError(
                    f"{name} would be {layer.format} with {options['method']}",
                    "its checkpoints can be read back for NVFP4 weights and inputs",
                )
        _refuse_experts(model, options["method"])
        return (int(options.get("lowrank", 32)) if options["method"] == "svdquant" else 0), set(chosen)
    return 0, set()


def _refuse_experts(model: nn.Module, method: str) -> None:
    """Refuses mixtures of experts that ModelOpt's export does not know what to do with after smoothing."""
    from modelopt.torch.export.layer_utils import get_experts_list, is_moe

    for name, module in model.named_modules():
        if is_moe(module):
            try:
                get_experts_list(module, type(model).__name__.lower())
            except (NotImplementedError, TypeError, AttributeError):
                raise UserError(
                    f"ModelOpt cannot export {type(model).__name__} after {method}: it does not know the experts"
                    f" of {name}",
                    "choose max, mse, local_hessian or gptq",
                ) from None


def keeps_smoothing(model: Any, smoothed: set[str]) -> set[str]:
    """Those of the layers smoothed by AWQ whose scale stays in the checkpoint.

    ModelOpt's export folds the others into a linear before (o_proj into v_proj, down_proj into up_proj, where their
    sizes agree), or into the layer norm whose output they read.

    Args:
        model: The model on the meta device.
        smoothed: Names of the layers.

    Raises:
        UserError: when a norm that would take a scale is read by a layer that is not smoothed, and would be wrong then.
    """
    from modelopt.torch.export.unified_export_hf import collect_shared_input_modules

    folded = set(folded_into(model, smoothed))
    readers: dict[torch.Tensor, list[str]] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: readers.setdefault(args[0], []).append(name))
        for name, module in model.named_modules()
        if hasattr(module, "weight_quantizer")
    ]
    try:
        with quiet_upstream():
            groups, norms = collect_shared_input_modules(model, lambda: dry_run(model), collect_layernorms=True)
    finally:
        for handle in handles:
            handle.remove()
    for tensor, group in groups.items():
        if len(group) > 1 and norms is not None and tensor in norms and group[0].name in smoothed - folded:
            names = {linear.name for linear in group}
            others = [name for name in readers[tensor] if name not in names]
            if others:
                raise UserError(
                    f"{others[0]} is kept and reads the same layer norm as {group[0].name}, whose smoothing scale is"
                    " folded into that norm",
                    f"quantize all layers that read it, or keep them all: {', '.join([*readers[tensor]])}",
                )
            folded |= names
    return smoothed - folded


def folded_into(model: nn.Module, smoothed: set[str]) -> dict[str, str]:
    """Of the layers smoothed by AWQ those whose scale is folded into a linear before, each with that linear's name."""
    from modelopt.torch.export.quant_utils import PQS_FUSE_MODULE_MAPPING

    modules: dict[str, Any] = dict(model.named_modules())
    found = {}
    for name, module in modules.items():
        for kinds, (into, of) in PQS_FUSE_MODULE_MAPPING:
            if f"{name}.{of}" in smoothed and any(kind in type(module).__name__ for kind in kinds):
                before, after = modules[f"{name}.{into}"], modules[f"{name}.{of}"]
                if before.weight.shape[-2] == after.weight.shape[-1]:
                    found[f"{name}.{of}"] = f"{name}.{into}"
    return found


def dry_run(model: Any) -> None:
    """One forward pass of a model on the meta device; its experts do nothing: which tokens they get is unknown."""
    for module in model.modules():
        if fused_experts(module) or stacked_experts(module):
            module.forward = lambda hidden, *_, **__: hidden
    tokens = torch.ones([1, 2], dtype=torch.long, device="meta")
    mask = torch.zeros([1, 1, 2, 2], device="meta")  # one of four dimensions is taken as it is, without a look inside
    options = {}
    if "position_ids" in inspect.signature(model.forward).parameters:  # which OPT would count from the mask otherwise
        options["position_ids"] = torch.arange(2, device="meta")[None]
    with torch.no_grad():
        model(tokens, attention_mask=mask, use_cache=False, **options)


def input_shapes(model: nn.Module, quantizers: list[nn.Module]) -> list[tuple[int, ...]]:
    """The shape of what each quantizer gets for two tokens."""
    from modelopt.torch.quantization.conversion import set_quantizer_by_cfg_context

    found: dict[nn.Module, tuple[int, ...]] = {}
    handles = [
        quantizer.register_forward_pre_hook(lambda module, inputs: found.update({module: tuple(inputs[0].shape)}))
        for quantizer in quantizers
    ]
    try:
        with quiet_upstream(), set_quantizer_by_cfg_context(model, [{"quantizer_name": "*", "enable": False}]):
            dry_run(model)
    finally:
        for handle in handles:
            handle.remove()
    return [found[quantizer] for quantizer in quantizers]
