"""Checks of a checkpoint's files: are they whole, do they agree, is all there that a loader needs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfbyte.quant.checks import Checkpoint, Rule
from halfbyte.records.digests import model_digest
from halfbyte.records.files import read_json
from halfbyte.records.manifest import load_manifest
from halfbyte.records.run import RunFolder

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_LAYER = re.compile(r"(?:^|\.)(?:model|language_model)\.layers\.(\d+)\.")
# safetensors pads its header; an export's files are larger than their tensors by this share at most, or by a header.
_MOST_HEADER = 0.05
_SMALL = 1 << 20


def _files(at: Checkpoint) -> Iterator[str]:
    yield from at.shards.faults


def _index(at: Checkpoint) -> Iterator[str]:
    yield from at.shards.index_faults


def _layers(at: Checkpoint) -> Iterator[str]:
    expected = at.text_config.get("num_hidden_layers")
    parts: dict[int, set[str]] = defaultdict(set)
    for name in at.shards:
        found = _LAYER.search(name)
        if found is not None:
            parts[int(found[1])].add(name[found.end() :])
    numbers = set(parts)
    if not isinstance(expected, int) or not numbers:
        return
    for number in sorted(set(range(expected)) - numbers):
        yield f"layer {number} has no tensors, the configuration says there are {expected}"
    extra = expected + int(at.text_config.get("num_nextn_predict_layers") or 0)
    for number in sorted(number for number in numbers if number >= extra):
        yield f"layer {number} has tensors, the configuration says there are {expected}"
    most = max(parts.values(), key=len)
    for number in sorted(numbers & set(range(expected))):
        lacking = sorted(_needed(most) - _needed(parts[number]))
        yield from (f"layer {number} lacks {part}, which other layers have" for part in lacking)


def _needed(parts: set[str]) -> set[str]:
    """Of a layer's tensors, the norms: kinds of attention and of MLP alternate in some models, these do not."""
    return {part for part in parts if part in ("input_layernorm.weight", "post_attention_layernorm.weight")}


def _companions(at: Checkpoint) -> Iterator[str]:
    if at.is_part:
        return  # a component of a diffusers pipeline; its tokenizers are components of their own
    if not any((at.folder / name).is_file() for name in _TOKENIZERS):
        yield f"{_TOKENIZERS[0]} is missing"
    for name in ("tokenizer_config.json", "generation_config.json"):
        if not (at.folder / name).is_file():
            yield f"{name} is missing"
    yield from _tokenizer(at)
    if at.source is not None:
        yield from _as_in_source(at, at.source.folder)


def _tokenizer(at: Checkpoint) -> Iterator[str]:
    path = at.folder / "tokenizer.json"
    if not path.is_file():
        return
    content = read_json(path)
    if content.get("truncation"):
        yield f"{path.name} cuts every text to {content['truncation'].get('max_length')} tokens"
    largest = max((entry["id"] for entry in content.get("added_tokens") or []), default=-1)
    vocabulary = (content.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict):
        largest = max([largest, *vocabulary.values()])
    rows = at.text_config.get("vocab_size")
    if isinstance(rows, int) and largest >= rows:
        yield f"{path.name} has token {largest}, and vocab_size is {rows}"


def chat_template(folder: Path) -> str | None:
    """A model's chat template, from its own file or from tokenizer_config.json."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    template: Any = read_json(path).get("chat_template") if path.is_file() else None
    return None if template is None else str(template)


def _as_in_source(at: Checkpoint, source: Path) -> Iterator[str]:
    theirs, ours = chat_template(source), chat_template(at.folder)
    if theirs is not None and ours is None:
        yield "the chat template is missing, and the source has one"
    elif theirs is not None and theirs != ours:
        yield "the chat template is not the source's"
    name = "generation_config.json"
    if (source / name).is_file() and (at.folder / name).is_file():
        for key in ("eos_token_id", "bos_token_id"):
            before, after = read_json(source / name).get(key), read_json(at.folder / name).get(key)
            if before != after:
                yield f"{name} has {key} {after}, the source {before}"
    name = "tokenizer.json"
    if (source / name).is_file() and (at.folder / name).is_file():
        before, after = (read_json(folder / name).get("model") for folder in (source, at.folder))
        if before != after:
            yield f"{name} is not the source's"


def _size(at: Checkpoint) -> Iterator[str]:
    tensors = sum(entry.end - entry.begin for entry in at.shards.entries.values())
    files = sum(path.stat().st_size for path in {entry.path for entry in at.shards.entries.values()})
    if files > tensors * (1 + _MOST_HEADER) + _SMALL:
        yield f"the files have {files} bytes, their tensors {tensors}"
    stray = [path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in at.folder.glob(pattern)]
    yield from (f"{name} lies beside the checkpoint and is no part of it" for name in sorted(stray))


def _manifest(at: Checkpoint) -> Iterator[str]:
    run = RunFolder(at.root.resolve().parent)
    if run.checkpoint == at.root.resolve() and run.manifest.is_file():
        recorded = load_manifest(run.manifest).checkpoint_digest
        if recorded is not None and recorded != model_digest(at.root):
            yield f"the files have changed since they were exported: {run.manifest.name} has another digest"


RULES = (
    Rule("files", "every file is whole, and every tensor is stored once and not empty", _files),
    Rule("index", "the index lists what the files hold", _index),
    Rule("layers", "all layers of the configuration are there", _layers),
    Rule(
        "companions",
        "tokenizer, chat template and generation config are there, and are the source's",
        _companions,
    ),
    Rule("size", "the files hold the checkpoint's tensors and nothing else", _size),
    Rule("manifest", "the files are those that were exported", _manifest),
)
