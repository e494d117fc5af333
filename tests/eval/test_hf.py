"""The hf backend generates what lm-eval's generates, and each sample from nothing but its logits and its seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import GPT2Config, GPT2LMHeadModel

from halfbyte.eval.backend import Generated, Prompt, Sampling
from halfbyte.eval.hf import HFBackend, plan_batches
from halfbyte.eval.lm import JournaledLM
from halfbyte.records.errors import UserError

TEXTS = ["the cat sees", "the sun is hot and the moon is", "a", "one two three four five", "the dog is not"]
GREEDY = Sampling(until=("\n",), max_gen_toks=12)
DRAWN = Sampling(until=("\n",), max_gen_toks=12, temperature=1.0, top_p=0.95)


def asked(tokenizer: Any, texts: list[str], sampling: Sampling, seeds: list[int] | None = None) -> list[Prompt]:
    return [
        Prompt(text, tuple(tokenizer(text).input_ids), sampling, None if seeds is None else seeds[at])
        for at, text in enumerate(texts)
    ]


def by_lm_eval(model: Any, tokenizer: Any, texts: list[str], settings: dict[str, Any]) -> list[str]:
    plain = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    requests = [Instance("generate_until", {}, (text, settings), 0, ("task", at, 1)) for at, text in enumerate(texts)]
    found: list[str] = plain.generate_until(requests, disable_tqdm=True)
    return found


@pytest.fixture(params=["in continuous batches", "by transformers' generate"])
def backend(request: pytest.FixtureRequest) -> Callable[..., HFBackend]:
    """A backend that generates in one of its two ways."""

    def make(model: Any, tokenizer: Any, **options: Any) -> HFBackend:
        made = HFBackend(model, tokenizer, **options)
        if request.param == "by transformers' generate":
            made.generator.refusal = "a test"
        else:
            assert made.generator.refusal is None
        return made

    return make


@pytest.mark.parametrize(
    ("until", "options"),
    [(["\n"], {}), (["the", " cat"], {}), (["at", "g s"], {}), ([], {}), (["\n"], {"repetition_penalty": 1.3})],
)
def test_greedy_texts_are_lm_evals(
    backend: Any, until: list[str], options: dict[str, Any], tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    settings = {"until": until, "max_gen_toks": 24, "do_sample": False, **options}
    sampling = Sampling(until=tuple(until), max_gen_toks=24, other=tuple(options.items()))
    found = backend(tiny_llama, tiny_tokenizer, batch_size=2).generate(asked(tiny_tokenizer, TEXTS, sampling))
    assert [one.text for one in found] == by_lm_eval(tiny_llama, tiny_tokenizer, TEXTS, settings)
    assert all(one.seed is None for one in found)


def test_a_vocabulary_larger_than_the_tokenizers_is_generated_from(
    backend: Any, llama_factory: Any, tiny_tokenizer: Any
) -> None:
    model = llama_factory(vocab_size=600)
    settings = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
    found = backend(model, tiny_tokenizer).generate(asked(tiny_tokenizer, TEXTS, GREEDY))
    assert [one.text for one in found] == by_lm_eval(model, tiny_tokenizer, TEXTS, settings)


def test_a_tokenizer_without_padding_token_is_enough(backend: Any, tiny_llama: Any, tokenizer_factory: Any) -> None:
    tokenizer = tokenizer_factory()
    expected = backend(tiny_llama, tokenizer).generate(asked(tokenizer, TEXTS, GREEDY))
    bare = tokenizer_factory()
    bare.pad_token = None
    assert backend(tiny_llama, bare).generate(asked(bare, TEXTS, GREEDY)) == expected


def test_a_sample_depends_on_its_seed_and_not_on_its_batch(backend: Any, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    prompts = asked(tiny_tokenizer, TEXTS * 3, DRAWN, list(range(15)))
    together = backend(tiny_llama, tiny_tokenizer, batch_size=4).generate(prompts)
    turned = backend(tiny_llama, tiny_tokenizer, batch_size=15).generate(prompts[::-1])[::-1]
    apart = [backend(tiny_llama, tiny_tokenizer, batch_size=1).generate([prompt])[0] for prompt in prompts[:4]]
    assert together == turned
    assert together[:4] == apart
    assert [one.seed for one in together] == list(range(15))


def test_both_ways_draw_the_same(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    prompts = asked(tiny_tokenizer, TEXTS, DRAWN, list(range(5)))
    plain = HFBackend(tiny_llama, tiny_tokenizer)
    plain.generator.refusal = "a test"
    assert plain.generate(prompts) == HFBackend(tiny_llama, tiny_tokenizer).generate(prompts)


def test_the_samples_of_a_question_differ(backend: Any, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    found = backend(tiny_llama, tiny_tokenizer).generate(asked(tiny_tokenizer, TEXTS[:1] * 16, DRAWN, list(range(16))))
    assert len({one.text for one in found}) > 8


def test_a_text_without_a_token_of_its_own_is_empty(backend: Any, llama_factory: Any, tiny_tokenizer: Any) -> None:
    model = llama_factory()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(384))
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias[1] = 100.0
    found = backend(model, tiny_tokenizer).generate(asked(tiny_tokenizer, TEXTS[:1], GREEDY))
    assert found == [Generated("", 1, "end_token", None)]


def test_all_of_a_models_end_tokens_end_a_text(backend: Any, llama_factory: Any, tiny_tokenizer: Any) -> None:
    model = llama_factory()
    (first,) = backend(model, tiny_tokenizer).generate(asked(tiny_tokenizer, TEXTS[:1], Sampling(max_gen_toks=3)))
    token = tiny_tokenizer(first.text).input_ids[-1]
    model.generation_config.eos_token_id = [1, token]
    (found,) = backend(model, tiny_tokenizer).generate(asked(tiny_tokenizer, TEXTS[:1], Sampling(max_gen_toks=3)))
    assert found.stop == "end_token"


def test_settings_that_continuous_batching_has_not_go_to_transformers(
    tiny_llama: Any, tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="halfbyte")  # an earlier command line may have made it quiet
    sampling = Sampling(until=("\n",), max_gen_toks=12, other=(("no_repeat_ngram_size", 2),))
    found = HFBackend(tiny_llama, tiny_tokenizer).generate(asked(tiny_tokenizer, TEXTS, sampling))
    settings = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False, "no_repeat_ngram_size": 2}
    assert [one.text for one in found] == by_lm_eval(tiny_llama, tiny_tokenizer, TEXTS, settings)
    assert "no_repeat_ngram_size is set" in caplog.text


def test_a_setting_for_drawing_that_would_have_no_effect_is_an_error(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    sampling = Sampling(max_gen_toks=4, temperature=1.0, other=(("min_p", 0.1),))
    with pytest.raises(UserError, match="min_p has no effect here"):
        HFBackend(tiny_llama, tiny_tokenizer).generate(asked(tiny_tokenizer, TEXTS[:1], sampling, [1]))


def test_out_of_memory_transformers_generate_goes_on_with_half(
    tiny_llama: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = asked(tiny_tokenizer, TEXTS, DRAWN, list(range(5)))
    expected = HFBackend(tiny_llama, tiny_tokenizer).generate(prompts)
    backend = HFBackend(tiny_llama, tiny_tokenizer, batch_size=4)
    backend.generator.refusal = "a test"
    call, sizes = tiny_llama.generate, []

    def lacking(**options: Any) -> Any:
        sizes.append(len(options["input_ids"]))
        if sizes[-1] > 2:
            options["stopping_criteria"][0].samples[0].roll()
            raise torch.OutOfMemoryError("no memory")
        return call(**options)

    monkeypatch.setattr(tiny_llama, "generate", lacking)
    assert backend.generate(prompts) == expected
    assert sizes == [4, 2, 2, 1]


def test_batches_keep_equal_prompts_together_and_begin_with_the_longest() -> None:
    prompts = [Prompt("", tuple([at % 7] * (1 + at % 7)), GREEDY if at % 2 else DRAWN, at) for at in range(84)]
    batches = plan_batches(prompts, 2)
    assert sorted(at for batch in batches for at in batch) == list(range(84))
    for batch in batches:
        assert len({prompts[at].sampling for at in batch}) == 1
    homes = {(prompts[at].tokens, prompts[at].sampling): set() for at in range(84)}
    for number, batch in enumerate(batches):
        for at in batch:
            homes[prompts[at].tokens, prompts[at].sampling].add(number)
    assert all(len(numbers) == 1 for numbers in homes.values())
    firsts = [len(prompts[batch[0]].tokens or ()) for batch in batches]
    assert firsts == sorted(firsts, reverse=True)


def test_each_sample_is_told_of_when_it_ends(backend: Any, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    made, told = backend(tiny_llama, tiny_tokenizer, batch_size=2), []
    made.told = lambda: told.append(1)
    made.generate(asked(tiny_tokenizer, TEXTS, GREEDY))
    assert len(told) == len(TEXTS)


def test_k_samples_of_lm_eval_have_k_seeds(tiny_llama: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    settings = {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    question = Instance("generate_until", {}, ("the cat sees", settings), 0, ("task", 7, 8))
    other = Instance("generate_until", {}, ("the dog", settings), 0, ("task", 8, 8))
    lm = JournaledLM(HFBackend(tiny_llama, tiny_tokenizer, batch_size=3), tmp_path / "one", "key")
    texts = lm.generate_until([question] * 8 + [other] * 8)
    assert [one.text for one in lm.generated["task", 7]] == texts[:8]
    assert len({one.seed for samples in lm.generated.values() for one in samples}) == 16
    fewer = JournaledLM(HFBackend(tiny_llama, tiny_tokenizer, batch_size=16), tmp_path / "other", "key")
    assert fewer.generate_until([question] * 4) == texts[:4]


@pytest.mark.real
def test_gsm8k_texts_are_lm_evals_token_for_token(smollm2: Path, tmp_path: Path) -> None:
    from halfbyte.quant.load import load
    from halfbyte.recipes.schema import ModelSpec

    loaded = load(ModelSpec(id=str(smollm2)), device="cpu")
    shots = "Question: Ann has 3 apples and buys 4 more. How many has she?\nAnswer: 3 + 4 = 7\n#### 7\n\n" * 2
    texts = [f"{shots}Question: {question}\nAnswer:" for question in ("Tom has 2 dogs.", "What is 5 times 6?", "Hi")]
    settings = {"until": ["Question:", "</s>", "<|im_end|>"], "max_gen_toks": 48, "do_sample": False}
    requests = [Instance("generate_until", {}, (text, settings), 0, ("task", at, 1)) for at, text in enumerate(texts)]
    lm = JournaledLM(HFBackend(loaded.model, loaded.tokenizer), tmp_path, "key")
    assert lm.backend.generator.refusal is None
    plain = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=3)
    assert lm.generate_until(requests) == plain.generate_until(requests, disable_tqdm=True)


def test_a_lack_of_memory_changes_no_batch_of_a_later_task(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    made = HFBackend(tiny_llama, tiny_tokenizer, batch_size=2)
    prompts = [Prompt("", (1, at), GREEDY, None) for at in range(40)]
    planned = made.generation_batches(prompts)
    made.generator.most = 1
    assert made.generation_batches(prompts) == planned


def test_settings_that_nothing_follows_are_refused_in_one_line(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    backend = HFBackend(tiny_llama, tiny_tokenizer)
    for name, value in (("temprature", 0.6), ("seed", 3), ("use_cache", False), ("pad_token_id", 1)):
        sampling = Sampling(max_gen_toks=4, other=((name, value),))
        with pytest.raises(UserError, match=f"gen_kwargs.{name} is no setting"):
            backend.generate(asked(tiny_tokenizer, ["a cat"], sampling))


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_a_model_whose_logits_are_no_numbers_generates_nothing(
    backend: Any, sampling: Sampling, llama_factory: Any, tiny_tokenizer: Any
) -> None:
    broken = llama_factory()
    made = backend(broken, tiny_tokenizer)
    broken.lm_head.weight.data[7] = float("nan")
    with pytest.raises(UserError, match="logits that are no numbers"):
        made.generate(asked(tiny_tokenizer, ["a cat"], sampling, [5]))


def test_a_window_beyond_the_positions_a_model_learned_is_refused(tiny_tokenizer: Any) -> None:
    learned = GPT2LMHeadModel(GPT2Config(vocab_size=384, n_embd=8, n_layer=1, n_head=1, n_positions=64))
    assert HFBackend(learned, tiny_tokenizer).max_length == 64
    with pytest.raises(UserError, match="max_length 65 does not fit into the model, which knows 64 positions"):
        HFBackend(learned, tiny_tokenizer, max_length=65)
