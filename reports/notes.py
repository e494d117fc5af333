"""Notes: what a reader must know beside the numbers, of the whole comparison and of each task."""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.reports import figures
from halfbyte.reports.comparison import Comparison, TaskResult
from halfbyte.reports.tables import SET_METRIC, labels
from halfbyte.reports.training import training_notes


def all_notes(comparisons: Sequence[Comparison]) -> list[str]:
    """What a reader must know beside the numbers: of the whole comparison and of each task."""
    _, names = labels(comparisons)
    notes = []
    for label, one in zip(names, comparisons, strict=True):
        notes += [f"{label}: allowed by the policy: {difference}" for difference in one.allowed]
        notes += [f"{label}: {waiver}" for waiver in one.waivers]
        if one.degraded and len(one.tasks) > 1:
            notes.append(
                f"{label}: worse beyond chance, at 5% for all {len(one.tasks)} tasks together (Holm): "
                f"{', '.join(one.degraded)}"
            )
        notes += [f"{label}: {row} could not be measured: {reason}" for row, reason in one.missing.items()]
        notes += [f"{label}: {note}" for note in [*training_notes(one), *one.notes]]
        if one.policy is not None:
            notes += [f"{label}: {row.metric} of {row.task} is {SET_METRIC}" for row in one.set_metrics]
        for row in one.tasks:
            notes += [f"{label}, {row.task}: {note}" for note in [*_more_of(row), *row.notes]]
        if one.policy is not None and not one.policy.release_evidence:
            notes.append(f"{label}: policy '{one.policy.name}' is no evidence for a release. {one.policy.description}")
    return notes


def _more_of(row: TaskResult) -> list[str]:
    """What the table of losses has no column for."""
    found = []
    if row.noise is not None:
        noise, result = row.noise, row.result
        found.append(
            f"two evaluations of the baseline differ by {figures.count(noise.lost)} lost and "
            f"{figures.count(noise.gained)} gained of {figures.count(noise.questions)} questions (noise floor); the "
            f"candidate by {figures.count(result.lost)} and {figures.count(result.gained)}"
        )
    if row.clustered is not None:
        found.append(
            f"{figures.interval(row.clustered)} is the interval of the loss if the subtasks, too, are a sample of many"
        )
    if row.samples > 1:
        found.append(f"{row.samples} samples a question: lost and gained count questions whose mean changed")
    return found
