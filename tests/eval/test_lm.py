"""The journaled LM answers as lm-eval's hf backend does, in fixed batches, and counts what can go wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from halfbyte.eval.hf import HFBackend
from halfbyte.eval.lm import JournaledLM
from halfbyte.records.errors import UserError

CONTEXTS = ["the cat sees", "the sun is hot and the moon is", "a", "one two three four five", "the dog is not"]
CHOICES = [" red", " the big blue bird", " a fish", " yes"]


def pairs() -> list[Instance]:
    return [
        Instance("loglikelihood", {}, (context, choice), number, ("task", at, 1))
        for at, context in enumerate(CONTEXTS)
        for number, choice in enumerate(CHOICES)
    ]


def single(kind: Any, texts: list[str], settings: dict[str, Any] | None = None) -> list[Instance]:
    arguments = [(text,) if settings is None else (text, settings) for text in texts]
    return [Instance(kind, {}, argument, 0, ("task", at, 1)) for at, argument in enumerate(arguments)]


GREEDY = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
SAMPLED = {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}


@pytest.fixture
def lm(tiny_llama: Any, tiny_tokenizer: Any, tmp_path: Path) -> Callable[..., JournaledLM]:
    def make(
        folder: str = "journals",
        key: str = "key",
        model: Any = None,
        tokenizer: Any = None,
        allow_truncated: bool = True,
        **options: Any,
    ) -> Any:
        options = {"batch_size": 1, "batch_tokens": 16, **options}
        backend = HFBackend(model or tiny_llama, tokenizer or tiny_tokenizer, **options)
        return JournaledLM(backend, tmp_path / folder, key, label="task", allow_truncated=allow_truncated)

    return make


def test_answers_are_those_of_the_hf_backend(lm: Any, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    plain = HFLM(pretrained=tiny_llama, tokenizer=tiny_tokenizer, batch_size=1)
    texts = [f"{context}{choice} {context}" for context in CONTEXTS for choice in CHOICES]
    for (ours, greedy), (theirs, same) in zip(
        lm().loglikelihood(pairs()), plain.loglikelihood(pairs(), disable_tqdm=True), strict=True
    ):
        assert ours == pytest.approx(theirs, abs=1e-4)
        assert greedy == same
    rolling = single("loglikelihood_rolling", texts)
    assert lm().loglikelihood_rolling(rolling) == pytest.approx(plain.loglikelihood_rolling(rolling), abs=1e-3)
    prompts = single("generate_until", CONTEXTS, GREEDY)
    assert lm().generate_until(prompts) == plain.generate_until(prompts, disable_tqdm=True)


def test_an_empty_context_is_scored_behind_the_prefix_token(lm: Any, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    requests = [Instance("loglikelihood", {}, ("", "the cat"), 0, ("task", 0, 1))]
    plain = HFLM(pretrained=tiny_llama, tokenizer=tiny_tokenizer, batch_size=1)
    journaled = lm()
    assert journaled.loglikelihood(requests)[0][0] == pytest.approx(
        plain.loglikelihood(requests, disable_tqdm=True)[0][0], abs=1e-4
    )
    assert [one.bos for one in journaled.book.asked.values()] == [[1]]


@pytest.mark.parametrize(
    ("method", "requests"),
    [
        ("loglikelihood", pairs()),
        ("loglikelihood_rolling", single("loglikelihood_rolling", CONTEXTS + CHOICES)),
        ("generate_until", single("generate_until", CONTEXTS + CHOICES, GREEDY)),
        ("generate_until", single("generate_until", (CONTEXTS + CHOICES) * 2, SAMPLED)),
    ],
    ids=["loglikelihood", "rolling", "greedy", "sampled"],
)
def test_a_run_cut_short_anywhere_ends_as_an_undisturbed_one(lm: Any, method: str, requests: list[Instance]) -> None:
    undisturbed = lm("undisturbed")
    expected = getattr(undisturbed, method)(requests)
    for batches in (0, 1, 2):
        cut = lm(f"cut {batches}")
        name = "generate" if method == "generate_until" else "score"
        answer, left = getattr(cut.backend, name), batches

        def fail(*arguments: Any, answer: Any = answer, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return answer(*arguments, **options)

        setattr(cut.backend, name, fail)
        with pytest.raises(KeyboardInterrupt):
            getattr(cut, method)(requests)
        resumed = lm(f"cut {batches}")
        assert getattr(resumed, method)(requests) == expected
        assert (resumed.book.asked, resumed.generated) == (undisturbed.book.asked, undisturbed.generated)
        assert resumed.tokens == undisturbed.tokens


def test_a_finished_journal_needs_no_model(lm: Any) -> None:
    expected = lm().loglikelihood(pairs())
    again = lm()
    again.backend.score = None
    assert again.loglikelihood(pairs()) == expected


def test_a_journal_of_other_settings_or_requests_is_not_used(lm: Any, llama_factory: Any) -> None:
    lm().loglikelihood(pairs())
    other = llama_factory(seed=7)
    assert lm(key="other", model=other).loglikelihood(pairs()) == lm("fresh", model=other).loglikelihood(pairs())
    fewer = pairs()[:-1]
    assert lm().loglikelihood(fewer) == lm("few").loglikelihood(fewer)


def test_sampling_differs_between_seeds_and_not_between_runs(lm: Any) -> None:
    prompts = single("generate_until", CONTEXTS, SAMPLED)
    one, again, other = lm("one"), lm("again"), lm("other")
    other.seed = 99
    assert one.generate_until(prompts) == again.generate_until(prompts)
    assert one.generate_until(prompts) != other.generate_until(prompts)


@pytest.mark.parametrize(("add_bos", "text", "count"), [(False, "", 0), (True, "", 1), (True, "<bos><bos>", 2)])
def test_bos_tokens_are_counted_as_the_model_gets_them(
    lm: Any, tokenizer_factory: Any, monkeypatch: pytest.MonkeyPatch, add_bos: bool, text: str, count: int
) -> None:
    requests = [Instance("loglikelihood", {}, (f"{text}the cat", " sees"), 0, ("task", 0, 1))]
    journaled = lm(tokenizer=tokenizer_factory(add_bos=add_bos))
    fed: list[list[int]] = []
    call = journaled.backend.model.forward

    def spy(ids: torch.Tensor, **options: Any) -> Any:
        fed.extend(ids.tolist())
        return call(ids, **options)

    monkeypatch.setattr(journaled.backend.model, "forward", spy)
    journaled.loglikelihood(requests)
    assert [(one.bos, one.doubled) for one in journaled.book.asked.values()] == [([count], max(0, count - 1))]
    assert fed[0][:count] == [0] * count
    assert fed[0][count] != 0


def test_truncated_prompts_are_counted(lm: Any) -> None:
    long = "the cat sees the dog and the moon " * 3
    journaled = lm(max_length=16)
    journaled.loglikelihood(
        [Instance("loglikelihood", {}, (text, " red"), 0, ("task", at, 1)) for at, text in enumerate(["the", long])]
    )
    tokens = len(journaled.tokenizer(long + " red").input_ids)
    assert [one.cut for one in journaled.book.asked.values()] == [0, tokens - 17]
    journaled = lm("generated", max_length=16)
    journaled.generate_until(single("generate_until", ["the", long], GREEDY))
    tokens = len(journaled.tokenizer(long).input_ids)
    assert [(one.cut, one.tokens) for one in journaled.book.asked.values()][1] == (tokens - 8, 8)


def test_truncated_prompts_are_an_error_unless_they_are_allowed(lm: Any) -> None:
    prompts = single("generate_until", ["the", "the cat sees the dog and the moon " * 3], GREEDY)
    with pytest.raises(UserError, match="task: 1 of 2 prompts do not fit into 16 tokens together with their answers"):
        lm(max_length=16, allow_truncated=False).generate_until(prompts)


def test_a_prompt_that_just_fits_is_not_truncated(lm: Any, tiny_tokenizer: Any) -> None:
    length = len(tiny_tokenizer("the cat sees red").input_ids)
    request = [Instance("loglikelihood", {}, ("the cat sees", " red"), 0, ("task", 0, 1))]
    for max_length, truncated in ((length - 1, 0), (length - 2, 1)):  # the last token is scored, not fed
        journaled = lm(f"journals {max_length}", max_length=max_length)
        journaled.loglikelihood(request)
        assert [one.cut for one in journaled.book.asked.values()] == [truncated]


def test_each_text_says_how_it_ended_and_how_long_it_is(lm: Any, tiny_tokenizer: Any, llama_factory: Any) -> None:
    model = llama_factory()
    cat, eos = tiny_tokenizer("cat").input_ids[-1], tiny_tokenizer.eos_token_id
    for token, stop, text, generated in ((cat, "length", "cat" * 8, 8), (eos, "end_token", "", 1)):
        with torch.no_grad():
            model.lm_head.weight.zero_()
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(384))
        with torch.no_grad():
            model.lm_head.bias[token] = 100.0  # says this and nothing else
        journaled = lm(f"journals {token}", model=model)
        prompts = single("generate_until", ["the", "a dog"], GREEDY)
        journaled.generate_until(prompts)
        for number in range(2):
            (found,) = journaled.generated["task", number]
            assert (found.stop, found.text.replace(" ", ""), found.tokens) == (stop, text, generated)
        prompt_tokens = sum(len(tiny_tokenizer(request.args[0]).input_ids) for request in prompts)
        assert journaled.tokens == prompt_tokens + 2 * generated


def test_a_generation_ended_by_a_stop_text_did_not_hit_the_limit(
    lm: Any, tiny_tokenizer: Any, llama_factory: Any
) -> None:
    model = llama_factory()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(384))
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias[tiny_tokenizer("cat").input_ids[-1]] = 100.0
    journaled = lm(model=model)
    journaled.generate_until(single("generate_until", ["the"], {**GREEDY, "until": ["at"]}))
    assert [one.stop for one in journaled.generated["task", 0]] == ["stop_string"]


def test_no_room_for_a_prompt_is_an_error(lm: Any) -> None:
    with pytest.raises(UserError, match="max_gen_toks 600 leaves no room for a prompt in 512 tokens"):
        lm().generate_until(single("generate_until", ["the"], {"until": [], "max_gen_toks": 600}))


def test_logits_that_are_no_numbers_are_an_error(lm: Any, llama_factory: Any) -> None:
    model = llama_factory()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="task: the model gives 20 of 20 log-likelihoods that are no numbers"):
        lm(model=model).loglikelihood(pairs())


@pytest.mark.parametrize("template", ["{{ raise_exception('no system role') }}", "{% for m in messages %}{{ m."])
def test_a_chat_template_that_refuses_a_chat_is_one_line(
    template: str, tiny_llama: Any, tokenizer_factory: Any, tmp_path: Path
) -> None:
    tokenizer = tokenizer_factory()
    tokenizer.chat_template = template
    lm = JournaledLM(HFBackend(tiny_llama, tokenizer), tmp_path, "key")
    with pytest.raises(UserError, match="does not render a chat that begins with system, user"):
        lm.apply_chat_template([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
