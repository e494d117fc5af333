"""The teacher's k largest log-probabilities of each token, computed once and stored in shards."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from halfbyte.quant.batches import Numbered, collate
from halfbyte.quant.top_k import TopK, top_k
from halfbyte.quant.training_rows import IGNORED, Rows
from halfbyte.records.errors import UserError
from halfbyte.records.files import read_as, write_bytes, write_json
from halfbyte.records.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

STORE_FILE = "store.json"
ROWS = 64
"""Rows of a shard: of 1,024 tokens and 64 logits each, 32 MiB."""
_PASS = 4096
"""Tokens of a forward pass."""
_CHUNK = 512
"""Tokens whose whole distributions are looked at at once in float32."""


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    key: str
    k: int
    temperature: float
    vocabulary: int
    rows: int
    tokens: int
    """Those that count in a loss."""


class StoredLogits:
    """The stored distributions of a training's rows, by the index of a row: those to train on, then those held out.

    Args:
        folder: As store_logits wrote it.

    Raises:
        UserError: when a shard is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = read_as(
            folder / STORE_FILE, _Facts, "a store of teacher logits", "delete it to have it made again"
        )
        missing = [path for path in map(self._path, range(_shards(self.facts.rows))) if not path.is_file()]
        if missing:
            raise UserError(f"{missing[0]} is missing", "run the training again to have it made")
        self._open = lru_cache(maxsize=8)(self._shard)

    def _path(self, shard: int) -> Path:
        return _path(self.folder, shard)

    def _shard(self, shard: int) -> Any:
        from safetensors import SafetensorError, safe_open

        path = self._path(shard)
        try:
            return cast(Any, safe_open)(path, framework="pt").__enter__()
        except SafetensorError as error:
            raise UserError(f"{path} is damaged: {error}", "delete it to have it made again") from None

    def read(self, rows: Sequence[int], temperature: float | None = None) -> TopK:
        """The distributions of all tokens of these rows that count in a loss, in their order.

        Args:
            rows: Indices.
            temperature: The one they were stored for, the default, or 1.

        Raises:
            IndexError: for a row that is not stored.
            ValueError: for another temperature.
        """
        wanted = self.facts.temperature if temperature is None else temperature
        if wanted not in (1.0, self.facts.temperature):
            raise ValueError(f"the logits are stored for temperature {self.facts.temperature} and 1, not {wanted}")
        parts = [self._row(row, wanted) for row in rows]
        return TopK(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def _row(self, row: int, temperature: float) -> TopK:
        if not 0 <= row < self.facts.rows:
            raise IndexError(f"row {row} of {self.facts.rows}")
        shard = self._open(row // ROWS)
        first, last = shard.get_slice("ends")[row % ROWS : row % ROWS + 2].tolist()
        log_probs, indices, log_rest = (shard.get_slice(name)[first:last] for name in TopK._fields)
        if temperature != 1.0:
            # log softmax(x / T) = log softmax(x) / T - a number of each token, which is stored beside.
            log_probs = log_probs / temperature - shard.get_slice("log_norm_warm")[first:last, None]
            log_rest = shard.get_slice("log_rest_warm")[first:last]
        return TopK(log_probs, indices.long(), log_rest)


def store_logits(
    teacher: PreTrainedModel,
    parts: Sequence[Rows],
    folder: Path,
    *,
    k: int,
    key: str,
    temperature: float = 1.0,
    vocabulary: int | None = None,
) -> StoredLogits:
    """Computes and stores the teacher's k largest log-probabilities of all tokens that count in a loss.

    A shard is written whole or not at all; what an earlier process wrote under the same key is kept.

    Args:
        teacher: A causal LM.
        parts: Rows to train on, and rows held out.
        folder: training/teacher of a run.
        k: Log-probabilities kept of each token.
        key: Digest of what decides them: the rows and the teacher.
        temperature: Of the distillation; distributions at 1 are stored as well.
        vocabulary: Tokens of the tokenizer, or whatever both models have logits of; None for all the teacher has.

    Raises:
        UserError: when k is above the vocabulary, or the disk has too little space.
    """
    width = int(cast(Any, teacher.config).vocab_size)
    width = width if vocabulary is None else min(width, vocabulary)
    if k > width:
        raise UserError(
            f"train.teacher.offline_top_k is {k}, and the vocabulary has {width} tokens", f"set it to {width} or less"
        )
    facts = _Facts(
        key=key,
        k=k,
        temperature=temperature,
        vocabulary=width,
        rows=sum(map(len, parts)),
        tokens=sum(part.learned for part in parts),
    )
    _claim(folder, facts)
    shards = [shard for shard in range(_shards(facts.rows)) if not _path(folder, shard).is_file()]
    if not shards:
        logger.info("teacher logits: done already")
        return StoredLogits(folder)
    _require_space(folder, facts, len(shards))
    rows = _Joined(parts)
    with progress_bar(total=len(shards), unit="shard", desc="teacher logits") as bar:
        for shard in shards:
            numbers = range(shard * ROWS, min((shard + 1) * ROWS, facts.rows))
            write_bytes(_path(folder, shard), _compute(teacher, [rows.numbered(at) for at in numbers], facts))
            bar.update(1)
    return StoredLogits(folder)


class _Joined:
    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = parts

    def numbered(self, index: int) -> Numbered:
        """A row by its index among all."""
        at = index
        for part in self.parts:
            if at < len(part):
                return Numbered(part[at], index)
            at -= len(part)
        raise IndexError(index)


def _shards(rows: int) -> int:
    return -(-rows // ROWS)


def _path(folder: Path, shard: int) -> Path:
    return folder / f"logits-{shard:05d}.safetensors"


def _claim(folder: Path, facts: _Facts) -> None:
    """Removes a store of other rows, another teacher, k or temperature."""
    path = folder / STORE_FILE
    if path.is_file() and read_as(path, _Facts, "a store of teacher logits") != facts:
        logger.info("teacher logits: those of another training are removed")
        shutil.rmtree(folder)
    write_json(path, facts.model_dump(mode="json"))


def _require_space(folder: Path, facts: _Facts, shards: int) -> None:
    needed = facts.tokens * (8 * facts.k + 12) * shards // _shards(facts.rows)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"no space for the teacher's logits at {folder}: {needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free",
            "lower train.teacher.offline_top_k, free some space, or choose another --output",
        )


def _compute(teacher: PreTrainedModel, rows: Sequence[Numbered], facts: _Facts) -> bytes:
    """A shard as the bytes of its file."""
    from safetensors.torch import save

    found: dict[str, list[Tensor]] = {}
    ends = [0]
    for batch in _passes(rows):
        inputs = collate(batch)
        counted = inputs["labels"][:, 1:] != IGNORED
        ends += [ends[-1] + int(count) for count in counted.sum(1).cumsum(0)]
        for name, chunks in _distributions(teacher, inputs, counted, facts).items():
            found.setdefault(name, []).extend(chunks)
    tensors = {name: torch.cat(chunks) for name, chunks in found.items()}
    return save({**tensors, "ends": torch.tensor(ends)})


def _passes(rows: Sequence[Numbered]) -> Iterator[list[Numbered]]:
    """Rows of one forward pass each, in their order."""
    batch: list[Numbered] = []
    for row in rows:
        longest = max(len(one.row.input_ids) for one in [*batch, row])
        if batch and longest * (len(batch) + 1) > _PASS:
            yield batch
            batch = []
        batch.append(row)
    yield batch


@torch.no_grad()
def _distributions(
    teacher: PreTrainedModel, inputs: dict[str, Tensor], counted: Tensor, facts: _Facts
) -> dict[str, list[Tensor]]:
    """What is stored of a batch's tokens that count, in chunks of them."""
    device = teacher.device
    # Without a cache: with one, transformers lets packed texts see each other.
    logits = teacher(
        input_ids=inputs["input_ids"].to(device), position_ids=inputs["position_ids"].to(device), use_cache=False
    ).logits[:, :-1][counted.to(device)]
    found: dict[str, list[Tensor]] = {}
    for chunk in logits.split(_CHUNK):
        chunk = chunk[:, : facts.vocabulary].float()
        cold = top_k(chunk, facts.k)
        kept = {"log_probs": cold.log_probs, "indices": cold.indices.int(), "log_rest": cold.log_rest}
        if facts.temperature != 1.0:
            warm = top_k(chunk, facts.k, facts.temperature)
            kept["log_norm_warm"] = cold.log_probs[:, 0] / facts.temperature - warm.log_probs[:, 0]
            kept["log_rest_warm"] = warm.log_rest
        for name, tensor in kept.items():
            found.setdefault(name, []).append(tensor.cpu().contiguous())
    return found
