"""Drawings for the page: SVG of matplotlib without size, font or colours of its own, so that it follows the page's."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# The colours drawn stand for custom properties of the page, so that one drawing serves a light and a dark page.
INK, MUTED, GRID, PASS, FAIL, OPEN, UNJUDGED, ODD = (f"#0a0b{i:02x}" for i in range(8))
_PROPERTIES = {
    INK: "ink", MUTED: "muted", GRID: "line", PASS: "pass", FAIL: "fail", OPEN: "inconclusive", UNJUDGED: "accent",
    ODD: "anomaly",
}  # fmt: skip
WIDTH = 10.4  # inches at 72 points


@contextmanager
def drawing() -> Iterator[None]:
    """Text stays text, and the same drawing has the same bytes every time."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "halfbyte", "font.size": 10}):
        yield


def style(axes: Axes, grid: str) -> None:
    """The frame that all drawings have: a line at the bottom, and a light grid behind."""
    axes.tick_params(colors=MUTED, length=3, labelsize=9)
    axes.grid(axis="x" if grid == "x" else "y", color=GRID, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)


def for_page(figure: Figure) -> str:
    """The drawing as SVG, without what only a file of its own needs, with the page's colours and font."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # it is the reader's font that has to have it
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue().decode("utf-8")
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 role="img"', svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", svg)
    for colour, name in _PROPERTIES.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg
