"""Sharing changes no answer: for several families, sliding windows, quantized KV caches and little memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from scoring import alone, assert_same, few_shot, scored
from tiny import CPU, make_model, sequences, spec

from halfbyte.eval import sharing
from halfbyte.eval.scorer import PACKED, PrefixScorer
from halfbyte.eval.sharing import Request


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_answers_are_those_of_single_forward_passes(family: str) -> None:
    model, requests = make_model(family).float(), few_shot()
    scorer = PrefixScorer(model, budget=256)
    assert scorer.shares
    assert any(batch.prefix for batch in scorer.plan(requests))
    assert_same(scored(scorer, requests), model, requests)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_questions_one_after_another_in_a_sequence_do_not_see_each_other(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKED, "cpu", 100)
    model, requests = make_model(family).float(), few_shot()
    scorer = PrefixScorer(model, budget=256)
    batches = scorer.plan(requests)
    # Gemma's window is shorter than these rows, and a mask of our own knows no window.
    assert any(batch.packed and len(batch.rows) > 1 for batch in batches) == (family != "gemma3")
    assert all(batch.computed <= 100 or len(batch.rows) == 1 for batch in batches if batch.packed)
    assert_same(scored(scorer, requests), model, requests)


def test_few_questions_of_unlike_lengths_are_packed_and_not_padded() -> None:
    model, draw = make_model("llama").float(), random.Random(4)
    contexts = [tuple(draw.randrange(5, 380) for _ in range(length)) for length in (90, 60, 31, 30, 17, 5, 2)]
    requests = [Request(context, tail) for context in contexts for tail in ((1, 2), (3, 4, 5), (6,))]
    scorer = PrefixScorer(model)
    (batch,) = scorer.plan(requests)
    assert (batch.prefix, batch.packed) == (0, True)
    assert_same(scored(scorer, requests), model, requests)


def test_branches_longer_than_a_sliding_window_get_rows_of_their_own() -> None:
    scorer = PrefixScorer(make_model("gemma3").float(), budget=256)
    assert all(len(row.branches) <= 1 for batch in scorer.plan(few_shot()) for row in batch.rows)
    short = [Request((5, 6), (7, 8)), Request((5, 6), (9, 10))]
    assert any(len(row.branches) == 2 for batch in scorer.plan(short) for row in batch.rows)
    assert_same(scored(scorer, short), scorer.model, short)


def _odd_model(kind: str) -> Any:
    """Random models of architectures whose answers are easily changed by sharing."""
    import transformers as hf

    shape: dict[str, Any] = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    torch.manual_seed(0)
    if kind == "position table":
        model: Any = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=384, n_embd=64, n_layer=2, n_head=4, n_positions=160))
    elif kind == "local attention":
        config = hf.GPTNeoConfig(vocab_size=384, hidden_size=64, num_layers=2, num_heads=4, window_size=16,
                                 attention_types=[[["global", "local"], 1]], max_position_embeddings=512)  # fmt: skip
        model = hf.GPTNeoForCausalLM(config)
    elif kind == "distances in the row":
        model = hf.MptForCausalLM(hf.MptConfig(vocab_size=384, d_model=64, n_heads=4, n_layers=2, max_seq_len=512))
    elif kind == "sliding window":
        model = hf.MistralForCausalLM(hf.MistralConfig(**shape, sliding_window=48))
    elif kind == "positions by length":
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 130}  # fmt: skip
        config = hf.Phi3Config(**shape, rope_parameters=rope, max_position_embeddings=512,
                               original_max_position_embeddings=130, pad_token_id=0)  # fmt: skip
        model = hf.Phi3ForCausalLM(config)
    else:
        config = hf.Llama4TextConfig(**shape, intermediate_size_mlp=128, head_dim=16, attention_chunk_size=32,
                                     num_local_experts=2, pad_token_id=0)  # fmt: skip
        model = hf.Llama4ForCausalLM(config)
    return model.float().eval()


@pytest.mark.parametrize(
    ("kind", "shares"),
    [("position table", True), ("local attention", True), ("sliding window", True), ("positions by length", False),
     ("chunked attention", False), ("distances in the row", False)],
)  # fmt: skip
def test_no_architecture_gets_other_answers(kind: str, shares: bool) -> None:
    model, requests = _odd_model(kind), few_shot(questions=5)
    scorer = PrefixScorer(model, budget=256)
    assert scorer.shares == shares
    if kind == "positions by length":  # one length a batch: the model itself looks at the longest row
        requests = requests[:1]
    assert_same(scored(scorer, requests), model, requests)


def test_a_row_beyond_the_window_is_not_masked_with_a_short_branched_one() -> None:
    model = _odd_model("sliding window")
    draw = random.Random(2)
    answers = [Request(tuple(draw.randrange(5, 380) for _ in range(20)), (1, 2, 3)) for _ in range(4)]
    requests = [*answers, *(Request(one.context, (9, 8)) for one in answers)]
    requests += [Request(tuple(draw.randrange(5, 380) for _ in range(60)), (4,)) for _ in range(2)]
    assert_same(scored(PrefixScorer(model, budget=4096), requests), model, requests)


def test_padding_has_a_place_in_a_table_of_positions() -> None:
    model, draw = _odd_model("position table"), random.Random(3)
    long = tuple(draw.randrange(5, 380) for _ in range(156))
    requests = [Request(long, (1, 2, 3)), Request(long, (4, 5, 6)), Request(long[:100], (7,))]
    assert_same(scored(PrefixScorer(model, budget=4096), requests), model, requests)


@pytest.mark.parametrize("kv_cache", ["fp8", "nvfp4"])
def test_a_quantized_kv_cache_changes_nothing(kv_cache: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    from tiny import quantize_both

    make_model("llama").save_pretrained(tmp_path / "model")
    both, _, _ = quantize_both(
        tmp_path / "model", tiny_tokenizer, tmp_path / "checkpoint", spec("nvfp4", kv_cache), torch.float32,
        torch.tensor([sequences()[1]]), weights_settled=False,
    )  # fmt: skip
    requests = few_shot(questions=4)
    found = scored(PrefixScorer(both.read_back, budget=256), requests)
    # An input at the edge of two codes may round to the other one where sums are taken in another order.
    close = [
        abs(value - alone(both.read_back, request)[0]) < 1e-3
        for (value, _), request in zip(found, requests, strict=True)
    ]
    assert sum(close) >= 0.9 * len(close)
    assert (
        max(abs(value - alone(both.read_back, request)[0]) for (value, _), request in zip(found, requests, strict=True))
        < 2
    )


def test_a_model_without_a_cache_is_scored_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama").float()
    forward = model.forward

    def without_cache(input_ids: Any, past_key_values: Any = None, position_ids: Any = None, **options: Any) -> Any:
        if past_key_values is not None:
            raise TypeError("unexpected keyword argument 'past_key_values'")
        return forward(input_ids, position_ids=position_ids, **options)

    monkeypatch.setattr(model, "forward", without_cache)
    scorer, requests = PrefixScorer(model, budget=512), few_shot(questions=2)
    assert not scorer.shares
    assert_same(scored(scorer, requests), model, requests)


def test_a_cache_that_is_read_wrongly_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama").float()
    forward = model.forward

    def forgets_the_prefix(ids: Any, position_ids: Any = None, **_: Any) -> Any:
        return forward(ids, position_ids=position_ids, use_cache=False)

    monkeypatch.setattr(model, "forward", forgets_the_prefix)
    assert not PrefixScorer(model, budget=512).shares


def test_out_of_memory_halves_the_rows_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = make_model("llama").float(), few_shot()
    scorer = PrefixScorer(model, budget=100_000)
    expected = scored(scorer, requests)
    forward, sizes, failures = model.forward, [], []

    def small(ids: torch.Tensor, **options: Any) -> Any:
        if ids.numel() > 130:
            failures.append(ids.numel())
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(ids.numel())
        return forward(ids, **options)

    monkeypatch.setattr(model, "forward", small)
    found = scored(scorer, requests)
    assert failures
    failures.clear()
    scored(scorer, requests)  # what was too much once is not tried again
    assert sizes
    assert not failures
    for (value, greedy), (wanted, same) in zip(found, expected, strict=True):
        assert value == pytest.approx(wanted, abs=1e-4)
        assert greedy == same


def test_one_row_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama").float()
    scorer = PrefixScorer(model, budget=512)

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        scored(scorer, [Request((1, 2), (3,))])


def test_logits_are_computed_where_they_are_read_alone() -> None:
    model, requests = make_model("llama").float(), few_shot()
    scorer = PrefixScorer(model, budget=4096)
    assert scorer.shares  # tried before anything is counted
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, out: rows.append(out[..., 0].numel()))
    scored(scorer, requests)
    # One position a prefix besides, which transformers computes for nothing.
    assert sum(rows) == sum(len(request.continuation) for request in requests) + 2
    assert sharing.MIN_SAVED <= 6 * 120
    assert model.device == CPU
