"""`halfbyte table`: lists the published tables, prints one, and lays our own figures beside it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.records.errors import UserError
from halfbyte.records.files import dumps
from halfbyte.records.memory import MEMORY_FILE

if TYPE_CHECKING:
    from halfbyte.reports.comparison import PublishedTable
    from halfbyte.reports.published import Published


def run(args: Namespace) -> int:
    """Prints the list, a table, or a table beside a comparison or measurement of memory that a command wrote."""
    from halfbyte.reports.published import (
        described,
        measured_any,
        overlay_rows,
        published_rows,
        published_table,
        published_tables,
    )
    from halfbyte.reports.text import aligned

    if args.table is None:
        if args.run is not None:
            raise UserError("--with needs a table to lay the run over", "halfbyte table march-2025-table-1 --with RUN")
        tables = published_tables().values()
        if args.json:
            print(dumps([one.model_dump(mode="json") for one in tables]), end="")
        else:
            width = max(len(one.name) for one in tables)
            print("\n".join(f"{one.name:{width}}  {one.about}: {_named(one.benchmarks)}" for one in tables))
        return 0
    published = published_table(args.table)
    overlays = [] if args.run is None else _overlays(published, args.run)
    if args.json:
        content = published.model_dump(mode="json")
        print(dumps(content if args.run is None else [one.model_dump(mode="json") for _, one in overlays]), end="")
        return 0
    print(f"{published.about}\n\n{aligned(published_rows(published))}\n\n{described(published)}")
    for label, one in overlays:
        shown = aligned(overlay_rows(one, label)) if measured_any(one) else f"{label} measured nothing of this table."
        print("\n".join([f"\n{shown}", *one.asked]))
    return 0


def _overlays(published: Published, folder: Path) -> list[tuple[str, PublishedTable]]:
    """The table with what a folder holds of it, by the name of what was measured; the file in it may be named too."""
    from halfbyte.reports.comparison import COMPARISON_FILE, load_comparisons
    from halfbyte.reports.memory import beside_memory, is_of_memory, read_memory
    from halfbyte.reports.published import beside

    if folder.name in (COMPARISON_FILE, MEMORY_FILE) and folder.is_file():
        folder = folder.parent
    if not is_of_memory(published):
        return [(one.label, beside(published, one)) for one in load_comparisons(folder)]
    record = read_memory(folder)
    if record is None:
        raise UserError(
            f"{folder} holds no {MEMORY_FILE}",
            "measure it with `halfbyte memory`, and name the run folder that it says",
        )
    return [(f"{record.rows[0].model}, {record.height} x {record.width} pixels", beside_memory(published, record))]


def _named(benchmarks: list[str]) -> str:
    shown = ", ".join(benchmarks[:4])
    return shown if len(benchmarks) <= 4 else f"{shown} and {len(benchmarks) - 4} more"
