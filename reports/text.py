"""Reports as plain text for a terminal and as Markdown for a pull request."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from halfbyte.reports.appendix import SPEED_NOTE, lengths_table, published_overlays, speed_table
from halfbyte.reports.comparison import Comparison
from halfbyte.reports.tables import (
    Table,
    all_notes,
    how_to_read,
    labels,
    losses_table,
    models_table,
    perplexity_line,
    verdict_word,
)

WIDTH = 110


def render_text(comparisons: Sequence[Comparison]) -> str:
    """All tables and verdicts as aligned plain text.

    Raises:
        UserError: when there is no comparison, or they have different baselines.
    """
    parts = [aligned(models_table(comparisons))]
    baseline, names = labels(comparisons)
    for label, one in zip(names, comparisons, strict=True):
        table = losses_table(one, label, baseline)
        parts.append(f"{table.title}\n{aligned(table)}")
        if one.fidelity is not None:
            parts.append(wrapped(perplexity_line(one.fidelity, label)))
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
    """Columns two blanks apart: labels to the left, numbers to the right, the last column to the left again."""
    lines = [table.headers, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.headers))]
    last = len(widths) - 1

    def aligned(line: list[str]) -> str:
        cells = [
            cell.ljust(widths[i]) if i < table.labels or i == last else cell.rjust(widths[i])
            for i, cell in enumerate(line)
        ]
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
    for label, one in zip(names, comparisons, strict=True):
        table = losses_table(one, label, baseline)
        parts.append(f"## {escaped(table.title)}")
        parts.append(piped(table))
        if one.fidelity is not None:
            parts.append(escaped(perplexity_line(one.fidelity, label)))
    parts.append(escaped(how_to_read(comparisons[0])))
    for overlay, source in published_overlays(comparisons):
        parts += [f"## Published: {escaped(overlay.title)}", piped(overlay), escaped(source)]
    parts += ["## Size and speed", piped(speed_table(comparisons)), SPEED_NOTE]
    if (lengths := lengths_table(comparisons)) is not None:
        parts += ["## Generated texts", piped(lengths)]
    if notes := all_notes(comparisons):
        parts.append("## Notes\n\n" + "\n".join(f"- {escaped(note)}" for note in notes))
    return "\n\n".join(parts) + "\n"


def piped(table: Table) -> str:
    last = len(table.headers) - 1
    marks = ["---" if i < table.labels or i == last else "--:" for i in range(len(table.headers))]
    lines = [[escaped(cell) for cell in table.headers], marks]
    lines += [[escaped(cell) for cell in row] for row in table.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escaped(text: str) -> str:
    """Text without effect as Markdown or HTML."""
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{character}" if character in "\\`*_|[]" else character for character in text)
