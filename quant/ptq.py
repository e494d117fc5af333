"""Post-training quantization with ModelOpt: calibrate, keep the calibration, settle the scales, export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from halfbyte.quant.backend import use_cpu_backend
from halfbyte.quant.numerics import (
    E2M1_MAX,
    E4M3_MAX,
    NVFP4_BLOCK,
    amax_of_scale,
    fp8_dequantize,
    fp8_quantize,
    fp8_scale,
    nvfp4_dequantize,
    nvfp4_quantize,
    nvfp4_scale_2,
)
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.records.errors import UserError
from halfbyte.records.files import atomic_folder, read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STATE_FILE = "state.json"
AMAX_FILE = "amax.safetensors"


def quantizers(model: nn.Module) -> dict[str, Any]:
    """The enabled ModelOpt quantizers of a model, by name."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    return {n: m for n, m in model.named_modules() if isinstance(m, TensorQuantizer) and m.is_enabled}


def calibrate(model: PreTrainedModel, config: dict[str, Any], loop: Callable[[nn.Module], None] | None) -> None:
    """Inserts quantizers into the model, in place, and calibrates them.

    Args:
        model: Where it computes; on a CPU the NVFP4 quantizers run on our numerics.
        config: What configs.quant_config made.
        loop: The calibration loop; None inserts the quantizers only.

    Raises:
        UserError: when a calibrated amax is not a finite number, naming the quantizer.
    """
    import modelopt.torch.quantization as mtq

    if model.device.type == "cpu":
        config = use_cpu_backend(config)
    if loop is None:
        config = {**config, "algorithm": None}
    with quiet_upstream():
        mtq.quantize(model, config, loop)
    for name, quantizer in quantizers(model).items():
        amax = quantizer.amax
        if amax is not None and not bool(torch.isfinite(amax).all()):
            raise UserError(
                f"calibration of {name} gave an amax that is not finite", "the model overflows on these texts"
            )


def save_calibration(model: nn.Module, folder: Path, key: str, **facts: Any) -> None:
    """Keeps the amax of every quantizer, so that a crash during export costs no calibration.

    Args:
        model: The calibrated model.
        folder: The run's calibration/ folder; it appears whole or not at all.
        key: Digest of all that shaped the calibration; load_calibration asks for the same.
        facts: What else to keep beside the key, for the manifest: digests of the texts, seconds.
    """
    state = {
        f"{name}.amax": quantizer.amax.detach().float().cpu().clone()
        for name, quantizer in quantizers(model).items()
        if getattr(quantizer, "_amax", None) is not None
    }
    with atomic_folder(folder) as partial:
        save_file(state, partial / AMAX_FILE)
        write_json(partial / STATE_FILE, {"schema_version": 1, "key": key, "quantizers": len(state), **facts})


def has_calibration(folder: Path, key: str) -> bool:
    """Whether `folder` holds a calibration made under `key`."""
    if not ((folder / STATE_FILE).is_file() and (folder / AMAX_FILE).is_file()):
        return False
    state = read_json(folder / STATE_FILE)
    return isinstance(state, dict) and state.get("key") == key


def load_calibration(model: PreTrainedModel, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Inserts quantizers into the original model, in place, with the amax kept in `folder`.

    Returns:
        The content of state.json: the key and the facts kept beside it.

    Raises:
        UserError: when the kept state does not belong to this model.
    """
    calibrate(model, config, None)
    try:
        state = load_file(folder / AMAX_FILE)
    except SafetensorError as error:
        raise UserError(f"{folder / AMAX_FILE} is damaged: {error}", "delete the folder to calibrate again") from None
    known = quantizers(model)
    for key, amax in state.items():
        quantizer = known.get(key.removesuffix(".amax"))
        if quantizer is None:
            raise UserError(
                f"{folder} has an amax for {key}, which the model lacks", "delete the folder or use --force"
            )
        quantizer.amax = amax.to(model.device)
    return dict(read_json(folder / STATE_FILE))


def settle(model: PreTrainedModel) -> None:
    """Makes the model in memory what its export will be, in place.

    1. Linears that read the same input (q/k/v, gate/up) get one amax, as loaders that fuse them assume; ModelOpt would
       do this silently during export.
    2. Every amax becomes one that is recovered exactly from the scale the checkpoint stores.
    3. Weights are rounded to the values their codes stand for. ModelOpt's export divides bfloat16 weights by the FP8
       scale in bfloat16 and rounds the quotient again to FP8, which moves about 3 % of the codes; and its CUDA kernel
       divides NVFP4 weights approximately, which moves ties. Weights that are rounded already are moved by neither.
    """
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

    with quiet_upstream(), torch.no_grad():
        requantize_resmooth_fused_llm_layers(model)
    for name, quantizer in quantizers(model).items():
        amax = getattr(quantizer, "_amax", None)
        if amax is not None and amax.numel() == 1 and float(amax) > 0:
            largest = scale_divisor(name, quantizer)
            quantizer.amax = amax_of_scale(amax.float() / largest, largest).reshape(amax.shape)
    with torch.no_grad():
        for module in model.modules():
            quantizer = getattr(module, "weight_quantizer", None)
            if quantizer is not None and quantizer.is_enabled:
                weight: nn.Parameter = module.weight  # type: ignore[assignment]
                weight.copy_(_rounded(weight, quantizer))


def _rounded(weight: Tensor, quantizer: Any) -> Tensor:
    """A weight rounded to the values of its codes; blocks that would not be rounded to the same values again are kept.

    Those are NVFP4 blocks with a scale near the smallest E4M3 value: no more than 4e-5 of the tensor's magnitude.
    """
    if quantizer.is_fp8:
        return fp8_dequantize(fp8_quantize(weight, fp8_scale(quantizer.amax)), weight.dtype)
    scale_2 = nvfp4_scale_2(quantizer.amax)
    rounded = nvfp4_dequantize(nvfp4_quantize(weight, scale_2), weight.dtype)
    again = nvfp4_dequantize(nvfp4_quantize(rounded, scale_2), weight.dtype)
    same = (again == rounded).reshape(*weight.shape[:-1], -1, NVFP4_BLOCK).all(dim=-1, keepdim=True)
    return torch.where(same.expand(*same.shape[:-1], NVFP4_BLOCK).flatten(-2), rounded, weight)


def scale_divisor(name: str, quantizer: Any) -> float:
    """What an amax is divided by to give the scale in the checkpoint; KV-cache scales use 448 in every format."""
    if name.endswith(("k_bmm_quantizer", "v_bmm_quantizer")) or quantizer.num_bits == (4, 3):
        return E4M3_MAX
    return E2M1_MAX * E4M3_MAX


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype) -> None:
    """Writes the settled model in ModelOpt's unified Hugging Face layout, with tokenizer and generation config.

    The folder appears whole or not at all. The model is packed in place and of no further use.

    Args:
        model: After settle().
        tokenizer: Saved beside the weights, with its chat template.
        folder: The run's checkpoint/ folder.
        dtype: Type of what stays unquantized.

    Raises:
        UserError: when the disk is full.
    """
    from modelopt.torch.export import export_hf_checkpoint

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    with atomic_folder(folder) as partial, quiet_upstream():
        export_hf_checkpoint(model, dtype=dtype, export_dir=partial)
        tokenizer.save_pretrained(partial)
