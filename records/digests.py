"""Content digests of files, texts, values and model folders, streamed and cached by size and time of change."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from halfbyte.records.errors import UserError
from halfbyte.records.files import write_text

CHUNK = 1 << 24
"""Bytes hashed at once without Python's lock: enough that a thread which waits for it loses little."""
READERS = 4
"""Files hashed at once; more of them would not make a disk faster."""

# What decides a model's answers: weights, configuration, tokenizer and template. Optimizer states, READMEs
# and our own manifest may change without making another model.
MODEL_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.gguf",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "chat_template*",
)


PIPELINE_FILE = "model_index.json"
"""What makes a folder a diffusers pipeline, whose parts lie in folders of their own."""


def cache_folder() -> Path:
    """The folder for what may be kept between runs: $HALFBYTE_CACHE, else ~/.cache/halfbyte."""
    home = os.environ.get("HALFBYTE_CACHE")
    return Path(home) if home else Path.home() / ".cache" / "halfbyte"


def text_digest(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def value_digest(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return text_digest(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, remembered by its inode, size and time of change, and so over a renaming.

    Where read_ahead has begun with the file, this waits for it.
    """
    begun = _ahead.get(path)
    if begun is not None:
        begun.wait()
        _ahead.pop(path, None)
    return _known_or_hashed(path)


def _known_or_hashed(path: Path) -> str:
    status = path.stat()
    key = value_digest([status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns])
    entry = cache_folder() / "digests" / key[:2] / key
    try:
        known = entry.read_text(encoding="ascii")
        if _DIGEST.fullmatch(known):
            return known
    except (OSError, ValueError):
        pass
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(CHUNK, status.st_size + 1)))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    with suppress(OSError, UserError):  # the cache saves time and nothing else; a read-only home must not stop a run
        write_text(entry, digest.hexdigest(), durable=False)
    return digest.hexdigest()


_DIGEST = re.compile("[0-9a-f]{64}")
_ahead: dict[Path, Event] = {}


def read_ahead(paths: Sequence[Path]) -> None:
    """Begins to hash files in the background; file_digest finds what is known of them then.

    Nobody needs to wait for it: the threads end with the process. What goes wrong, file_digest will meet again.
    """
    new = [path for path in paths if path not in _ahead]
    _ahead.update((path, Event()) for path in new)

    def work() -> None:
        with suppress(IndexError):
            while True:
                path = new.pop()
                begun = _ahead[path]
                try:
                    with suppress(OSError):
                        _known_or_hashed(path)
                finally:
                    begun.set()

    for _ in range(min(READERS, len(new))):
        Thread(target=work, name="read ahead", daemon=True).start()


def file_digests(paths: Sequence[Path]) -> list[str]:
    """file_digest of several files at once: hashing gives up Python's lock, so that each may have a core."""
    with ThreadPoolExecutor(max_workers=READERS) as readers:
        return list(readers.map(file_digest, paths))


def text_identity(dataset: str) -> str:
    """What tells a source of texts apart: the digest of a local file's content, else the name of the data set."""
    path = Path(dataset).expanduser()
    return file_digest(path) if path.is_file() else dataset


def model_files(folder: Path) -> list[Path]:
    """The files of a model folder that decide its answers, sorted by name; of a pipeline, those of all its parts."""
    patterns = list(MODEL_FILES)
    if (folder / PIPELINE_FILE).is_file():
        parts = (*MODEL_FILES, "scheduler_config.json", "preprocessor_config.json")
        patterns = [PIPELINE_FILE, *(f"*/{pattern}" for pattern in parts)]
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def model_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of a model folder's files, or of a single model file.

    Raises:
        UserError: when there is no such folder or nothing in it is part of a model.
    """
    if folder.is_file():
        return file_digest(folder)
    files = model_files(folder)
    if not files:
        raise UserError(f"{folder} holds no model", "a model folder has config.json and *.safetensors, or a .gguf file")
    names = [path.relative_to(folder).as_posix() for path in files]
    return value_digest([list(pair) for pair in zip(names, file_digests(files), strict=True)])
