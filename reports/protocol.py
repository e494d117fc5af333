"""How ours was measured, beside published figures, and what is known to be another way than the published one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from halfbyte.records.record import UNKNOWN
from halfbyte.reports import figures
from halfbyte.reports.comparison import Comparison, TaskResult

if TYPE_CHECKING:
    from halfbyte.reports.published import Published

_SHOTS = re.compile(r"_(\d+)shot")


def asked(published: Published, comparison: Comparison, used: Mapping[str, TaskResult]) -> list[str]:
    """Lines that say whose figures ours are and how each benchmark was asked, with what differs from the published way.

    What was published of a protocol is little: what a line does not say of it is not known.

    Args:
        published: The table.
        comparison: What ours are from.
        used: Of each benchmark that has figures of ours, the task they are of.
    """
    if not used:
        return []
    lines = []
    ours, theirs = comparison.baseline.name, published.model
    if theirs is not None and _plain(theirs) != _plain(ours):
        lines.append(f"ours is of {ours}, the published figures are of {theirs}")
    for benchmark, task in used.items():
        differs = list(_differences(published, benchmark, task))
        more = f"; published otherwise: {', '.join(differs)}" if differs else ""
        lines.append(f"ours, {benchmark}: {_described(task)}{more}")
    return lines


def _plain(model: str) -> str:
    """A model's own name: without its owner or folder, and without what a table says behind it."""
    name = model.split(" ")[0].rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def _described(task: TaskResult) -> str:
    settings = task.settings
    parts = [f"task {settings.task}", f"{task.metric},{task.filter}" if task.filter != "none" else task.metric]
    if not task.draws:
        parts.append(f"{', '.join(map(str, sorted(_shots(task))))} examples")
        templates = {None: "no chat template", UNKNOWN: "the server's chat template"}
        parts.append(templates.get(settings.chat_template, "the model's chat template"))
    questions = f"{figures.count(task.result.questions)} {'prompts' if task.draws else 'questions'}"
    if settings.limit is not None:
        each = " of each subtask" if len(settings.subtasks) > 1 else ""
        questions += f" (the first {figures.count(settings.limit)}{each} alone)"
    parts.append(questions)
    if task.samples > 1:
        parts.append(f"{task.samples} samples of each")
    generation = next((one.generation for one in settings.subtasks.values() if one.generation), {})
    parts += [f"{name} {generation[name]}" for name in ("temperature", "top_p", "max_gen_toks") if name in generation]
    return ", ".join(parts)


def _shots(task: TaskResult) -> set[int]:
    return {subtask.num_fewshot for subtask in task.settings.subtasks.values()}


def _differences(published: Published, benchmark: str, task: TaskResult) -> list[str]:
    found = []
    repeats = (published.repeats or {}).get(benchmark)
    if repeats is not None and repeats != task.samples:
        found.append(f"{repeats} samples of each")
    shots = _SHOTS.search(benchmark)
    if shots is not None and _shots(task) != {int(shots.group(1))}:
        found.append(f"{shots.group(1)} examples")
    return found
