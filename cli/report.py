"""`halfbyte report`: all reports of finished runs once more, from the records alone; nothing is evaluated."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from halfbyte.compare import rendered
from halfbyte.records.errors import UserError
from halfbyte.records.record import find_records, load_record
from halfbyte.records.run import RunFolder

if TYPE_CHECKING:
    from halfbyte.reports.policy import Policy

logger = logging.getLogger(__name__)


def run(args: Namespace) -> int:
    """Writes the reports of each run into its folder, or of all into --output; the exit code is the verdict's."""
    from halfbyte.reports.comparison import EXIT_CODES
    from halfbyte.reports.evidence import compare_folders, run_folders
    from halfbyte.reports.gate import worst
    from halfbyte.reports.policy import load_policy
    from halfbyte.reports.write import write_reports

    comparisons, written = [], []
    for root in args.run:
        folder = RunFolder(root)
        name, published = _asked(folder)
        ours, theirs = run_folders(folder)
        policy = load_policy(args.policy or name)
        judged = args.policy is not None or _applies(policy, theirs)
        comparisons.append(compare_folders(ours, theirs, policy if judged else None, args.published or published))
        if args.output is None:
            written += write_reports([comparisons[-1]], folder.root)
    if args.output is not None:
        written += write_reports(comparisons, args.output)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    print(rendered(comparisons, "json" if args.json else "text"), end="")
    # What was not judged is no pass.
    return EXIT_CODES[worst([one.verdict.verdict if one.verdict else "inconclusive" for one in comparisons])]


def _asked(folder: RunFolder) -> tuple[str, str | None]:
    """The policy and the published table that the run's recipe names."""
    try:
        recipe = yaml.safe_load(folder.recipe.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "give a folder that `halfbyte run` wrote"
        raise UserError(f"{folder.root} is no run: it has no recipe.yaml", hint) from None
    return recipe["gate"]["policy"], recipe.get("published")


def _applies(policy: Policy, records: Path) -> bool:
    """Whether the recipe's policy can judge the records: those that a limit cut were not judged by the run either."""
    for task, path in find_records(records).items():
        try:
            if policy.decides(task):
                policy.refuse_limit(task, load_record(path).fingerprint.limit)
        except UserError as refusal:
            logger.warning("%s; the sides are compared without a verdict", refusal.message)
            return False
    return True
