"""Post-training quantization with ModelOpt: calibrate, keep the calibration, settle the scales, export."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from halfbyte.quant.backend import register
from halfbyte.quant.configs import methods
from halfbyte.quant.elements import E4M3_BITS
from halfbyte.quant.expert_blocks import declare_blocks, is_published_as_blocks, register_blocks
from halfbyte.quant.host_memory import given_back
from halfbyte.quant.numerics import E2M1_MAX, E4M3_MAX, FP8_BLOCK, amax_of_scale, scale_of_amax
from halfbyte.quant.patches import fused_once, memory_kept, shards_side_by_side, unhurried_max
from halfbyte.quant.rounding import Unstable, kept_buffers, put_back, quantized_weights, round_in_place
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.quant.writing import on_host
from halfbyte.records.digests import file_digests
from halfbyte.records.errors import UserError
from halfbyte.records.files import atomic_folder, read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
QUANTIZERS_FILE = "quantizers.pth"
TENSORS_FILE = "tensors.safetensors"
WEIGHTS_FILES = "weights{suffix}.safetensors"

_SMOOTHING = ("._pre_quant_scale", "._svdquant_lora_a", "._svdquant_lora_b")
"""Buffers of quantizers that a checkpoint holds in the type of what is kept."""
_WEIGHTS_STAY = ("max", "mse", "local_hessian", "nvfp4_act_headroom")
"""Algorithms that change no weight."""
_SHARD = "1GB"
"""The most that a file of weights holds: several are written and hashed side by side, and pass through host memory."""


def quantizers(model: nn.Module) -> dict[str, Any]:
    """The enabled ModelOpt quantizers of a model, by name."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    return {n: m for n, m in model.named_modules() if isinstance(m, TensorQuantizer) and m.is_enabled}


def calibrate(model: PreTrainedModel, config: dict[str, Any], loop: Callable[[nn.Module], None]) -> None:
    """Inserts quantizers into the model, in place, and calibrates them.

    Args:
        model: Where it computes; on a CPU the quantizers run on our numerics.
        config: What configs.quant_config made.
        loop: The calibration loop.

    Raises:
        UserError: when an amax is not a finite number.
    """
    import modelopt.torch.quantization as mtq

    register()
    hint = "the model overflows on these texts in the type it computes in; leave them out, or look at its weights"
    try:
        # Without it the search of AWQ leaves more with the process than the weights take; a pass alone leaves little.
        freeing = given_back() if changes_weights(config) else nullcontext()
        with freeing, quiet_upstream(), unhurried_max(), torch.no_grad():
            mtq.quantize(model, config, loop)
    except AssertionError as error:  # ModelOpt's calibrator does not name the quantizer
        found = re.match(r"detected (inf|nan) values in amax", str(error))
        if found is None:
            raise
        raise UserError(f"calibration met activations or weights that are {found[1]}", hint) from error
    for name, quantizer in quantizers(model).items():
        for kind in ("_amax", "_pre_quant_scale"):
            found = getattr(quantizer, kind, None)
            if found is not None and not bool(torch.isfinite(found).all()):
                raise UserError(f"calibration of {name} gave {kind.removeprefix('_')} values that are not finite", hint)


def changes_weights(config: dict[str, Any]) -> bool:
    """Whether a configuration's calibration algorithms change weights, which save_calibration must then keep."""
    return any(method not in (None, *_WEIGHTS_STAY) for method in methods(config))


def save_calibration(model: nn.Module, folder: Path, key: str, **facts: Any) -> None:
    """Keeps what calibration found and changed, so that a crash during export costs no calibration.

    That is ModelOpt's own description of the quantizers, their tensors (amax, smoothing scales, low-rank factors), and
    the weights where the algorithm changed them. These are as large as the original: see drop_weights.

    Args:
        model: The calibrated model.
        folder: The run's calibration/ folder; it appears whole or not at all.
        key: Digest of all that shaped the calibration; load_calibration asks for the same.
        facts: What else to keep beside the key, for the manifest: digests of the texts, seconds.
    """
    import modelopt.torch.opt as mto

    description = mto.modelopt_state(model)
    steps = {name for name, _ in description["modelopt_state_dict"]}
    state = model.state_dict()
    contents = {TENSORS_FILE: sorted(_quantizer_tensors(model) & state.keys())}
    if not steps <= {"quantize", *(f"{name}_calibrate" for name in _WEIGHTS_STAY)}:
        weights = {weight.name: state[weight.name] for weight in quantized_weights(model) if weight.name in state}
        split = split_torch_state_dict_into_shards(weights, filename_pattern=WEIGHTS_FILES, max_shard_size=_SHARD)
        contents.update(split.filename_to_tensors)
    with atomic_folder(folder) as partial:
        torch.save(description, partial / QUANTIZERS_FILE)
        for file, names in contents.items():
            save_file({name: on_host(state[name].detach().contiguous()) for name in names}, partial / file)
        names = [QUANTIZERS_FILE, *contents]
        files = dict(zip(names, file_digests([partial / name for name in names]), strict=True))
        write_json(partial / STATE_FILE, {"schema_version": 3, "key": key, "files": files, **facts})


def _quantizer_tensors(model: nn.Module) -> set[str]:
    from modelopt.torch.quantization.nn import TensorQuantizer

    return {
        f"{name}.{buffer}"
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer)
        for buffer in module.state_dict()
    }


def has_calibration(folder: Path, key: str) -> bool:
    """Whether `folder` holds a calibration made under `key`, whole."""
    if not (folder / STATE_FILE).is_file():
        return False
    state = read_json(folder / STATE_FILE)
    if not isinstance(state, dict) or (state.get("schema_version"), state.get("key")) != (3, key):
        return False
    return all((folder / name).is_file() for name in state["files"])


def drop_weights(folder: Path) -> None:
    """Removes the weights from a kept calibration whose checkpoint is published; amax and scales stay to be read.

    Where there were any, has_calibration is false from then on.
    """
    for path in folder.glob(WEIGHTS_FILES.format(suffix="*")):
        path.unlink()


def load_calibration(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Puts the original model, in place, into the state that save_calibration kept in `folder`.

    Returns:
        The content of state.json: the key and the facts kept beside it.

    Raises:
        UserError: when the kept state is damaged or does not belong to this model.
    """
    import modelopt.torch.opt as mto
    from modelopt.torch.quantization.nn import TensorQuantizer

    register()
    facts = dict(read_json(folder / STATE_FILE))
    hint = "delete the folder to calibrate again"
    kept: dict[str, str] = facts["files"]
    for name, digest in zip(kept, file_digests([folder / name for name in kept]), strict=True):
        if kept[name] != digest:
            raise UserError(f"{folder / name} is damaged", hint)
    lacking: set[str] | None = None
    surplus: list[str] = []
    with quiet_upstream():
        mto.restore_from_modelopt_state(model, modelopt_state_path=folder / QUANTIZERS_FILE)
        for module in model.modules():
            if isinstance(module, TensorQuantizer):
                module.to(model.device)
        lacking = _quantizer_tensors(model)
        for name in kept.keys() - {QUANTIZERS_FILE}:
            found = load_file(folder / name)
            lacking -= found.keys()
            surplus += model.load_state_dict(found, strict=False).unexpected_keys
    if surplus or lacking:
        raise UserError(f"the calibration in {folder} is of another model: {[*surplus, *lacking][0]}", hint)
    return facts


def share_scales(model: PreTrainedModel) -> None:
    """Gives linears that read the same input (q/k/v, gate/up) one amax, in place, as loaders that fuse them assume.

    Smoothing scales are folded into the layer before where that is possible. ModelOpt would do this silently during
    export.
    """
    from modelopt.torch.export import unified_export_hf as upstream

    with quiet_upstream(), torch.no_grad():
        if is_diffusers(model):
            upstream._fuse_qkv_linears_diffusion(model, strict=True)
        else:
            upstream.requantize_resmooth_fused_llm_layers(model)
        for module in cast(Any, model).modules():
            if getattr(getattr(module, "weight_quantizer", None), "svdquant_lora_a", None) is not None:
                # ModelOpt leaves siblings views of one tensor, which cannot be saved one by one.
                module.weight.data = module.weight.data.clone(memory_format=torch.contiguous_format)


def is_diffusers(model: nn.Module) -> bool:
    """Whether a model is a part of a diffusers pipeline."""
    if "diffusers" not in sys.modules:
        return False
    from modelopt.torch.export.diffusers_utils import is_diffusers_object

    return bool(is_diffusers_object(model))


def settle(
    model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16, *, scales_are_shared: bool = False
) -> list[Unstable]:
    """Makes the model in memory what its export will be, in place.

    1. share_scales(), unless that was done.
    2. What the checkpoint keeps in `dtype` is rounded to it: a model calibrated in float32 may not be of that type any
       more where calibration changed it.
    3. Every amax of an input or a KV cache becomes one that is recovered exactly from the scale the checkpoint stores.
    4. Weights are rounded to the values their codes stand for (see rounding.rounded), and their quantizers, which have
       nothing left to do, are switched off for forward passes.

    Args:
        model: After calibration.
        dtype: Type of what stays unquantized in the checkpoint.
        scales_are_shared: Whether share_scales() was called: a second time would not be the same (see fused_once).

    Returns:
        What export() must put back first.
    """
    if not scales_are_shared:
        share_scales(model)
    with torch.no_grad():
        for name, tensor in model.named_buffers():
            if name.endswith(_SMOOTHING):
                tensor.data = tensor.data.contiguous()  # as it is read: another order of sums has other last bits
        for tensor, kind in _kept(model, dtype):
            tensor.copy_(tensor.to(kind))
    for name, quantizer in quantizers(model).items():
        amax = getattr(quantizer, "_amax", None)
        if "weight_quantizer" not in name and amax is not None and amax.numel() == 1 and float(amax) > 0:
            largest = scale_divisor(name, quantizer)
            settled = amax_of_scale(scale_of_amax(amax, largest), largest).reshape(amax.shape)
            quantizer._amax = settled  # not through .amax, which would keep the type it has
    unstable = []
    for weight in quantized_weights(model):
        _complete(weight.measured, weight.quantizer)
        unstable.append(round_in_place(weight, dtype))
        weight.quantizer.disable_quant()
    return [found for found in unstable if found is not None]


def _kept(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[Tensor, torch.dtype]]:
    """What the checkpoint keeps, each tensor with the type it is stored in."""
    for parameter in model.parameters():
        yield parameter, dtype
    yield from kept_buffers(model, dtype).values()
    for name, buffer in model.named_buffers():
        if name.endswith(_SMOOTHING):
            yield buffer, dtype


def _complete(values: Tensor, quantizer: Any) -> None:
    """Gives a weight quantizer what ModelOpt's export would otherwise make up, or squeeze out of shape."""
    blocks = quantizer.block_sizes or {}
    dynamic = blocks.get("scale_bits") == (8, 0)
    if getattr(quantizer, "_amax", None) is None and not dynamic:
        quantizer.amax = values.detach().abs().amax().float()  # an algorithm that searches linears passes experts by
    if blocks.get(-2) == FP8_BLOCK:
        rows, columns = (-(-side // FP8_BLOCK) for side in values.shape)
        quantizer._amax = quantizer._amax.reshape(rows, 1, columns, 1)  # a single square would become a scalar


def scale_divisor(name: str, quantizer: Any) -> float:
    """What an amax is divided by to give the scale in the checkpoint; KV-cache scales use 448 in every format."""
    if name.endswith(("k_bmm_quantizer", "v_bmm_quantizer")) or quantizer.num_bits == (4, 3):
        return E4M3_MAX
    return E2M1_MAX * E4M3_MAX


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    dtype: torch.dtype,
    unstable: Sequence[Unstable],
) -> None:
    """Writes the settled model in ModelOpt's unified Hugging Face layout, with tokenizer and generation config.

    gpt-oss with experts in MXFP4 is written in OpenAI's layout: see expert_blocks.

    The model is packed in place and of no further use. That `folder` appears whole or not at all, its caller sees to.

    Args:
        model: After settle() with the same `dtype`.
        tokenizer: Saved beside the weights, with its chat template; None for a part of a pipeline.
        folder: Where the checkpoint is written.
        dtype: Type of what stays unquantized.
        unstable: What settle() gave.
    """
    from modelopt.torch.export import export_hf_checkpoint

    weight_only = _is_mxfp4_weight_only(model)
    in_blocks = any(map(is_published_as_blocks, model.modules()))
    register_blocks()
    put_back(model, unstable)
    _divide_on_a_cpu(model)
    _cast_kept(model, dtype)
    with quiet_upstream(), fused_once(), memory_kept(), shards_side_by_side():
        export_hf_checkpoint(model, dtype=dtype, export_dir=folder, max_shard_size=_SHARD)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    if in_blocks:
        declare_blocks(folder)
    elif weight_only:
        _declare_weight_only(folder)


def _divide_on_a_cpu(model: nn.Module) -> None:
    """Moves each amax of which a float32 scale is made to the CPU, where ModelOpt's quotient is correctly rounded.

    CUDA multiplies by a reciprocal, after which an FP8 weight is now and then a unit in the last place off the values
    of the model in memory; in a small model that is enough to change one answer in twenty.
    """
    for name, quantizer in quantizers(model).items():
        amax = getattr(quantizer, "_amax", None)
        inputs = "weight_quantizer" not in name
        if amax is not None and amax.numel() == 1 and (inputs or quantizer.num_bits == E4M3_BITS):
            quantizer._amax = amax.float().cpu()


def _cast_kept(model: nn.Module, dtype: torch.dtype) -> None:
    """A function of its own, so that no name of a weight outlives it: packing frees each weight as it goes."""
    for tensor, kind in _kept(model, dtype):
        tensor.data = tensor.data.to(kind)


def _is_mxfp4_weight_only(model: nn.Module) -> bool:
    from modelopt.torch.export.quant_utils import get_quantization_format

    found = [weight for weight in quantized_weights(model) if weight.quantizer.is_mx_format]
    return (
        bool(found)
        and get_quantization_format(model) == "mxfp4"
        and not any(w.input_quantizer.is_enabled for w in found)
    )


def _declare_weight_only(folder: Path) -> None:
    """Says of an MXFP4 checkpoint that its inputs are not quantized: ModelOpt declares both kinds alike."""
    for name, block in (("hf_quant_config.json", "quantization"), ("config.json", "quantization_config")):
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        content[block]["weight_only"] = True
        write_json(folder / name, content)
