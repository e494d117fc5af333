"""halfbyte plan: what a recipe will make, take and be able to tell, from its model's configuration alone."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from halfbyte.recipes.facts import MEMORY_GB
from halfbyte.recipes.find import load_recipe, unsupported, with_limit
from halfbyte.recipes.throughput import Throughput, drawing_on, measured_on, stated
from halfbyte.records.errors import UserError
from halfbyte.records.files import dumps

if TYPE_CHECKING:
    import torch

    from halfbyte.plan_tokens import TaskTokens
    from halfbyte.quant.produce import Job
    from halfbyte.reports.policy import Policy

_RATES = (0.02, 0.05, 0.1)
"""Flip rates of the table for people; JSON has more."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a recipe is planned to run."""

    name: str
    device: torch.device
    capacity: int | None
    """Bytes of its memory; None where that is not known."""
    here: bool
    """Whether it is on this machine."""


def run(args: Namespace) -> int:
    """Prints the plan; nothing is computed, and nothing written."""
    recipe = with_limit(load_recipe(args.recipe, args.set), args.limit)
    throughput = Throughput() if args.throughput is None else stated(args.throughput)
    place = _place(args.device)
    if args.measure and not place.here:
        raise UserError(f"{place.name} is not on this machine", "leave --measure out, or --device")
    from halfbyte.quant.produce import prepare  # torch and ModelOpt take seconds; a typo in a recipe should not
    from halfbyte.reports.applies import require_tasks_of
    from halfbyte.reports.policy import load_policy
    from halfbyte.reports.text import wrapped

    policy = load_policy(recipe.gate.policy)
    require_tasks_of(policy, recipe.evaluate)
    reason = unsupported(recipe)
    try:
        job = prepare(recipe, place.device, read_ahead=False, weights=False)
        plan, head = _plan_of(job, place, policy, throughput, args)
    except UserError as error:
        if reason is None:
            raise
        raise UserError(f"{recipe.name} cannot be run: {reason}", f"nor planned here: {error.message}") from error
    plan["unsupported"] = reason
    if reason is not None:
        head = f"{wrapped(f'cannot be run: {reason}')}\n{head}"
    print(dumps(plan) if args.json else _text(plan, head, policy), end="")
    return 0


def _place(name: str | None) -> Place:
    """The device of this machine, or one that recipes/facts.py knows, as RTX-5090, H200 or h200.

    Raises:
        UserError: for an unknown one.
    """
    import torch

    from halfbyte.quant.models import device_of
    from halfbyte.quant.training_plan import device_memory

    known = {re.sub(r"[\s_-]", "", one).lower(): one for one in MEMORY_GB}
    found = known.get(re.sub(r"[\s_-]", "", name or "").lower())
    if found is not None:
        return Place(found, torch.device("cuda"), int(MEMORY_GB[found] * 1e9), here=False)
    try:
        device = device_of(name)
    except UserError as error:
        raise UserError(error.message, f"{error.hint}; to plan for: {', '.join(MEMORY_GB)}") from None
    label = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Place(label, device, device_memory(device), here=True)


def _plan_of(
    job: Job, place: Place, policy: Policy, throughput: Throughput, args: Namespace
) -> tuple[dict[str, Any], str]:
    from halfbyte.quant.pipelines import PipelineSource

    if isinstance(job.source, PipelineSource):
        from halfbyte.plan_images import plan_images

        if args.measure:
            raise UserError("a model that draws is not measured by --measure", "state its speed: --throughput drawn=N")
        speeds = throughput.over(drawing_on(_profile(place.name), job.plan.weights))
        return plan_images(job, place.name, place.capacity, speeds, args.data_root)
    from halfbyte.eval.memory import resident  # with all that is imported, as a run has too
    from halfbyte.plan_hours import calibration_tokens, measure, plan_hours, shown, token_weights
    from halfbyte.plan_memory import plan_memory
    from halfbyte.plan_tokens import count_tokens
    from halfbyte.quant.models import left_to_defaults
    from halfbyte.stages import described, plan_training, told

    training = plan_training(job, capacity=place.capacity, measured=args.measure)
    tasks = count_tokens(job, args.data_root)
    process = resident() if place.device.type == "cpu" else 0
    gpu = place.capacity if place.device.type == "cuda" else None
    memory = plan_memory(job, tasks, training, process=process, capacity=gpu)
    profile = measured_on(_profile(place.name), token_weights(job))
    if job.recipe.evaluate.backend != "hf":
        profile = profile.without("scored", "generated")  # measured of our own scorer and generator
    speeds = throughput.over(profile)
    if args.measure:
        speeds = throughput.over(measure(job, tasks).over(speeds))
    hours = plan_hours(job, tasks, training, speeds, calibration_tokens(job, args.data_root))
    known = [one.hours for one in hours if one.hours is not None]
    assumed = left_to_defaults(job.source)
    plan = {
        **described(job, training),
        "assumed": assumed,
        "device": place.name,
        "device_bytes": place.capacity,
        "process_bytes": process,
        "peak_memory_bytes": {one.stage: one.peak for one in memory},
        "memory_notes": {one.stage: one.note for one in memory if one.note},
        "tokens": {one.task: one.as_dict() for one in tasks},
        "throughput": shown(speeds),
        "hours": {one.stage: one.hours for one in hours} | {"total": sum(known) if len(known) == len(hours) else None},
        "hours_at_most": [one.stage for one in hours if one.at_most],
        "hours_notes": {one.stage: one.note for one in hours if one.note},
        **_power(tasks, policy),
    }
    lines = [
        f"assumed      {name} {value}: config.json does not say it, and transformers takes this"
        for name, value in assumed.items()
    ]
    return plan, "\n".join([told(job, training), *lines])


def _profile(name: str) -> str:
    """The name that throughput.yaml has for a device: torch calls an H200 'NVIDIA H200'."""
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _power(tasks: list[TaskTokens], policy: Policy) -> dict[str, Any]:
    """What the policy will be able to see of each task, and of those it cannot the reason."""
    from halfbyte.recipes.benchmarks import benchmarks
    from halfbyte.reports.plan import PlannedTask, not_planned, one_metric, plan

    published = benchmarks().tasks
    known: list[PlannedTask] = []
    notes: dict[str, str] = {}
    for one in tasks:
        if not one.questions or not one.outcomes:
            continue
        metric = one_metric(one.metrics, policy) if one.metrics else None
        if metric is None and one.metrics and one.task not in published:
            names = ", ".join(one.metrics)
            notes[one.task] = f"its metrics differ ({names}): name the one that decides, evaluate.tasks.N.metric"
            continue
        task = PlannedTask(one.task, one.questions, one.samples, metric)
        reason = not_planned(task, policy)
        if reason is None:
            known.append(task)
        else:
            notes[one.task] = reason
    return {"power": [asdict(row) for row in plan(known, policy)], "power_notes": notes}


def _text(plan: dict[str, Any], head: str, policy: Policy) -> str:
    from halfbyte.reports.plan import Outlook, how_to_read_plan, plan_table
    from halfbyte.reports.text import aligned, wrapped

    parts = [head, *_memory_lines(plan)]
    if plan["tokens"]:
        parts += ["", *_token_lines(plan["tokens"])]
    parts += ["", *_hour_lines(plan)]
    rows = [Outlook(**row) for row in plan["power"] if row["flips"] in _RATES]
    if rows:
        table = plan_table(rows, policy)
        parts += ["", table.title, aligned(table), "", wrapped(how_to_read_plan(policy, rows))]
    if plan["power_notes"]:
        parts += ["", *(wrapped(f"no power of {task}: {why}") for task, why in plan["power_notes"].items())]
    return "\n".join(parts) + "\n"


def _memory_lines(plan: dict[str, Any]) -> list[str]:
    from halfbyte.quant.training_plan import USABLE

    capacity = plan["device_bytes"]
    there = "" if capacity is None else f", which has {capacity / 1e9:.1f} GB"
    own = plan["process_bytes"]
    process = f"; {own / 1e9:.2f} GB of each are this process and its libraries" if own else ""
    lines = [f"peak memory  on one {plan['device']}{there}{process}"]
    for stage, peak in plan["peak_memory_bytes"].items():
        note = plan["memory_notes"].get(stage, "")
        shown = f"{stage.replace('_', ' '):20}"
        if peak is None:
            lines.append(f"             {shown} {note}")
            continue
        fits = "" if capacity is None or peak <= USABLE * capacity else "  does not fit"
        lines.append(f"             {shown} {peak / 1e9:9.2f} GB{fits}{f'  ({note})' if note else ''}")
    return lines


def _token_lines(tokens: dict[str, dict[str, Any]]) -> list[str]:
    from halfbyte.reports.tables import Table
    from halfbyte.reports.text import aligned

    def number(value: int | None) -> str:
        return "unknown" if value is None else f"{value:,}"

    headers = ["task", "questions", "samples", "prompt tokens", "longest", "generated at most", "source"]
    rows = [
        [
            name,
            *(number(task[key]) for key in ("questions", "samples", "prompts", "longest", "generated")),
            task["source"],
        ]
        for name, task in tokens.items()
    ]
    return aligned(Table("Tokens", headers, rows)).splitlines()


def _hour_lines(plan: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for stage, hours in plan["hours"].items():
        note = plan["hours_notes"].get(
            stage, "a stage of it is not known" if stage == "total" and hours is None else ""
        )
        most = "<= " if stage in plan["hours_at_most"] or (stage == "total" and plan["hours_at_most"]) else ""
        shown = (
            f"not known: {note}" if hours is None else f"{most}{hours:.2f}" if hours >= 0.1 else f"{most}{hours:.4f}"
        )
        shown += f"  ({note})" if note and hours is not None else ""
        lines.append(f"{'hours' if not lines else '':12} {stage.replace('_', ' '):20} {shown}")
    for kind, rate in plan["throughput"].items():
        least = "at least " if rate["at_least"] else ""
        lines.append(f"{'':12} {kind}: {least}{rate['tokens_per_second']:,.0f} tokens/s, {rate['source']}")
    return lines
