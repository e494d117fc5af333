"""How the coefficients in quant/reciprocal.py were found: prints them, from what the GPU at hand gives.

PYTHONPATH=tests/support python tests/support/recover_reciprocal.py
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECES = 128


def truncated_squares() -> Tensor:
    """int64 [65536]: squares of 16 bits without the columns below 2^17.

    That the squarer drops exactly these columns showed when the error of the best parabola of each piece was averaged
    over the pieces and fitted by products of two bits: weight -1 for every product in a column below 2^17, else 0.
    """
    t = torch.arange(2**16)
    squares = torch.zeros_like(t)
    for i in range(16):
        for j in range(i, 16):
            column = i + j + (i < j)
            if column >= 17:
                squares += ((t >> i) & (t >> j) & 1) << column
    return squares


def recover(reciprocals: Tensor) -> list[tuple[int, int, int]]:
    """c0, -c1 and c2 of each piece, given the reciprocals (float32) of all 2^23 float32 in [1, 2).

    Raises:
        ValueError: when no integers fit a piece, or several do.
    """
    results = (reciprocals.double() * 2**24).long().reshape(PIECES, -1)
    squares, t = truncated_squares(), torch.arange(2**16)
    terms = torch.stack([torch.ones(2**16), t / 2**16, squares / 2**32], dim=1).double()
    close = torch.linalg.lstsq(terms, results.T.double() + 0.5).solution.T
    found = []
    for piece in range(PIECES):
        fits = []
        c1, c2 = (int(close[piece, column].floor()) for column in (1, 2))
        for slope in range(c1 - 1, c1 + 3):
            for curvature in range(c2 - 1, c2 + 3):
                rest = (slope << 16) * t + curvature * squares
                low = int(((results[piece] << 32) - rest).max()) - (2023 << 17)
                high = int((((results[piece] + 1) << 32) - rest).min()) - (2023 << 17)
                fits += [(c0, -slope, curvature) for c0 in range(-(-low >> 30), -(-high >> 30))]
        if len(fits) != 1:
            raise ValueError(f"{len(fits)} sets of integers fit piece {piece}")
        found.append(fits[0])
    return found


if __name__ == "__main__":
    import gpu_division

    mantissas = (torch.arange(2**23, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    for name, values in zip(
        ("c0", "-c1", "c2"), zip(*recover(gpu_division.reciprocal(mantissas.cuda()).cpu()), strict=True), strict=True
    ):
        print(name, *values)
