"""halfbyte verify: checks the numbers of an exported checkpoint, one row a check."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from halfbyte.records.files import dumps


def run(args: Namespace) -> int:
    """Prints each check; exit code 1 when one failed."""
    from halfbyte.quant.verify import verify  # torch takes seconds

    checks = verify(Path(args.checkpoint))
    if args.json:
        print(dumps([check.as_dict() for check in checks]), end="")
    else:
        print("\n".join(map(str, checks)))
    return 0 if all(check.passed for check in checks) else 1
