"""The forest plot: the loss of every task with its interval and its margin, as SVG that follows the page's colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import east_asian_width

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

from halfbyte.reports import figures
from halfbyte.reports.comparison import Comparison, TaskResult
from halfbyte.reports.drawing import FAIL, INK, MUTED, ODD, OPEN, PASS, UNJUDGED, WIDTH, drawing, for_page, style
from halfbyte.reports.tables import labels, row_word

_MARKS = {
    "pass": (PASS, "o"),
    "fail": (FAIL, "s"),
    "inconclusive": (OPEN, "D"),
    "anomaly": (ODD, "X"),
    None: (UNJUDGED, "o"),
}
_SIZE = 10.0  # points
_SMALLEST = 7.0
_NAME = 31  # characters of that size in the column of names
_ROW = 0.36
_ROWS = 32  # of one drawing, so that it fits on a printed page


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    result: TaskResult


def forest_plots(comparisons: Sequence[Comparison]) -> list[tuple[str, str]]:
    """(caption, SVG) for each unit of measure; rows without an interval are left out.

    Shares between 0 and 1 have one axis together; any other metric has its own, since losses in different units say
    nothing beside each other.
    """
    _, names = labels(comparisons)
    groups: dict[str, list[_Row]] = {}
    tasks = list(dict.fromkeys(row.task for one in comparisons for row in one.tasks))
    for task in tasks:
        for label, one in zip(names, comparisons, strict=True):
            for row in one.tasks:
                if row.task == task and row.result.interval is not None:
                    name = f"{row.task} · {label}" if len(comparisons) > 1 else row.task
                    groups.setdefault(_unit(row), []).append(_Row(name, row))
    plots = []
    for unit, rows in groups.items():
        limits = _limits(rows)
        parts = [rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)]
        for number, part in enumerate(parts, start=1):
            caption = f"Loss of {unit}" + (f", part {number} of {len(parts)}" if len(parts) > 1 else "")
            plots.append((caption, _draw(part, limits)))
    return plots


def _unit(row: TaskResult) -> str:
    if row.result.mcnemar_p is not None or (min(row.result.baseline, row.result.candidate) >= 0 and _at_most_one(row)):
        return "scores between 0 and 1"
    return row.metric


def _at_most_one(row: TaskResult) -> bool:
    return max(row.result.baseline, row.result.candidate) <= 1


def _draw(rows: list[_Row], limits: tuple[float, float]) -> str:
    with drawing():
        height = 0.75 + _ROW * len(rows)
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_axes((0.26, 0.5 / height, 0.36, 1 - 0.55 / height))
        for place, row in enumerate(rows):
            _draw_row(figure, axes, len(rows) - 1 - place, row)
        _draw_frame(axes, len(rows), limits)
        return for_page(figure)


def _draw_row(figure: Figure, axes: Axes, height: int, row: _Row) -> None:
    result, judgement = row.result.result, row.result.judgement
    found = result.interval
    assert found is not None
    colour, mark = _MARKS[judgement.verdict if judgement else None]
    axes.plot([found.low, found.high], [height, height], color=colour, linewidth=2.4, solid_capstyle="butt", zorder=3)
    axes.plot([result.loss], [height], color=colour, marker=mark, markersize=7, zorder=4)
    if judgement is not None:
        axes.plot([judgement.margin] * 2, [height - 0.36, height + 0.36], color=INK, linewidth=1.6, zorder=2)
    across = blended_transform_factory(figure.transFigure, axes.transData)
    name, size = _fitting(row.name)
    words = (
        (0.25, "right", INK, name, size),
        (0.70, "right", INK, figures.figure(result.loss), _SIZE),
        (0.715, "left", MUTED, f"({figures.interval(found)})", _SIZE),
        (0.995, "right", colour, row_word(judgement) if judgement else "", _SIZE),
    )
    for x, align, tint, text, points in words:
        axes.text(
            x, height, text, transform=across, ha=align, va="center", color=tint, fontsize=points, parse_math=False
        )


def _fitting(name: str) -> tuple[str, float]:
    """A name as the column of names has room for it, and its size in points: smaller, then without its middle."""
    wide = [2 if east_asian_width(character) in "WF" else 1 for character in name]
    size = max(_SMALLEST, _SIZE * min(1.0, _NAME / sum(wide)))
    while sum(wide) * size > _NAME * _SIZE:
        middle = len(wide) // 2
        name, wide = f"{name[: middle - 1]}…{name[middle + 1 :]}", [*wide[: middle - 1], 1, *wide[middle + 1 :]]
    return name, size


def _limits(rows: list[_Row]) -> tuple[float, float]:
    """Both ends of the axis, the same for all parts of a plot."""
    ends = [0.0]
    for row in rows:
        found, judgement = row.result.result.interval, row.result.judgement
        assert found is not None
        ends += [found.low, found.high, *([judgement.margin] if judgement else [])]
    pad = 0.06 * (max(ends) - min(ends) or 1.0)
    return min(ends) - pad, max(ends) + pad


def _draw_frame(axes: Axes, rows: int, limits: tuple[float, float]) -> None:
    axes.set_xlim(*limits)
    axes.set_ylim(-0.7, rows - 0.3)
    axes.axvline(0, color=MUTED, linewidth=1, zorder=1)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(5))
    style(axes, "x")
    axes.set_xlabel("← candidate better · loss · candidate worse →", color=MUTED, fontsize=9)
