"""`halfbyte doctor`: what is installed and how it runs on this machine, and what to do about what does not."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from halfbyte import __version__
from halfbyte.checkup import Check, checkup
from halfbyte.records.errors import EXIT_BAD_INPUT
from halfbyte.records.files import dumps

GROUPS = ("devices", "formats", "packages", "libraries", "places")


def run(args: Namespace) -> int:
    """Prints what was found; 0 where everything works that a user needs, 2 where something does not."""
    if not args.quiet:
        print("looking at this machine, which takes up to a minute ...", file=sys.stderr, flush=True)
    found = checkup(Path("runs"))
    problems = [check for check in found if check.status == "problem"]
    if args.json:
        status = "problems" if problems else "ok"
        checks = [check.as_dict() for check in found]
        print(dumps({"halfbyte": __version__, "status": status, "checks": checks}), end="")
    else:
        print("\n".join(lines(found)))
    return EXIT_BAD_INPUT if problems else 0


def lines(found: list[Check]) -> list[str]:
    """The checks by group, what is not right with its fix below, and the sum of it."""
    width = max(len(check.name) for check in found)
    result = [f"halfbyte {__version__}"]
    for group in [*GROUPS, *sorted({check.group for check in found} - {*GROUPS})]:
        chosen = [check for check in found if check.group == group]
        result += ["", group] if chosen else []
        for check in chosen:
            result.append(f"  {check.status:8} {check.name:{width}}  {check.found}")
            if check.fix is not None:
                result.append(f"  {'':8} {'':{width}}  -> {check.fix}")
    problems = sum(check.status == "problem" for check in found)
    warnings = sum(check.status == "warning" for check in found)
    end = f"{problems} {'problem' if problems == 1 else 'problems'}" if problems else "everything that is needed works"
    return [*result, "", f"{end}, {warnings} {'warning' if warnings == 1 else 'warnings'}"]
