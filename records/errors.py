"""The one error class for a user's mistake: a line that says what is wrong and what to do about it."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

EXIT_BAD_INPUT = 2
EXIT_ANOMALY = 4


class UserError(Exception):
    """A mistake the user can mend; printed as one line without a traceback, exit code 2.

    Args:
        message: What is wrong, naming the offending value.
        hint: What to do about it, a command where there is one.
    """

    exit_code = EXIT_BAD_INPUT
    details: str | None = None
    """Several lines that show what is wrong, printed above the message."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        self.message = " ".join(line.strip() for line in message.splitlines())  # libraries' messages have several
        super().__init__(self.message)
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} ({self.hint})"


class Anomaly(UserError):
    """A result that no quantization explains: something is broken, and to call it a loss of accuracy would mislead."""

    exit_code = EXIT_ANOMALY


def unknown_name(kind: str, name: str, known: Iterable[str], *, likeness: float = 0.5) -> UserError:
    """The error for a name that is not in a list: names the nearest and then all the known ones.

    Args:
        kind: What it is a name of.
        name: The unknown one.
        known: The list.
        likeness: How like the nearest must be, from 0 to 1; of thousands of names one is half like any other.

    >>> print(unknown_name("preset", "nvfp5", ["fp8", "nvfp4"]))
    unknown preset 'nvfp5' (did you mean 'nvfp4'? known: fp8, nvfp4)
    """
    names = sorted(known)
    near = _nearest(name, names, likeness)
    listing = f"known: {', '.join(names)}" if names else "none is known here"
    hint = f"did you mean '{near}'? {listing}" if near is not None else listing
    return UserError(f"unknown {kind} '{name}'", hint)


def _nearest(name: str, names: list[str], likeness: float) -> str | None:
    """The name most like another, whatever its case and its dashes; else the one with most of its words."""
    plain = {_plain(one): one for one in reversed(names)}
    near = get_close_matches(_plain(name), plain, n=1, cutoff=likeness)
    if near:
        return plain[near[0]]
    words = set(_plain(name).split("_"))
    most = max(plain, key=lambda one: len(words & set(one.split("_"))), default="")
    return plain[most] if words & set(most.split("_")) - {""} else None


def _plain(name: str) -> str:
    return "_".join(re.findall(r"[^\W_]+", name.casefold()))


_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)


@contextmanager
def disk_full_is_a_user_error(path: Path) -> Iterator[None]:
    """Turns "no space left on device" and a place that cannot be written into a UserError, while writing below `path`.

    safetensors reports a full disk as its own exception type with the operating system's text, hence the look
    at the message.
    """
    try:
        yield
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or any(text in str(error) for text in _FULL):
            raise UserError(
                f"no space left on the disk while writing {path}",
                f"free some space or {_elsewhere(path)}, then run the same command again; finished stages are kept",
            ) from error
        if isinstance(error, OSError) and error.errno in _UNWRITABLE and _concerns(error, path):
            raise UserError(f"cannot write {path}: {error.strerror}", _elsewhere(path)) from error
        if isinstance(error, FileNotFoundError) and _takes_nothing(error, path):
            above = Path(error.filename).parent
            raise UserError(f"cannot write {path}: nothing can be made in {above}", _elsewhere(path)) from error
        raise


_FULL = (
    "No space left on device", "os error 28", "Not enough disk space",
    "iostream error", "PytorchStreamWriter failed writing file", "unexpected pos",
)  # fmt: skip
"""Python's, safetensors' and datasets' words for it; and torch.save's, which says no more of any failure to write."""


def _elsewhere(path: Path) -> str:
    from halfbyte.records.digests import cache_folder  # which imports this module

    return "set $HALFBYTE_CACHE to another folder" if path.is_relative_to(cache_folder()) else "choose another --output"


def _concerns(error: OSError, path: Path) -> bool:
    """Whether an error is about `path`, something beside or below it, or a folder above it."""
    name = str(error.filename or path)
    return str(path).startswith(name) or name.startswith(str(path.parent))


def _takes_nothing(error: FileNotFoundError, path: Path) -> bool:
    """Whether `path`, what is written in its place or a folder above it was not found when it was made, as in /proc."""
    if not error.filename or error.filename2:  # a file that went away before it was renamed is no such place
        return False
    place = Path(error.filename)
    return (path.is_relative_to(place) or place.parent == path.parent) and place.parent.is_dir()
