"""A measurement of memory beside the published tables of it: the same formats, all parts loaded and one at a time."""

from __future__ import annotations

from pathlib import Path

from halfbyte.records.files import read_as
from halfbyte.records.memory import MEMORY_FILE, MemoryRecord, MemoryRow
from halfbyte.reports import figures
from halfbyte.reports.comparison import PublishedTable
from halfbyte.reports.published import Published, overlaid, published_tables

_WAYS = {"VRAM_default": False, "VRAM_low_vram": True}
"""Columns of a published table, and whether the parts of a pipeline are loaded one at a time."""


def is_of_memory(published: Published) -> bool:
    """Whether a published table is one of peak memory."""
    return published.unit == "GB" and set(published.benchmarks) <= _WAYS.keys()


def read_memory(folder: Path) -> MemoryRecord | None:
    """The measurement in a folder; None where there is none.

    Raises:
        UserError: when it is damaged, or of another version.
    """
    path = folder / MEMORY_FILE
    if not path.is_file():
        return None
    return read_as(path, MemoryRecord, "a measurement of memory", "measure again: halfbyte memory")


def beside_memory(published: Published, record: MemoryRecord) -> PublishedTable:
    """The published table with our peaks in GB of 10^9 bytes, where a format of the same name was measured."""
    return overlaid(published, lambda row, benchmark: _ours(record, row, _WAYS[benchmark]))


def memory_tables(record: MemoryRecord | None, model: str) -> list[PublishedTable]:
    """All published tables of the memory of a model, with ours beside them.

    Args:
        record: The measurement; None for no table.
        model: As its recipe names it: black-forest-labs/FLUX.1-dev.
    """
    tables = [one for one in published_tables().values() if is_of_memory(one)]
    if record is None:
        return []
    return [beside_memory(one, record) for one in tables if one.model and model.startswith(one.model.split()[0])]


def _ours(record: MemoryRecord, row: str, low_vram: bool) -> float | None:
    found: MemoryRow | None = next(
        (one for one in record.rows if one.low_vram == low_vram and _names(one.format) == row.lower()), None
    )
    return None if found is None or record.kind != "cuda" else found.peak / 1e9


def _names(format_: str) -> str:
    """A format in the word of published rows: NVFP4 is FP4."""
    return figures.format_label(format_).lower().removeprefix("nv")
