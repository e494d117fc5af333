"""What a serving engine computes, on a tiny model of transformers: log-probabilities of a prompt, and texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Text:
    """A generated text."""

    ids: list[int]
    """Without the end token."""
    text: str
    reason: str
    """stop or length, as OpenAI names them."""
    stop: str | int | None
    """The stop string or token; None for the end token."""
    count: int
    """Tokens, the end token included."""


class Brain:
    """A tiny model that answers as an engine does.

    Args:
        model: A causal LM of transformers.
        tokenizer: Its tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @torch.inference_mode()
    def log_probs(self, ids: Sequence[int]) -> torch.Tensor:
        """Of the token after each position, float32 [tokens, vocabulary]."""
        return self.model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)

    def generate(
        self,
        ids: Sequence[int],
        *,
        most: int,
        temperature: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        bias: dict[int, float] | None = None,
    ) -> Text:
        """A text after a prompt, greedy at temperature 0."""
        dice = torch.Generator().manual_seed(seed) if seed is not None else None
        made: list[int] = []
        while len(made) < most:
            scores = self.log_probs([*ids, *made])[-1].clone()
            for token, value in (bias or {}).items():
                scores[token] += value
            if temperature > 0:
                token = int(torch.multinomial((scores / temperature).softmax(-1), 1, generator=dice))
            else:
                token = int(scores.argmax())
            if token == self.tokenizer.eos_token_id:
                return Text(made, self._decode(made), "stop", None, len(made) + 1)
            made.append(token)
            text = self._decode(made)
            if token in stop_ids:
                return Text(made, text, "stop", token, len(made))
            for one in stop:
                if one in text:
                    return Text(made, text[: text.index(one)], "stop", one, len(made))
        return Text(made, self._decode(made), "length", None, len(made))

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
