"""Checkpoints in any stored format, made from a plain model with the numerics alone, laid out as exporters do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import make_model
from torch import Tensor

from halfbyte.quant import numerics as nm

Parts = dict[str, Tensor]
INPUT_AMAX = 6.5


def _amax(weight: Tensor) -> Tensor:
    return weight.float().abs().amax()


def _fp8(weight: Tensor) -> tuple[Parts, Tensor]:
    q = nm.fp8_quantize(weight, nm.fp8_scale(_amax(weight)))
    scale = torch.tensor(INPUT_AMAX) / nm.E4M3_MAX
    return {"weight": q.codes, "weight_scale": q.scale, "input_scale": scale}, nm.fp8_dequantize(q)


def _fp8_channel(weight: Tensor) -> tuple[Parts, Tensor]:
    q = nm.fp8_quantize(weight, nm.fp8_scale(weight.float().abs().amax(dim=-1)))
    return {"weight": q.codes, "weight_scale": q.scale}, nm.fp8_dequantize(q)


def _fp8_block(weight: Tensor) -> tuple[Parts, Tensor]:
    q = nm.fp8_block_quantize(weight)
    return {"weight": q.codes, "weight_scale_inv": q.scale}, nm.fp8_block_dequantize(q.codes, q.scale)


def _fp8_pb_wo(weight: Tensor) -> tuple[Parts, Tensor]:
    parts, values = _fp8_block(weight)
    scale = parts.pop("weight_scale_inv")
    # ModelOpt keeps the broadcast dimensions, and drops all of them where there is one square only.
    return parts | {"weight_scale": scale.squeeze() if scale.numel() == 1 else scale[:, None, :, None]}, values


def _nvfp4(weight: Tensor, *, calibrated: bool = True) -> tuple[Parts, Tensor]:
    q = nm.nvfp4_quantize(weight, nm.nvfp4_scale_2(_amax(weight)))
    parts = {"weight": q.codes, "weight_scale": q.scale, "weight_scale_2": q.scale_2}
    if calibrated:
        parts["input_scale"] = nm.nvfp4_scale_2(torch.tensor(INPUT_AMAX))
    return parts, nm.nvfp4_dequantize(q)


def _w4a8_nvfp4_fp8(weight: Tensor) -> tuple[Parts, Tensor]:
    """Blocks of 32, whose scales are the maximum of two of 16; the tensor's scale is amax / 448."""
    scale_2 = _amax(weight) / nm.E4M3_MAX
    blocks = weight.float().unflatten(-1, (-1, 32))
    scale = (blocks.abs().amax(dim=-1) / (6 * scale_2)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    codes = nm.e2m1_codes(blocks / (scale.float() * scale_2).unsqueeze(-1))
    values = nm.e2m1_decode(codes) * (scale.float() * scale_2).unsqueeze(-1)
    parts = {"weight": nm.pack_e2m1(codes.flatten(-2)), "weight_scale": scale, "weight_scale_2": scale_2}
    return parts | {"input_scale": torch.tensor(INPUT_AMAX) / nm.E4M3_MAX}, values.flatten(-2)


def _mxfp4(weight: Tensor) -> tuple[Parts, Tensor]:
    q = nm.mxfp4_quantize(weight)
    return {"weight": q.codes, "weight_scale": q.scale}, nm.mxfp4_dequantize(q)


def _mxfp8(weight: Tensor) -> tuple[Parts, Tensor]:
    q = nm.mxfp8_quantize(weight)
    return {"weight": q.codes, "weight_scale": q.scale}, nm.mxfp8_dequantize(q)


def _nvfp4_awq(weight: Tensor) -> tuple[Parts, Tensor]:
    smooth = (torch.arange(weight.shape[-1]) % 3 + 1) / 2  # powers of two and 1.5, so that products are exact
    parts, values = _nvfp4(weight.float() / smooth)
    return parts | {"pre_quant_scale": smooth.bfloat16()}, values * smooth


def _nvfp4_svd(weight: Tensor) -> tuple[Parts, Tensor]:
    generator = torch.Generator().manual_seed(weight.shape[0])
    a = torch.randn(4, weight.shape[1], generator=generator).bfloat16()
    b = (torch.randn(weight.shape[0], 4, generator=generator) / 16).bfloat16()
    smooth = (torch.arange(weight.shape[-1]) % 3 + 1) / 2
    parts, values = _nvfp4(weight.float() / smooth - b.float() @ a.float())
    branch = {"weight_quantizer._svdquant_lora_a": a, "weight_quantizer._svdquant_lora_b": b}
    return parts | branch | {"pre_quant_scale": smooth.bfloat16()}, (values + b.float() @ a.float()) * smooth


STORE: dict[str, Callable[[Tensor], tuple[Parts, Tensor]]] = {
    "FP8": _fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8_channel,
    "FP8_BLOCK": _fp8_block,
    "FP8_PB_WO": _fp8_pb_wo,
    "NVFP4": _nvfp4,
    "NVFP4_AWQ": _nvfp4_awq,
    "NVFP4_SVD": _nvfp4_svd,
    "W4A16_NVFP4": lambda weight: _nvfp4(weight, calibrated=False),
    "W4A8_NVFP4_FP8": _w4a8_nvfp4_fp8,
    "MXFP4": _mxfp4,
    "W4A8_MXFP4_FP8": _mxfp4,
    "MXFP8": _mxfp8,
}
"""By declared format: the tensors of a weight, and the float32 values they stand for."""


IDS = torch.randint(0, 384, (2, 30), generator=torch.Generator().manual_seed(3))


def logits_of(model: Any) -> torch.Tensor:
    """What a model answers to IDS."""
    with torch.no_grad():
        return model(IDS).logits  # type: ignore[no-any-return]


def write_all(folder: Path, declared: str, family: str = "llama", **more: Any) -> Path:
    """A tiny model of a family with all that is usually quantized stored in one format; see write()."""
    keep = ("embed", "norm", "lm_head", "gate.", "router")
    in_config = None
    if declared == "FP8_BLOCK":
        in_config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    return write(
        make_model(family),
        folder,
        lambda name: None if any(part in f"{name}." for part in keep) else declared,
        own_file=None if in_config else {"quant_algo": declared, "exclude_modules": ["lm_head"]},
        in_config=in_config,
        **more,
    )


def write(
    model: Any,
    folder: Path,
    formats: Callable[[str], str | None],
    *,
    own_file: dict[str, Any] | None = None,
    in_config: dict[str, Any] | None = None,
    more: Parts | None = None,
    tokenizer: Any = None,
    shards: int = 1,
    index: Callable[[str], bool] | None = None,
) -> Path:
    """Stores the weights of a model in low precision.

    Args:
        model: Saved by transformers first, under the names of its hub checkpoints.
        folder: The checkpoint; its values in float32 go to folder.plain.
        formats: The format of a module by its name in the checkpoint; None keeps it.
        own_file: Content of hf_quant_config.json's "quantization"; None for no such file.
        in_config: quantization_config in config.json; None for none.
        more: Further tensors.
        tokenizer: Saved beside the checkpoint.
        shards: Over how many files the tensors are spread.
        index: Which tensors the index names; all by default.

    Returns:
        The folder with the plain values, which transformers opens.
    """
    plain = folder.with_name(folder.name + ".plain")
    model.save_pretrained(plain)
    stored, values = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        chosen = formats(name.removesuffix(".weight")) if name.endswith(".weight") and tensor.dim() == 2 else None
        if chosen is None:
            stored[name] = values[name] = tensor
        else:
            parts, values[name] = STORE[chosen](tensor)
            stored |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
    save_file({name: value.float() for name, value in values.items()}, plain / "model.safetensors", {"format": "pt"})
    folder.mkdir()
    _save(stored | (more or {}), folder, shards, index or (lambda _: True))
    config = json.loads((plain / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": in_config} if in_config else {})))
    if own_file is not None:
        content = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": own_file}
        (folder / "hf_quant_config.json").write_text(json.dumps(content))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return plain


def _save(tensors: Parts, folder: Path, shards: int, index: Callable[[str], bool]) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    where = {name: files[i % shards] for i, name in enumerate(sorted(tensors))}  # a weight and its scales lie apart
    for file in files:
        save_file({name: tensors[name] for name in where if where[name] == file}, folder / file, {"format": "pt"})
    weight_map = {name: file for name, file in where.items() if index(name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def open_plain(plain: Path) -> Any:
    """The plain values as transformers opens them, with experts one after the other as in read-back."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    for config in (model.config, getattr(model.config, "text_config", None)):
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
    return model


def without_rounding(model: Any) -> Any:
    """A read-back model that leaves inputs and KV cache as they are."""
    for module in model.modules():
        if type(module).__name__ == "TensorQuantizer":
            module.disable()
    return model
