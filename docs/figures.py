"""Draws the figures of docs/formats.md out of halfbyte's own numerics.

python docs/figures.py
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("svg")

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from halfbyte.quant import numerics
from halfbyte.records.files import write_text

FOLDER = Path(__file__).resolve().parent / "images"
VALUES = 2**16
SEED = 1234
GREY, BLUE, GREEN, RED = "#8a8a8a", "#1f5fa8", "#76b900", "#c0392b"
# Text stays text, and nothing in a file depends on when or in which process it was drawn.
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "halfbyte",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def e2m1() -> Figure:
    """The staircase that rounds a number to E2M1, and the sixteen codes below it."""
    figure, (stairs, line) = plt.subplots(2, 1, figsize=(7, 5), height_ratios=(4, 1), layout="constrained")
    x = torch.linspace(-7.5, 7.5, 3001)
    stairs.plot(x, x, color=GREY, linewidth=0.8, linestyle="--", label="the number itself")
    stairs.plot(x, numerics.e2m1_round(x), color=BLUE, linewidth=1.6, label="rounded to E2M1")
    values = torch.tensor(numerics.E2M1_VALUES)
    middles = (values[1:] + values[:-1]) / 2
    stairs.plot(middles, numerics.e2m1_round(middles), "o", color=RED, markersize=4, label="halfway: to the even code")
    stairs.set_xlabel("number divided by its block's scale")
    stairs.set_ylabel("value of the code")
    stairs.set_yticks([-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6])
    stairs.grid(axis="y", linewidth=0.3)
    stairs.legend(frameon=False)
    both = [*(-values).tolist(), *values.tolist()]
    line.vlines(both, 0, 1, color=BLUE, linewidth=1.6)
    for code, value in enumerate(values.tolist()):
        line.text(value, 1.15, f"{code:04b}", ha="center", fontsize=6, rotation=90, va="bottom")
        if value:
            line.text(-value, 1.15, f"{code + 8:04b}", ha="center", fontsize=6, rotation=90, va="bottom")
    line.set_xlim(stairs.get_xlim())
    line.set_ylim(0, 2.6)
    line.set_yticks([])
    line.set_xlabel("all values and their codes: sign, two bits of exponent, one of mantissa (1000 is -0)")
    line.spines["left"].set_visible(False)
    return figure


def block_scales() -> Figure:
    """One row of 32 weights in NVFP4 and in MXFP4: what is kept, and on which grid."""
    row = 0.02 * torch.randn(32, generator=_generator())
    row[5], row[22] = 0.09, -0.031
    scale_2 = numerics.nvfp4_scale_2(row.abs().max())
    nvfp4 = numerics.nvfp4_quantize(row, scale_2)
    mxfp4 = numerics.mxfp4_quantize(row)
    figure, axes = plt.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
    _block(
        axes[0],
        row,
        numerics.nvfp4_dequantize(nvfp4),
        (nvfp4.scale.float() * nvfp4.scale_2).tolist(),
        "NVFP4: blocks of 16, scales in E4M3",
    )
    _block(
        axes[1],
        row,
        numerics.mxfp4_dequantize(mxfp4),
        numerics.e8m0_decode(mxfp4.scale).tolist(),
        "MXFP4: blocks of 32, scales that are powers of two",
    )
    axes[1].set_xlabel("weight in the row")
    return figure


def _block(axes: Axes, row: Tensor, read_back: Tensor, scales: list[float], title: str) -> None:
    size = len(row) // len(scales)
    for block, scale in enumerate(scales):
        grid = [sign * scale * value for value in numerics.E2M1_VALUES for sign in (1, -1)]
        axes.hlines(grid, block * size - 0.5, (block + 1) * size - 0.5, color=GREEN, linewidth=0.5)
        axes.text(block * size - 0.4, 0.118, f"scale {scale:.5f}", fontsize=7, color="#4b7600")
    axes.bar(range(len(row)), row, color="#d0d8e2", width=0.8, label="weight")
    axes.plot(range(len(row)), read_back, "o", color=BLUE, markersize=3.5, label="read back")
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_ylim(-0.09, 0.135)
    axes.legend(frameon=False, loc="upper right", ncols=2)


class Kind(NamedTuple):
    """A format as the figure and the table of errors have it."""

    name: str
    bits: float
    """Bits a weight, scales included, for a matrix of 4096 x 4096."""
    read_back: Callable[[Tensor], Tensor]


def _one_scale(x: Tensor) -> Tensor:
    scale = x.abs().max() / numerics.E2M1_MAX
    return numerics.e2m1_round(x / scale) * scale


def _nvfp4(x: Tensor) -> Tensor:
    return numerics.nvfp4_dequantize(numerics.nvfp4_quantize(x, numerics.nvfp4_scale_2(x.abs().max())))


def _fp8(x: Tensor) -> Tensor:
    return numerics.fp8_dequantize(numerics.fp8_quantize(x, numerics.fp8_scale(x.abs().max())))


KINDS = (
    Kind("FP8, one scale a tensor", 8.0, _fp8),
    Kind("MXFP8", 8.25, lambda x: numerics.mxfp8_dequantize(numerics.mxfp8_quantize(x))),
    Kind("NVFP4", 4.5, _nvfp4),
    Kind("MXFP4", 4.25, lambda x: numerics.mxfp4_dequantize(numerics.mxfp4_quantize(x))),
    Kind("E2M1, one scale a tensor", 4.0, _one_scale),
)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def weights() -> dict[str, Tensor]:
    """Values of two shapes: a bell without outliers, as most weights are, and one with heavy tails."""
    normal, *others = torch.randn(4, VALUES, generator=_generator())
    spread = torch.stack(others).square().mean(dim=0).sqrt()  # of Student's t, 3 degrees
    return {"normal": normal, "heavy tails": normal / spread}


def errors() -> dict[str, dict[str, float]]:
    """Root mean square error over root mean square value, by format and by shape of the values."""
    return {
        kind.name: {
            shape: round(float((kind.read_back(x) - x).square().mean().sqrt() / x.square().mean().sqrt()), 4)
            for shape, x in weights().items()
        }
        for kind in KINDS
    }


def error() -> Figure:
    """The error of each format on both shapes of values."""
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    found = errors()
    places = torch.arange(len(found)).tolist()
    for at, (shape, color) in enumerate(zip(weights(), (BLUE, RED), strict=True)):
        heights = [100 * by_shape[shape] for by_shape in found.values()]
        bars = axes.bar([place + 0.38 * at - 0.19 for place in places], heights, width=0.36, color=color, label=shape)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    names = [f"{kind.name.replace(', ', chr(10))}\n{kind.bits:g} bits" for kind in KINDS]
    axes.set_xticks(places, names, fontsize=8)
    axes.set_ylabel("error, % of the values (RMS)")
    axes.set_yscale("log")
    axes.set_yticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="upper left")
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {"e2m1": e2m1, "block-scales": block_scales, "error": error}


def svg(draw: Callable[[], Figure]) -> str:
    """A figure as the text of its file."""
    with plt.rc_context(STYLE):
        figure = draw()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def main() -> None:
    """Writes all figures."""
    for name, draw in FIGURES.items():
        write_text(FOLDER / f"{name}.svg", svg(draw))


if __name__ == "__main__":
    main()
