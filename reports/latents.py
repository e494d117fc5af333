"""The latents' distance from the baseline's over the steps, as a drawing: where on the way a candidate departs."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from halfbyte.reports.comparison import Comparison
from halfbyte.reports.drawing import FAIL, MUTED, ODD, OPEN, PASS, UNJUDGED, WIDTH, drawing, for_page, style
from halfbyte.reports.tables import labels

_HEIGHT = 2.9  # inches
_COLOURS = (UNJUDGED, OPEN, PASS, ODD, FAIL)
_LINES = ("-", "--", ":")
CAPTION = "Distance of the latents from the baseline's after each step, as a share of their norm (mean over the images)"


def latent_plots(comparisons: Sequence[Comparison]) -> list[tuple[str, str]]:
    """(caption, SVG), with a line for each candidate whose latents were kept; empty where none were."""
    _, names = labels(comparisons)
    lines = [
        (label, one.latent_distances)
        for label, side in zip(names, comparisons, strict=True)
        for one in side.pictures
        if one.latent_distances
    ]
    if not lines:
        return []
    with drawing():
        figure = Figure(figsize=(WIDTH, _HEIGHT))
        axes = figure.add_axes((0.07, 0.17, 0.90, 0.72))
        for place, (label, distances) in enumerate(lines):
            colour, line = _COLOURS[place % len(_COLOURS)], _LINES[place // len(_COLOURS) % len(_LINES)]
            steps = range(1, len(distances) + 1)
            axes.plot(steps, distances, color=colour, linestyle=line, marker="o", markersize=3.5, label=label)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step", color=MUTED, fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        style(axes, "y")
        axes.legend(loc="best", fontsize=9, frameon=False, labelcolor=MUTED)
        return [(CAPTION, for_page(figure))]
