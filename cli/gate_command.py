"""`halfbyte gate`: the same comparison with a verdict, as an exit code for a pipeline."""

from __future__ import annotations

from argparse import Namespace

from halfbyte.compare_command import rendered
from halfbyte.records.files import write_text


def run(args: Namespace) -> int:
    """Prints the comparison and its verdict; 0 pass, 1 fail, 3 inconclusive, 4 anomaly."""
    from halfbyte.reports.evidence import compare_folders
    from halfbyte.reports.policy import load_policy
    from halfbyte.reports.summary import write_step_summary

    comparison = compare_folders(args.baseline, args.candidate, load_policy(args.policy), few_flips=True)
    assert comparison.verdict is not None, "a comparison with a policy has a verdict"
    if args.junit is not None:
        from halfbyte.reports.junit import junit

        write_text(args.junit, junit([comparison]))
    write_step_summary([comparison])
    print(rendered([comparison], "json" if args.json else "text"), end="")
    return comparison.verdict.exit_code
