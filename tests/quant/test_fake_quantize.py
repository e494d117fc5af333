"""Fake quantization: the bits of ModelOpt's kernels written down step by step, and what an H200 gave."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import kernels
import pytest
import torch
from distributions import DISTRIBUTIONS, corners, differing, draw, without_sign
from torch import Tensor

from halfbyte.quant import numerics as n

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPE = (128, 512)
MEASURED = Path(__file__).with_name("h200_mx.json")


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_format_has_the_kernels_bits(name: str, dtype: torch.dtype) -> None:
    x = draw(name, SHAPE, dtype, _generator())
    for share in (1.0, 0.37):
        amax = x.abs().amax().float() * share
        assert not differing(n.nvfp4_fake_quantize(x, amax), kernels.nvfp4_dynamic(x, amax)).any()
        assert not differing(n.fp8_fake_quantize(x, amax), kernels.fp8(x, amax)).any()
    block_amax = x.float().abs().reshape(-1, 16).amax(dim=-1) * torch.rand(x.numel() // 16, generator=_generator(1))
    for largest in (448.0, 256.0):
        static = kernels.nvfp4_static(x, block_amax, block_amax.amax(), largest)
        assert not differing(n.nvfp4_static_fake_quantize(x, block_amax, block_amax.amax(), largest), static).any()
    assert not differing(n.mxfp4_fake_quantize(x), kernels.mx(x, 6.0), without_sign(x)).any()
    assert not differing(n.mxfp8_fake_quantize(x), kernels.mx(x, 448.0), without_sign(x)).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_infinities_nan_and_subnormals_become_what_the_kernels_make_of_them(dtype: torch.dtype) -> None:
    x = corners(dtype, torch.device("cpu"))
    for amax in (0.0, 1e-45, 1e-38, 2.0**-24, 1e-4, 3.0, 3e38, torch.inf):
        largest = torch.tensor(amax)
        assert not differing(n.nvfp4_fake_quantize(x, largest), kernels.nvfp4_dynamic(x, largest)).any()
        assert not differing(n.fp8_fake_quantize(x, largest), kernels.fp8(x, largest)).any()
    blocks = torch.tensor([0.0, 1e-38, 1e-9, 1.0, 300.0, torch.inf, torch.nan]).repeat(x.numel() // 16 // 7 + 1)
    blocks = blocks[: x.numel() // 16]
    for amax in (0.0, 1e-6, 1.0, 1e4, torch.inf):
        static = kernels.nvfp4_static(x, blocks, torch.tensor(amax), 448.0)
        assert not differing(n.nvfp4_static_fake_quantize(x, blocks, torch.tensor(amax)), static).any()
    assert not differing(n.mxfp4_fake_quantize(x), kernels.mx(x, 6.0), without_sign(x)).any()
    assert not differing(n.mxfp8_fake_quantize(x), kernels.mx(x, 448.0), without_sign(x)).any()


@pytest.mark.parametrize(("name", "function"), [("E2M1", n.mxfp4_fake_quantize), ("E4M3", n.mxfp8_fake_quantize)])
def test_mx_gives_what_the_extension_gave_on_an_h200(name: str, function: Callable[[Tensor], Tensor]) -> None:
    """Blocks whose amax is up to three units from largest x 2^e, for e down to where scales are subnormal.

    Measured with ModelOpt 0.47 and CUDA 13: fused_amax_convert of blocks of 32 with these four values and zeros.
    """
    rows = [[int(word, 16) for word in row.split()] for row in json.loads(MEASURED.read_text())[name]]
    bits = torch.tensor(rows, dtype=torch.int64).to(torch.int32).view(torch.float32)
    x = torch.nn.functional.pad(bits[:, :4], (0, 28))
    assert not differing(function(x)[:, :4], bits[:, 4:], without_sign(x)[:, :4]).any()


def test_mx_takes_infinities_nan_and_subnormals_as_the_extension_did_on_an_h200() -> None:
    x = torch.zeros(6, 32)
    x[0, 0] = torch.inf
    x[1, 0] = torch.nan
    x[2, :2] = torch.tensor([3e38, -1.0])
    x[3, :3] = torch.tensor([torch.inf, 1.0, -3.3])
    x[4, :3] = torch.tensor([torch.nan, 1.0, -3.3])
    x[5, :3] = torch.tensor([2.0**-127, 2.0**-130, -(2.0**-126)])
    inf, nan = torch.inf, torch.nan
    four = [[inf, 0, 0], [-6, 0, 0], [inf, 0, 0], [inf, 0, 0], [-6, 1, -3], [0, 0, 0]]
    eight = [[inf, 0, 0], [nan, 0, 0], [2.9774707105582116e38, 0, 0], [inf, 0, 0], [nan, 1, -3.25], [0, 0, 0]]
    assert torch.equal(n.mxfp4_fake_quantize(x)[:, :3], torch.tensor(four))
    torch.testing.assert_close(n.mxfp8_fake_quantize(x)[:, :3], torch.tensor(eight), rtol=0, atol=0, equal_nan=True)


def test_fp8_follows_the_kernel_along_an_axis_and_the_eager_formula_for_blocks() -> None:
    from modelopt.torch.quantization.tensor_quant import fp8_eager

    x = torch.randn(6, 8, 40, generator=_generator())
    rows = x.abs().amax(dim=(1, 2), keepdim=True)
    assert torch.equal(n.fp8_fake_quantize(x, rows), kernels.fp8(x, rows))
    assert torch.equal(n.fp8_fake_quantize(x, rows.flatten()), kernels.fp8(x, rows))
    blocks = x.abs().amax(dim=-1, keepdim=True)
    assert torch.equal(n.fp8_fake_quantize(x, blocks), fp8_eager(x, blocks))


FAKE: dict[str, Callable[[Tensor], Tensor]] = {
    "NVFP4": lambda x: n.nvfp4_fake_quantize(x, torch.tensor(3.0)),
    "static NVFP4": lambda x: n.nvfp4_static_fake_quantize(x, torch.full((x.numel() // 16,), 3.0)),
    "MXFP4": n.mxfp4_fake_quantize,
    "MXFP8": n.mxfp8_fake_quantize,
    "FP8": lambda x: n.fp8_fake_quantize(x, torch.tensor(3.0)),
}


@pytest.mark.parametrize("function", FAKE.values(), ids=FAKE)
def test_large_tensors_are_worked_on_in_parts_with_the_same_result(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(5, 3, 96, generator=_generator())
    whole = function(x)
    monkeypatch.setattr("halfbyte.quant.fake_quantize.CHUNK", 200)
    assert torch.equal(function(x), whole)


@pytest.mark.parametrize("function", FAKE.values(), ids=FAKE)
def test_gradients_pass_straight_through(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 32, generator=_generator()).requires_grad_()
    weight = torch.randn(2, 32, generator=_generator(1))
    (function(x) * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weight)


def test_a_limit_stops_the_gradient_of_larger_values() -> None:
    x = torch.tensor([-4.0, -3.0, 0.5, 3.5]).requires_grad_()
    n.straight_through(lambda x: n.fp8_fake_quantize(x, torch.tensor(3.0)), x, torch.tensor(3.0)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("function", FAKE.values(), ids=FAKE)
def test_the_input_is_not_changed_and_may_be_a_view(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(64, 32, generator=_generator())
    copy = x.clone()
    assert torch.equal(function(x.t()), function(x.t().contiguous()))
    assert torch.equal(x, copy)


@pytest.mark.parametrize("function", FAKE.values(), ids=FAKE)
def test_empty_tensors_stay_empty(function: Callable[[Tensor], Tensor]) -> None:
    for shape in ((0, 32), (3, 0)):
        assert function(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize(("name", "size"), [("NVFP4", 16), ("MXFP4", 32), ("MXFP8", 32)])
@pytest.mark.parametrize("length", [1, 15, 17, 31, 33, 70])
def test_a_last_block_that_is_not_full_is_quantized_as_if_zeros_followed(name: str, size: int, length: int) -> None:
    x = torch.linspace(-3, 2.5, 3 * length).reshape(3, length)
    full = torch.nn.functional.pad(x, (0, -length % size))
    assert torch.equal(FAKE[name](x), FAKE[name](full)[:, :length])


def test_a_block_below_the_kernels_threshold_becomes_zero() -> None:
    x = torch.full((1, 32), 1e-5)
    x[0, 16] = 1.0
    assert n.nvfp4_fake_quantize(x, torch.tensor(1.0))[0, :16].abs().max() == 0
