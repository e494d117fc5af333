"""Calibration and export: what is kept, what is settled, and what ModelOpt's plain export would have shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny import CPU, make_model, sequences, spec

from halfbyte.quant import calibration, configs, ptq
from halfbyte.quant import numerics as n
from halfbyte.quant.models import locate, open_original
from halfbyte.quant.rounding import quantized_weights
from halfbyte.records.digests import model_digest
from halfbyte.records.errors import UserError


def _calibrated(folder: Path, preset: str, kv_cache: str | None = None) -> Any:
    if not folder.exists():
        make_model("llama").save_pretrained(folder)
    model = open_original(locate(str(folder)), weights=torch.bfloat16, compute=torch.float32, device=CPU)
    loop = calibration.forward_loop(sequences(), tokens_per_row=64, pack=True)
    ptq.calibrate(model, configs.quant_config(spec(preset, kv_cache)), loop)
    return model


def test_modelopts_plain_export_moves_fp8_codes_that_settled_weights_keep() -> None:
    """The reason for settling FP8 weights: bfloat16 / scale is rounded to bfloat16 before it is rounded to FP8.

    Fails when ModelOpt mends it: then settling FP8 weights can go.
    """
    from modelopt.torch.export.quant_utils import to_quantized_weight

    weight = (torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    scale = n.fp8_scale(weight.abs().max())
    right = n.fp8_quantize(weight, scale)

    def moved(weights: torch.Tensor) -> float:
        exported = to_quantized_weight(weights, scale, "fp8")
        return float((exported.float() != right.codes.float()).float().mean())

    assert 0.01 < moved(weight) < 0.06
    assert moved(n.fp8_dequantize(right, torch.bfloat16)) == 0


@pytest.mark.parametrize("preset", ["fp8", "nvfp4"])
def test_settling_twice_changes_nothing(preset: str, tmp_path: Path) -> None:
    model = _calibrated(tmp_path / "model", preset)
    ptq.settle(model)
    once = {name: parameter.clone() for name, parameter in model.named_parameters()}
    ptq.settle(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, once[name])


def test_linears_that_read_the_same_input_share_their_scales(tmp_path: Path, tiny_tokenizer: Any) -> None:
    model = _calibrated(tmp_path / "model", "nvfp4", "fp8")
    unstable = ptq.settle(model)
    ptq.export(model, tiny_tokenizer, tmp_path / "checkpoint", torch.bfloat16, unstable)
    with safe_open(tmp_path / "checkpoint" / "model.safetensors", framework="pt") as file:
        for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            names = [name for name in file.keys() if any(f".{part}." in name for part in group)]  # noqa: SIM118
            for scale in ("input_scale", "weight_scale_2"):
                for layer in ("layers.0.", "layers.1."):
                    values = {float(file.get_tensor(x)) for x in names if layer in x and x.endswith(f".{scale}")}
                    assert len(values) == 1


@pytest.mark.parametrize(("factor", "met"), [(1e38, "inf"), (float("nan"), "nan")])
@pytest.mark.parametrize("preset", ["fp8", "nvfp4", "NVFP4_AWQ_LITE_CFG"])
def test_a_model_that_overflows_is_named_as_such(factor: float, met: str, preset: str, tmp_path: Path) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight *= factor
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=rf"calibration .*(are {met}|not finite).*the model overflows on these texts"):
        _calibrated(tmp_path / "model", preset)


def test_another_assertion_of_modelopt_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr("modelopt.torch.quantization.quantize", fail)
    with pytest.raises(AssertionError, match="a bug"):
        _calibrated(tmp_path / "model", "fp8")


def test_a_kept_calibration_gives_the_same_checkpoint(tmp_path: Path, tiny_tokenizer: Any) -> None:
    model = _calibrated(tmp_path / "model", "nvfp4", "fp8")
    ptq.save_calibration(model, tmp_path / "calibration", "key")
    unstable = ptq.settle(model)
    ptq.export(model, tiny_tokenizer, tmp_path / "first", torch.bfloat16, unstable)
    assert ptq.has_calibration(tmp_path / "calibration", "key")
    assert not ptq.has_calibration(tmp_path / "calibration", "another key")
    again = open_original(locate(str(tmp_path / "model")), weights=torch.bfloat16, compute=torch.float32, device=CPU)
    ptq.load_calibration(again, tmp_path / "calibration")
    unstable = ptq.settle(again)
    ptq.export(again, tiny_tokenizer, tmp_path / "second", torch.bfloat16, unstable)
    assert model_digest(tmp_path / "first") == model_digest(tmp_path / "second")


@pytest.mark.parametrize("preset", ["NVFP4_AWQ_LITE_CFG", "NVFP4_SVDQUANT_DEFAULT_CFG"])
def test_changed_weights_are_kept_in_small_files_until_they_are_dropped(
    preset: str, tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ptq, "_SHARD", 80_000)
    assert ptq.changes_weights(configs.quant_config(spec(preset)))
    model = _calibrated(tmp_path / "model", preset)
    calibrated = tmp_path / "calibration"
    ptq.save_calibration(model, calibrated, "key")
    weights = sorted(calibrated.glob("weights*"))
    assert len(weights) > 2
    assert max(path.stat().st_size for path in weights) < 90_000
    values = sum(weight.values.numel() for weight in quantized_weights(model))
    assert 0 <= sum(path.stat().st_size for path in weights) - 4 * values < 10_000
    ptq.export(model, tiny_tokenizer, tmp_path / "first", torch.bfloat16, ptq.settle(model))
    assert len(list((tmp_path / "first").glob("model-*.safetensors"))) > 1
    again = open_original(locate(str(tmp_path / "model")), weights=torch.bfloat16, compute=torch.float32, device=CPU)
    ptq.load_calibration(again, calibrated)
    ptq.export(again, tiny_tokenizer, tmp_path / "second", torch.bfloat16, ptq.settle(again))
    assert model_digest(tmp_path / "first") == model_digest(tmp_path / "second")
    ptq.drop_weights(calibrated)
    names = {ptq.STATE_FILE, ptq.QUANTIZERS_FILE, ptq.TENSORS_FILE}
    assert {path.name for path in calibrated.iterdir()} == names
    assert not ptq.has_calibration(calibrated, "key")


def test_a_calibration_that_changes_no_weight_keeps_none(tmp_path: Path) -> None:
    assert not ptq.changes_weights(configs.quant_config(spec("nvfp4")))
    ptq.save_calibration(_calibrated(tmp_path / "model", "nvfp4"), tmp_path / "calibration", "key")
    ptq.drop_weights(tmp_path / "calibration")
    assert ptq.has_calibration(tmp_path / "calibration", "key")


def test_gradients_pass_straight_through_the_cpu_backend(tmp_path: Path) -> None:
    model = _calibrated(tmp_path / "model", "nvfp4")
    layer = model.model.layers[0].mlp.down_proj
    layer.weight.requires_grad_()
    x = torch.randn(2, layer.in_features, generator=torch.Generator().manual_seed(0))
    layer(x).sum().backward()
    assert torch.allclose(layer.weight.grad, layer.input_quantizer(x).sum(0).expand_as(layer.weight), atol=1e-4)


def test_a_damaged_calibration_is_named_and_an_incomplete_one_is_made_again(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "model")
    model = open_original(locate(str(tmp_path / "model")), weights=torch.bfloat16, compute=torch.float32, device=CPU)
    config = configs.quant_config(spec("fp8"))
    ptq.calibrate(model, config, calibration.forward_loop(sequences(2), tokens_per_row=64, pack=True))
    ptq.save_calibration(model, tmp_path / "kept", "key")
    assert ptq.has_calibration(tmp_path / "kept", "key")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()}
    for name in (ptq.TENSORS_FILE, ptq.QUANTIZERS_FILE):
        (tmp_path / "kept" / name).write_bytes(b"abc")
        fresh = open_original(
            locate(str(tmp_path / "model")), weights=torch.bfloat16, compute=torch.float32, device=CPU
        )
        with pytest.raises(UserError, match=r"is damaged.*delete the folder to calibrate again"):
            ptq.load_calibration(fresh, tmp_path / "kept")
        (tmp_path / "kept" / name).write_bytes(whole[name])
    (tmp_path / "kept" / ptq.TENSORS_FILE).unlink()
    assert not ptq.has_calibration(tmp_path / "kept", "key")
