"""What torch compiles for a GPU is the same rounding: as formulas on a CPU, and as kernels beside ModelOpt's."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.quant import compiled
from halfbyte.quant.attach import input_quantizer, prepare
from halfbyte.quant.fake_quantize import fp8_fake_quantize, fp8_kernel_scales, nvfp4_fake_quantize, nvfp4_to_e4m3
from halfbyte.quant.numerics import (
    fp8_dequantize,
    fp8_quantize,
    fp8_scale,
    nvfp4_dequantize,
    nvfp4_quantize,
    nvfp4_scale_2,
)
from halfbyte.quant.reciprocal import reciprocal

TYPES = [torch.bfloat16, torch.float16, torch.float32]


def _inputs(dtype: torch.dtype, rows: int = 64, width: int = 512) -> Tensor:
    """Normal, heavy-tailed, tiny, huge, zero, and special values."""
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(rows, width, generator=draw)
    x[rows // 2 :] /= torch.rand(rows - rows // 2, width, generator=draw).sqrt()
    x[1], x[2], x[3] = x[1] * 1e-7, x[2] * 1e4, 0
    x[4, :6] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-30, -1e-30])
    return x.to(dtype)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("amax", [3.0, 40.0, 1e-9])
def test_the_formulas_are_those_of_fake_quantization(dtype: torch.dtype, amax: float) -> None:
    x, largest = _inputs(dtype), torch.tensor(amax)
    fp8 = compiled.fp8_rounded(x, *fp8_kernel_scales(largest))
    assert torch.equal(fp8.nan_to_num(nan=7e4), fp8_fake_quantize(x, largest).nan_to_num(nan=7e4))
    nvfp4 = compiled.nvfp4_rounded(x, *nvfp4_to_e4m3(largest), reciprocal)
    assert _same(nvfp4, nvfp4_fake_quantize(x, largest))


@pytest.mark.parametrize("dtype", TYPES)
def test_weights_are_dequantized_to_the_same_bits(dtype: torch.dtype) -> None:
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(1))
    nvfp4 = nvfp4_quantize(weight, nvfp4_scale_2(weight.abs().amax()))
    assert _same(compiled.nvfp4_values(*nvfp4, dtype), nvfp4_dequantize(nvfp4, dtype))
    for amax in (weight.abs().amax(), weight.abs().amax(-1, keepdim=True)):
        fp8 = fp8_quantize(weight, fp8_scale(amax))
        assert _same(compiled.fp8_values(*fp8, dtype), fp8_dequantize(fp8, dtype))


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def test_a_compiled_formula_that_gives_other_bits_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="halfbyte")
    kernel = compiled.Compiled(_doubled)
    x = torch.ones(2, 3)
    for _ in range(2):
        assert torch.equal(kernel(lambda: x * 3, x), x * 3)
    assert len([line for line in caplog.messages if "other bits" in line]) == 1


def test_what_torch_cannot_compile_is_left_to_the_reference(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler\nand much more")

    caplog.set_level(logging.INFO, logger="halfbyte")
    monkeypatch.setattr(torch, "compile", refuses)
    kernel = compiled.Compiled(_doubled)
    x = torch.ones(2, 3)
    assert torch.equal(kernel(lambda: x + 1, x), x + 1)
    assert caplog.messages == ["torch does not compile _doubled: no compiler"]


def test_no_more_shapes_are_compiled_than_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda x: tried.append(x.shape) or x * 2)
    kernel = compiled.Compiled(_doubled)
    for width in range(1, 70):
        x = torch.ones(2, width)
        assert torch.equal(kernel(lambda x=x: x * 2, x), x * 2)
    assert len(tried) == 64


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_kernels_are_compiled_and_give_the_bits_of_modelopts(kind: Any, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    prepare(device)
    quantizer = input_quantizer(kind, torch.tensor(0.002), None, dtype=dtype, device=device)
    kernel = compiled._fp8 if kind == "fp8" else compiled._nvfp4
    kernel._compiled.clear()
    with torch.inference_mode():
        for rows in (4096, 2048, 3000, 777):
            x = _inputs(dtype, rows, 2048).to(device)[None]
            for _ in range(2):
                found = quantizer(x)
            quantizer.backend = None
            assert _same(found, quantizer(x))
            quantizer.backend = compiled.BACKEND
    assert [found is not None for found in kernel._compiled.values()] == [True]


@pytest.mark.gpu
def test_weights_are_dequantized_by_compiled_kernels() -> None:
    weight = torch.randn(4096, 2048, device="cuda")
    nvfp4 = nvfp4_quantize(weight, nvfp4_scale_2(weight.abs().amax()))
    fp8 = fp8_quantize(weight, fp8_scale(weight.abs().amax()))
    for _ in range(2):
        expected = nvfp4_dequantize(nvfp4, torch.bfloat16)
        assert _same(compiled.dequantize_nvfp4(lambda: expected, *nvfp4, torch.bfloat16), expected)  # noqa: B023
        values = fp8_dequantize(fp8, torch.bfloat16)
        assert _same(compiled.dequantize_fp8(lambda: values, *fp8, torch.bfloat16), values)  # noqa: B023
    assert all(compiled._nvfp4_values._compiled.values())
    assert all(compiled._fp8_values._compiled.values())
