"""Planning an evaluation: which losses a policy can see on a set of tasks, and how many questions it needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.recipes.benchmarks import benchmarks
from halfbyte.records.errors import UserError, unknown_name
from halfbyte.reports import figures
from halfbyte.reports.comparison import Comparison
from halfbyte.reports.metrics import SHARE
from halfbyte.reports.policy import Policy
from halfbyte.reports.power import (
    POWER,
    Spread,
    chance_to_pass,
    detectable_loss,
    flip_deviation,
    questions_needed,
    samples_needed,
)
from halfbyte.reports.tables import Table

_MOST = 10**9  # questions or samples
FLIP_RATES = (0.01, 0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """A task as it would be evaluated."""

    task: str
    questions: int
    samples: int = 1


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one task can tell at one flip rate."""

    task: str
    questions: int
    samples: int
    flips: float
    """Share of questions that change, lost and gained together, when nothing is lost; with one sample each."""
    margin: float
    visible: float
    """The smallest margin that a candidate which lost nothing passes, and the smallest loss proven, with 80 %."""
    passes: float
    """The probability that a candidate which lost nothing passes at the policy's margin."""
    needed: int | None
    """Questions with which that probability is 80 %."""
    samples_needed: int | None
    """Samples a question that would do it with the same questions, at best; None where no number would."""


def parse_tasks(text: str) -> list[PlannedTask]:
    """Tasks as `mmlu,gsm8k,aime_2024=30x64,mine=500`: a known name, or name=questions, with x samples.

    Raises:
        UserError: for an unknown task without a number, and what is no number.
    """
    known = benchmarks().tasks
    found = []
    for part in filter(None, (one.strip() for one in text.split(","))):
        match = re.fullmatch(r"([^=]+?)(?:=(\d+))?(?:x(\d+))?", part)
        if match is None:
            raise UserError(f"'{part}' is not a task", "write name, name=questions or name=questionsxsamples")
        name, questions, samples = match[1], match[2], int(match[3] or 1)
        if questions is None and name not in known:
            wrong = unknown_name("task", name, known)
            raise UserError(wrong.message, f"write {name}=NUMBER_OF_QUESTIONS; {wrong.hint}")
        number = int(questions) if questions is not None else known[name].questions
        if number < 1 or samples < 1:
            raise UserError(f"'{part}' has no questions or no samples", "both are at least 1")
        if max(number, samples) > _MOST:
            raise UserError(f"'{part}' is more than anybody evaluates", f"give at most {figures.count(_MOST)}")
        found.append(PlannedTask(name, number, samples))
    if not found:
        raise UserError("no task to plan for was named", f"known: {', '.join(sorted(known))}")
    return found


def outlook(task: PlannedTask, flips: float, policy: Policy) -> Outlook:
    """What a task can tell if so many of its answers change without a loss.

    With k samples a question the changes are taken for the samples' luck, which k divides: the best case, since a
    question that a candidate cannot answer any more stays lost however often it is asked.
    """
    margin = _margin(task.task, policy)
    deviation = flip_deviation(flips / 2, flips / 2) / task.samples**0.5
    needed = questions_needed(deviation, margin, margin, policy.alpha)
    single = flip_deviation(flips / 2, flips / 2)
    luck = Spread(between=0.0, within=single**2, samples=1)
    samples = samples_needed(luck, task.questions, margin, margin, policy.alpha)
    return Outlook(
        task=task.task,
        questions=task.questions,
        samples=task.samples,
        flips=flips,
        margin=margin,
        visible=detectable_loss(deviation, task.questions, policy.alpha),
        passes=chance_to_pass(0.0, deviation, task.questions, margin, policy.alpha),
        needed=needed,
        samples_needed=samples,
    )


def _margin(task: str, policy: Policy) -> float:
    if policy.ratio is not None:
        return 1 - policy.ratio  # of a baseline that answers everything: the largest it can be
    if policy.margin is None and task not in policy.margins:
        raise UserError(
            f"policy '{policy.name}' has no margin for shares between 0 and 1, which {task} is planned as",
            f"take another policy, or name one for the task: margins: {{{task}: ...}}",
        )
    return policy.margin_of(task, "a share between 0 and 1", SHARE)


def plan(tasks: Sequence[PlannedTask], policy: Policy, rates: Sequence[float] = FLIP_RATES) -> list[Outlook]:
    """The outlook of each task at each flip rate."""
    return [outlook(task, rate, policy) for task in tasks for rate in rates]


def measured_plan(comparison: Comparison, policy: Policy) -> list[Outlook]:
    """The same at the flip rate that a pair of records shows, for each task of 0/1 outcomes or means of them.

    Raises:
        UserError: when no task has any.
    """
    found = []
    for row in comparison.tasks:
        if row.bounds != SHARE:
            continue
        result = row.result
        rate = min(1.0, result.deviation**2 * row.samples)
        found.append(outlook(PlannedTask(row.task, result.questions, row.samples), rate, policy))
    if not found:
        raise UserError("no task of these records has outcomes between 0 and 1", "plan for others by hand")
    return found


def plan_table(rows: Sequence[Outlook], policy: Policy) -> Table:
    """One row for each task and flip rate."""
    headers = [
        "task", "questions", "samples", "flips", "margin", "smallest loss seen", "passes if nothing lost",
        "questions needed", "or samples",
    ]  # fmt: skip
    cells = [
        [
            row.task,
            figures.count(row.questions),
            figures.count(row.samples),
            figures.share(row.flips),
            figures.figure(row.margin),
            figures.figure(row.visible),
            figures.share(row.passes, 0),
            figures.NONE if row.needed is None else figures.rounded_up(row.needed),
            figures.count(row.samples_needed),
        ]
        for row in rows
    ]
    return Table(f"Power under policy '{policy.name}'", headers, cells)


def how_to_read_plan(policy: Policy) -> str:
    """What the columns mean."""
    text = (
        f"Flips is the share of questions whose answer changes though nothing is lost. Smallest loss seen: a true loss "
        f"that these questions prove with {figures.level(POWER)} probability, and the smallest margin under which a "
        f"candidate that lost nothing passes as often. Questions needed: for {figures.level(POWER)} at the margin of "
        f"policy '{policy.name}'. Samples: the same by asking each question several times, at best."
    )
    if policy.ratio is None:
        return text
    return text + (
        f" Policy '{policy.name}' judges a score by its point estimate and needs no proof: planned is a proof of the "
        "same margin, for a baseline that answers everything."
    )
