"""Reports as plain text for a terminal and as Markdown for a pull request."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from halfbyte.reports.appendix import lengths_table, published_overlays, speed_note, speed_table
from halfbyte.reports.comparison import Comparison
from halfbyte.reports.notes import all_notes
from halfbyte.reports.tables import (
    Table,
    how_to_read,
    labels,
    losses_table,
    models_table,
    perplexity_line,
    references_table,
    seeds_table,
    set_metrics_table,
    verdict_word,
)
from halfbyte.reports.training import gains_tables, training_lines

WIDTH = 110
_SEEDS = (
    "Several seeds of one training are one row above: the mean, and ± the standard deviation among them. One by one:"
)


def render_text(comparisons: Sequence[Comparison]) -> str:
    """All tables and verdicts as aligned plain text.

    Raises:
        UserError: when there is no comparison, or they have different baselines.
    """
    parts = [aligned(models_table(comparisons))]
    baseline, names = labels(comparisons)
    if (seeds := seeds_table(comparisons)) is not None:
        parts.append(f"The seeds one by one\n{aligned(seeds)}")
    for label, one in zip(names, comparisons, strict=True):
        if one.tasks:
            table = losses_table(one, label, baseline)
            parts.append(f"{table.title}\n{aligned(table)}")
        if one.fidelity is not None:
            parts.append(wrapped(perplexity_line(one.fidelity, label)))
        parts += [wrapped(line) for line in training_lines(one, label)]
    others = [set_metrics_table(comparisons), references_table(comparisons), *gains_tables(comparisons)]
    parts += [f"{table.title}\n{aligned(table)}" for table in others if table is not None]
    parts.append(wrapped(how_to_read(comparisons[0])))
    if notes := all_notes(comparisons):
        parts.append("Notes\n" + "\n".join(wrapped(f"- {note}", "  ") for note in notes))
    for label, one in zip(names, comparisons, strict=True):
        if one.verdict is not None:
            head = f"{verdict_word(one)}: {label}"
            parts.append(f"{head}\n{wrapped(one.verdict.sentence)}\n{wrapped('Next: ' + one.verdict.next_step)}")
    return "\n\n".join(parts) + "\n"


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def aligned(table: Table) -> str:
    """Columns two blanks apart: words to the left, numbers to the right."""
    lines = [table.headers, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.headers))]

    def aligned(line: list[str]) -> str:
        cells = [cell.ljust(widths[i]) if table.has_words(i) else cell.rjust(widths[i]) for i, cell in enumerate(line)]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([aligned(table.headers), rule, *(aligned(row) for row in table.rows)])


def render_markdown(comparisons: Sequence[Comparison]) -> str:
    """The same as Markdown.

    Raises:
        UserError: when there is no comparison, or they have different baselines.
    """
    models = models_table(comparisons)
    baseline, names = labels(comparisons)
    parts = [f"# Accuracy loss against {escaped(baseline)}"]
    for label, one in zip(names, comparisons, strict=True):
        if one.verdict is not None:
            parts.append(
                f"**{verdict_word(one)}: {escaped(label)}.** {escaped(one.verdict.sentence)} "
                f"*{escaped(one.verdict.next_step)}*"
            )
    parts.append(piped(models))
    if (seeds := seeds_table(comparisons)) is not None:
        parts += [_SEEDS, piped(seeds)]
    for label, one in zip(names, comparisons, strict=True):
        parts.append(f"## {escaped(label)} against {escaped(baseline)}")
        if one.tasks:
            parts.append(piped(losses_table(one, label, baseline)))
        if one.fidelity is not None:
            parts.append(escaped(perplexity_line(one.fidelity, label)))
        parts += [escaped(line) for line in training_lines(one, label)]
    others = [set_metrics_table(comparisons), references_table(comparisons), *gains_tables(comparisons)]
    for table in (table for table in others if table is not None):
        parts += [f"## {escaped(table.title)}", piped(table)]
    parts.append(escaped(how_to_read(comparisons[0])))
    for overlay, source in published_overlays(comparisons):
        parts += [f"## Published: {escaped(overlay.title)}", piped(overlay), escaped(source)]
    parts += ["## Size and speed", piped(speed_table(comparisons)), escaped(speed_note(comparisons))]
    if (lengths := lengths_table(comparisons)) is not None:
        parts += ["## Generated texts", piped(lengths)]
    if notes := all_notes(comparisons):
        parts.append("## Notes\n\n" + "\n".join(f"- {escaped(note)}" for note in notes))
    return "\n\n".join(parts) + "\n"


def piped(table: Table) -> str:
    marks = ["---" if table.has_words(i) else "--:" for i in range(len(table.headers))]
    lines = [[escaped(cell) for cell in table.headers], marks]
    lines += [[escaped(cell) for cell in row] for row in table.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escaped(text: str) -> str:
    """Text without effect as Markdown or HTML."""
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{character}" if character in "\\`*_|[]" else character for character in text)
