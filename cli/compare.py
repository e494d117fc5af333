"""`halfbyte compare`: one baseline and its candidates, question by question; a loss is shown and never an error."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.records.fidelity import FIDELITY_FILE, FidelityRecord, load_fidelity
from halfbyte.records.files import dumps
from halfbyte.records.record import find_records, load_record
from halfbyte.records.run import RunFolder

if TYPE_CHECKING:
    from halfbyte.reports.comparison import Comparison
    from halfbyte.reports.policy import Policy

log = logging.getLogger(__name__)


def run(args: Namespace) -> int:
    """Prints the comparison in the format asked for, and writes it into --output."""
    from halfbyte.reports.policy import load_policy

    policy = None if args.policy is None else load_policy(args.policy)
    comparisons = [compare_folders(args.baseline, candidate, policy) for candidate in args.candidate]
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
        from halfbyte.reports.comparison import ComparisonFile

        return dumps(ComparisonFile(comparisons=list(comparisons)).model_dump(mode="json"))
    if style == "html":
        from halfbyte.reports.html import render_html  # imports matplotlib, which takes longer than a gate

        return render_html(comparisons)
    from halfbyte.reports.text import render_markdown, render_text

    return {"text": render_text, "markdown": render_markdown}[style](comparisons)


def compare_folders(baseline: Path, candidate: Path, policy: Policy | None) -> Comparison:
    """Compares the records below two folders, with the candidate's fidelity where it was measured."""
    from halfbyte.reports.compare import compare

    return compare(baseline, candidate, policy=policy, fidelity=find_fidelity(baseline, candidate))


def find_fidelity(baseline: Path, candidate: Path) -> FidelityRecord | None:
    """The candidate's fidelity against this baseline: below its folder, or in the run that its folder belongs to."""
    ours, theirs = _digests(baseline), _digests(candidate)
    places = [path.parent for path in sorted(candidate.rglob(FIDELITY_FILE))]
    run_folder = RunFolder(candidate.resolve().parent.parent)
    for digest in sorted(theirs):
        places += [path.parent for path in sorted(run_folder.fidelity(digest).rglob(FIDELITY_FILE))]
    for folder in places:
        record = load_fidelity(folder)
        if record.baseline.digest in ours and record.candidate.digest in theirs:
            return record
        log.warning("%s is of other models than those compared and is left out", folder / FIDELITY_FILE)
    return None


def _digests(folder: Path) -> set[str]:
    return {load_record(path).model.digest for path in find_records(folder).values()}
