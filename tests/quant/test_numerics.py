"""Tensors in every format: what ModelOpt packs, there and back, error bounds, the corner values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.quant import numerics as n

CASES = ["normal", "heavy", "tiny", "zero blocks", "all equal"]


def _tensor(case: str, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=generator)
    if case == "heavy":
        x = x / torch.randn(64, 128, generator=generator).abs().clamp(min=1e-2)
    elif case == "tiny":
        x = x * 10.0 ** torch.linspace(-9, 0, 64).unsqueeze(1)
    elif case == "zero blocks":
        x[:, ::2] = 0
        x[3] = 0
    elif case == "all equal":
        x = torch.full((64, 128), -0.37)
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_nvfp4_packs_the_bits_that_modelopt_packs(case: str, dtype: torch.dtype) -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    x = _tensor(case, dtype)
    scale_2 = n.nvfp4_scale_2(x.abs().max())
    ours = n.nvfp4_quantize(x, scale_2)
    theirs, scale, _ = NVFP4QTensor.quantize(x.clone(), 16, None, scale_2)
    assert torch.equal(ours.codes, theirs._quantized_data)
    assert torch.equal(ours.scale.view(torch.uint8), scale.view(torch.uint8))
    back = theirs.dequantize(dtype=dtype, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    assert torch.equal(n.nvfp4_dequantize(ours, dtype), back)


@pytest.mark.parametrize("case", ["normal", "heavy", "all equal"])
def test_fake_quantization_equals_the_checkpoint_but_for_ties_where_no_block_is_tiny(case: str) -> None:
    x = _tensor(case, torch.bfloat16)
    scale_2 = n.nvfp4_scale_2(x.abs().max())
    q = n.nvfp4_quantize(x, scale_2)
    differing = n.nvfp4_fake_quantize(x, x.abs().max()) != n.nvfp4_dequantize(q, torch.bfloat16)
    scaled = x.abs().double().unflatten(-1, (-1, 16)) / (q.scale.float() * scale_2).double().unsqueeze(-1)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    distance = (scaled.flatten(-2).unsqueeze(-1) / ties - 1).abs().amin(dim=-1)
    # There the kernel's approximate reciprocal decides, and bfloat16 weights under a bfloat16 amax do get there.
    assert differing.float().mean() < 1e-3
    assert (distance[differing] < 2**-22).all()


def test_weights_whose_rows_do_not_divide_into_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of the block size 16"):
        n.nvfp4_quantize(torch.zeros(2, 24), torch.tensor(1.0))
    with pytest.raises(ValueError, match="not a multiple of the block size 32"):
        n.mxfp4_quantize(torch.zeros(2, 48))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_mxfp8_has_the_bits_that_modelopt_packs(case: str, dtype: torch.dtype) -> None:
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    x = _tensor(case, dtype)
    ours = n.mxfp8_quantize(x)
    theirs, scale = MXFP8QTensor.quantize(x.clone())
    assert torch.equal(ours.scale, scale)
    assert torch.equal(ours.codes.view(torch.uint8), theirs._quantized_data.view(torch.uint8))
    assert torch.equal(n.mxfp8_dequantize(ours, dtype), theirs.dequantize(dtype=dtype, scale=scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_mxfp4_has_the_bits_that_modelopt_packs_but_for_ties_and_the_sign_of_zeros(
    case: str, dtype: torch.dtype
) -> None:
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    x = _tensor(case, dtype)
    ours = n.mxfp4_quantize(x)
    theirs, scale = MXFP4QTensor.quantize(x.clone(), 32)
    assert torch.equal(ours.scale, scale.reshape(ours.scale.shape))
    scaled = x.float().unflatten(-1, (-1, 32)) / n.e8m0_decode(ours.scale).unsqueeze(-1)
    tie = torch.isin(scaled.abs(), torch.tensor([0.75, 1.75, 3.5])).flatten(-2)
    differing = n.unpack_e2m1(ours.codes) != n.unpack_e2m1(theirs._quantized_data)
    assert torch.equal(differing, tie | (x == 0))
    back = theirs.dequantize(dtype=dtype, scale=scale, block_sizes={-1: 32})
    assert torch.equal(n.mxfp4_dequantize(ours, dtype)[~tie], back[~tie])


@pytest.mark.parametrize("case", CASES)
def test_fp8_blocks_have_the_bits_that_modelopt_packs(case: str) -> None:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    x = torch.nn.functional.pad(_tensor(case, torch.float32), (3, 2, 70, 60))
    x[:, 0] = 0.5  # no square of zeros, for which ModelOpt has no scale
    ours = n.fp8_block_quantize(x)
    assert ours.scale.shape == (2, 2)
    theirs, _ = FP8QTensor.quantize(x, ours.scale, block_sizes={-1: 128, -2: 128})
    assert torch.equal(ours.codes.view(torch.uint8), theirs._quantized_data.view(torch.uint8))
    back = theirs.dequantize(dtype=torch.float32, scale=ours.scale, block_sizes={-1: 128, -2: 128})
    assert torch.equal(n.fp8_block_dequantize(*ours), back)


def _there_and_back(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """x through a format, and what one step of E2M1 or E4M3 near 1 is worth at each value."""
    if name == "NVFP4":
        q = n.nvfp4_quantize(x, n.nvfp4_scale_2(x.abs().amax()))
        return n.nvfp4_dequantize(q), (q.scale.float() * q.scale_2).repeat_interleave(16, dim=-1)
    if name == "MXFP4":
        q4 = n.mxfp4_quantize(x)
        return n.mxfp4_dequantize(q4), n.e8m0_decode(q4.scale).repeat_interleave(32, dim=-1)
    if name == "MXFP8":
        q8 = n.mxfp8_quantize(x)
        return n.mxfp8_dequantize(q8), n.e8m0_decode(q8.scale).repeat_interleave(32, dim=-1)
    if name == "FP8 blocks":
        square = n.fp8_block_quantize(x, block=16)
        return n.fp8_block_dequantize(*square, block=16), _expand(square.scale, 16, x.shape)
    amax = x.abs().amax(dim=-1, keepdim=True) if name == "FP8 rows" else x.abs().amax()
    q = n.fp8_quantize(x, n.fp8_scale(amax))
    return n.fp8_dequantize(q), q.scale.expand(x.shape)


def _expand(scale: Tensor, block: int, shape: torch.Size) -> Tensor:
    return scale.repeat_interleave(block, dim=0).repeat_interleave(block, dim=1)[: shape[0], : shape[1]]


FORMATS = {"NVFP4": 1, "MXFP4": 1, "MXFP8": 3, "FP8": 3, "FP8 rows": 3, "FP8 blocks": 3}
"""Bits of mantissa by format."""


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Rows of 64 ordinary values, of one magnitude or of very different ones, with zeros among them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 3.0]))
    x = torch.randn(20, 64, generator=generator) * torch.exp(spread * torch.randn(20, 64, generator=generator))
    x[torch.rand(20, 64, generator=generator) < draw(st.sampled_from([0.0, 0.5]))] = 0
    return x * 10.0 ** draw(st.integers(-10, 10))


@settings(max_examples=60, deadline=None)
@given(tensors(), st.sampled_from(sorted(FORMATS)))
def test_no_value_is_moved_by_more_than_half_a_step(x: Tensor, name: str) -> None:
    back, scale = _there_and_back(name, x)
    mantissa = FORMATS[name]
    least = 2.0**-mantissa if mantissa == 1 else 2.0**-9
    # Half a step is 2^-(mantissa + 1) of the power of two below a value. As it is rounded to E4M3, a scale of NVFP4
    # may be too small by a part in 16; the largest value then moves down to 6, which is less than half a step.
    half = torch.maximum(x.abs() * 2.0 ** -(mantissa + 1), scale * least / 2)
    assert ((back - x).abs() <= half * (1 + 2**-20)).all()


@settings(max_examples=60, deadline=None)
@given(tensors(), st.sampled_from(sorted(FORMATS)))
def test_what_has_been_through_a_format_is_not_moved_again(x: Tensor, name: str) -> None:
    once, scale = _there_and_back(name, x)
    again, _ = _there_and_back(name, once)
    exact = torch.ones_like(x, dtype=torch.bool)
    if name == "NVFP4":  # block scales near the smallest E4M3 value are not found again
        exact = scale > 2.0**-4 * float(n.nvfp4_scale_2(x.abs().amax()))
    torch.testing.assert_close(again[exact], once[exact], rtol=2**-22, atol=0)


@settings(max_examples=40, deadline=None)
@given(tensors(), st.sampled_from(sorted(FORMATS)))
def test_the_sign_of_x_decides_nothing_but_the_sign(x: Tensor, name: str) -> None:
    assert torch.equal(_there_and_back(name, -x)[0], -_there_and_back(name, x)[0])


FAKE: dict[str, Callable[[Tensor], Tensor]] = {
    "NVFP4": lambda x: n.nvfp4_fake_quantize(x, x.abs().amax()),
    "MXFP4": n.mxfp4_fake_quantize,
    "MXFP8": n.mxfp8_fake_quantize,
    "FP8": lambda x: n.fp8_fake_quantize(x, x.abs().amax()),
}


@settings(max_examples=60, deadline=None)
@given(tensors(), st.sampled_from(sorted(FAKE)))
def test_within_a_block_the_larger_stays_the_larger(x: Tensor, name: str) -> None:
    size = 16 if name == "NVFP4" else 32
    x = x.unflatten(-1, (-1, size)).sort(dim=-1).values.flatten(-2)
    y = FAKE[name](x).unflatten(-1, (-1, size))
    assert (y.diff(dim=-1) >= 0).all()


@settings(max_examples=40, deadline=None)
@given(tensors(), st.sampled_from(["MXFP4", "MXFP8"]))
def test_mx_kernels_and_checkpoints_agree(x: Tensor, name: str) -> None:
    assert torch.equal(FAKE[name](x), _there_and_back(name, x)[0])


def test_fp8_keeps_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~codes.float().isnan()]
    scale = torch.tensor(0.0123)
    again = n.fp8_quantize(n.fp8_dequantize(n.FP8(finite, scale), torch.bfloat16), scale)
    assert torch.equal(again.codes.float(), finite.float())


def test_fp8_takes_a_scale_a_row_in_both_shapes() -> None:
    x = _tensor("heavy", torch.bfloat16)
    scale = n.fp8_scale(x.abs().amax(dim=-1))
    for shaped in (scale, scale.unsqueeze(-1)):
        q = n.fp8_quantize(x, shaped)
        assert torch.equal(q.codes.float(), (x.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).float())
        assert torch.equal(n.fp8_dequantize(q), q.codes.float() * scale.unsqueeze(-1))


def test_tensors_of_zeros_stay_zeros() -> None:
    x = torch.zeros(4, 64)
    for name in FORMATS:
        assert torch.equal(_there_and_back(name, x)[0], x)
    for function in FAKE.values():
        assert torch.equal(function(x), x)


def test_infinities_saturate_in_their_block_and_nan_shows() -> None:
    x = torch.ones(1, 64)
    x[0, 3], x[0, 40] = torch.inf, torch.nan
    one = torch.tensor(1.0)
    for back in (
        n.nvfp4_dequantize(n.nvfp4_quantize(x, n.nvfp4_scale_2(one))),
        n.mxfp4_dequantize(n.mxfp4_quantize(x)),
        n.mxfp8_dequantize(n.mxfp8_quantize(x)),
        n.fp8_dequantize(n.fp8_quantize(x, n.fp8_scale(one))),
    ):
        assert back[0, 3] >= 1
        assert back[0, 40].isnan()
        assert not back[0, :3].isnan().any()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_empty_tensors_stay_empty(shape: tuple[int, int]) -> None:
    x = torch.zeros(shape)
    one = torch.tensor(1.0)
    assert n.nvfp4_dequantize(n.nvfp4_quantize(x, one)).shape == shape
    assert n.mxfp4_dequantize(n.mxfp4_quantize(x)).shape == shape
    assert n.mxfp8_dequantize(n.mxfp8_quantize(x)).shape == shape
    assert n.fp8_dequantize(n.fp8_quantize(x, one)).shape == shape


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_the_amax_found_for_a_scale_gives_that_scale_again(amax: float) -> None:
    for largest in (n.E4M3_MAX, n.E2M1_MAX * n.E4M3_MAX):
        scale = torch.tensor(amax) / largest
        assert torch.equal(n.amax_of_scale(scale, largest) / largest, scale)


@given(st.integers(0x0080, 0x7F00))
def test_a_bfloat16_amax_is_found_again_exactly(bits: int) -> None:
    amax = torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16).float()
    for largest in (n.E4M3_MAX, n.E2M1_MAX * n.E4M3_MAX):
        scale = amax / largest
        if scale >= torch.finfo(torch.float32).tiny:
            assert torch.equal(n.amax_of_scale(scale, largest), amax)


@given(st.integers(0x3000, 0x4F00))
def test_an_amax_behind_a_scale_that_modelopt_made_on_cuda_is_found_nearly(bits: int) -> None:
    amax = torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16).float()
    for largest in (n.E4M3_MAX, n.E2M1_MAX * n.E4M3_MAX):
        found = n.amax_of_scale(amax * torch.tensor(1 / largest), largest)
        assert abs(int(found.view(torch.int32)) - int(amax.view(torch.int32))) <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-6, 1.0, 300.0])
def test_values_of_16_bits_are_the_float32_ones_rounded_once(size: float, dtype: torch.dtype) -> None:
    w = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)) * size
    squares = n.fp8_block_quantize(w)
    for narrow, wide in [
        *(
            (n.fp8_dequantize(n.fp8_quantize(w, scale), dtype), n.fp8_dequantize(n.fp8_quantize(w, scale)))
            for scale in (n.fp8_scale(w.abs().amax()), n.fp8_scale(w.abs().amax(1)))
        ),
        (n.fp8_block_dequantize(*squares, dtype), n.fp8_block_dequantize(*squares)),
        *(
            (dequantize(quantized, dtype), dequantize(quantized))
            for dequantize, quantized in (
                (n.nvfp4_dequantize, n.nvfp4_quantize(w, n.nvfp4_scale_2(w.abs().amax()))),
                (n.mxfp4_dequantize, n.mxfp4_quantize(w)),
                (n.mxfp8_dequantize, n.mxfp8_quantize(w)),
            )
        ),
    ]:
        assert narrow.dtype == dtype
        assert torch.equal(narrow, wide.to(dtype))
