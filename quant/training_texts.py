"""Training data: the texts, pairs and chats of a recipe as rows of tokens and labels, for training and validation."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfbyte.quant.packing import pack
from halfbyte.quant.training_rows import Rows, Text
from halfbyte.quant.turns import Written, write_chat, write_pair
from halfbyte.recipes.texts import as_text, label, load_rows, load_texts
from halfbyte.recipes.training import TrainingSource, TrainSpec
from halfbyte.records.digests import value_digest
from halfbyte.records.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_BATCH = 1000
"""Texts tokenized at once."""


class Sampled(NamedTuple):
    """A text the teacher wrote."""

    tokens: Sequence[int]
    prompt: int
    """Tokens at its beginning that were given and not written."""
    text: str


@dataclass
class Counts:
    """What became of the texts of one source."""

    texts: int = 0
    """Taken from it."""
    empty: int = 0
    """Left out, since they, or the response in them, are blank."""
    short: int = 0
    """Left out, since a text of one token predicts nothing."""
    masked: int = 0
    """Left out, since nothing of them counts in the loss: no assistant's turn, or it was cut off."""
    truncated: int = 0
    """Cut to the length; they stay."""
    repeated: int = 0
    """Left out, since a text held out for validation is the same but for case and whitespace."""
    train: int = 0
    validation: int = 0

    def __str__(self) -> str:
        left_out = {"empty": self.empty, "too short": self.short, "nothing to learn": self.masked}
        parts = [f"{count} {what}" for what, count in {**left_out, "as held out": self.repeated}.items() if count]
        cut = f"; {self.truncated} cut to train.length" if self.truncated else ""
        left = f"; left out: {', '.join(parts)}" if parts else ""
        return f"{self.texts} texts, {self.train} to train on and {self.validation} held out{left}{cut}"


@dataclass(frozen=True)
class Examples:
    """The rows of a training."""

    train: Rows
    validation: Rows
    """Of texts that are in no row of `train`."""
    digest: str
    """SHA-256 over the rows of both in their order: tokens, what counts, and what shares a row."""
    data: dict[str, str]
    """The digest of each source's texts as they were read, by its name."""
    counts: dict[str, Counts]
    """By source."""
    texts: dict[str, list[str]] = field(repr=False)
    """What is trained and validated on, as it is written out, by source: for quant.leakage.overlap."""


def training_examples(
    spec: TrainSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    data_root: Path | None = None,
    *,
    packs: bool = True,
    sampled: Sequence[Sampled] | None = None,
) -> Examples:
    """The rows to train and to validate on; the same for the same spec, data and tokenizer, bit for bit.

    A text ends with the end-of-text token where it is not cut, and starts with what the tokenizer begins texts with; a
    chat has what its template writes. Texts are held out before they are packed, so that no row is of both parts.

    Args:
        spec: The recipe's train block.
        tokenizer: The model's.
        max_length: Tokens the model takes; None where it does not say.
        data_root: See recipes.data.data_root.
        packs: What quant.packing.packs_rows says of the model: without it there is one text a row.
        sampled: The texts the teacher wrote, where the recipe has those for its data.

    Raises:
        UserError: when a source is missing, lacks a column, holds chats for a model without a template, or has nothing
            left after filtering; and when a row would be longer than the model takes.
    """
    if max_length is not None and spec.length > max_length:
        raise UserError(
            f"train.length is {spec.length}, and the model takes at most {max_length} tokens",
            f"set train.length to {max_length} or less",
        )
    texts: list[Text] = []
    counts: dict[str, Counts] = {}
    plain: dict[str, list[str]] = {}
    data: dict[str, str] = {}
    for name, source in _named(spec.sources):
        counts[name], plain[name] = Counts(), []
        written = _drawn(_written(source, spec, tokenizer, data_root), source.samples, spec.seed)
        data[name] = value_digest([[one.text, one.learned] for one in written])
        texts += _encode(written, name, spec, tokenizer, counts[name], plain[name])
        _require_some(label(source), counts[name], sum(text.source == name for text in texts))
    if sampled is not None:
        name = "sampled from the teacher"
        counts[name], plain[name] = Counts(), [one.text for one in sampled]
        data[name] = value_digest([[list(one.tokens), one.prompt] for one in sampled])
        texts += _from_teacher(sampled, name, spec, counts[name])
        _require_some("what the teacher wrote", counts[name], len(texts))
    train, held = _split(texts, spec, counts)
    for name, count in counts.items():
        logger.info("%s: %s", name, count)
    digest = hashlib.sha256()
    parts = []
    for part in (train, held):
        packed = spec.packing and packs
        lengths = [len(text.tokens) for text in part]
        rows = Rows(part, pack(lengths, spec.length) if packed else [[at] for at in range(len(part))], packed=packed)
        rows.update(digest)
        parts.append(rows)
    return Examples(parts[0], parts[1], digest.hexdigest(), data, counts, plain)


def _named(sources: Sequence[TrainingSource]) -> Iterator[tuple[str, TrainingSource]]:
    """Sources with a name each, a number behind it where one data set is named twice."""
    seen: list[str] = []
    for source in sources:
        name = " ".join(filter(None, [source.dataset, source.name, source.split]))
        seen.append(name)
        yield (name if seen.count(name) == 1 else f"{name} ({seen.count(name)})"), source


def _drawn(written: list[Written], samples: int, seed: int) -> list[Written]:
    return written if len(written) <= samples else random.Random(seed).sample(written, samples)


def _written(
    source: TrainingSource, spec: TrainSpec, tokenizer: PreTrainedTokenizerBase, root: Path | None
) -> list[Written]:
    """All texts of a source; blank where there is nothing to learn from."""
    if source.messages_field is not None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"{label(source)} holds chats, and the model has no chat template to write them with",
                "train an instruction-tuned model on it, or name prompt_field and response_field",
            )
        rows = load_rows(source, source.columns, root)
        where = f"chat {{}} of {label(source)}"
        return [
            write_chat(messages, tokenizer, where.format(at), spans=spec.mask_prompts)
            for at, (messages,) in enumerate(rows, start=1)
        ]
    if source.prompt_field is not None:
        pairs = [
            tuple(as_text(value, source, column) for value, column in zip(row, source.columns.values(), strict=True))
            for row in load_rows(source, source.columns, root)
        ]
        return [
            write_pair(prompt, response, source.layout) if response.strip() else Written("")
            for prompt, response in pairs
        ]
    return [Written(text) for text in load_texts(source, data_root=root, whole=True).texts]


def _encode(
    written: Sequence[Written],
    source: str,
    spec: TrainSpec,
    tokenizer: PreTrainedTokenizerBase,
    counts: Counts,
    kept: list[str],
) -> Iterator[Text]:
    """The texts as tokens, without those that teach nothing; counts them, and adds what is kept to `kept`."""
    counts.texts = len(written)
    filled = [one for one in written if one.text.strip()]
    counts.empty = len(written) - len(filled)
    for first in range(0, len(filled), _BATCH):
        batch = filled[first : first + _BATCH]
        for one, (ids, learned) in zip(batch, _tokens(batch, tokenizer, spec.mask_prompts), strict=True):
            text = _cut(ids, learned, source, one.text, spec.length, counts)
            if text is not None:
                kept.append(one.text)
                yield text


def _tokens(
    batch: Sequence[Written], tokenizer: PreTrainedTokenizerBase, mask: bool
) -> list[tuple[list[int], NDArray[np.bool_]]]:
    """Token ids of each text with its special tokens, and which of them are learned."""
    begin, end = getattr(tokenizer, "bos_token", None), tokenizer.eos_token_id
    # A text that is written with its first special token gets no second one, by lm-eval's rule for prompts.
    bare = [one.template or bool(begin and one.text.startswith(begin)) for one in batch]
    spans = mask and any(one.learned is not None for one in batch)
    if spans and not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} does not tell which token stands where, so that no prompt can be masked",
            "set train.mask_prompts to false, or give the model a tokenizer.json",
        )
    found: list[tuple[list[int], NDArray[np.bool_]]] = [([], np.zeros(0, bool))] * len(batch)
    for plain in (False, True):
        where = [at for at, flag in enumerate(bare) if flag is plain]
        if not where:
            continue
        # Not truncation=True: a fast tokenizer keeps that setting and would be saved with it into the checkpoint.
        encoded = tokenizer(
            [batch[at].text for at in where],
            add_special_tokens=not plain,
            return_offsets_mapping=spans,
            verbose=False,
        )
        for number, at in enumerate(where):
            ids = [int(token) for token in encoded["input_ids"][number]]
            learned = np.ones(len(ids), dtype=bool)
            if spans and batch[at].learned is not None:
                learned = _inside(np.array(encoded["offset_mapping"][number]).reshape(-1, 2), batch[at].learned or ())
            if not batch[at].template and end is not None and ids[-1:] != [end]:
                ids, learned = [*ids, int(end)], np.append(learned, True)
            found[at] = ids, learned
    return found


def _inside(offsets: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which tokens have a character in one of the spans."""
    start, end = offsets[:, 0], offsets[:, 1]
    inside = np.zeros(len(offsets), dtype=bool)
    for first, last in spans:
        inside |= (end > first) & (start < last) & (end > start)
    return inside


def _cut(
    ids: Sequence[int], learned: NDArray[np.bool_], source: str, text: str, length: int, counts: Counts
) -> Text | None:
    if len(ids) < 2:
        counts.short += 1
        return None
    learned = learned[:length].copy()
    learned[0] = False  # nothing comes before it, and in a packed row another text does
    if not learned.any():
        counts.masked += 1
        return None
    counts.truncated += len(ids) > length
    key = hashlib.blake2b(" ".join(text.casefold().split()).encode(errors="replace"), digest_size=16).digest()
    return Text(np.array(ids[:length], dtype=np.int32), learned, source, key)


def _from_teacher(sampled: Sequence[Sampled], source: str, spec: TrainSpec, counts: Counts) -> Iterator[Text]:
    counts.texts = len(sampled)
    for one in sampled:
        learned = np.ones(len(one.tokens), dtype=bool)
        if spec.mask_prompts:
            learned[: one.prompt] = False
        text = _cut(one.tokens, learned, source, one.text, spec.length, counts)
        if text is not None:
            yield text


def _require_some(what: str, counts: Counts, left: int) -> None:
    if left == 0:
        raise UserError(
            f"nothing of {what} is left to train on: of {counts.texts} texts {counts.empty} are empty, {counts.short} "
            f"too short, and {counts.masked} have no token that counts in the loss",
            "look at the columns it names, and at train.length and train.mask_prompts",
        )


def _split(texts: Sequence[Text], spec: TrainSpec, counts: dict[str, Counts]) -> tuple[list[Text], list[Text]]:
    """Texts to train on, and texts held out, drawn by the seed; what is the same as one held out is not trained on."""
    if len(texts) < 2:
        raise UserError("there is one text, and one is to be held out for validation", "train on more texts")
    wanted = max(1, round(spec.validation.share * len(texts)))
    drawn = random.Random(spec.seed).sample(range(len(texts)), min(wanted, spec.validation.samples or wanted))
    held = {texts[at].key: texts[at] for at in reversed(drawn)}
    train = []
    for text in texts:
        if text.key not in held:
            counts[text.source].train += 1
            train.append(text)
        elif held[text.key] is not text:
            counts[text.source].repeated += 1
    for text in held.values():
        counts[text.source].validation += 1
    if not train:
        raise UserError("all texts are the same, so that nothing is left to train on", "train on other texts")
    return train, list(reversed(held.values()))
