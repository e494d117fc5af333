"""Values to compare kernels on: normal, heavy-tailed, equal, tiny, huge, mixed in sign, and at every E2M1 tie."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _sign(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator, device=generator.device) * 2.0 - 1.0


def _exponents(shape: tuple[int, int], low: float, high: float, generator: torch.Generator) -> Tensor:
    """A power of two for each block of 16 columns."""
    blocks = (shape[0], -(-shape[1] // 16))
    power = torch.rand(blocks, generator=generator, device=generator.device) * (high - low) + low
    return torch.exp2(power.double()).repeat_interleave(16, dim=1)[:, : shape[1]]


def _normal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _student(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Student's t with 2 degrees of freedom: a normal over the root of an exponential variable of mean 1."""
    exponential = torch.empty(shape, device=generator.device).exponential_(generator=generator)
    return _normal(shape, generator) / exponential.sqrt()


def _equal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return _normal((shape[0], 1), generator).expand(shape)


def _tiny(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """One value near 1 a row, the rest down to the smallest subnormals."""
    x = _normal(shape, generator) * _exponents(shape, -150, 0, generator)
    x[:, 0] = 1.0
    return x


def _huge(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return _normal(shape, generator) * _exponents(shape, 0, 128, generator)


def _mixed(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Even magnitudes of either sign; one in ten is a zero, and these have signs, too."""
    magnitude = torch.rand(shape, generator=generator, device=generator.device)
    return torch.where(magnitude < 0.1, 0.0, magnitude) * _sign(shape, generator)


def _ties(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Ties times every E4M3 block scale, up to three units of float32 off; in every 16th column what makes that scale.

    The tensor's amax gives a scale that is a power of two, with which every tie is exact, or in every second call
    another number, near which ties are.
    """
    device = generator.device
    chosen = torch.rand((), generator=generator, device=device)
    scale_2 = torch.where(chosen < 0.5, 2.0**-4, chosen)
    codes = torch.arange(1, 127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    blocks = (shape[0], -(-shape[1] // 16))
    scale = codes[torch.randint(0, 126, blocks, generator=generator, device=device)]
    scale[0, 0] = 448.0
    scale = scale.repeat_interleave(16, dim=1)[:, : shape[1]]
    tie = torch.tensor(TIES, device=device)[torch.randint(0, 7, shape, generator=generator, device=device)]
    tie[:, ::16] = 6.0
    bits = (tie * scale).view(torch.int32)
    near = torch.randint(-3, 4, shape, generator=generator, device=device, dtype=torch.int32)
    near = torch.where(torch.rand(shape, generator=generator, device=device) < 0.5, 0, near)
    near[:, ::16] = 0
    return (bits + near).view(torch.float32) * _sign(shape, generator) * scale_2


DISTRIBUTIONS: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "normal": _normal,
    "Student t, 2 degrees": _student,
    "all equal": _equal,
    "tiny": _tiny,
    "huge": _huge,
    "mixed signs and zeros": _mixed,
    "E2M1 ties": _ties,
}


def draw(name: str, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Finite values of a distribution, on the generator's device."""
    largest = torch.finfo(dtype).max
    return DISTRIBUTIONS[name](shape, generator).clamp(-largest, largest).to(dtype)


def corners(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of 64 values with zeros, infinities, NaN and the smallest and largest numbers among ordinary ones."""
    info = torch.finfo(dtype)
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, info.max, -info.max, info.tiny, -info.tiny]
    special += [info.smallest_normal / 2, -info.smallest_normal / 4, 2.0**-126, 2.0**-127, 1e-5, -3.3, 448.0, 464.0]
    x = torch.linspace(-3, 5, 64, dtype=torch.float64).repeat(4 * len(special), 1)
    for index, value in enumerate(special):
        x[4 * index, 5] = value
        x[4 * index + 1, 3:40] = value
        x[4 * index + 2, :] = value
        x[4 * index + 3, :] = value
        x[4 * index + 3, 9] = 1e-3
    return x.to(dtype).to(device)


def differing(ours: Tensor, theirs: Tensor, signless: Tensor | None = None) -> Tensor:
    """Where the bits of two tensors differ; NaN is NaN, and where `signless` says so the sign does not matter."""
    integer = torch.int16 if ours.element_size() == 2 else torch.int32
    a, b = ours.view(integer), theirs.view(integer)
    if signless is not None:
        largest = torch.iinfo(integer).max
        a, b = torch.where(signless, a & largest, a), torch.where(signless, b & largest, b)
    return (a != b) & ~(ours.isnan() & theirs.isnan())


def without_sign(x: Tensor) -> Tensor:
    """Where ModelOpt's MX extension leaves the sign undefined: zeros, what it takes for zeros, and NaN."""
    return ~(x.float().abs() >= 2.0**-126)
