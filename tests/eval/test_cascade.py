"""Packed rows without a mask answer as single passes do; on a CPU the kernel's place is taken by plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scoring import assert_same, few_shot, scored
from tiny import make_model
from torch import Tensor

from halfbyte.eval import cascade, trial
from halfbyte.eval.scorer import PACKED, PrefixScorer
from halfbyte.eval.sharing import Request


def _plain_flash(
    query: Tensor, key: Tensor, value: Tensor, pieces: Any, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """What cascade.flash gives, by a score for each pair."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    outputs, normalizers = [], []
    for at in range(len(pieces.queries) - 1):
        ours, theirs = (slice(int(ends[at]), int(ends[at + 1])) for ends in (pieces.queries, pieces.keys))
        scores = torch.einsum("qhd,khd->hqk", query[ours], key[theirs]) * scale
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[theirs]))
        normalizers.append(scores.logsumexp(-1))
    assert int(pieces.queries[-1]) == len(query)
    assert int(pieces.keys[-1]) == len(key)
    return torch.cat(outputs), torch.cat(normalizers, dim=1)


@pytest.fixture
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade, "flash", _plain_flash)
    monkeypatch.setattr(cascade, "takes", lambda _model: True)
    monkeypatch.setitem(PACKED, "cpu", 100)


@pytest.mark.usefixtures("_on_a_cpu")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_packed_rows_and_their_branches_do_not_see_each_other(family: str) -> None:
    model, requests = make_model(family).float(), few_shot()
    scorer = PrefixScorer(model, budget=256)
    assert scorer.cascades
    assert any(batch.packed and batch.prefix and len(batch.rows) > 1 for batch in scorer.plan(requests))
    assert_same(scored(scorer, requests), model, requests)


@pytest.mark.usefixtures("_on_a_cpu")
def test_rows_without_a_common_beginning_are_packed_too() -> None:
    model = make_model("llama").float()
    requests = [Request(tuple(range(5, 5 + size)), tail) for size in (40, 30, 3) for tail in ((1, 2), (3,), (4, 5))]
    scorer = PrefixScorer(model)
    (batch,) = scorer.plan(requests)
    assert (batch.prefix, batch.packed, scorer.cascades) == (0, True, True)
    assert_same(scored(scorer, requests), model, requests)


@pytest.mark.usefixtures("_on_a_cpu")
def test_an_attention_of_another_kind_is_masked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="halfbyte")
    assert not PrefixScorer(make_model("gemma3").float()).cascades  # a sliding window
    model = make_model("llama").float()
    model.config._attn_implementation = "eager"
    kept = trial.PackedRows.attend

    def capped(self: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        return kept(self, module, query, key, value, {**options, "softcap": 30.0})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial.PackedRows, "attend", capped)
        scorer = PrefixScorer(model, budget=256)
        assert not scorer.cascades
        assert "attention with softcap" in caplog.text
    assert_same(scored(scorer, few_shot()), model, few_shot())


def test_a_cpu_has_no_such_kernel() -> None:
    assert not PrefixScorer(make_model("llama").float()).cascades


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_on_a_gpu_answers_are_those_of_single_passes(family: str) -> None:
    model = make_model(family).to("cuda", torch.bfloat16)
    wide, requests = make_model(family).float(), few_shot()
    scorer = PrefixScorer(model, budget=1024)
    assert scorer.cascades
    batches = scorer.plan(requests)
    assert any(batch.packed and len(batch.rows) > 1 for batch in batches)
    masked = PrefixScorer(model, budget=1024)
    masked.__dict__["cascades"] = False
    exact = [value for value, _ in scored(PrefixScorer(wide), requests)]
    apart = [
        max(abs(value - other) for (value, _), other in zip(scored(one, requests), exact, strict=True))
        for one in (scorer, masked)
    ]
    assert apart[0] <= 2 * apart[1], "no further from float32 than with a mask, up to chance"
