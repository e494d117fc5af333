"""Whether a policy applies to what a recipe evaluates, asked before hours are spent and not by the gate after them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from halfbyte.recipes.schema import EvaluateSpec
from halfbyte.records.errors import UserError, unknown_name
from halfbyte.records.noise import load_noise
from halfbyte.records.record import load_record
from halfbyte.reports.gate import refuse_set_metrics
from halfbyte.reports.pairing import Pairs, pair_all
from halfbyte.reports.policy import Policy
from halfbyte.reports.verdict import PERPLEXITY
from halfbyte.reports.waivers import refuse_unknown_tasks


def require_tasks_of(policy: Policy, settings: EvaluateSpec) -> None:
    """Refuses a policy that decides on, or waives, what a recipe does not evaluate; known before anything is opened.

    Of a recipe of images nothing is refused here.

    Args:
        policy: The recipe's.
        settings: Its evaluate block.

    Raises:
        UserError: naming what is missing.
    """
    if settings.images is not None:
        return
    tasks = [spec.task for spec in settings.tasks]
    missing = [] if policy.primary == "all" else [task for task in policy.primary if task not in tasks]
    if missing:
        raise UserError(
            f"policy '{policy.name}' decides on {', '.join(missing)}, which the recipe does not evaluate "
            f"(it evaluates {', '.join(tasks)})",
            "add the task to evaluate.tasks, or correct `primary` in the policy",
        )
    refuse_unknown_tasks(policy, [*tasks, PERPLEXITY])
    if policy.perplexity_margin is not None and settings.fidelity is None:
        raise UserError(
            f"policy '{policy.name}' decides on perplexity, which the recipe does not measure",
            "add evaluate.fidelity to the recipe, or leave perplexity_margin out of the policy",
        )


def refuse_unknown_bounds(policy: Policy, folders: Iterable[Path]) -> None:
    """Bounds of a metric that no record has are a misspelling, and the metric that was meant has none.

    Args:
        policy: The policy.
        folders: Those of all records of one side.

    Raises:
        UserError: naming the metrics that are there.
    """
    if not policy.bounds:
        return
    known = sorted({figure.metric for folder in folders for figure in load_record(folder).metrics})
    for metric in policy.bounds:
        if metric not in known:
            wrong = unknown_name("metric", metric, known)
            raise UserError(
                f"policy '{policy.name}' says the bounds of {metric}, which no task was evaluated by",
                f"correct `bounds` in the policy; {wrong.hint}",
            )


def require_margins(policy: Policy, baseline: Sequence[Path]) -> None:
    """Refuses a policy that could not judge what a baseline was evaluated on, before its candidate is made.

    The baseline is paired with itself, so that what would be in the way of a comparison is found as well.

    Args:
        policy: The recipe's.
        baseline: The folders of the baseline's records, one a task.

    Raises:
        UserError: for a metric without a margin, for one of the whole set that the policy decides on, for values out of
            the bounds that the policy declares, and for a noise floor that was not measured.
    """
    refuse_unknown_bounds(policy, baseline)
    found = {
        folder: pair_all(folder, folder, policy.allow, policy.allow_unknown, bounds=policy.bounds)
        for folder in baseline
    }
    every = [one for row in found.values() for one in row]
    rows = [one.row for one in every if isinstance(one, Pairs)]
    refuse_set_metrics([figure for one in every for figure in one.set_metrics], rows, policy)
    for folder, row in found.items():
        for one in row:
            if not isinstance(one, Pairs) or not policy.decides(one.row):
                continue
            if policy.ratio is None:
                policy.margin_of(one.row, one.metric, one.bounds)
            policy.refuse_without_noise(one.row, load_noise(folder), "evaluate it twice: --repeat-baseline")
