"""What text encoders see of prompts: tokens beyond their limits, and characters that their tokenizers do not know."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.eval.pipeline_parts import quiet
from halfbyte.recipes.prompts import Prompt, shown
from halfbyte.records.errors import UserError

logger = logging.getLogger(__name__)

MOSTLY = 0.5
"""Share of a prompt's characters that a tokenizer must know; with fewer the image is of something else."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the encoders of a pipeline see of one prompt."""

    clip_cut: int
    """Tokens beyond CLIP's limit (77)."""
    t5_cut: int
    """Tokens beyond the limit of the other encoder (T5, ...)."""
    cut_everywhere: bool
    """Whether no encoder sees the prompt's end."""
    unknown: int
    """Characters that the other encoder's tokenizer does not know; CLIP's knows all bytes."""
    letters: int
    """Characters without space."""


def look_at(tokenizers: Mapping[str, Any], prompts: Sequence[Prompt], max_sequence_length: int) -> list[Seen]:
    """What the encoders see of each prompt; nothing is computed.

    Args:
        tokenizers: Of the pipeline, by name.
        prompts: The prompts.
        max_sequence_length: Limit of the encoders that are not CLIP, in tokens.
    """
    with quiet():
        return [_seen(list(tokenizers.values()), prompt.text, max_sequence_length) for prompt in prompts]


def _seen(tokenizers: list[Any], text: str, limit: int) -> Seen:
    clip, other, unknown = [0], [0], 0
    everywhere: list[bool] = []
    for tokenizer in tokenizers:
        is_clip = "CLIP" in type(tokenizer).__name__
        encoded = tokenizer(text, truncation=False, verbose=False, return_offsets_mapping=not is_clip)
        cut = max(0, len(encoded["input_ids"]) - (tokenizer.model_max_length if is_clip else limit))
        everywhere.append(cut > 0)
        (clip if is_clip else other).append(cut)
        if not is_clip and tokenizer.unk_token_id is not None:
            pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
            spans = [text[start:end] for token, (start, end) in pairs if token == tokenizer.unk_token_id]
            unknown = max(unknown, sum(not letter.isspace() for span in spans for letter in span))
    letters = sum(not letter.isspace() for letter in text)
    return Seen(max(clip), max(other), bool(everywhere) and all(everywhere), unknown, letters)


def require_seen(prompts: Sequence[Prompt], seen: Sequence[Seen], *, allow: bool) -> None:
    """Refuses prompts whose end no encoder sees or whose letters are mostly unknown; warns of what is only counted.

    Args:
        prompts: The prompts.
        seen: What look_at says of each.
        allow: Whether such prompts are drawn all the same, and counted (evaluate.allow_truncated).

    Raises:
        UserError: naming the first.
    """
    anyway = "or set evaluate.allow_truncated to draw them all the same, and count them"
    cut = [prompt for prompt, one in zip(prompts, seen, strict=True) if one.cut_everywhere]
    if cut and not allow:
        raise UserError(
            f"{len(cut)} of {len(prompts)} prompts are longer than every text encoder reads, the first on line "
            f"{cut[0].line}: {shown(cut[0].text)}",
            f"shorten them, raise evaluate.images.max_sequence_length, {anyway}",
        )
    foreign = [prompt for prompt, one in zip(prompts, seen, strict=True) if one.unknown > MOSTLY * one.letters]
    if foreign and not allow:
        raise UserError(
            f"{len(foreign)} of {len(prompts)} prompts are written in letters that the text encoder does not know, "
            f"the first on line {foreign[0].line}: {shown(foreign[0].text)}",
            f"translate them, {anyway}",
        )
    by_clip = sum(one.clip_cut > 0 for one in seen)
    some = sum(one.unknown > 0 for one in seen)
    if by_clip:
        logger.warning("CLIP's text encoder does not see the end of %d of %d prompts (77 tokens)", by_clip, len(seen))
    if some:
        logger.warning("%d of %d prompts hold characters that the text encoder does not know", some, len(seen))
