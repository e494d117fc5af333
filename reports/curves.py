"""The training curves: loss and KL divergence over the steps, with PTQ's level and the step that was exported."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from halfbyte.reports.comparison import Comparison, Training
from halfbyte.reports.drawing import INK, MUTED, OPEN, PASS, UNJUDGED, WIDTH, drawing, for_page, style
from halfbyte.reports.tables import labels

_HEIGHT = 2.9  # inches
_FEW = 40  # points that are marked one by one

Points = list[tuple[int, float]]


def training_plots(comparisons: Sequence[Comparison]) -> list[tuple[str, str]]:
    """(caption, SVG) for each trained candidate."""
    _, names = labels(comparisons)
    return [
        (f"Training of {label}", _draw(one.training))
        for label, one in zip(names, comparisons, strict=True)
        if one.training is not None
    ]


def _draw(training: Training) -> str:
    losses = [(row.step, row.loss) for row in training.steps if row.loss is not None]
    validations = [(row.step, row.validation_loss) for row in training.validations if row.validation_loss is not None]
    kl = [(row.step, row.validation_kl) for row in training.validations if row.validation_kl is not None]
    record = training.record
    with drawing():
        figure = Figure(figsize=(WIDTH, _HEIGHT))
        places = [(0.07, 0.17, 0.40, 0.68), (0.57, 0.17, 0.40, 0.68)] if kl else [(0.07, 0.17, 0.90, 0.68)]
        # What qad minimises is a divergence and no cross-entropy, so that it belongs on the other axis.
        beside_kl = record.method == "qad" and bool(kl)
        axes = figure.add_axes(places[0])
        if not beside_kl:
            _line(axes, losses, UNJUDGED, "training")
        _line(axes, validations, PASS, "validation")
        _levels(axes, record.start.loss, record.best_step)
        _frame(axes, "loss, nats a token" if record.learned == "tokens" else "mean squared error of the velocity")
        if kl:
            axes = figure.add_axes(places[1])
            if beside_kl:
                _line(axes, losses, UNJUDGED, "training")
            _line(axes, kl, PASS, "validation")
            _levels(axes, record.start.kl, record.best_step)
            _frame(axes, "KL divergence from the teacher, nats a token")
        return for_page(figure)


def _line(axes: Axes, points: Points, colour: str, name: str) -> None:
    if points:
        mark = "o" if len(points) <= _FEW else None
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=colour, linewidth=1.6, marker=mark, markersize=3.5, label=name, zorder=3)


def _levels(axes: Axes, start: float | None, best_step: int) -> None:
    """PTQ's level across, and the exported step upright."""
    if start is not None:
        axes.axhline(start, color=OPEN, linewidth=1.4, linestyle="--", label="PTQ", zorder=2)
    axes.axvline(best_step, color=INK, linewidth=1, linestyle=":", label="exported", zorder=2)


def _frame(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.set_xlabel("step", color=MUTED, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    style(axes, "y")
    axes.legend(loc="best", fontsize=9, frameon=False, labelcolor=MUTED)
