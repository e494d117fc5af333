"""Texts to calibrate, train and measure on: a local file, a hub data set or one of ModelOpt's names, seeded."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable, Mapping, Sequence
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
    if not _is_file(source) and _modelopt_knows(source.dataset):
        texts = _from_modelopt(source, root)
        seed = None
    else:
        (column,), rows = _read(source, None, root)
        texts = [as_text(value, source, column) for (value,) in rows]
    filled = [text for text in texts if text.strip()]
    if not filled:
        raise UserError(f"{label(source)} holds no text", "every text in it is blank")
    if not whole:
        count = min(source.samples, len(filled))
        if count < source.samples:
            log.warning("%s holds %d texts; %d were asked for", label(source), len(filled), source.samples)
        texts = filled[:count] if seed is None else random.Random(seed).sample(filled, count)
    return Texts(texts, value_digest(texts))


def load_rows(source: TextSource, fields: Mapping[str, str], data_root: Path | None = None) -> list[tuple[Any, ...]]:
    """All rows of a source that has columns, in their order, as what they hold in some of them.

    Args:
        source: A hub data set or a .jsonl file.
        fields: The columns wanted, by the field of the recipe that names each.
        data_root: See recipes.data.data_root.

    Raises:
        UserError: when the source is missing, empty, has no columns, or lacks one of these; names it.
    """
    if not _is_file(source) and _modelopt_knows(source.dataset):
        raise UserError(f"'{source.dataset}' is a name of ModelOpt's, which gives plain texts", "name a hub data set")
    _, rows = _read(source, fields, find_root(data_root))
    if not rows:
        raise UserError(f"{label(source)} holds no row")
    return rows


def require_local(source: TextSource, fields: Mapping[str, str] | None = None) -> None:
    """Reads a source that is a local file, so that a mistake in it shows before anything is computed or replaced.

    Args:
        source: The source.
        fields: Its columns, see load_rows; none for plain texts.

    Raises:
        UserError: see load_texts and load_rows.
    """
    if _is_file(source):
        if fields:
            load_rows(source, fields)
        else:
            load_texts(source, whole=True)


def _is_file(source: TextSource) -> bool:
    path = Path(source.dataset).expanduser()
    return path.suffix in (".jsonl", ".txt") or path.is_file()


def label(source: TextSource) -> str:
    """A source as messages name it."""
    return f"'{source.dataset}'" if source.name is None else f"'{source.dataset}' ({source.name})"


def _columns(source: TextSource, fields: Mapping[str, str] | None, there: Sequence[str]) -> tuple[str, ...]:
    """The columns wanted; without `fields` the one that holds the text."""
    if fields is not None:
        for field, column in fields.items():
            if column not in there:
                raise _no_column(source, field, (column,), there)
        return tuple(fields.values())
    wanted = (source.field,) if source.field is not None else FIELDS
    for column in wanted:
        if column in there:
            return (column,)
    raise _no_column(source, "field", wanted, there)


def _no_column(source: TextSource, field: str, wanted: Sequence[str], there: Sequence[str]) -> UserError:
    return UserError(
        f"{label(source)} has no column {' or '.join(repr(column) for column in wanted)}",
        f"set {field} to one of its columns: {', '.join(there)}",
    )


_Rows = tuple[tuple[str, ...], list[tuple[Any, ...]]]
"""Columns, and what each row holds in them."""


def _read(source: TextSource, fields: Mapping[str, str] | None, root: Path | None) -> _Rows:
    if _is_file(source):
        return _from_file(Path(source.dataset).expanduser(), source, fields)
    return _from_hub(source, fields, root)


def as_text(value: Any, source: TextSource, column: str) -> str:
    """The text in a column, empty where there is none.

    Raises:
        UserError: when it is no text.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(
            f"column '{column}' of {label(source)} holds {type(value).__name__}, not text: {str(value)[:40]}",
            "mend such rows or leave them out, or choose another column",
        )
    return value


def _content(path: Path) -> str:
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"text file {path} does not exist", "it is looked for beside the recipe and in the current folder"
        ) from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"text file {path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}",
            "convert it, for example with `iconv -t utf-8`",
        ) from None
    if not content.strip():
        raise UserError(f"text file {path} is empty")
    return content


def _from_file(path: Path, source: TextSource, fields: Mapping[str, str] | None) -> _Rows:
    lines = _content(path).split("\n")  # splitlines() would also cut at characters that JSON strings may hold
    if path.suffix == ".txt":
        for field, column in (fields or ({} if source.field is None else {"field": source.field})).items():
            raise UserError(f"{path} is plain text; {field} '{column}' would have no effect", f"leave {field} out")
        return ("text",), [(line,) for line in lines]
    columns: tuple[str, ...] = ()
    rows: list[tuple[Any, ...]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}:{number} is not JSON: {error}",
                "write one JSON object a line; a file that ends in .txt is read as plain text",
            ) from None
        if "\\ud" in line.lower() and not _is_unicode(row):
            raise UserError(
                f"{path}:{number} holds half of a surrogate pair (\\ud800 to \\udfff), which is no character",
                "write the character itself, or leave the line out",
            )
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} is not a JSON object", 'write lines such as {"text": "..."}')
        columns = columns or _columns(source, fields, list(row))
        for column in columns:
            if column not in row:
                raise UserError(f"{path}:{number} has no column '{column}'", f"its columns: {', '.join(row)}")
        rows.append(tuple(row[column] for column in columns))
    return columns, rows


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _from_hub(source: TextSource, fields: Mapping[str, str] | None, root: Path | None) -> _Rows:
    import datasets

    load = cast(Callable[..., Any], datasets.load_dataset)
    with loading(source.dataset, root):
        found = find_dataset(source.dataset, root)
        rows = load(found, source.name, split=source.split, cache_dir=cache_of(found))
    columns = _columns(source, fields, rows.column_names)
    return columns, list(zip(*(rows[column] for column in columns), strict=True))


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
