"""`halfbyte completion`: prints what makes a shell complete commands, options, recipes, policies, tables and files."""

from __future__ import annotations

import shlex
from argparse import Action, ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Iterator, Sequence
from typing import Any

from halfbyte.parser import build_parser
from halfbyte.records.files import dumps

FOLDERS = ("DIR", "CHECKPOINT", "BASELINE", "CANDIDATE", "RUN", "RECORDS", "MODEL", "ID_OR_PATH")
"""What an argument is called that takes a folder, if maybe a hub id too."""


def run(args: Namespace) -> int:
    """Prints the script for one shell."""
    script = completion(args.shell)
    print(dumps({"shell": args.shell, "script": script}) if args.json else script, end="")
    return 0


def completion(shell: str) -> str:
    """The script for a shell: bash, zsh or fish.

    The names of recipes, policies and tables are those of this version.
    """
    import shtab

    from halfbyte.recipes.find import shipped_files
    from halfbyte.reports.policy import shipped_policies
    from halfbyte.reports.published import published_tables

    parser = build_parser()
    known = {
        "RECIPE": _names("recipes", [*shipped_files()]),
        "POLICY": _names("policies", [*shipped_policies()]),
        "NAME_OR_FILE": _names("policies", [*shipped_policies()]),
        "TABLE": _names("tables", [*published_tables()]),
        "FILE": shtab.FILE,
        **dict.fromkeys(FOLDERS, shtab.DIRECTORY),
    }
    for action in _arguments(parser):
        found = known.get(str(action.metavar))
        if found is not None:
            action.complete = found  # type: ignore[attr-defined]
    script = str(shtab.complete(parser, shell=shell))
    return script if script.endswith("\n") else f"{script}\n"


def _arguments(parser: ArgumentParser) -> Iterator[Action]:
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for command in action.choices.values():
                yield from _arguments(command)
        else:
            yield action


def _names(kind: str, names: Sequence[str]) -> dict[str, Any]:
    """Names, or files in their place, in each shell's own words."""
    listed, function = " ".join(map(shlex.quote, names)), f"_halfbyte_{kind}"
    return {
        "bash": function,
        "zsh": function,
        "fish": f"({function})",
        "preamble": {
            "bash": f'{function}() {{ compgen -W "{listed}" -- "$1"; _shtab_compgen_files "$1"; }}',
            "zsh": f"{function}() {{ compadd -- {listed}; _files -g '*.y(a|)ml'; }}",
            "fish": f"function {function}; printf '%s\\n' {listed}; __fish_complete_suffix .yaml; end",
        },
    }
