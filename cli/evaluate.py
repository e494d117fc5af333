"""halfbyte eval: one model, original or exported, on lm-eval tasks."""

from __future__ import annotations

from argparse import Namespace

from pydantic import ValidationError

from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.errors import UserError
from halfbyte.records.files import dumps


def run(args: Namespace) -> int:
    """Evaluates, writes a record a task, prints each metric and where the records are."""
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks names no task", "give lm-eval tasks, separated by commas")
    try:
        settings = EvaluateSpec(
            dtype=args.dtype,
            weights=args.weights,
            batch_size=args.batch_size,
            max_length=args.max_length,
            apply_chat_template=args.apply_chat_template,
            tasks=[TaskSpec(task=name, num_fewshot=args.num_fewshot, limit=args.limit) for name in names],
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{first['loc'][-1]} {first['input']!r}: {first['msg']}") from None
    from halfbyte.eval.run import evaluate_model  # torch and lm-eval take seconds
    from halfbyte.quant.load import load_as_it_is

    found = load_as_it_is(args.model, dtype=args.dtype, device=args.device, weights=args.weights)
    records = evaluate_model(found.model, found.tokenizer, found.summary, settings, args.output, args.data_root)
    if args.json:
        print(dumps([record.model_dump(mode="json") for record in records]), end="")
        return 0
    print(f"{found.summary.name}: {found.summary.format}, {found.summary.bits_per_weight:.2f} bits per weight")
    for record in records:
        for metric in record.metrics:
            if metric.subtask == record.task:
                spread = "" if metric.stderr is None else f" +- {metric.stderr:.4f}"
                value = f"{metric.value:.4f}{spread}"
                print(f"{record.task:24} {metric.metric:16} {metric.filter:18} {value}  n={metric.questions}")
    print(f"records: {args.output}")
    return 0
