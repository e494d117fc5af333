"""Reads a report's page: the numbers in its tables, and every way in which a report may write one of the JSON."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from halfbyte.reports import figures
from halfbyte.reports.statistics import Interval


class _Page(HTMLParser):
    """Collects the tags, the attributes that reach out, and the text of the number cells."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.numbers: list[str] = []
        self._in_number = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "xlink:href")]
        self._in_number = tag == "td" and ("class", "num") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._in_number = self._in_number and tag != "td"

    def handle_data(self, data: str) -> None:
        if self._in_number and data.strip():
            self.numbers.append(data.strip())


def page(html: str) -> _Page:
    found = _Page()
    found.feed(html)
    return found


def written(value: Any) -> set[str]:
    """Every way in which the reports may write the numbers of a JSON value."""
    if isinstance(value, dict):
        if "mean" in value and "deviation" in value:
            return _of_seeds(value["mean"], value["deviation"])
        texts = set().union(*(written(one) for one in value.values())) if value else set()
        if {"low", "high"} <= value.keys():
            texts.add(figures.interval(Interval(**value)))
        return texts
    if isinstance(value, list):
        return set().union(*(written(one) for one in value)) if value else set()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return set()
    texts = {
        figures.figure(value),
        figures.figure(value, 1),
        figures.figure(value, 2),
        figures.percent(value),
        figures.share(value),
    }
    texts.add(figures.p_value(value))
    return texts | ({figures.count(value), figures.size(value)} if isinstance(value, int) else set())


def _of_seeds(mean: float, deviation: float | None) -> set[str]:
    texts = {figures.spread(mean, deviation, digits) for digits in (1, 2, 4)}
    shares = figures.spread(100 * mean, None if deviation is None else 100 * deviation, 1)
    return texts | {f"{shares}%", figures.count(round(mean))}
