"""Whether a policy applies to what a recipe evaluates, asked before hours are spent and not by the gate after them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halfbyte.records.errors import UserError
from halfbyte.records.noise import load_noise
from halfbyte.records.record import load_record
from halfbyte.reports.metrics import definition
from halfbyte.reports.policy import Policy
from halfbyte.reports.verdict import PERPLEXITY
from halfbyte.reports.waivers import refuse_unknown_tasks


def require_tasks_of(policy: Policy, tasks: Sequence[str], *, fidelity: bool) -> None:
    """Refuses a policy that decides on, or waives, what a recipe does not evaluate; known before anything is opened.

    Args:
        policy: The recipe's.
        tasks: The names of its tasks.
        fidelity: Whether it measures KL divergence and perplexity.

    Raises:
        UserError: naming what is missing.
    """
    missing = [] if policy.primary == "all" else [task for task in policy.primary if task not in tasks]
    if missing:
        raise UserError(
            f"policy '{policy.name}' decides on {', '.join(missing)}, which the recipe does not evaluate "
            f"(it evaluates {', '.join(tasks)})",
            "add the task to evaluate.tasks, or correct `primary` in the policy",
        )
    refuse_unknown_tasks(policy, [*tasks, PERPLEXITY])
    if policy.perplexity_margin is not None and not fidelity:
        raise UserError(
            f"policy '{policy.name}' decides on perplexity, which the recipe does not measure",
            "add evaluate.fidelity to the recipe, or leave perplexity_margin out of the policy",
        )


def require_margins(policy: Policy, baseline: Sequence[Path]) -> None:
    """Refuses a policy that lacks a margin for what a baseline was evaluated on, before its candidate is made.

    Args:
        policy: The recipe's.
        baseline: The folders of the baseline's records, one a task.

    Raises:
        UserError: for a metric without a margin, and for a noise floor that was not measured.
    """
    for folder in baseline:
        record = load_record(folder)
        if not policy.decides(record.task):
            continue
        metric, filter_name = record.primary
        higher = next(m.higher_is_better for m in record.metrics if (m.metric, m.filter) == (metric, filter_name))
        known = definition(metric, higher)
        if policy.ratio is None and not known.of_set:
            policy.margin_of(record.task, metric, known.bounds)
        if policy.noise_floor is not None and load_noise(folder) is None:
            raise UserError(
                f"policy '{policy.name}' takes the noise floor for its margin, and the baseline was evaluated once on "
                f"{record.task}",
                "evaluate it twice: --repeat-baseline",
            )
