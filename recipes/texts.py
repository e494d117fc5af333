"""Texts for calibration and fidelity: from a local file, a hub data set or one of ModelOpt's names, seeded."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, cast

from halfbyte.recipes.data import cache_of, find_dataset, loading
from halfbyte.recipes.data import data_root as find_root
from halfbyte.recipes.schema import TextSource
from halfbyte.records.digests import value_digest
from halfbyte.records.errors import UserError

log = logging.getLogger(__name__)

FIELDS = ("text", "question", "prompt", "content")


class Texts(NamedTuple):
    """Texts and what identifies them."""

    texts: list[str]
    digest: str
    """SHA-256 over the texts in their order."""


def load_texts(
    source: TextSource, seed: int | None = None, data_root: Path | None = None, *, whole: bool = False
) -> Texts:
    """The texts of a source.

    ModelOpt's names (cnn_dailymail, ...) give the first `source.samples` texts as ModelOpt's own examples take them,
    whatever the seed, so that a calibration can be compared with theirs.

    Args:
        source: What to read. A .txt file holds one text a line.
        seed: With a seed a random sample of `source.samples` texts that are not blank; without, the first ones.
        data_root: See recipes.data.data_root.
        whole: All texts in their order, blank ones too; `source.samples` and `seed` are not used.

    Raises:
        UserError: when the source is missing, empty, not UTF-8, not JSON lines, or has no such column; names it.
    """
    root = find_root(data_root)
    path = Path(source.dataset).expanduser()
    if path.suffix in (".jsonl", ".txt") or path.is_file():
        texts = _from_file(path, source)
    elif _modelopt_knows(source.dataset):
        texts = _from_modelopt(source, root)
        seed = None
    else:
        texts = _from_hub(source, root)
    filled = [text for text in texts if text.strip()]
    if not filled:
        raise UserError(f"{_label(source)} holds no text", "every text in it is blank")
    if not whole:
        count = min(source.samples, len(filled))
        if count < source.samples:
            log.warning("%s holds %d texts; %d were asked for", _label(source), len(filled), source.samples)
        texts = filled[:count] if seed is None else random.Random(seed).sample(filled, count)
    return Texts(texts, value_digest(texts))


def require_local(source: TextSource) -> None:
    """Reads a source that is a local file, so that a mistake in it shows before anything is computed or replaced.

    Raises:
        UserError: see load_texts.
    """
    path = Path(source.dataset).expanduser()
    if path.suffix in (".jsonl", ".txt") or path.is_file():
        load_texts(source, whole=True)


def _label(source: TextSource) -> str:
    return f"'{source.dataset}'" if source.name is None else f"'{source.dataset}' ({source.name})"


def _column(source: TextSource, columns: Sequence[str]) -> str:
    wanted = (source.field,) if source.field is not None else FIELDS
    for column in wanted:
        if column in columns:
            return column
    raise UserError(
        f"{_label(source)} has no column {' or '.join(repr(column) for column in wanted)}",
        f"set field to one of its columns: {', '.join(columns)}",
    )


def _as_text(value: Any, source: TextSource, column: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(
            f"column '{column}' of {_label(source)} holds {type(value).__name__}, not text", "choose another"
        )
    return value


def _from_file(path: Path, source: TextSource) -> list[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"text file {path} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"text file {path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}",
            "convert it, for example with `iconv -t utf-8`",
        ) from None
    if not content.strip():
        raise UserError(f"text file {path} is empty")
    lines = content.split("\n")  # splitlines() would also cut at characters that JSON strings may hold
    if path.suffix == ".txt":
        if source.field is not None:
            raise UserError(f"{path} is plain text; field '{source.field}' would have no effect", "leave field out")
        return lines
    column: str | None = None
    texts: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number} is not JSON: {error}", "write one JSON object a line") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} is not a JSON object", 'write lines such as {"text": "..."}')
        column = column or _column(source, list(row))
        if column not in row:
            raise UserError(f"{path}:{number} has no column '{column}'", f"its columns: {', '.join(row)}")
        texts.append(_as_text(row[column], source, column))
    return texts


def _from_hub(source: TextSource, root: Path | None) -> list[str]:
    import datasets

    load = cast(Callable[..., Any], datasets.load_dataset)
    with loading(source.dataset, root):
        found = find_dataset(source.dataset, root)
        rows = load(found, source.name, split=source.split, cache_dir=cache_of(found))
    column = _column(source, rows.column_names)
    return [_as_text(value, source, column) for value in rows[column]]


def _modelopt_knows(name: str) -> bool:
    if "/" in name:  # a hub id or a folder; the look below imports torch
        return False
    from modelopt.torch.utils.dataset_utils import get_supported_datasets

    return name in cast(Callable[[], list[str]], get_supported_datasets)()


def _from_modelopt(source: TextSource, root: Path | None) -> list[str]:
    from modelopt.torch.utils import dataset_utils

    read = cast(Callable[..., list[str]], dataset_utils.get_dataset_samples)
    hub_id = str(cast(dict[str, Any], dataset_utils.SUPPORTED_DATASET_CONFIG)[source.dataset]["config"]["path"])
    local = find_dataset(hub_id, root)
    # ModelOpt recognises a local copy by the last part of its path alone.
    is_local = local != hub_id and Path(local).name == source.dataset
    with loading(local if is_local else hub_id, root), redirect_stdout(sys.stderr):  # it prints what it loads
        return read(local if is_local else source.dataset, source.samples)
