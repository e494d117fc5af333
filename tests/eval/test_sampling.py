"""Tokens are drawn from the distribution that was asked for, by each sample's own numbers alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import TopKLogitsWarper, TopPLogitsWarper

from halfbyte.eval import sampling as sampling_module
from halfbyte.eval.backend import Sampling, sample_seed
from halfbyte.eval.sampling import Dice, draw


def logits_of(seed: int, rows: int, vocabulary: int) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6, top_p=0.95),
        Sampling(temperature=2.0, top_k=7),
        Sampling(temperature=1.5, top_k=20, top_p=0.5),
    ],
)
def test_draws_follow_transformers_distribution(sampling: Sampling) -> None:
    logits = logits_of(0, 1, 50)
    scores = logits / sampling.temperature
    none = torch.empty(0, 0, dtype=torch.long)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(none, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(none, scores)
    expected = scores.softmax(-1)[0].double()
    count = 20000
    rolls = [Dice(seed).roll() for seed in range(count)]
    drawn = torch.bincount(draw(logits.expand(count, -1), sampling, rolls), minlength=50)
    assert not drawn[expected == 0].any()
    likely = expected * count >= 5
    seen = torch.cat([drawn[likely], drawn[~likely].sum()[None]]).double()
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]]) * count
    keep = wanted > 0
    assert stats.chisquare(seen[keep], wanted[keep] * seen.sum() / wanted.sum()).pvalue > 1e-3


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.floats(0.05, 1.0), st.integers(0, 60), st.floats(0.0, 1.0, exclude_max=True))
def test_a_draw_depends_on_its_own_row_alone(seed: int, top_p: float, top_k: int, roll: float) -> None:
    logits = logits_of(seed, 4, 60).bfloat16().float()  # with ties
    sampling = Sampling(temperature=0.8, top_p=top_p, top_k=top_k)
    together = draw(logits, sampling, [0.1, roll, 0.9, 0.5])[1]
    assert draw(logits[1:2], sampling, [roll])[0] == together


def test_a_flat_distribution_needs_more_than_the_likeliest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(1, 3, 400) / 100
    sampling = Sampling(temperature=1.0, top_p=0.9)
    rolls = [0.1, 0.5, 0.99]
    expected = draw(logits, sampling, rolls)
    monkeypatch.setattr(sampling_module, "_LIKELY", 8)
    assert torch.equal(draw(logits, sampling, rolls), expected)


def test_the_last_number_draws_a_possible_token() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert draw(logits, Sampling(temperature=1.0), [1 - 2**-53]).item() == 1
    assert draw(logits, Sampling(temperature=1.0), [0.0]).item() == 0


def test_the_samples_of_a_question_have_seeds_of_their_own() -> None:
    seeds = [sample_seed(1234, "aime24", document, repeat) for document in range(30) for repeat in range(64)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sample_seed(1, "aime24", 0, 0) != sample_seed(2, "aime24", 0, 0) != sample_seed(2, "aime25", 0, 0)
