"""The approximate reciprocal: every result an H200 gave, and what becomes of very small and large divisors."""

from __future__ import annotations

import hashlib

import pytest
import torch
from kernels import divide
from recover_reciprocal import recover

from halfbyte.quant import reciprocal as module
from halfbyte.quant.reciprocal import reciprocal

# SHA-256 of rcp.approx.ftz.f32 of all float32 in [1, 2) in order, as little-endian float32, measured on an H200.
MEASURED = "c408381446132e07fa5581e930dc33fb790bea7ec4276ef3621e322df2492a55"


def _mantissas(exponent: int) -> torch.Tensor:
    return (torch.arange(2**23, dtype=torch.int32) + ((127 + exponent) << 23)).view(torch.float32)


def test_all_mantissas_give_what_an_h200_gave() -> None:
    result = reciprocal(_mantissas(0))
    assert hashlib.sha256(result.numpy().tobytes()).hexdigest() == MEASURED
    nearest = (1 / _mantissas(0).double()).float()
    units = result.view(torch.int32) - nearest.view(torch.int32)
    assert torch.unique(units, return_counts=True)[1].tolist() == [374_723, 7_280_086, 733_799]


def test_no_other_integers_give_these_results() -> None:
    assert recover(reciprocal(_mantissas(0))) == list(zip(module._C0, module._C1, module._C2, strict=True))


@pytest.mark.parametrize("exponent", [-126, -20, 5, 125])
def test_other_exponents_have_the_same_mantissas(exponent: int) -> None:
    scaled = reciprocal(_mantissas(exponent)).double() * 2.0**exponent
    assert torch.equal(scaled, reciprocal(_mantissas(0)).double())


def test_subnormals_count_as_zeros_and_signs_are_kept() -> None:
    x = torch.tensor([0.0, -0.0, 1e-39, -1e-39, torch.inf, -torch.inf, 2.0**126, 2.0**126 * 1.5, -3e38])
    expected = [torch.inf, -torch.inf, torch.inf, -torch.inf, 0.0, -0.0, 2.0**-126, 0.0, -0.0]
    assert torch.equal(reciprocal(x).view(torch.int32), torch.tensor(expected).view(torch.int32))
    assert reciprocal(torch.tensor(torch.nan)).isnan()
    assert torch.equal(reciprocal(-_mantissas(3)), -reciprocal(_mantissas(3)))


def test_the_divisors_of_mx_have_the_nearest_reciprocal() -> None:
    for divisor in (6.0, 448.0):
        assert torch.equal(reciprocal(torch.tensor(divisor)), torch.tensor(1 / divisor))


def test_division_by_subnormals_gives_what_an_h200_gave() -> None:
    a = [0.38511452078819275, 0.3180657923221588, 0.2025156468153, 0.050731658935546875, 0.6322274208068848]
    b = [
        6.803135888481268e-39,
        8.585230203994032e-39,
        1.6782412837247236e-39,
        3.3288769877022484e-39,
        1.1100754326645156e-38,
    ]
    measured = [
        5.660838267487584e37,
        3.7048024317812973e37,
        1.2067136217547782e38,
        1.5239871719377206e37,
        5.695355379211319e37,
    ]
    assert torch.equal(divide(torch.tensor(a), torch.tensor(b)), torch.tensor(measured))
