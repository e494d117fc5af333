"""Settling weights: in memory they are what a reader of the checkpoint will have, for every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CPU, make_model, sequences, spec

from halfbyte.quant import calibration, configs, ptq
from halfbyte.quant.checkpoint import quant_format
from halfbyte.quant.load import open_exported
from halfbyte.quant.models import locate, open_original
from halfbyte.quant.numerics import FP8, fp8_dequantize, fp8_quantize
from halfbyte.quant.rounding import quantized_weights, round_in_place, rounded


def _calibrated(model: Any, folder: Path, preset: str) -> Any:
    model.save_pretrained(folder)
    opened = open_original(locate(str(folder)), weights=torch.bfloat16, compute=torch.float32, device=CPU)
    loop = calibration.forward_loop(sequences(), tokens_per_row=64, pack=True)
    ptq.calibrate(opened, configs.quant_config(spec(preset)), loop)
    return opened


PRESETS = (
    "FP8_DEFAULT_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "W4A16_NVFP4_CFG",
    "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG",
    "NVFP4_FOUR_OVER_SIX_CFG",
    "MXFP4_DEFAULT_CFG",
    "MXFP8_DEFAULT_CFG",
)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_rounded_weights_are_those_of_modelopts_quantizer_but_for_ties(
    family: str, preset: str, tmp_path: Path
) -> None:
    """Its kernels divide approximately, so that ties may fall to the other side, of values and of block scales."""
    model = _calibrated(make_model(family), tmp_path, preset)
    weights = list(quantized_weights(model))
    assert len(weights) == (14 if family == "llama" else 8 + 2 * 2 * 4)
    for weight in weights:
        values, faked, ours = weight.values.detach(), weight.quantizer(weight.values).detach(), rounded(weight).detach()
        apart = (ours - faked).abs() > 1e-6 * faked.abs()
        assert float(apart.float().mean()) < 0.02, weight.name
        assert float((ours - values).norm()) < 1.01 * float((faked - values).norm()), weight.name


def _divides_like_cuda(x: torch.Tensor, y: Any) -> torch.Tensor:
    return x * (1 / y) if isinstance(y, float) else torch.true_divide(x, y)


def test_an_fp8_weight_is_rounded_with_the_scale_that_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA too, where dividing a tensor by a number multiplies by its reciprocal; a CPU is made to do so here."""
    from modelopt.torch.export.unified_export_hf import _export_quantized_weight

    model = _calibrated(make_model("llama"), tmp_path, "FP8_DEFAULT_CFG")
    weights = {weight.name: weight for weight in quantized_weights(model)}
    divided = {name: weight.quantizer.amax / 448.0 for name, weight in weights.items()}
    monkeypatch.setattr(torch.Tensor, "__truediv__", _divides_like_cuda)
    ours = {name: rounded(weight).detach() for name, weight in weights.items()}
    scales = {}
    for name, weight in weights.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        codes = fp8_quantize(weight.values.detach(), weight.quantizer.amax / 448.0).codes
        _export_quantized_weight(layer, torch.bfloat16)
        scales[name] = layer.weight_scale
        assert torch.equal(ours[name], fp8_dequantize(FP8(codes, layer.weight_scale))), name
    assert any(scales[name] != divided[name] for name in weights), "both divisions agree: the test tests nothing"


def test_modelopts_plain_export_rounds_mxfp4_ties_towards_zero() -> None:
    """The reason for settling MXFP4 weights. Fails when ModelOpt mends it: then they need not be settled."""
    from modelopt.torch.export.quant_utils import to_quantized_weight

    ties = torch.tensor([[6.0, 0.75, 1.75, 3.5] + [0.0] * 28])
    codes = to_quantized_weight(ties, None, "mxfp4", block_size=32)
    assert codes[0, :2].tolist() == [0x17, 0x53]  # 0.5 beside 6, then 1.5 and 3; half to even would be 1, 2 and 4
    settled = to_quantized_weight(torch.tensor([[6.0, 1.0, 2.0, 4.0] + [0.0] * 28]), None, "mxfp4", block_size=32)
    assert settled[0, :2].tolist() == [0x27, 0x64]


def test_blocks_near_the_smallest_scale_are_exported_as_they_are_in_memory(tmp_path: Path, tiny_tokenizer: Any) -> None:
    model = make_model("llama")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        weight = model.model.layers[0].mlp.down_proj.weight
        weight[:, 16:] *= torch.rand(64, 112, generator=generator) * 3e-5  # scales of a few times 2^-9
    opened = _calibrated(model, tmp_path / "model", "NVFP4_DEFAULT_CFG")
    ptq.settle(opened)
    assert opened.__dict__["_unstable"], "no block is near the smallest scale: the test tests nothing"
    memory = opened.model.layers[0].mlp.down_proj.weight.detach().clone()
    ptq.export(opened, tiny_tokenizer, tmp_path / "checkpoint", torch.bfloat16)
    declared = quant_format(tmp_path / "checkpoint")
    assert declared is not None
    found = open_exported(locate(str(tmp_path / "checkpoint")), declared, dtype=torch.float32, device=CPU)
    assert torch.equal(found.model.layers[0].mlp.down_proj.weight, memory)


def test_rounding_twice_is_rounding_once(tmp_path: Path) -> None:
    model = _calibrated(make_model("qwen3_moe"), tmp_path, "W4A8_NVFP4_FP8_CFG")
    for weight in quantized_weights(model):
        assert round_in_place(weight, torch.bfloat16) is None
        once = weight.values.detach().clone()
        round_in_place(weight, torch.bfloat16)
        assert torch.equal(weight.values, once)
