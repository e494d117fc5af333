"""Claims about the server backend, against a fake that answers as vLLM does but for the faults it is told to have."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from brain import Brain
from fake_server import Faults, serving

from halfbyte.eval.backend import Prompt, Sampling
from halfbyte.eval.server import ServerBackend, open_server
from halfbyte.eval.sharing import Request
from halfbyte.records.errors import UserError
from halfbyte.records.record import UNKNOWN

CHAT = [{"role": "user", "content": "the cat sees"}]


@pytest.fixture(scope="module")
def brain(tiny_llama: Any, tiny_tokenizer: Any) -> Brain:
    """What the fake computes with."""
    return Brain(tiny_llama, tiny_tokenizer)


def _requests(tokenizer: Any) -> list[Request]:
    text = "the cat sees the dog"
    context = tuple(tokenizer(text)["input_ids"])
    answers = (" and the sun", " not", " big fish fish fish")
    return [Request(context, tuple(tokenizer(text + answer)["input_ids"][len(context) :])) for answer in answers]


def _scores(backend: ServerBackend, requests: list[Request]) -> list[tuple[float, bool]]:
    found: dict[int, tuple[float, bool]] = {}
    for batch in backend.score_batches(requests):
        found |= dict(zip(batch.members, backend.score(requests, batch), strict=True))
    return [found[at] for at in range(len(requests))]


def _expected(brain: Brain, request: Request) -> tuple[float, bool]:
    rows = brain.log_probs([*request.context, *request.continuation])[len(request.context) - 1 : -1]
    tokens = list(request.continuation)
    value = sum(float(row[token]) for row, token in zip(rows, tokens, strict=True))
    return value, [int(row.argmax()) for row in rows] == tokens


def _prompt(tokenizer: Any, text: str, *, seed: int | None = None, **sampling: Any) -> Prompt:
    settings = {"max_gen_toks": 8, **sampling}
    return Prompt(text, tuple(tokenizer(text)["input_ids"]), Sampling(**settings), seed)


@pytest.mark.parametrize(
    "faults",
    [
        Faults(),
        Faults(text_only=True),
        Faults(no_echo=True),
        Faults(shifted_echo=True),
        Faults(owner="llamacpp", no_echo=True, llama_shape=True),
    ],
    ids=["echo", "text alone", "no echo", "echo off by one", "llama.cpp"],
)
def test_scores_are_those_of_the_model(brain: Brain, tiny_tokenizer: Any, faults: Faults) -> None:
    requests = _requests(tiny_tokenizer)
    if not faults.text_only:  # what a random model says has other tokens when it is written down
        requests.append(Request(requests[0].context, tuple(brain.generate(requests[0].context, most=3).ids)))
    with serving(brain, faults) as server:
        found = _scores(open_server(server.spec(), tiny_tokenizer), requests)
    for request, (value, greedy) in zip(requests, found, strict=True):
        expected, is_greedy = _expected(brain, request)
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy is is_greedy
    assert faults.text_only or found[-1][1]


def test_a_prompt_that_cannot_be_written_as_text_is_refused(brain: Brain, tiny_tokenizer: Any) -> None:
    context = tuple(tiny_tokenizer("the cat")["input_ids"])
    parts = tuple(token for letter in " sees" for token in tiny_tokenizer(letter)["input_ids"])
    with serving(brain, Faults(text_only=True)) as server, pytest.raises(UserError, match="takes prompts as text"):
        _scores(open_server(server.spec(), tiny_tokenizer), [Request(context, parts)])


def test_a_server_that_adds_bos_to_texts_is_sent_texts_without(llama_factory: Any, tokenizer_factory: Any) -> None:
    tokenizer = tokenizer_factory(add_bos=True)
    brain = Brain(llama_factory(), tokenizer)
    context = tuple(tokenizer("the cat")["input_ids"])
    request = Request(context, tuple(tokenizer(" sees", add_special_tokens=False)["input_ids"]))
    with serving(brain, Faults(text_only=True, adds_bos=True)) as server:
        ((value, _),) = _scores(open_server(server.spec(), tokenizer), [request])
    assert value == pytest.approx(_expected(brain, request)[0], abs=1e-4)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (Faults(no_echo=True, bias_ignored=True), "every token of a senseless text|echoes"),
        (Faults(shifted_echo=True, biased=True), "not those of the tokens"),
    ],
)
def test_log_probabilities_that_are_not_of_the_prompt_are_refused_in_one_line(
    brain: Brain, tiny_tokenizer: Any, faults: Faults, reason: str
) -> None:
    with serving(brain, faults) as server, pytest.raises(UserError, match="gives no log-prob") as raised:
        _scores(open_server(server.spec(), tiny_tokenizer), _requests(tiny_tokenizer))
    assert any(part in str(raised.value) for part in reason.split("|"))
    assert "tasks that generate" in str(raised.value)


def test_greedy_texts_are_those_of_the_hf_backend(brain: Brain, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    from halfbyte.eval.hf import HFBackend

    prompts = [_prompt(tiny_tokenizer, text) for text in ("the cat", "one two three", "fire tree bird")]
    hf = HFBackend(tiny_llama, tiny_tokenizer)
    with serving(brain) as server:
        backend = open_server(server.spec(), tiny_tokenizer)
        (batch,) = backend.generation_batches(prompts)
        found = backend.generate([prompts[at] for at in batch])
    assert found == hf.generate(prompts)


def test_a_text_is_cut_at_a_stop_string_and_says_how_it_ended(brain: Brain, tiny_tokenizer: Any) -> None:
    whole = brain.generate(tiny_tokenizer("the cat")["input_ids"], most=8).text
    stop = whole[len(whole) // 2 :][:3]
    with serving(brain) as server:
        (stopped, full) = open_server(server.spec(), tiny_tokenizer).generate(
            [_prompt(tiny_tokenizer, "the cat", until=(stop,)), _prompt(tiny_tokenizer, "the cat")]
        )
    assert stopped.text == whole[: whole.index(stop)]
    assert (stopped.stop, full.stop) == ("stop_string", "length")
    assert full.tokens == 8


def test_what_stopped_a_text_is_not_invented(brain: Brain, tiny_tokenizer: Any) -> None:
    whole = brain.generate(tiny_tokenizer("the cat")["input_ids"], most=8).text
    with serving(brain, Faults(no_reason=True)) as server:
        (found,) = open_server(server.spec(), tiny_tokenizer).generate(
            [_prompt(tiny_tokenizer, "the cat", until=(whole[-2:],))]
        )
    assert found.stop == "stopped"


def test_stop_strings_that_are_special_tokens_are_sent_as_tokens(brain: Brain, tiny_tokenizer: Any) -> None:
    with serving(brain) as server:
        open_server(server.spec(), tiny_tokenizer).generate([_prompt(tiny_tokenizer, "the cat", until=("<|user|>",))])
    path, payload = server.asked[-1]
    assert path == "/v1/completions"
    assert payload["stop_token_ids"] == [tiny_tokenizer.convert_tokens_to_ids("<|user|>")]


def test_sampling_defaults_of_the_server_are_turned_off(brain: Brain, tiny_tokenizer: Any) -> None:
    with serving(brain) as server:
        open_server(server.spec(), tiny_tokenizer).generate([_prompt(tiny_tokenizer, "the cat")])
    payload = server.asked[-1][1]
    assert (payload["top_k"], payload["top_p"], payload["min_p"], payload["repetition_penalty"]) == (0, 1.0, 0.0, 1.0)


def test_each_sample_is_drawn_with_its_own_seed(brain: Brain, tiny_tokenizer: Any) -> None:
    prompts = [_prompt(tiny_tokenizer, "the cat", seed=seed, temperature=1.0) for seed in (1, 2, 1)]
    with serving(brain) as server:
        found = open_server(server.spec(), tiny_tokenizer).generate(prompts)
    assert [one.seed for one in found] == [1, 2, 1]
    assert found[0].text == found[2].text != found[1].text


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (Faults(seed_ignored=True), "ignores the seed.*different texts for one seed"),
        (Faults(one_seed=True), "ignores the seed.*one text for different seeds"),
        (Faults(limit_ignored=True), "generated 13 tokens where 8 were the most"),
        (Faults(cuts_to=2), "counts 2 tokens in a prompt of .*: it cuts prompts"),
        (Faults(no_usage=True), "does not report usage.prompt_tokens"),
        (Faults(says="<html>It works!</html>"), "no JSON object: <html>It works!</html>"),
        (Faults(says='{"object": "list"}'), "serves 0 models: none"),
        (Faults(models=("a", "b")), "serves 2 models: a, b.*name one in evaluate.server.model"),
        (Faults(window=None), "does not say how long a prompt may be"),
        (Faults(key="secret"), r"refuses a request without a key \(\$HALFBYTE_TEST_KEY is not set\)"),
        (Faults(fails_after=0), "answers 500, at each of 2 tries: CUDA error"),
        (Faults(says='{"data": 5}'), "serves 0 models: none"),
        (Faults(says='{"data": ["a"]}'), "serves 0 models: none"),
        (Faults(says="[" * 100_000), "no JSON object"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:40],
)
def test_what_is_wrong_with_a_server_is_said_in_one_line(
    brain: Brain, tiny_tokenizer: Any, faults: Faults, reason: str
) -> None:
    text = "the cat sees the dog and the sun"
    with serving(brain, faults) as server, pytest.raises(UserError, match=reason) as raised:
        open_server(server.spec(api_key_env="HALFBYTE_TEST_KEY"), tiny_tokenizer).generate(
            [_prompt(tiny_tokenizer, text, seed=1, temperature=1.0)]
        )
    assert "\n" not in str(raised.value)


def test_a_key_comes_from_the_environment_and_is_never_shown(
    brain: Brain, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(brain, Faults(key="secret-1")) as server:
        spec = server.spec(api_key_env="HALFBYTE_TEST_KEY")
        monkeypatch.setenv("HALFBYTE_TEST_KEY", "secret-1")
        assert open_server(spec, tiny_tokenizer).max_length == 510
        monkeypatch.setenv("HALFBYTE_TEST_KEY", "secret-2")
        with pytest.raises(UserError, match=r"refuses the key in \$HALFBYTE_TEST_KEY") as raised:
            open_server(spec, tiny_tokenizer)
    assert "secret" not in str(raised.value)


def test_a_model_the_server_does_not_have_is_named_with_those_it_has(brain: Brain, tiny_tokenizer: Any) -> None:
    with serving(brain) as server, pytest.raises(UserError, match=r"'tinny' \(did you mean 'tiny'\?"):
        open_server(server.spec(model="tinny"), tiny_tokenizer)


def test_a_busy_server_is_asked_again(brain: Brain, tiny_tokenizer: Any) -> None:
    with serving(brain) as server:
        backend = open_server(server.spec(retries=3), tiny_tokenizer)
        backend.generate([_prompt(tiny_tokenizer, "the cat")])
        server.faults.statuses = [429, 503]
        (found,) = backend.generate([_prompt(tiny_tokenizer, "the cat")])
    assert found.tokens == 8


def test_a_server_that_is_gone_or_too_slow_is_said_to_be(brain: Brain, tiny_tokenizer: Any) -> None:
    with serving(brain, Faults(slow=0.5)) as server, pytest.raises(UserError, match=r"no answer within 0.05 seconds"):
        open_server(server.spec(timeout=0.05, retries=3), tiny_tokenizer)
    assert len(server.asked) == 1, "a time-out is not tried again"
    with pytest.raises(UserError, match=r"no server answers at .*Connection refused \(start it"):
        open_server(server.spec(retries=0), tiny_tokenizer)


def test_a_server_that_cannot_be_reached_is_not_said_to_be_slow(
    brain: Brain, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise requests.ConnectTimeout("connect timeout=10")

    monkeypatch.setattr(requests.Session, "request", unreachable)
    with serving(brain) as server, pytest.raises(UserError, match=r"no server answers at .*connect timeout=10"):
        open_server(server.spec(), tiny_tokenizer)


def test_a_window_that_is_too_short_is_refused_at_once(brain: Brain, tiny_tokenizer: Any) -> None:
    with serving(brain) as server:
        assert open_server(server.spec(), tiny_tokenizer, max_length=300).max_length == 300
        with pytest.raises(UserError, match="at most 510"):
            open_server(server.spec(), tiny_tokenizer, max_length=512)


def test_settings_that_servers_do_not_take_are_refused(brain: Brain, tiny_tokenizer: Any) -> None:
    prompts = [_prompt(tiny_tokenizer, "the cat", other=(("bad_words_ids", [[4]]),))]
    with serving(brain) as server:
        backend = open_server(server.spec(), tiny_tokenizer)
        assert backend.generation_batches(prompts) == [[0]]
        with pytest.raises(UserError, match="bad_words_ids"):
            backend.generate(prompts)


def test_messages_get_the_servers_template_which_is_recognised(brain: Brain, tiny_tokenizer: Any) -> None:
    with serving(brain) as server:
        chat = open_server(server.spec(api="chat"), tiny_tokenizer)
        plain = open_server(server.spec(), tiny_tokenizer)
        assert chat.tokenizer is None
        assert chat.chat_template(True) == plain.chat_template(True) == tiny_tokenizer.chat_template
        assert chat.bos == [0]
        sampling = Sampling(max_gen_toks=8)
        text = plain.apply_chat_template(CHAT)
        ours = plain.generate([Prompt(text, tuple(tiny_tokenizer(text)["input_ids"]), sampling, None)])
        theirs = chat.generate([Prompt(chat.apply_chat_template(CHAT), None, sampling, None)])
    assert ours == theirs
    assert chat.engine == "vllm 9.9 (chat)"


def test_a_template_that_is_another_or_unknown_is_not_taken_for_ours(brain: Brain, tiny_tokenizer: Any) -> None:
    found = []
    for faults in (Faults(other_template=True), Faults(no_tokenize=True), Faults(cuts_to=3)):
        with serving(brain, faults) as server:
            backend = open_server(server.spec(api="chat"), tiny_tokenizer)
            found.append(backend.chat_template(True))
            prompt = Prompt(backend.apply_chat_template(CHAT), None, Sampling(max_gen_toks=2), None)
            if faults.cuts_to:
                with pytest.raises(UserError, match="cuts prompts"):
                    backend.generate([prompt])
            else:
                backend.generate([prompt])
    assert found[1] == UNKNOWN
    assert found[0] not in (UNKNOWN, None, tiny_tokenizer.chat_template)


def test_a_thought_without_an_answer_is_an_empty_text(brain: Brain, tiny_tokenizer: Any) -> None:
    with serving(brain, Faults(null_content=True)) as server:
        backend = open_server(server.spec(api="chat"), tiny_tokenizer)
        prompt = Prompt(backend.apply_chat_template(CHAT), None, Sampling(max_gen_toks=8), None)
        (found,) = backend.generate([prompt])
    assert (found.text, found.stop, found.tokens) == ("", "length", 8)


def test_a_chat_endpoint_scores_nothing_and_continues_no_answer(brain: Brain, tiny_tokenizer: Any) -> None:
    with serving(brain) as server:
        backend = open_server(server.spec(api="chat"), tiny_tokenizer)
        with pytest.raises(UserError, match="api to completions"):
            backend.score_batches(_requests(tiny_tokenizer))
        with pytest.raises(UserError, match="api to completions"):
            backend.apply_chat_template([*CHAT, {"role": "assistant", "content": "It"}], add_generation_prompt=False)


def test_equal_prompts_stay_in_one_batch(brain: Brain, tiny_tokenizer: Any) -> None:
    prompts = [_prompt(tiny_tokenizer, f"the cat {at // 3}", seed=at, temperature=1.0) for at in range(30)]
    with serving(brain) as server:
        batches = open_server(server.spec(concurrency=1), tiny_tokenizer).generation_batches(prompts)
    assert sorted(at for batch in batches for at in batch) == list(range(30))
    assert all({at // 3 * 3 + one for one in range(3)} <= set(batch) for batch in batches for at in batch)


def test_messages_are_sent_as_they_are(brain: Brain, tiny_tokenizer: Any) -> None:
    with serving(brain) as server:
        backend = open_server(server.spec(api="chat"), tiny_tokenizer)
        backend.generate([Prompt(backend.apply_chat_template(CHAT), None, Sampling(max_gen_toks=1), None)])
    sent = [payload for path, payload in server.asked if path == "/v1/chat/completions"]
    assert sent[-1]["messages"] == CHAT
    assert json.loads(json.dumps(sent[-1]))["model"] == "tiny"


def test_each_text_is_told_of_when_it_has_ended(brain: Brain, tiny_tokenizer: Any) -> None:
    with serving(brain) as server:
        backend = open_server(server.spec(), tiny_tokenizer)
        ended: list[int] = []
        backend.told = lambda: ended.append(len(ended))
        backend.generate([_prompt(tiny_tokenizer, f"the cat {at}") for at in range(5)])
    assert ended == list(range(5))


@pytest.mark.parametrize(
    "nonsense",
    [
        5, [], {"content": [5]}, {"content": [{"logprob": -1.0, "top_logprobs": 5}]},
        {"content": [{"logprob": -1.0, "top_logprobs": [5]}]}, {"token_logprobs": 5}, {"token_logprobs": {"a": 1}},
        {"token_logprobs": [-1.0] * 99, "top_logprobs": 5},
    ],
)  # fmt: skip
def test_log_probabilities_of_another_shape_are_one_line(brain: Brain, tiny_tokenizer: Any, nonsense: Any) -> None:
    with serving(brain, Faults(overwrites={"logprobs": nonsense})) as server:
        backend = open_server(server.spec(), tiny_tokenizer)
        with pytest.raises(UserError, match="gives no log-probabilities"):
            backend.score([Request((5, 6), (7,))], backend.score_batches([Request((5, 6), (7,))])[0])


def test_half_an_emoji_does_not_end_an_evaluation(brain: Brain, tiny_tokenizer: Any) -> None:
    with serving(brain, Faults(overwrites={"text": "ok \ud83d and \ud83d\ude00"})) as server:
        (found,) = open_server(server.spec(), tiny_tokenizer).generate([_prompt(tiny_tokenizer, "the cat")])
    assert found.text == "ok \ufffd and \U0001f600"
