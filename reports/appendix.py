"""The tables behind the verdict: size and speed, the published figures beside ours, the layers, and the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfbyte.records.record import MemoryKind, ModelSummary
from halfbyte.reports import figures
from halfbyte.reports.comparison import Comparison, Cost
from halfbyte.reports.published import measured_any, overlay_rows
from halfbyte.reports.tables import Table, labels

_SPEED_NOTE = (
    "Speed and memory are those of the evaluation on its own hardware, with the formats emulated where the hardware "
    "lacks them; they say nothing about a serving engine."
)
_PEAKS: dict[MemoryKind, str] = {
    "cuda": "the most that CUDA's allocator gave out",
    "process": "the largest resident size of the process, on a CPU",
}


def speed_note(comparisons: Sequence[Comparison]) -> str:
    """What speed and peak memory in the table are, and are not."""
    baseline, names = labels(comparisons)
    sides = [(baseline, comparisons[0].costs["baseline"])]
    sides += [(label, one.costs["candidate"]) for label, one in zip(names, comparisons, strict=True)]
    of: dict[MemoryKind, list[str]] = {}
    for label, cost in sides:
        if cost.memory_kind is not None:
            of.setdefault(cost.memory_kind, []).append(label)
    if not of:
        return _SPEED_NOTE
    if len(of) == 1:
        return f"{_SPEED_NOTE} Peak memory is {_PEAKS[next(iter(of))]}."
    kinds = ", ".join(f"of {' and '.join(labels_)} {_PEAKS[kind]}" for kind, labels_ in of.items())
    return f"{_SPEED_NOTE} Peak memory is {kinds}: not to be compared."


def speed_table(comparisons: Sequence[Comparison]) -> Table:
    """One row a model: its size, and how fast it was evaluated on that side's hardware."""
    baseline, names = labels(comparisons)
    first = comparisons[0]
    rows = [_cost_row(baseline, first.baseline, first.costs["baseline"])]
    rows += [
        _cost_row(label, one.candidate, one.costs["candidate"]) for label, one in zip(names, comparisons, strict=True)
    ]
    headers = ["model", "size on disk", "of the baseline", "bits/weight", "peak memory"]
    headers += ["tokens evaluated", "seconds", "tokens/s"]
    return Table("Size and speed", headers, rows)


def _cost_row(label: str, model: ModelSummary, cost: Cost) -> list[str]:
    return [
        label,
        figures.size(model.bytes_on_disk),
        figures.share(cost.bytes_share),
        figures.figure(model.bits_per_weight, 2),
        figures.size(cost.memory_bytes),
        figures.count(cost.tokens),
        figures.figure(cost.seconds, 1),
        figures.figure(cost.tokens_per_second, 1),
    ]


def lengths_table(comparisons: Sequence[Comparison]) -> Table | None:
    """Mean tokens of generated texts and what happened to them; None where nothing was generated."""
    _, names = labels(comparisons)
    rows = []
    for label, one in zip(names, comparisons, strict=True):
        for row in one.tasks:
            if not row.generates:
                continue
            for side, length, health in (
                ("baseline", row.baseline_length, row.baseline_health),
                (label, row.candidate_length, row.candidate_health),
            ):
                counts = (health.samples, health.hit_cap, health.empty, health.unanswered, health.unexpected_stops)
                rows.append([row.task, side, figures.figure(length, 1), *(figures.count(number) for number in counts)])
    if not rows:
        return None
    headers = ["task", "side", "mean tokens", "texts", "cut at the limit", "empty", "no answer found", "odd endings"]
    return Table("Generated texts", headers, rows, labels=2)


def layers_tables(comparisons: Sequence[Comparison]) -> list[Table]:
    """The layer table of each candidate whose checkpoint was at hand."""
    _, names = labels(comparisons)
    return [
        Table(
            f"Layers of {label}",
            ["layers", "format", "number", "size"],
            [[one_.name, one_.format, figures.count(one_.layers), figures.size(one_.bytes)] for one_ in one.layers],
            labels=2,
        )
        for label, one in zip(names, comparisons, strict=True)
        if one.layers
    ]


def published_overlays(comparisons: Sequence[Comparison]) -> list[tuple[Table, str]]:
    """Published figures beside ours, each table with where it is from."""
    found = []
    _, names = labels(comparisons)
    for place, (label, one) in enumerate(zip(names, comparisons, strict=True)):
        for table in one.published:
            source = f"{table.model or 'Several models'}. Source: {'; '.join(table.source)} (seen: {table.seen}). "
            measured = "" if measured_any(table) else "None of its rows was measured here. "
            text = " ".join([f"{source}{measured}Settings: {table.settings}", *(f"{line}." for line in table.asked)])
            found.append((overlay_rows(table, label, measured_only=place > 0), text))
    return found


def manifest_table(comparisons: Sequence[Comparison]) -> Table | None:
    """What made each candidate, one line a field; None where no manifest was at hand."""
    _, names = labels(comparisons)
    found = [(label, one.manifest) for label, one in zip(names, comparisons, strict=True) if one.manifest]
    if not found:
        return None
    flat = [(label, dict(_flat(manifest))) for label, manifest in found]
    fields = list(dict.fromkeys(name for _, fields in flat for name in fields))
    rows = [[name, *(fields.get(name, figures.NONE) for _, fields in flat)] for name in fields]
    return Table("Manifest", ["", *(label for label, _ in flat)], rows, labels=1 + len(flat))


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for key in sorted(value) for pair in _flat(value[key], f"{name}.{key}" if name else str(key))]
    if isinstance(value, list):
        return [(name, " ".join(str(one) for one in value))]
    return [(name, figures.NONE if value is None else str(value))]
