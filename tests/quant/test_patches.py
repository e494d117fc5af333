"""ModelOpt's max calibrator without waiting: the same amax, each tensor read once."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from modelopt.torch.quantization.calib.max import MaxCalibrator
from tiny import make_model, sequences, spec
from torch import Tensor, nn

from halfbyte.quant import calibration, configs, patches, ptq

X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))


def _amax(calibrators: list[Any], tensors: list[Tensor]) -> list[Any]:
    for calibrator in calibrators:
        for x in tensors:
            calibrator.collect(x)
    return [calibrator.compute_amax() for calibrator in calibrators]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("axis", [None, 0, -1], ids=str)
def test_the_amax_is_modelopts(axis: int | None, dtype: torch.dtype) -> None:
    tensors = [X.to(dtype), -3 * X.to(dtype), torch.zeros_like(X, dtype=dtype), nn.Parameter(X.to(dtype) / 2)]
    expected = _amax([MaxCalibrator(8, axis)], tensors)
    with patches.unhurried_max():
        found = _amax([MaxCalibrator(8, axis)], tensors)
    assert torch.equal(found[0], expected[0])
    assert (found[0].shape, found[0].dtype) == (expected[0].shape, expected[0].dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("axis", [None, 0], ids=str)
def test_what_is_not_finite_stays_so(axis: int | None, value: float) -> None:
    x = X.clone()
    x[1, 2] = value
    with patches.unhurried_max():
        (found,) = _amax([MaxCalibrator(8, axis)], [X, x, X.clone()])
    assert not bool(torch.isfinite(found).all())


def test_modelopt_by_itself_waits_for_the_device_at_each_tensor() -> None:
    # When this fails, patches.unhurried_max may have become needless.
    with pytest.raises(AssertionError, match="detected inf"):
        MaxCalibrator(8, None).collect(X / 0)


def test_what_several_layers_read_is_looked_at_once_and_they_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = _looks(monkeypatch)
    with patches.unhurried_max():
        found = _amax([MaxCalibrator(8, None) for _ in range(3)], [X])
        assert len(looks) == 1
        found[0].fill_(-1)
        assert [float(one) for one in found[1:]] == [float(X.abs().max())] * 2
        _amax([MaxCalibrator(8, None)], [X.mul(2)])
        X.mul_(1)  # a change in place
        _amax([MaxCalibrator(8, None)], [X])
        assert len(looks) == 3


def test_a_weight_is_looked_at_again_only_where_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = _looks(monkeypatch)
    weights = [nn.Parameter(X.clone(), requires_grad=False) for _ in range(2)]
    calibrators = [MaxCalibrator(8, None) for _ in weights]

    def forward() -> list[float]:
        for calibrator, weight in zip(calibrators, weights, strict=True):
            calibrator.collect(weight)
        return [float(calibrator.compute_amax()) for calibrator in calibrators]

    with patches.unhurried_max():
        first = forward()
        assert forward() == first
        assert len(looks) == 2
        weights[0].mul_(2)
        weights[1].data = weights[1].data * 4
        assert forward() == [2 * first[0], 4 * first[1]]
        for calibrator in calibrators:
            calibrator.reset()
        assert forward() == [2 * first[0], 4 * first[1]]


def test_an_export_gives_memory_back_after_each_weight_by_itself_and_not_within_ours(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # When the first part fails, patches.memory_kept may have become needless.
    from modelopt.torch.export import export_hf_checkpoint

    calls: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    loop = calibration.forward_loop(sequences(4), tokens_per_row=64, pack=True)
    for times in (14, 0):
        model = make_model("llama").float()
        model.config.architectures = [type(model).__name__]
        ptq.calibrate(model, configs.quant_config(spec("fp8")), loop)
        calls.clear()
        if times:
            export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=tmp_path / "theirs")
        else:
            ptq.export(model, tiny_tokenizer, tmp_path / "ours", torch.bfloat16, ptq.settle(model))
        assert len(calls) == times


def _looks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    looks: list[Tensor] = []
    real = torch.aminmax

    def looked(x: Tensor) -> Any:
        looks.append(x)
        return real(x)

    monkeypatch.setattr(torch, "aminmax", looked)
    return looks


@pytest.mark.parametrize(
    "preset", ["FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG", "NVFP4_AWQ_LITE_CFG", "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG"]
)
def test_calibration_finds_what_modelopts_own_finds(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrated() -> dict[str, Tensor]:
        model = make_model("llama").float()
        loop = calibration.forward_loop(sequences(4), tokens_per_row=64, pack=True)
        ptq.calibrate(model, configs.quant_config(spec(preset)), loop)
        return {name: value for name, value in model.state_dict().items() if "quantizer" in name or "proj" in name}

    found = calibrated()
    monkeypatch.setattr(ptq, "unhurried_max", nullcontext)
    expected = calibrated()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
