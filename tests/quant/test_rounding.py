"""Settling weights: in memory they are what a reader of the checkpoint will have, for every format."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CPU, make_model, sequences, spec

from halfbyte.quant import calibration, configs, ptq, rounding
from halfbyte.quant.backend import register
from halfbyte.quant.checkpoint import quant_format
from halfbyte.quant.load import open_exported
from halfbyte.quant.models import locate, open_original
from halfbyte.quant.numerics import FP8, fp8_dequantize, fp8_quantize
from halfbyte.quant.rounding import Weight, quantized_weights, round_in_place, rounded


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
    """Its FP4 kernels divide approximately, so that ties may fall to the other side, of values and of block scales.

    FP8's codes are those of the model in memory: where amax has few bits, one value in a hundred is a tie.
    """
    model = _calibrated(make_model(family), tmp_path, preset)
    weights = list(quantized_weights(model))
    assert len(weights) == (14 if family == "llama" else 8 + 2 * 2 * 4)
    for weight in weights:
        values, faked, ours = weight.values.detach(), weight.quantizer(weight.values).detach(), rounded(weight).detach()
        apart = (ours - faked).abs() > 1e-6 * faked.abs()
        assert float(apart.float().mean()) <= (0 if preset.startswith("FP8") else 0.02), weight.name
        assert float((ours - values).norm()) < 1.01 * float((faked - values).norm()), weight.name


def test_ties_of_an_fp8_weight_fall_as_in_memory(tmp_path: Path) -> None:
    model = _calibrated(make_model("llama"), tmp_path, "FP8_DEFAULT_CFG")
    weight = next(quantized_weights(model))
    with torch.no_grad():
        weight.values.copy_(torch.arange(weight.values.numel()).reshape(weight.values.shape) % 129 * 3.25 / 128)
    weight.quantizer.amax = torch.tensor(3.25)
    nearest = fp8_dequantize(fp8_quantize(weight.values.detach(), torch.tensor(3.25 / 448)), weight.values.dtype)
    faked = weight.quantizer(weight.values).detach()
    assert int(((nearest - faked).abs() > 1e-6 * faked).sum()) > 0, "no tie, nothing shown"
    assert torch.allclose(rounded(weight), faked, rtol=1e-6, atol=0)


def _divides_like_cuda(x: torch.Tensor, y: Any) -> torch.Tensor:
    return x * (1 / y) if isinstance(y, float) else torch.true_divide(x, y)


def test_an_fp8_weight_is_rounded_with_a_scale_that_no_device_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA dividing a tensor by a number multiplies by its reciprocal; a CPU is made to do so here."""
    from modelopt.torch.export.unified_export_hf import _export_quantized_weight

    model = _calibrated(make_model("llama"), tmp_path, "FP8_DEFAULT_CFG")
    weights = {weight.name: weight for weight in quantized_weights(model)}
    ours = {name: rounded(weight).detach() for name, weight in weights.items()}
    divided = {name: weight.quantizer.amax / 448.0 for name, weight in weights.items()}
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__truediv__", _divides_like_cuda)
        assert all(torch.equal(rounded(weight), ours[name]) for name, weight in weights.items())
        differs = [name for name, weight in weights.items() if weight.quantizer.amax / 448.0 != divided[name]]
        assert differs, "both divisions agree: the test tests nothing"
    for name in weights:
        layer = model.get_submodule(name.removesuffix(".weight"))
        codes = fp8_quantize(ours[name], divided[name]).codes
        _export_quantized_weight(layer, torch.bfloat16)
        assert torch.equal(layer.weight_scale, divided[name])
        assert torch.equal(fp8_dequantize(FP8(codes, layer.weight_scale)), ours[name]), name


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
    unstable = ptq.settle(opened)
    assert unstable, "no block is near the smallest scale: the test tests nothing"
    memory = opened.model.layers[0].mlp.down_proj.weight.detach().clone()
    ptq.export(opened, tiny_tokenizer, tmp_path / "checkpoint", torch.bfloat16, unstable)
    declared = quant_format(tmp_path / "checkpoint")
    assert declared is not None
    found = open_exported(locate(str(tmp_path / "checkpoint")), declared, dtype=torch.float32, device=CPU)
    assert torch.equal(found.model.layers[0].mlp.down_proj.weight, memory)


def _linear(preset: str, rows: int, columns: int) -> tuple[Weight, Any]:
    """One random weight [rows, columns] in bfloat16, and the quantized linear it is of."""
    import modelopt.torch.quantization as mtq

    register()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16))
    inputs = torch.randn(4, columns, dtype=torch.bfloat16)
    with torch.no_grad():
        mtq.quantize(model, copy.deepcopy(getattr(mtq, preset)), lambda model: model(inputs))
    (weight,) = quantized_weights(model)
    ptq._complete(weight.values, weight.quantizer)
    return weight, model[0]


@pytest.mark.parametrize("preset", PRESETS)
def test_rounding_by_rows_is_rounding_at_once(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = _linear(preset, 304, 160)
    once = rounded(weight)
    assert len(list(rounding._chunks(weight.values))) == 1
    parts = [slice(0, 128), slice(128, 256), slice(256, 304)]
    monkeypatch.setattr(rounding, "_chunks", lambda values: parts if len(values) == 304 else None)
    round_in_place(weight, torch.bfloat16)
    assert torch.equal(weight.values, once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [0.0, 2.0, 6.0, 14.0, 60.0])
@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_not_rounded_a_second_time_would_not_have_moved(
    preset: str, spread: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, _ = _linear(preset, 256, 512)
    blocks = torch.randn(256, 32, 1) * spread
    with torch.no_grad():
        weight.values.copy_((weight.values.reshape(256, 32, 16) * torch.exp2(-blocks.abs())).flatten(1))
        weight.values[0, :40] = 0
    before = weight.values.detach().clone()
    quick = round_in_place(weight, dtype)
    settled = weight.values.detach().clone()
    weight.values.detach().copy_(before)
    by_rows = rounding._rounding(weight)
    monkeypatch.setattr(rounding, "_rounding", lambda _: lambda x, rows: (by_rows(x, rows)[0], False))
    found = round_in_place(weight, dtype)
    assert torch.equal(weight.values, settled)
    assert (quick is None) == (found is None)
    if quick is not None and found is not None:
        assert all(map(torch.equal, (*quick.where, quick.original), (*found.where, found.original)))


def test_ordinary_weights_are_rounded_once() -> None:
    for preset in ("NVFP4_DEFAULT_CFG", "FP8_DEFAULT_CFG"):
        weight, _ = _linear(preset, 256, 512)
        assert rounding._rounding(weight)(weight.values.detach(), slice(0, 256))[1], preset


def test_what_is_put_back_is_in_its_place_whatever_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, layer = _linear("NVFP4_DEFAULT_CFG", 304, 160)
    with torch.no_grad():
        weight.values[130:, 16:] *= torch.rand(174, 9).repeat_interleave(16, dim=1) * 2e-5
    before = weight.values.detach().clone()
    found = round_in_place(weight, torch.bfloat16)
    assert found is not None
    weight.values.detach().copy_(before)
    monkeypatch.setattr(rounding, "_chunks", lambda _: [slice(0, 128), slice(128, 256), slice(256, 304)])
    by_rows = round_in_place(weight, torch.bfloat16)
    assert by_rows is not None
    assert all(map(torch.equal, by_rows.where, found.where))
    assert torch.equal(by_rows.original, before[found.where])
    rounding.put_back(layer, [by_rows._replace(name=".weight")])
    assert torch.equal(weight.values[found.where], before[found.where])


def _peak(work: Callable[[], object]) -> int:
    """The most bytes that torch held at once while `work` ran, beside those held before."""
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    changes: list[tuple[int, int]] = []

    def collect(events: list[Any]) -> None:
        for event in events:
            if event.tag == _EventType.Allocation:
                changes.append((event.start_time_ns, event.extra_fields.alloc_size))
            collect(event.children)

    assert profiled.profiler is not None
    collect(profiled.profiler.kineto_results.experimental_event_tree())
    return max(accumulate(size for _, size in sorted(changes, key=lambda change: change[0])))


@pytest.mark.parametrize("preset", ["FP8_DEFAULT_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "NVFP4_DEFAULT_CFG"])
def test_rounding_a_large_weight_takes_less_memory_than_modelopts_export_of_it(preset: str) -> None:
    from modelopt.torch.export.unified_export_hf import _export_quantized_weight

    weight, layer = _linear(preset, 2048, 4096)
    settling = _peak(lambda: round_in_place(weight, torch.bfloat16))
    exporting = _peak(lambda: _export_quantized_weight(layer, torch.bfloat16))
    print(f"{settling / weight.values.numel():.2f} and {exporting / weight.values.numel():.2f} bytes a weight")
    assert settling < 2 * weight.values.numel()
    assert settling < exporting


def test_packing_frees_each_weight_as_it_goes(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[:, 16:] *= 1e-5
    opened = _calibrated(model, tmp_path / "model", "NVFP4_DEFAULT_CFG")
    unstable = ptq.settle(opened)
    assert unstable, "nothing is put back: the test tests less"
    held = {weight.name: weakref.ref(weight.values) for weight in quantized_weights(opened)}
    packed = []

    def pack(model: Any, **_: object) -> None:
        for name, weight in held.items():
            model.get_submodule(name.removesuffix(".weight")).weight = torch.nn.Parameter(torch.zeros(1))
            assert weight() is None, f"{name} is still in memory"
            packed.append(name)

    monkeypatch.setattr("modelopt.torch.export.export_hf_checkpoint", pack)
    ptq.export(opened, tiny_tokenizer, tmp_path / "checkpoint", torch.bfloat16, unstable)
    assert len(packed) == 14


def test_rounding_twice_is_rounding_once(tmp_path: Path) -> None:
    model = _calibrated(make_model("qwen3_moe"), tmp_path, "W4A8_NVFP4_FP8_CFG")
    for weight in quantized_weights(model):
        assert round_in_place(weight, torch.bfloat16) is None
        once = weight.values.detach().clone()
        round_in_place(weight, torch.bfloat16)
        assert torch.equal(weight.values, once)
