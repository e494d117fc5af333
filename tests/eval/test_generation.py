"""Continuous batching gives what each sequence gives alone, whatever is beside it and whatever memory there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from halfbyte.eval.backend import Stop
from halfbyte.eval.generation import Generator, Sample
from halfbyte.quant.attach import attach_kv_cache, prepare

SMALL = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 1, "head_dim": 16,
}  # fmt: skip
NEW = 20


def made(kind: str, **options: Any) -> Any:
    """A random tiny model of an architecture."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**{**SMALL, **options})
        return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


def with_kv_cache(kind: str) -> Any:
    prepare(torch.device("cpu"))
    model = made("Llama")
    attach_kv_cache(model, {}, kind, torch.device("cpu"))
    return model


def prompts() -> list[tuple[int, ...]]:
    """Some with 40 tokens in common, one of a single token, one in it twice."""
    dice = torch.Generator().manual_seed(5)

    def drawn(count: int) -> list[int]:
        found: list[int] = torch.randint(2, 384, (count,), generator=dice).tolist()
        return found

    head = drawn(40)
    found = [tuple(head + drawn(count)) for count in (3, 9, 15, 1)] + [tuple(drawn(count)) for count in (1, 5, 30)]
    return [*found, found[1]]


def greedy(logits: Tensor, _: list[Sample]) -> Tensor:
    return logits.argmax(-1)


def ended(tokens: Sequence[int]) -> Stop | None:
    """At different lengths, which tokens decide."""
    if tokens[-1] % 16 == 3:
        return "stop_string"
    return "length" if len(tokens) >= NEW else None


def alone(model: Any, prompt: tuple[int, ...], end: Callable[[Sequence[int]], Stop | None] = ended) -> list[int]:
    """By transformers, one by one."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=90, do_sample=False, eos_token_id=None, pad_token_id=1
    )
    found: list[int] = []
    for token in output[0, len(prompt) :].tolist():
        found.append(token)
        if end(found) is not None:
            break
    return found


def generated(generator: Generator, end: Callable[[Sequence[int]], Stop | None] = ended) -> list[list[int]]:
    samples = [Sample(prompt) for prompt in prompts()]
    generator.generate(samples, greedy, end)
    assert all(sample.stop is not None for sample in samples)
    return [sample.tokens for sample in samples]


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: made("Llama"),
    "llama with eager attention": lambda: eager(made("Llama")),
    "an FP8 KV cache": lambda: with_kv_cache("FP8"),
    "an NVFP4 KV cache": lambda: with_kv_cache("NVFP4"),
    "a sliding window": lambda: made("Mistral", sliding_window=8),
    "a sliding window in some layers": lambda: made("Gemma3Text", sliding_window=8),
    "soft caps": lambda: eager(made("Gemma2", sliding_window=8)),
    "sinks and experts": lambda: made("GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "learned positions": lambda: made("GPT2", n_embd=64, n_layer=2, n_head=4, n_positions=512),
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_texts_are_those_of_each_sequence_alone(name: str) -> None:
    model = MODELS[name]()
    generator = Generator(model, slots=3, budget=64)
    assert generator.refusal is None
    assert generated(generator) == [alone(model, prompt) for prompt in prompts()]


@pytest.mark.parametrize("slots", [1, 2, 8, 100])
def test_the_number_of_slots_changes_no_text(tiny_llama: Any, slots: int) -> None:
    assert generated(Generator(tiny_llama, slots=slots)) == [alone(tiny_llama, prompt) for prompt in prompts()]


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("Bloom", {"n_head": 4, "n_layer": 2}, "BloomForCausalLM takes no position_ids"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic rotary"),
        ("Mamba", {}, "MambaForCausalLM takes no position_ids"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_reason(kind: str, options: dict[str, Any], reason: str) -> None:
    assert reason in str(Generator(made(kind, **options)).refusal)


def test_a_model_whose_logits_differ_in_slots_is_refused(llama_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama_factory()
    call = model.forward

    def other(*arguments: Any, **options: Any) -> Any:
        output = call(*arguments, **options)
        if options.get("past_key_values") is not None:
            output.logits = output.logits * 1.5
        return output

    monkeypatch.setattr(model, "forward", other)
    generator = Generator(model)
    monkeypatch.setattr("inspect.signature", lambda _: type("", (), {"parameters": {"position_ids": None}}))
    assert "gives other logits there" in str(generator.refusal)


def long(tokens: Sequence[int]) -> Stop | None:
    return "length" if len(tokens) >= 90 else None


def test_slots_grow_with_the_texts_and_not_before(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(tiny_llama, slots=3)
    capacities = []
    resize = generator.decoder.resize

    def watched(count: int, capacity: int, *, used: int) -> None:
        capacities.append(capacity)
        resize(count, capacity, used=used)

    monkeypatch.setattr(generator.decoder, "resize", watched)
    assert generated(generator, long) == [alone(tiny_llama, prompt, long) for prompt in prompts()]
    assert capacities[0] == 128
    assert 192 in capacities


def test_where_memory_is_planned_for_less_the_shortest_wait_and_no_token_is_lost(
    tiny_llama: Any, caplog: pytest.LogCaptureFixture
) -> None:
    generator = Generator(tiny_llama, slots=8)
    generator.room = 400  # three slots of 128 tokens, two of 192
    caplog.set_level("INFO", logger="halfbyte")  # an earlier command line may have made it quiet
    assert generated(generator, long) == [alone(tiny_llama, prompt, long) for prompt in prompts()]
    assert "wait until longer ones are done" in caplog.text


@pytest.mark.parametrize(
    ("where", "moment"),
    [(where, at) for where in ("logits", "resize", "prefill") for at in (0, 1)] + [("logits", 50)],
)
def test_out_of_memory_half_as_many_sequences_go_on_with_what_they_have(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch, where: str, moment: int
) -> None:
    generator = Generator(tiny_llama, slots=8, budget=1000 if moment == 0 else 64)
    owner: Any = generator if where == "prefill" else generator.decoder
    call, calls = getattr(owner, where), 0

    def lacking(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == moment + 1:
            raise torch.OutOfMemoryError("no memory")
        return call(*arguments, **options)

    monkeypatch.setattr(owner, where, lacking)
    assert generated(generator, long) == [alone(tiny_llama, prompt, long) for prompt in prompts()]
    assert calls > moment
    assert (generator.most, generator.budget) != (8, 1000 if moment == 0 else 64)


def test_out_of_memory_with_one_sequence_is_an_error(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(tiny_llama, slots=8)

    def lacking(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(generator.decoder, "logits", lacking)
    with pytest.raises(torch.OutOfMemoryError):
        generated(generator)


def test_equal_beginnings_are_computed_once(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(tiny_llama, slots=4)
    assert generator.decoder.slots.count == 0
    computed: list[int] = []
    call = generator._compute

    def watched(ids: Tensor, shared: Any, start: int) -> Any:
        computed.append(ids.numel())
        return call(ids, shared, start)

    monkeypatch.setattr(generator, "_compute", watched)
    prompt = prompts()[2]
    samples = [Sample(prompt) for _ in range(16)]
    generator.generate(samples, greedy, ended)
    assert computed == [len(prompt) - 1]
    assert {tuple(sample.tokens) for sample in samples} == {tuple(alone(tiny_llama, prompt))}


def test_nothing_to_generate_needs_no_model() -> None:
    class NoModel:
        device = torch.device("cpu")

    Generator(NoModel()).generate([], greedy, ended)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "an FP8 KV cache", "a sliding window", "sinks and experts"])
def test_on_a_gpu_replayed_steps_give_the_texts_of_each_sequence_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[name]().to("cuda")
    for module in model.modules():
        for quantizer in ("k_bmm_quantizer", "v_bmm_quantizer"):
            if hasattr(module, quantizer):
                getattr(module, quantizer).to("cuda")
    generator = Generator(model, slots=6, budget=64)
    assert generator.refusal is None
    captured: list[tuple[int, int]] = []
    capture = generator.decoder._capture

    def watched(key: tuple[int, int]) -> None:
        capture(key)
        captured.append(key)

    monkeypatch.setattr(generator.decoder, "_capture", watched)
    texts = generated(generator, long)
    for prompt, tokens in zip(prompts(), texts, strict=True):
        ids = torch.tensor([[*prompt, *tokens]], device="cuda")
        greedy_tokens = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        assert greedy_tokens == tokens
    assert captured
    if name != "sinks and experts":  # whose routing waits for the GPU
        assert generator.decoder.graphs


@pytest.mark.gpu
def test_on_a_gpu_slots_keep_within_what_is_planned(llama_factory: Any) -> None:
    generator = Generator(llama_factory().to("cuda"), slots=32)
    assert generator.decoder is not None
    generator.room = 2048  # eight slots of 256 tokens
    texts = generated(generator, long)
    assert len(texts) == len(prompts())
    assert generator.decoder.slots.count == 0
