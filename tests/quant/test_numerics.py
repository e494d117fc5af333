"""The number formats: every tie, every code, the corner values, and equality with what ModelOpt packs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_every_e2m1_tie_goes_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert n.e2m1_decode(n.e2m1_codes(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert n.e2m1_decode(n.e2m1_codes(-ties)).tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]


@given(st.floats(-20, 20, width=32))
def test_e2m1_rounds_to_a_nearest_value(x: float) -> None:
    got = float(n.e2m1_round(torch.tensor([x])))
    best = min(abs(abs(x) - value) for value in n.E2M1_VALUES)
    assert abs(abs(x) - abs(got)) == pytest.approx(best, abs=1e-6)
    assert got == 0 or (got > 0) == (x > 0)
    assert float(n.e2m1_decode(n.e2m1_codes(torch.tensor([x])))) == got


def test_every_byte_survives_unpacking_and_packing() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    assert torch.equal(n.pack_e2m1(n.unpack_e2m1(packed)), packed)
    assert n.unpack_e2m1(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [1, 2]  # the even element is the low half


def test_an_odd_row_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="odd"):
        n.pack_e2m1(torch.zeros(2, 3, dtype=torch.uint8))


def test_e4m3_saturates_instead_of_nan() -> None:
    assert n.e4m3_round(torch.tensor([1e9, -1e9, 464.1])).float().tolist() == [448.0, -448.0, 448.0]


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


def test_a_block_below_the_kernels_threshold_becomes_zero() -> None:
    x = torch.full((1, 32), 1e-5)
    x[0, 16] = 1.0
    assert n.nvfp4_fake_quantize(x, torch.tensor(1.0))[0, :16].abs().max() == 0


@settings(max_examples=50)
@given(st.integers(1, 70))
def test_a_last_block_that_is_not_full_is_quantized_as_if_zeros_followed(length: int) -> None:
    x = torch.linspace(-3, 5, length).unsqueeze(0)
    full = torch.nn.functional.pad(x, (0, -length % 16))
    amax = x.abs().max()
    assert torch.equal(n.nvfp4_fake_quantize(x, amax), n.nvfp4_fake_quantize(full, amax)[:, :length])


def test_empty_tensors_stay_empty() -> None:
    assert n.nvfp4_fake_quantize(torch.zeros(0, 32), torch.tensor(1.0)).shape == (0, 32)


def test_weights_whose_rows_do_not_divide_into_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of the block size 16"):
        n.nvfp4_quantize(torch.zeros(2, 24), torch.tensor(1.0))


def test_fp8_keeps_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~codes.float().isnan()]
    scale = torch.tensor(0.0123)
    again = n.fp8_quantize(n.fp8_dequantize(n.FP8(finite, scale), torch.bfloat16), scale)
    assert torch.equal(again.codes.float(), finite.float())


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
