"""Atomic files and folders: what is under its final name is whole, whatever was killed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from halfbyte.records.errors import UserError, disk_full_is_a_user_error

if TYPE_CHECKING:
    from pydantic import BaseModel

T = TypeVar("T", bound="BaseModel")

PARTIAL = ".partial"


def fsync_folder(folder: Path) -> None:
    """Makes renames inside `folder` durable (POSIX: a rename is on disk once its directory is)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Writes `content` under `path` by temporary file, fsync and rename; creates the folder.

    Without `durable` there is no fsync: after a power cut the file may be empty or hold zeros. That is for what can be
    made again and is looked at when it is read: fsync may wait for all else that is on its way to the disk.
    """
    with disk_full_is_a_user_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes 0600, which colleagues could not read
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        if durable:
            fsync_folder(path.parent)


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with what is in it."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Writes UTF-8 text atomically; see write_bytes."""
    write_bytes(path, text.encode("utf-8"), durable=durable)


def dumps(value: Any) -> str:
    """JSON as this project writes it: indented, sorted, non-ASCII kept, no NaN.

    Raises:
        ValueError: for NaN and infinities, which are no JSON and would not be read back by other tools.
    """
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON atomically."""
    write_text(path, dumps(value))


def read_json(path: Path, hint: str = "restore it or delete it to have it made again") -> Any:
    """Reads a JSON file.

    Args:
        path: The file.
        hint: What to do where it is no JSON.

    Raises:
        UserError: when it is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a file") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}", hint) from None


def read_as(path: Path, model: type[T], what: str, hint: str | None = None) -> T:
    """Reads a JSON file as one of this project's records.

    Args:
        path: The file.
        model: Its pydantic model.
        what: What it should be, for the message.
        hint: What to do where it is none.

    Raises:
        UserError: when it is missing, no JSON, or of another version.
    """
    content = read_json(path)
    try:
        return model.model_validate(content)
    except ValueError as error:
        raise UserError(f"{path} is not {what}: {error}", hint) from None


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Gives a fresh folder to write into and renames it to `final` once the block has ended well.

    What an earlier, killed attempt left is removed first; after an error nothing is left under either name.
    An existing `final` is replaced only at the end.
    """
    partial = final.with_name(final.name + PARTIAL)
    with disk_full_is_a_user_error(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            for path in partial.rglob("*"):
                if path.is_file():
                    path.chmod(0o666 & ~_umask())  # safetensors writes 0600, which colleagues could not read
            sync_files(partial)
            replace_folder(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def hold(file: int | IO[str], message: str, hint: str) -> None:
    """Locks an open file or folder for this process until it is closed; a kill frees it.

    Raises:
        UserError: with this message and hint, when another process holds it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(message, hint) from None


def sync_files(folder: Path) -> None:
    """Waits until the content of all files in a folder is on the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sync_file(path)


def sync_file(path: Path) -> None:
    """Waits until the content of a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def replace_folder(whole: Path, final: Path) -> None:
    """Renames a folder that is whole to `final`, in the place of what is there."""
    if final.exists():
        old = final.with_name(final.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(final, old)
        os.replace(whole, final)
        shutil.rmtree(old)
    else:
        os.replace(whole, final)
    fsync_folder(final.parent)
