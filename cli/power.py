"""`halfbyte power`: before spending GPU hours, which losses a policy can see and how many questions it needs."""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import asdict

from halfbyte.records.errors import UserError
from halfbyte.records.files import dumps

logger = logging.getLogger(__name__)


def run(args: Namespace) -> int:
    """Prints the table for tasks at several flip rates, or for a pair of records at the rates they show."""
    from halfbyte.reports import plan
    from halfbyte.reports.evidence import compare_folders
    from halfbyte.reports.policy import load_policy
    from halfbyte.reports.text import aligned, wrapped

    policy = load_policy(args.policy)
    if (args.tasks is None) == (not args.records):
        raise UserError("name either tasks or two record folders", "halfbyte power --policy release --tasks mmlu,gsm8k")
    if args.tasks is not None:
        rows = plan.plan(plan.parse_tasks(args.tasks), policy)
    elif len(args.records) != 2:
        raise UserError(f"{len(args.records)} record folders are no pair", "give BASELINE and CANDIDATE")
    else:
        baseline, candidate = args.records
        rows, left_out = plan.measured_plan(compare_folders(baseline, candidate, None, few_flips=True), policy)
        for task, reason in left_out.items():
            logger.warning("%s is left out: %s", task, reason)
    if args.json:
        print(dumps([asdict(row) for row in rows]), end="")
    else:
        print(f"{aligned(plan.plan_table(rows, policy))}\n\n{wrapped(plan.how_to_read_plan(policy, rows))}")
    return 0
