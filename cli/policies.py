"""`halfbyte policies`: lists the shipped policies, or prints one."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from halfbyte.records.files import dumps


def run(args: Namespace) -> int:
    """Prints the list, a policy's file, or with --json the validated whole of it."""
    from halfbyte.reports.policy import load_policy, shipped_policies

    shipped = shipped_policies()
    if args.policy is None:
        policies = [load_policy(name) for name in shipped]
        if args.json:
            print(dumps([{"name": one.name, "description": one.description} for one in policies]), end="")
        else:
            width = max(len(one.name) for one in policies)
            print("\n".join(f"{one.name:{width}}  {one.description}" for one in policies))
        return 0
    policy = load_policy(args.policy)  # refuses an unknown name, and a file that is no policy
    if args.json:
        print(dumps(policy.model_dump(mode="json")), end="")
    else:
        print(shipped.get(args.policy) or Path(args.policy).read_text(encoding="utf-8"), end="")
    return 0
