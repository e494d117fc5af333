"""The front door: `main` parses the command line, runs one command and turns its outcome into an exit code.

    halfbyte recipes
    halfbyte run demo-fp8
    halfbyte compare BASELINE CANDIDATE

stdout carries the result, stderr the log and the progress. Exit codes: 0 done or pass, 1 fail, 2 bad input,
3 inconclusive, 4 anomaly, 70 a bug, 130 interrupted. No command's libraries are imported before that command runs.
"""

from __future__ import annotations

import importlib
import logging
import os
import shlex
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import cast

from halfbyte.parser import build_parser
from halfbyte.records.errors import UserError

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_BUG = 70  # sysexits.h: internal software error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments after the program's name; those of the process by default.

    Returns:
        The exit code. A user's mistake is 2 after one line on stderr; a bug is 70 after its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(
            f"unrecognized arguments: {shlex.join(unknown)}\nhalfbyte: hint: halfbyte {arguments[0]} --help "
            "lists the options; a recipe's fields have none of their own: --set evaluate.include_path=FOLDER"
        )
    _prepare(args)
    try:
        # A name and not a function in the parser, so that parsing imports no command.
        module = importlib.import_module(f"halfbyte.{args.module}")
        command = cast("Callable[[Namespace], int]", module.run)
        code = command(args)
        sys.stdout.flush()
        return code
    except UserError as error:
        if error.details:  # first, so that the last lines on a terminal are the error and what to do
            print(f"{error.details}\n", file=sys.stderr)
        print(f"halfbyte: error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"halfbyte: hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        again = shlex.join(["halfbyte", *arguments])
        print(f"\nhalfbyte: interrupted; the same command goes on where it stopped: {again}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; without this Python complains once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception:
        traceback.print_exc()  # a bug; Python's own exit code for it is 1, which here says that a loss is proven
        return EXIT_BUG


def _prepare(args: Namespace) -> None:
    """Applies the options that every command shares."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("halfbyte").setLevel(logging.WARNING if args.quiet else logging.INFO)
    if args.quiet:
        os.environ["TQDM_DISABLE"] = "1"
    if getattr(args, "data_root", None) is not None:
        os.environ["HALFBYTE_DATA"] = str(args.data_root)
