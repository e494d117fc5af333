"""Planning an evaluation: which losses a policy can see on a set of tasks, and how many questions it needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.recipes.benchmarks import benchmarks
from halfbyte.records.errors import UserError, unknown_name
from halfbyte.reports import figures
from halfbyte.reports.comparison import Comparison
from halfbyte.reports.metrics import SHARE, Bounds, bounds_of, refuse_bounds
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
    metric: str | None = None
    """What it is judged by; None takes it for a share between 0 and 1."""

    def bounds(self, policy: Policy) -> Bounds | None:
        """Of one question's value; None where they are not known."""
        return SHARE if self.metric is None else bounds_of(self.metric, policy.bounds)


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
    metric: str | None
    """None where the task was taken for a share."""
    bounds: Bounds
    """Of one question's value; a question that changes goes from one end to the other."""


def parse_tasks(text: str) -> list[PlannedTask]:
    """Tasks as `mmlu,gsm8k,aime_2024=30x64,mine/my_metric=500`: a known name, or name=questions, with x samples.

    Raises:
        UserError: for an unknown task without a number, and what is no number.
    """
    known = benchmarks().tasks
    found = []
    for part in filter(None, (one.strip() for one in text.split(","))):
        match = re.fullmatch(r"([^=]+?)(?:=(\d+))?(?:x(\d+))?", part)
        if match is None:
            raise UserError(f"'{part}' is not a task", "write name, name=questions or name=questionsxsamples")
        questions, samples = match[2], int(match[3] or 1)
        name, slash, metric = match[1].partition("/")
        if slash and not (name and metric):
            raise UserError(f"'{part}' is not a task and its metric", "write name/metric=questions")
        if questions is None and name not in known:
            wrong = unknown_name("task", name, known)
            raise UserError(wrong.message, f"write {name}=NUMBER_OF_QUESTIONS; {wrong.hint}")
        number = int(questions) if questions is not None else known[name].questions
        if number < 1 or samples < 1:
            raise UserError(f"'{part}' has no questions or no samples", "both are at least 1")
        if max(number, samples) > _MOST:
            raise UserError(f"'{part}' is more than anybody evaluates", f"give at most {figures.count(_MOST)}")
        found.append(PlannedTask(name, number, samples, metric or None))
    if not found:
        raise UserError("no task to plan for was named", f"known: {', '.join(sorted(known))}")
    return found


def outlook(task: PlannedTask, flips: float, policy: Policy) -> Outlook:
    """What a task can tell if so many of its answers change without a loss.

    With k samples a question the changes are taken for the samples' luck, which k divides: the best case, since a
    question that a candidate cannot answer any more stays lost however often it is asked.

    Raises:
        UserError: when the bounds of its metric are not known, or the policy has no margin for it.
    """
    bounds = task.bounds(policy)
    if bounds is None:
        why, hint = _unbounded(str(task.metric))
        raise UserError(f"nothing can be planned for {task.task}: {why}", hint)
    width = bounds[1] - bounds[0]
    margin = _margin(task, bounds, policy)
    single = width * flip_deviation(flips / 2, flips / 2)
    deviation = single / task.samples**0.5
    needed = questions_needed(deviation, margin, margin, policy.alpha, width=width)
    luck = Spread(between=0.0, within=single**2, samples=1)
    samples = samples_needed(luck, task.questions, margin, margin, policy.alpha, width=width)
    return Outlook(
        task=task.task,
        questions=task.questions,
        samples=task.samples,
        flips=flips,
        margin=margin,
        visible=detectable_loss(deviation, task.questions, policy.alpha, width=width),
        passes=chance_to_pass(0.0, deviation, task.questions, margin, policy.alpha, width),
        needed=needed,
        samples_needed=samples,
        metric=task.metric,
        bounds=bounds,
    )


def _unbounded(metric: str) -> tuple[str, str]:
    """Why nothing is known of a metric without bounds, and what to do."""
    if refuse_bounds(metric, SHARE) is not None:
        return f"values of {metric} come nowhere near its ends", "compare two evaluations: `halfbyte compare`"
    return (
        f"the bounds of {metric} are not known",
        f"say them in the policy if it has any: bounds: {{{metric}: [lowest, highest]}}",
    )


def _margin(task: PlannedTask, bounds: Bounds, policy: Policy) -> float:
    if policy.ratio is not None:
        return (1 - policy.ratio) * max(map(abs, bounds))  # of the largest baseline there can be
    if task.metric is not None:
        return policy.margin_of(task.task, task.metric, bounds)
    if policy.margin is None and task.task not in policy.margins:
        raise UserError(
            f"policy '{policy.name}' has no margin for shares between 0 and 1, which {task.task} is planned as",
            f"name its metric, as {task.task}/METRIC={task.questions}, take another policy, or name a margin for the "
            f"task: margins: {{{task.task}: ...}}",
        )
    return policy.margin_of(task.task, "a share between 0 and 1", SHARE)


def plan(tasks: Sequence[PlannedTask], policy: Policy, rates: Sequence[float] = FLIP_RATES) -> list[Outlook]:
    """The outlook of each task at each flip rate."""
    return [outlook(task, rate, policy) for task in tasks for rate in rates]


def not_planned(task: PlannedTask, policy: Policy) -> str | None:
    """Why nothing can be said of a task that is evaluated all the same; None where something can.

    A task that decides needs a margin, and the outlook says so.
    """
    bounds = task.bounds(policy)
    if bounds is None:
        return "; ".join(_unbounded(str(task.metric)))
    if policy.decides(task.task):
        return None
    try:
        _margin(task, bounds, policy)
    except UserError as refusal:
        return f"it does not decide, and {refusal.message}"
    return None


def one_metric(metrics: Sequence[str], policy: Policy) -> str | None:
    """A metric that stands for all that a task may be judged by; None where it matters which of them it is."""
    alike = {(bounds_of(one, policy.bounds), policy.margins.get(one)) for one in metrics}
    return metrics[0] if len(alike) == 1 else None


def measured_plan(comparison: Comparison, policy: Policy) -> tuple[list[Outlook], dict[str, str]]:
    """The same at the flip rate that a pair of records shows, and of each task left out the reason.

    Of values between bounds the rate is that of questions which go from one end to the other and spread as far.

    Raises:
        UserError: when no task is left, or a task that decides has no margin.
    """
    found, left_out = [], {}
    for row in comparison.tasks:
        result = row.result
        task = PlannedTask(row.task, result.questions, row.samples, row.metric)
        bounds, reason = task.bounds(policy), not_planned(task, policy)
        if bounds is None or reason is not None:
            left_out[row.task] = str(reason)
            continue
        rate = min(1.0, (result.deviation / (bounds[1] - bounds[0])) ** 2 * row.samples)
        found.append(outlook(task, rate, policy))
    if not found:
        reasons = "; ".join(f"{task}: {reason}" for task, reason in left_out.items())
        raise UserError(f"no task of these records can be planned for: {reasons}", "plan for others by hand")
    return found, left_out


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


def how_to_read_plan(policy: Policy, rows: Sequence[Outlook] = ()) -> str:
    """What the columns mean, and what was taken for granted of which task."""
    text = (
        f"Flips is the share of questions whose answer changes though nothing is lost. Smallest loss seen: a true loss "
        f"that these questions prove with {figures.level(POWER)} probability, and the smallest margin under which a "
        f"candidate that lost nothing passes as often. Questions needed: for {figures.level(POWER)} at the margin of "
        f"policy '{policy.name}'. Samples: the same by asking each question several times, at best."
    )
    known = benchmarks().tasks
    assumed = dict.fromkeys(row.task for row in rows if row.metric is None and row.task not in known)
    if assumed:
        names = ", ".join(assumed)
        text += (
            f" Taken for a share between 0 and 1, since no metric was named: {names}; another metric is named as "
            f"{next(iter(assumed))}/METRIC, and its bounds in the policy."
        )
    others = {f"{row.task}/{row.metric}": row.bounds for row in rows if row.bounds != SHARE}
    for name, (low, high) in others.items():
        text += f" A question of {name} is worth {low:g} to {high:g}, and one that changes goes from end to end."
    if policy.ratio is None:
        return text
    return text + (
        f" Policy '{policy.name}' judges a score by its point estimate and needs no proof: planned is a proof of the "
        "same margin, for a baseline that answers everything."
    )
