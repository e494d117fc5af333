"""Draws tokens from logits, each sample with random numbers of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper

from halfbyte.eval.backend import Sampling

_LIKELY = 1024
"""Tokens looked at for top_p before all are sorted: they hold its mass in almost every case."""


class Dice:
    """A sample's own random numbers, one a token.

    Args:
        seed: The sample's.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generator = np.random.Generator(np.random.Philox(seed))

    def roll(self) -> float:
        """The next one, in [0, 1)."""
        return float(self._generator.random())


def draw(logits: Tensor, sampling: Sampling, rolls: Sequence[float]) -> Tensor:
    """A token for each row, int64 [rows]: the first whose cumulative probability is above the row's roll.

    Tokens are passed in the order of the vocabulary, and those of equal probability at the edge of top_k or top_p are
    all kept, so that nothing depends on how a batch was sorted.

    Args:
        logits: float32 [rows, vocabulary].
        sampling: Its temperature is above 0.
        rolls: In [0, 1).
    """
    none = torch.empty(0, 0, dtype=torch.long, device=logits.device)
    scores = TemperatureLogitsWarper(sampling.temperature)(none, logits)
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = TopKLogitsWarper(sampling.top_k)(none, scores)
    probabilities = scores.softmax(-1)
    if sampling.top_p < 1:
        probabilities = probabilities.where(probabilities >= _edge(probabilities, sampling.top_p), 0)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    wanted = torch.tensor(rolls, dtype=torch.float64, device=logits.device)[:, None] * total
    wanted = wanted.minimum(torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(-1)


def _edge(probabilities: Tensor, top_p: float) -> Tensor:
    """The smallest probability among the fewest tokens that together have top_p, [rows, 1]."""
    for count in (min(_LIKELY, probabilities.shape[-1]), probabilities.shape[-1]):
        likely = probabilities.topk(count).values
        before = likely.cumsum(-1, dtype=torch.float64) - likely
        kept = (before < top_p).sum(-1, keepdim=True)
        if count == probabilities.shape[-1] or int(kept.max()) < count:
            break
    return likely.gather(-1, kept - 1)
