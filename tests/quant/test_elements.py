"""E2M1, E4M3 and E8M0: every code, every tie, the corner values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.quant import elements
from halfbyte.quant import numerics as n

TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
BYTES = torch.arange(256, dtype=torch.uint8)


def test_every_e2m1_tie_goes_to_the_even_code() -> None:
    ties = torch.tensor(TIES)
    assert n.e2m1_decode(n.e2m1_codes(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert n.e2m1_decode(n.e2m1_codes(-ties)).tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]


def test_beside_every_e2m1_tie_the_nearer_value_is_taken() -> None:
    ties = torch.tensor(TIES)
    below, above = torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(9.0))
    assert n.e2m1_round(below).tolist() == list(n.E2M1_VALUES[:-1])
    assert n.e2m1_round(above).tolist() == list(n.E2M1_VALUES[1:])


@given(st.floats(-20, 20, width=32))
def test_e2m1_rounds_to_a_nearest_value(x: float) -> None:
    got = float(n.e2m1_round(torch.tensor([x])))
    best = min(abs(abs(x) - value) for value in n.E2M1_VALUES)
    assert abs(abs(x) - abs(got)) == pytest.approx(best, abs=1e-6)
    assert got == 0 or (got > 0) == (x > 0)
    assert float(n.e2m1_decode(n.e2m1_codes(torch.tensor([x])))) == got


def test_every_e2m1_code_is_kept() -> None:
    codes = BYTES[:16]
    negative_zero = codes == 8  # the sign bit says x < 0, which -0.0 is not
    assert torch.equal(n.e2m1_codes(n.e2m1_decode(codes)), torch.where(negative_zero, 0, codes))


def test_e2m1_saturates_and_has_no_nan() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -0.0, -1e-40])
    assert n.e2m1_codes(x).tolist() == [7, 15, 7, 7, 0, 8]
    assert n.e2m1_round(x)[:2].tolist() == [6.0, -6.0]
    assert n.e2m1_round(x)[2].isnan()


def test_every_byte_survives_unpacking_and_packing() -> None:
    packed = BYTES.reshape(16, 16)
    assert torch.equal(n.pack_e2m1(n.unpack_e2m1(packed)), packed)
    assert n.unpack_e2m1(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [1, 2]  # the even element is the low half
    assert torch.equal(n.e2m1_unpacked(packed), n.e2m1_decode(n.unpack_e2m1(packed)))


def test_an_odd_row_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="odd"):
        n.pack_e2m1(torch.zeros(2, 3, dtype=torch.uint8))


def test_e4m3_saturates_instead_of_nan() -> None:
    x = torch.tensor([1e9, -1e9, 464.1, torch.inf])
    assert n.e4m3_round(x).float().tolist() == [448.0, -448.0, 448.0, 448.0]
    assert n.e4m3_round(torch.tensor([torch.nan])).float().isnan().all()


def test_e4m3_is_decoded_as_torch_does() -> None:
    codes = BYTES.view(torch.float8_e4m3fn)
    torch.testing.assert_close(n.e4m3_decode(codes), codes.float(), rtol=0, atol=0, equal_nan=True)


@given(st.floats(0, 600, width=32) | st.floats(0, 2.0**-5, width=32))
def test_rounding_e4m3_in_place_is_torchs_rounding(x: float) -> None:
    magnitude = torch.tensor([x])
    assert torch.equal(elements.round_to_e4m3_(magnitude.clone()), n.e4m3_round(magnitude).float())


def test_every_e4m3_tie_goes_to_the_even_code() -> None:
    values = BYTES[:127].view(torch.float8_e4m3fn).float()
    ties = (values[1:] + values[:-1]) / 2
    even = BYTES[:126] + (BYTES[:126] & 1)
    assert torch.equal(n.e4m3_round(ties).view(torch.uint8), even)
    assert torch.equal(elements.round_to_e4m3_(ties.clone()), n.e4m3_decode(even.view(torch.float8_e4m3fn)))


def test_e8m0_is_a_power_of_two_for_every_code_but_the_last() -> None:
    values = n.e8m0_decode(BYTES)
    assert torch.equal(values[:255].double(), torch.exp2(torch.arange(-127, 128, dtype=torch.float64)))
    assert values[255].isnan()
    assert torch.equal(n.e8m0_encode(values), BYTES)


@given(st.floats(2.0**-126, 2.0**126, width=32))
def test_e8m0_takes_the_least_power_that_is_not_below(x: float) -> None:
    value = float(n.e8m0_decode(n.e8m0_encode(torch.tensor([x]))))
    assert value / 2 < x <= value


def test_e8m0_has_no_sign_zero_or_infinity() -> None:
    x = torch.tensor([0.0, -1.0, 1e-45, 2.0**-127, 3e38, torch.inf])
    assert n.e8m0_encode(x).tolist() == [0, 0, 0, 0, 254, 254]


def test_codes_of_empty_tensors_are_empty() -> None:
    empty = torch.zeros(0, 8)
    assert n.pack_e2m1(n.e2m1_codes(empty)).shape == (0, 4)
    assert n.e2m1_unpacked(torch.zeros(3, 0, dtype=torch.uint8)).shape == (3, 0)
    assert n.e8m0_decode(n.e8m0_encode(empty)).shape == (0, 8)
