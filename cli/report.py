"""`halfbyte report`: all reports of finished runs once more, from the records alone; nothing is evaluated."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.compare_command import can_judge, exit_code, rendered
from halfbyte.records.errors import UserError
from halfbyte.records.record import find_records, load_record
from halfbyte.records.run import RunFolder

if TYPE_CHECKING:
    from halfbyte.reports.comparison import Comparison


def run(args: Namespace) -> int:
    """Writes the reports of each run into its folder, or of all into --output; the exit code is the verdict's."""
    from halfbyte.reports.evidence import compare_folders, run_folders
    from halfbyte.reports.methods import with_gains
    from halfbyte.reports.policy import load_policy
    from halfbyte.reports.tables import check_one_baseline
    from halfbyte.reports.write import write_reports

    comparisons: list[Comparison] = []
    candidates: list[Path] = []
    written: list[Path] = []
    for root in args.run:
        folder = RunFolder(root)
        name, published = _asked(folder)
        ours, theirs = run_folders(folder)
        policy = load_policy(args.policy or name)
        # Records that a limit cut were not judged by the run either.
        judged = args.policy is not None or can_judge(policy, _limits(theirs))
        comparisons.append(compare_folders(ours, theirs, policy if judged else None, args.published or published))
        candidates.append(theirs)
    check_one_baseline(comparisons)  # before anything is written
    if args.output is None:
        for root, one in zip(args.run, comparisons, strict=True):
            written += write_reports([one], root)
    comparisons = with_gains(comparisons, candidates)
    if args.output is not None:
        written += write_reports(comparisons, args.output)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    print(rendered(comparisons, "json" if args.json else "text"), end="")
    return exit_code(comparisons)


def _asked(folder: RunFolder) -> tuple[str, str | None]:
    """The policy and the published table that the run's recipe names."""
    from halfbyte.reports.evidence import read_recipe

    recipe = read_recipe(folder)
    if not recipe:
        hint = "give a folder that `halfbyte run` wrote"
        raise UserError(f"{folder.root} is no run: it has no recipe.yaml", hint)
    gate = recipe.get("gate")
    if not isinstance(gate, dict) or not isinstance(gate.get("policy"), str):
        raise UserError(f"{folder.recipe} names no policy (gate: policy)", "run the recipe again")
    return gate["policy"], recipe.get("published")


def _limits(records: Path) -> dict[str, int | None]:
    return {task: load_record(path).fingerprint.limit for task, path in find_records(records).items()}
