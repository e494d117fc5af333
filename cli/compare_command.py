"""`halfbyte compare`: one baseline and its candidates, question by question; a loss is shown and never an error."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.records.errors import UserError
from halfbyte.records.files import dumps

if TYPE_CHECKING:
    from halfbyte.reports.comparison import Comparison
    from halfbyte.reports.policy import Policy

logger = logging.getLogger(__name__)


def run(args: Namespace) -> int:
    """Prints the comparison in the format asked for, and writes it into --output."""
    from halfbyte.reports.evidence import compare_folders
    from halfbyte.reports.methods import with_gains
    from halfbyte.reports.policy import load_policy

    policy = None if args.policy is None else load_policy(args.policy)
    comparisons = [compare_folders(args.baseline, candidate, policy) for candidate in args.candidate]
    comparisons = with_gains(comparisons, args.candidate)
    written: list[Path] = []
    if args.output is not None:
        from halfbyte.reports.write import write_reports

        written = write_reports(comparisons, args.output)
    print(rendered(comparisons, "json" if args.json else args.format), end="")
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    return 0


def rendered(comparisons: Sequence[Comparison], style: str) -> str:
    """The comparisons as text, markdown, json (the content of comparison.json) or html."""
    if style == "json":
        from halfbyte.reports.methods import comparison_file

        return dumps(comparison_file(comparisons).model_dump(mode="json"))
    if style == "html":
        from halfbyte.reports.html import render_html  # imports matplotlib, which takes longer than a gate

        return render_html(comparisons)
    from halfbyte.reports.text import render_markdown, render_text

    return {"text": render_text, "markdown": render_markdown}[style](comparisons)


def can_judge(policy: Policy, limits: Mapping[str, int | None]) -> bool:
    """Whether a policy can judge tasks that are cut to some questions; where it cannot, a warning says why.

    Args:
        policy: The policy.
        limits: The limit of each task; None for all its questions.
    """
    for task, limit in limits.items():
        try:
            if policy.decides(task):
                policy.refuse_limit(task, limit)
        except UserError as refusal:
            logger.warning("%s; the sides are compared without a verdict", refusal.message)
            return False
    return True


def exit_code(comparisons: Sequence[Comparison]) -> int:
    """That of the worst verdict; what was not judged is no pass."""
    from halfbyte.reports.comparison import EXIT_CODES
    from halfbyte.reports.gate import worst

    return EXIT_CODES[worst([one.verdict.verdict if one.verdict else "inconclusive" for one in comparisons])]
