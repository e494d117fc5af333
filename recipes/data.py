"""Where data sets are found: below the data root first, on the hub otherwise, with errors that say what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import yaml

from halfbyte.records.digests import cache_folder, file_digests, value_digest
from halfbyte.records.errors import UserError

DATA_VARIABLE = "HALFBYTE_DATA"
PROBE_SECONDS = 5.0
FILE_FORMATS = ("json", "csv", "parquet", "text", "arrow")
"""What `datasets` reads by itself: names of formats, not of data sets."""


def data_root(given: Path | None = None) -> Path | None:
    """The data root: a folder laid out like the hub (`<owner>/<data set>/...`), looked into before the hub is asked.

    Args:
        given: The folder as an argument names it; by default the one $HALFBYTE_DATA names, if any.

    Raises:
        UserError: when the folder does not exist.
    """
    named = str(given) if given is not None else os.environ.get(DATA_VARIABLE)
    if not named:
        return None
    root = Path(named).expanduser()
    if not root.is_dir():
        origin = "the data root" if given is not None else f"the data root in ${DATA_VARIABLE}"
        raise UserError(f"{origin}, {root}, is not a folder", "name a folder laid out like the hub, or unset it")
    return root.resolve()


def find_dataset(name: str, root: Path | None) -> str:
    """The absolute folder of data set `name` below `root`, or `name` itself where it is not there."""
    if root is not None and name and not Path(name).is_absolute() and (root / name).is_dir():
        return str(root / name)
    return name


def cache_of(found: str) -> str | None:
    """The folder for `datasets` to cache a local data set in; None, its default, for one of the hub.

    Its own cache tells local folders apart by their last name and their README alone: after a file was changed, or in
    another root, it would give the old questions.
    """
    folder = Path(found)
    if not folder.is_absolute():
        return None
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    state = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return str(cache_folder() / "datasets" / value_digest(state)[:16])


def dataset_digest(name: str, root: Path | None) -> str:
    """What tells the content of a data set below the data root from others; "" where it comes from the hub."""
    folder = Path(find_dataset(name, root))
    return folder_digest(folder) if folder.is_absolute() else ""


def folder_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of all files in a folder; "" where there is none."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".pyc"))
    names = [str(path.relative_to(folder)) for path in files]
    return value_digest(list(zip(names, file_digests(files), strict=True))) if files else ""


@cache
def hub_is_reachable() -> bool:
    """Whether the hub answers within a few seconds; asked once a process."""
    import httpx
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except httpx.HTTPError:
        return False
    return True


class NotAtHand(UserError):
    """A data set that is neither below the data root nor to be had from the hub."""


@contextmanager
def loading(name: str, root: Path | None) -> Iterator[None]:
    """Around `datasets.load_dataset(name)`: no minutes of retries without a network, and errors for people.

    A data set in the hub's local cache is found without a network as well.

    Raises:
        NotAtHand: when the data set is gated, unknown or unreachable.
        UserError: when it lacks the configuration or split asked for, or cannot be read.
    """
    import datasets
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError

    local = name in FILE_FORMATS or Path(name).exists() or find_dataset(name, root) != name
    if not local and name.startswith(("/", ".", "~")):
        raise UserError(f"data set folder {name} does not exist")
    bars = datasets.are_progress_bars_disabled()
    if local:
        datasets.disable_progress_bars()
    before = datasets.config.HF_HUB_OFFLINE
    if not local and not before and not hub_is_reachable():
        datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    except (DatasetGenerationError, yaml.YAMLError) as error:  # the YAML is at the head of its README.md
        raise UserError(f"data set '{name}' cannot be read: {error.__cause__ or error}") from error
    except (DatasetNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise NotAtHand(_reason(name, root, error), _where(name, root)) from error
    except (FileNotFoundError, StopIteration) as error:  # StopIteration is what an empty JSON file leads to
        raise UserError(f"data set '{name}' holds no data: {str(error) or 'its file is empty'}") from error
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        raise NotAtHand(
            f"the hub has data set '{name}' only as a loading script, which `datasets` no longer runs",
            _where(name, root),
        ) from error
    except ValueError as error:
        if not any(sign in str(error) for sign in ("BuilderConfig", "Unknown split", "Config name is missing")):
            raise
        hint = "its README.md on the hub names its configurations: put it beside the files" if local else None
        raise UserError(f"data set '{name}': {' '.join(str(error).split())}", hint) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before
        if local and not bars:
            datasets.enable_progress_bars()


def _reason(name: str, root: Path | None, error: Exception) -> str:
    if "gated" in str(error).lower():
        return f"data set '{name}' is gated: its owners grant access on https://huggingface.co/datasets/{name}"
    here = "" if root is None else "not below the data root, and "
    if isinstance(error, ConnectionError):
        return f"data set '{name}' is {here}not to be had from the hub: it cannot be reached"
    return f"data set '{name}' is {here}not on the hub"


def _where(name: str, root: Path | None) -> str:
    if root is not None:
        return f"put its files into {root / name}, or get access on the hub and log in with `hf auth login`"
    return (
        f"put its files into a folder {name} below the folder that ${DATA_VARIABLE} names, or get access on the hub "
        "and log in with `hf auth login`"
    )
