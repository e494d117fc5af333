"""The reciprocal as NVIDIA GPUs approximate it, bit for bit, so that a CPU can follow kernels that divide by it.

Triton's float32 `a / b`, and CUDA's under --use_fast_math, is a x rcp.approx(b). The unit behind rcp.approx cuts [1, 2)
into 128 pieces and evaluates c0 - c1 t + c2 t^2 on each, in fixed point, with a squarer that leaves its low columns out
(Oberman and Siu, "A High-Performance Area-Efficient Multifunction Interpolator", ARITH 2005). The coefficients below
were recovered from what rcp.approx.ftz.f32 gave for all 2^23 mantissas on an H200: on each piece a single set of
integers fits, and with them every result is met (tests/support/recover_reciprocal.py).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

# fmt: off
_C0 = (
    67108864, 66588642, 66076422, 65572021, 65075262, 64585976, 64103992, 63629146, 63161284, 62700254, 62245905,
    61798091, 61356677, 60921524, 60492499, 60069474, 59652325, 59240930, 58835170, 58434930, 58040099, 57650569,
    57266231, 56886986, 56512729, 56143366, 55778798, 55418934, 55063686, 54712961, 54366677, 54024747, 53687093,
    53353633, 53024288, 52698987, 52377651, 52060212, 51746596, 51436737, 51130565, 50828017, 50529029, 50233538,
    49941482, 49652803, 49367442, 49085342, 48806449, 48530705, 48258060, 47988464, 47721861, 47458204, 47197444,
    46939534, 46684429, 46432082, 46182446, 45935480, 45691143, 45449392, 45210185, 44973481, 44739244, 44507436,
    44278016, 44050948, 43826199, 43603730, 43383510, 43165503, 42949675, 42735995, 42524430, 42314950, 42107525,
    41902122, 41698714, 41497270, 41297764, 41100168, 40904453, 40710593, 40518561, 40328333, 40139883, 39953186,
    39768218, 39584955, 39403371, 39223448, 39045159, 38868484, 38693401, 38519888, 38347924, 38177489, 38008563,
    37841123, 37675154, 37510633, 37347543, 37185866, 37025582, 36866673, 36709124, 36552915, 36398030, 36244452,
    36092164, 35941151, 35791396, 35642884, 35495599, 35349528, 35204652, 35060959, 34918436, 34777064, 34636835,
    34497732, 34359741, 34222849, 34087044, 33952313, 33818641, 33686019,
)
"""Values at the left end of each piece, in units of 2^-26."""
_C1 = (
    131068, 129044, 127066, 125134, 123244, 121398, 119594, 117828, 116102, 114414, 112762, 111144, 109562, 108014,
    106498, 105014, 103560, 102136, 100742, 99376, 98038, 96726, 95442, 94182, 92946, 91736, 90548, 89384, 88242,
    87120, 86022, 84942, 83884, 82846, 81826, 80824, 79842, 78878, 77930, 77000, 76086, 75188, 74306, 73440, 72588,
    71752, 70928, 70120, 69326, 68544, 67776, 67022, 66280, 65548, 64830, 64124, 63428, 62746, 62072, 61410, 60758,
    60118, 59486, 58864, 58254, 57652, 57058, 56474, 55900, 55334, 54776, 54228, 53686, 53154, 52628, 52112, 51602,
    51100, 50604, 50116, 49636, 49162, 48696, 48234, 47780, 47334, 46892, 46456, 46028, 45604, 45186, 44776, 44368,
    43968, 43574, 43184, 42798, 42418, 42044, 41674, 41310, 40950, 40594, 40244, 39898, 39556, 39218, 38886, 38556,
    38232, 37912, 37594, 37282, 36974, 36668, 36368, 36070, 35776, 35486, 35200, 34916, 34636, 34360, 34086, 33816,
    33550, 33286, 33026,
)
"""Slopes, negated, in units of 2^-24 over the width of a piece."""
_C2 = (
    1013, 989, 966, 945, 923, 902, 883, 863, 845, 827, 809, 791, 774, 758, 742, 727, 711, 696, 682, 669, 656, 642,
    631, 618, 605, 594, 582, 572, 561, 549, 540, 529, 519, 510, 501, 490, 482, 474, 465, 457, 449, 441, 433, 426,
    418, 412, 403, 397, 390, 383, 377, 371, 366, 358, 353, 348, 341, 337, 331, 326, 320, 316, 310, 305, 302, 297,
    291, 287, 283, 279, 274, 271, 266, 263, 258, 256, 251, 248, 243, 240, 237, 233, 231, 226, 223, 222, 218, 214,
    212, 208, 205, 204, 199, 197, 196, 193, 189, 186, 184, 182, 180, 178, 175, 173, 171, 169, 166, 165, 161, 160,
    159, 155, 154, 153, 150, 149, 147, 145, 143, 143, 140, 138, 137, 135, 133, 132, 131, 130,
)
"""Curvatures, in the same units."""
# fmt: on
_ROUNDING = 2023
"""Added before the result is cut to 24 bits, in units of 2^-39: makes up for the columns the squarer leaves out."""


@lru_cache(maxsize=4)
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """c0, c1 and c2 (int64 [128]) and the squares of all t (int64 [65536]), all in units of 2^-40.

    The square of 16 bits is the sum of b_i b_j 2^(i + j + 1) over i < j and of b_i 2^(2 i). The unit adds only the
    columns from 2^17 on, and t runs from 0 to 1, so that a square has the units of 2^-15.
    """
    t = torch.arange(2**16, device=device)
    squares = torch.zeros_like(t)
    for i in range(16):
        for j in range(i, 16):
            column = i + j + (i < j)
            if column >= 17:
                squares += ((t >> i) & (t >> j) & 1) << (column - 17)
    c0, c1, c2 = (torch.tensor(c, device=device) for c in (_C0, _C1, _C2))
    return (c0 << 14) + 2 * _ROUNDING, c1, 2 * c2, squares


def reciprocal(x: Tensor) -> Tensor:
    """rcp.approx.ftz.f32: 1 / x within one unit in the last place, subnormal numbers taken and given as zeros.

    Args:
        x: float32, any shape. A zero gives the infinity of its sign, an infinity the zero, NaN gives NaN.
    """
    c0, c1, c2, squares = _tables(x.device)
    bits = x.contiguous().view(torch.int32)
    piece, t = (bits >> 16) & 0x7F, (bits & 0xFFFF).long()
    # 24 bits, from 2^23 to 2^24, of a result in [0.5, 1]; adding the exponent to them carries where it is 1.
    mantissa = (c0[piece] - c1[piece] * t + c2[piece] * squares[t]) >> 16
    exponent = (bits >> 23) & 0xFF
    result = (mantissa.int() - 0x00800000) + ((253 - exponent) << 23)
    result = torch.where(result < 0x00800000, 0, result)
    result = torch.where(exponent == 0, 0x7F800000, torch.where(exponent == 255, 0, result))
    signed = (result | (bits & -0x80000000)).view(torch.float32)
    return torch.where(x.isnan(), x, signed)
