"""How numbers are written for people: one function a kind, used by every report, so that all of them agree."""

from __future__ import annotations

from datetime import UTC, datetime

from halfbyte.records.record import ModelSummary
from halfbyte.reports.statistics import Interval

NONE = "–"
_FORMATS = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}


def figure(value: float | None, digits: int = 4) -> str:
    """A metric's value or loss; a minus sign only where something of it is left after rounding.

    >>> figure(0.51557), figure(-0.00001), figure(18.4936), figure(None)
    ('0.5156', '0.0000', '18.4936', '–')
    """
    if value is None:
        return NONE
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def apart(value: float, other: float) -> tuple[str, str]:
    """Two different values with as many digits as it takes to see that they differ.

    >>> apart(0.01001, 0.01)
    ('0.01001', '0.01000')
    """
    for digits in range(4, 16):
        pair = figure(value, digits), figure(other, digits)
        if pair[0] != pair[1] or value == other:
            return pair
    return repr(value), repr(other)


def interval(value: Interval | None, digits: int = 4) -> str:
    """Both ends.

    >>> interval(Interval(-0.0018, 0.0137, 0.9, "Tango score"))
    '-0.0018 to 0.0137'
    """
    return NONE if value is None else f"{figure(value.low, digits)} to {figure(value.high, digits)}"


def metric_label(metric: str, filter_: str) -> str:
    """A metric, with the filter of its answers where there is one."""
    return metric if filter_ == "none" else f"{metric} ({filter_})"


def level(value: float) -> str:
    """A confidence level.

    >>> level(1 - 2 * 0.05)
    '90%'
    """
    return f"{100 * value:.6g}%"


def percent(value: float | None, digits: int = 1) -> str:
    """A number that is in percent already."""
    return NONE if value is None else f"{figure(value, digits)}%"


def share(value: float | None, digits: int = 1) -> str:
    """A share from 0 to 1 in percent."""
    return NONE if value is None else percent(100 * value, digits)


def p_value(value: float | None) -> str:
    """A p-value.

    >>> p_value(0.2429), p_value(3e-9), p_value(1.0)
    ('0.243', '< 0.001', '1.000')
    """
    if value is None:
        return NONE
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def spread(mean: float | None, deviation: float | None, digits: int = 4) -> str:
    """A mean over seeds and their standard deviation.

    >>> spread(0.46552, 0.0012), spread(0.46552, None)
    ('0.4655 ± 0.0012', '0.4655')
    """
    text = figure(mean, digits)
    return text if deviation is None else f"{text} ± {figure(deviation, digits)}"


def count(value: int | None) -> str:
    """A count, with separators of thousands.

    >>> count(14042)
    '14,042'
    """
    return NONE if value is None else f"{value:,}"


def rounded_up(value: int) -> str:
    """A required number of questions, rounded up to two digits: more would claim a precision it has not.

    >>> rounded_up(19110), rounded_up(37)
    ('20,000', '37')
    """
    unit = 10 ** max(0, len(str(value)) - 2)
    return count(-(-value // unit) * unit)


def size(value: int | None) -> str:
    """Bytes in the unit a person would choose (decimal, as disks and the hub count).

    >>> size(269_060_552), size(1_610_000_000)
    ('269.1 MB', '1.61 GB')
    """
    if value is None:
        return NONE
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def time(value: str) -> str:
    """A time in UTC as the records hold it, for people.

    >>> time("2026-11-29T16:01:21+00:00")
    '2026-11-29 16:01 UTC'
    """
    return datetime.fromisoformat(value).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def format_label(format_: str) -> str:
    """A format as people write it."""
    return _FORMATS.get(format_, format_)


def model_label(model: ModelSummary) -> str:
    """The short name of a model in tables: its format as people write it."""
    return format_label(model.format)
