"""halfbyte eval: one model, original or exported, on lm-eval tasks; or what that would ask and take."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.recipes.data import data_root
from halfbyte.recipes.find import load_evaluation, require_distinct
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.cache import EVALUATIONS
from halfbyte.records.digests import cache_folder
from halfbyte.records.errors import UserError
from halfbyte.records.files import dumps
from halfbyte.records.manifest import hardware
from halfbyte.records.noise import load_noise
from halfbyte.records.record import EvaluationRecord, load_record
from halfbyte.sides import Side, cached_folder, evaluate_into, identify, measure_noise, whole_record

if TYPE_CHECKING:
    from halfbyte.eval.plan import TaskPlan
    from halfbyte.quant.load import Described, Loaded


def run(args: Namespace) -> int:
    """Evaluates, writes a record a task, prints each metric and where the records are."""
    if _of_images(args):
        from halfbyte.evaluate_images import run as run_images

        return run_images(args)
    settings = _settings(args)
    if args.dry_run:
        return _plan(args, settings)
    if args.output is None and args.show is None:
        raise UserError("--output is missing", "name the folder for results and samples")
    identity = identify(args.model, dtype=args.dtype, device=args.device)
    side = Side(identity.digest, identity.device, identity.dtype, partial(_open, args), partial(_describe, args.model))
    if args.show is not None:
        return _show(args, settings, side)
    folders = evaluate_into(args.output, side, settings, args.data_root, cached=not identity.quantized)
    if args.repeat_baseline:
        measure_noise(side, settings, folders, args.data_root)
    records = [load_record(folder) for folder in folders]
    if args.json:
        print(dumps([record.model_dump(mode="json") for record in records]), end="")
        return 0
    model = records[0].model
    print(f"{args.model}: {model.format}, {model.bits_per_weight:.2f} bits per weight")
    for folder, record in zip(folders, records, strict=True):
        noise = load_noise(folder) if args.repeat_baseline else None
        for metric in record.metrics:
            if metric.subtask == record.task:
                spread = "" if metric.stderr is None else f" +- {metric.stderr:.4f}"
                value = f"{metric.value:.4f}{spread}"
                again = ""
                if noise is not None:
                    _, lost, gained = noise.of(metric.metric, metric.filter)
                    again = f"  flipped when asked again: {lost + gained}"
                print(f"{record.task:24} {metric.metric:16} {metric.filter:18} {value}  n={metric.questions}{again}")
    print(f"records: {args.output}")
    return 0


def _of_images(args: Namespace) -> bool:
    if (args.tasks is None) == (args.prompts is None):
        raise UserError(
            "nothing says what to evaluate" if args.tasks is None else "--tasks and --prompts exclude each other",
            "give --tasks for a language model, or --prompts for one that draws",
        )
    if args.tasks is not None and args.reference is not None:
        raise UserError("--reference belongs to --prompts", "leave it out")
    return args.prompts is not None


def _settings(args: Namespace) -> EvaluateSpec:
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks names no task", "give lm-eval tasks, separated by commas")
    for name in names:
        if name.startswith(".") or "/" in name or " " in name:  # it names a folder
            raise UserError(f"task '{name}' is no name of a task", "names have no slash, no space and no dot in front")
    block = {
        "dtype": args.dtype,
        "weights": args.weights,
        "batch_size": args.batch_size,
        "max_length": args.max_length,
        "allow_truncated": args.allow_truncated,
        "apply_chat_template": args.apply_chat_template,
        "tasks": [
            {"task": name, "num_fewshot": args.num_fewshot, "limit": args.limit, "samples": args.samples}
            for name in names
        ],
    }
    settings = load_evaluation(block, args.set)
    require_distinct(settings)
    return settings


def _open(args: Namespace) -> Loaded:
    from halfbyte.quant.load import load_as_it_is  # torch takes seconds

    return load_as_it_is(args.model, dtype=args.dtype, device=args.device, weights=args.weights)


def _describe(name: str) -> Described:
    from halfbyte.quant.load import describe_as_it_is  # torch takes seconds

    return describe_as_it_is(name)


def _show(args: Namespace, settings: EvaluateSpec, side: Side) -> int:
    """Prints the first questions of each task: out of a record where there is one, else they are evaluated."""
    if args.json:
        raise UserError("--show has no JSON", "the lines of samples_*.jsonl in the record's folder are that")
    from halfbyte.quant.models import locate, open_tokenizer  # torch takes seconds
    from halfbyte.show import Painter, show

    painter = Painter(open_tokenizer(locate(args.model)))
    with tempfile.TemporaryDirectory() as scratch:
        for spec in settings.tasks:
            few = spec if spec.limit is not None else spec.model_copy(update={"limit": args.show})
            folder, record = _record(args, settings, side, [spec, few], Path(scratch))
            for line in show(folder, record, args.show, painter):
                print(line)
    return 0


def _record(
    args: Namespace, settings: EvaluateSpec, side: Side, specs: list[TaskSpec], scratch: Path
) -> tuple[Path, EvaluationRecord]:
    """The record of the first of the tasks that there is one of, else one of the last, evaluated into `scratch`."""
    for spec in specs:
        places = [cached_folder(side, spec, settings)]
        places += [args.output / spec.task] if args.output is not None else []
        for folder in places:
            record = whole_record(folder, side.key(spec, settings), settings, args.data_root)
            if record is not None:
                return folder, record
    folder = scratch / specs[-1].task
    return folder, side.evaluate(specs[-1], settings, folder, args.data_root)


def _plan(args: Namespace, settings: EvaluateSpec) -> int:
    """Prints what the evaluation would ask and take."""
    from halfbyte.eval.plan import earlier_records, plan_task  # torch and lm-eval take seconds
    from halfbyte.eval.resolve import require_tasks
    from halfbyte.quant.models import empty_model, locate, open_tokenizer

    require_tasks(settings)
    identity = identify(args.model, dtype=args.dtype, device=args.device)
    source = locate(args.model)
    tokenizer = open_tokenizer(source)
    _, model = empty_model(source)
    root = data_root(args.data_root)
    places = [cache_folder() / EVALUATIONS / identity.digest[:16], *([args.output] if args.output else [])]
    known = earlier_records(places, identity.digest, hardware())
    plans = [
        plan_task(model, tokenizer, spec, settings, root, device=identity.device, known=known)
        for spec in settings.tasks
    ]
    if args.json:
        print(dumps([asdict(plan) for plan in plans]), end="")
        return 0
    for line in plan_table(plans):
        print(line)
    return 0


def plan_table(plans: list[TaskPlan]) -> list[str]:
    """The plan of each task and their sum, as lines."""
    from halfbyte.eval.plan import ENOUGH

    head = ["task", "questions", "prompt tokens", "distinct", "longest", "too long", "texts", "to generate", "time"]
    rows = [head]
    for plan in plans:
        most = plan.texts and plan.expected_generated is None
        rows.append(
            [
                plan.task,
                f"{plan.questions:,}",
                f"{plan.prompt_tokens:,}",
                f"{plan.distinct_tokens:,}",
                f"{plan.longest:,}",
                f"{plan.truncated:,}",
                f"{plan.texts:,}",
                f"{'<= ' if most else ''}{plan.generated:,}",
                _duration(plan.seconds, at_most=bool(most)),
            ]
        )
    if len(plans) > 1:
        known = [plan.seconds for plan in plans if plan.seconds is not None]
        total = sum(known) if len(known) == len(plans) else None
        most = any(plan.texts and plan.expected_generated is None for plan in plans)
        sums = [sum(values) for values in zip(*map(_numbers, plans), strict=True)]
        cells = [f"{value:,}" for value in sums]
        generated = f"{'<= ' if most else ''}{cells[4]}"
        rows.append(
            ["all", cells[0], cells[1], cells[2], "", cells[3], cells[5], generated, _duration(total, at_most=most)]
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(pairs))
        for pairs in (zip(row, widths, strict=True) for row in rows)
    ]
    if any(plan.seconds is None for plan in plans):
        lines.append(
            "time: not known, since no record of this model on this hardware says how fast it is; a short evaluation "
            f"such as --limit 50 --output DIR (at least {ENOUGH:,} tokens) and then --dry-run --output DIR will tell"
        )
    if any(plan.truncated for plan in plans):
        lines.append("too long: prompts that do not fit are an error unless --allow-truncated is given")
    return lines


def _numbers(plan: TaskPlan) -> list[Any]:
    return [plan.questions, plan.prompt_tokens, plan.distinct_tokens, plan.truncated, plan.generated, plan.texts]


def _duration(seconds: float | None, *, at_most: bool) -> str:
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    return f"<= {text}" if at_most else text
