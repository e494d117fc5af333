"""What several commands' options have in common: the subcommand itself, numbers, --set, and where work is done."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter, _SubParsersAction
from pathlib import Path
from typing import TypeAlias

# argparse has no public name for what add_subparsers returns.
Commands: TypeAlias = "_SubParsersAction[ArgumentParser]"

DTYPES = ("auto", "bfloat16", "float16", "float32")
FORMATS = ("text", "markdown", "json", "html")

EXIT_CODES = "exit codes: 0 done or pass, 1 fail, 2 bad input, 3 inconclusive, 4 anomaly, 70 a bug, 130 interrupted"


def command(commands: Commands, name: str, module: str, summary: str, examples: str) -> ArgumentParser:
    """A subcommand with the options that every command has."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}\n\n{EXIT_CODES}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.set_defaults(module=module)
    parser.add_argument("--quiet", action="store_true", help="no progress and no log on stderr, warnings excepted")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return number


def days(text: str) -> float:
    """A number of days, not negative."""
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < 1e6:
        raise ArgumentTypeError(f"'{text}' is not a number of days")
    return days


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text.strip() == "0" else positive(text)


def add_set(parser: ArgumentParser, of: str = "the recipe") -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help=f"override one field of {of}, such as evaluate.tasks.0.limit=100; may be given several times",
    )


def add_work(parser: ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default cuda where there is one")
    add_data_root(parser)


def add_data_root(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--data-root",
        type=Path,
        metavar="DIR",
        help="folder laid out like the hub where data sets are looked up first; by default $HALFBYTE_DATA",
    )


def add_repeat(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--repeat-baseline",
        action="store_true",
        help="evaluate the baseline twice, in other batches and with other seeds, and keep what flips as noise floor",
    )
