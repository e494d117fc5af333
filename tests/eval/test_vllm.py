"""Claims about the vllm backend, against the few classes of vLLM it uses on a tiny model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
from brain import Brain

from halfbyte.eval import vllm as backend_module
from halfbyte.eval.backend import Prompt, Sampling
from halfbyte.eval.hf import HFBackend
from halfbyte.eval.sharing import Request
from halfbyte.eval.vllm import VLLMBackend, open_vllm
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.errors import UserError

Open = Callable[..., VLLMBackend]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tiny_llama: Any, tiny_tokenizer: Any) -> list[dict[str, Any]]:
    """The fake in vLLM's place; the arguments its engines were started with."""
    module, made = fake_vllm.make(Brain(tiny_llama, tiny_tokenizer))
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(backend_module, "version", lambda _: "9.9")
    return made


@pytest.fixture
def opened(engines: list[dict[str, Any]], tiny_tokenizer: Any, tmp_path: Path) -> Open:
    """Starts the backend with some settings."""
    assert engines == []

    def start(**settings: Any) -> VLLMBackend:
        spec = EvaluateSpec(backend="vllm", tasks=[TaskSpec(task="any")], **settings)
        return open_vllm(tmp_path, tiny_tokenizer, spec)

    return start


def _prompt(tokenizer: Any, text: str, *, seed: int | None = None, **sampling: Any) -> Prompt:
    return Prompt(text, tuple(tokenizer(text)["input_ids"]), Sampling(**{"max_gen_toks": 8, **sampling}), seed)


def test_scores_and_greedy_texts_are_those_of_the_hf_backend(
    opened: Open, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    hf, backend = HFBackend(tiny_llama, tiny_tokenizer), opened()
    prompts = [_prompt(tiny_tokenizer, text) for text in ("the cat", "one two three", "fire tree bird")]
    assert backend.generate(prompts) == hf.generate(prompts)
    context = prompts[0].tokens or ()
    greedy = tuple(Brain(tiny_llama, tiny_tokenizer).generate(context, most=3).ids)
    requests = [Request(context, answer) for answer in (greedy, *(one.tokens or () for one in prompts))]
    (batch,) = backend.score_batches(requests)
    found = dict(zip(batch.members, backend.score(requests, batch), strict=True))
    for planned in hf.score_batches(requests):
        for at, (value, is_greedy) in zip(planned.members, hf.score(requests, planned), strict=True):
            assert found[at] == (pytest.approx(value, abs=1e-4), is_greedy)
    assert found[0][1]


def test_a_text_says_how_it_ended(opened: Open, tiny_tokenizer: Any) -> None:
    backend = opened()
    (whole,) = backend.generate([_prompt(tiny_tokenizer, "the cat")])
    stop = whole.text[len(whole.text) // 2 :][:3]
    (stopped,) = backend.generate([_prompt(tiny_tokenizer, "the cat", until=(stop,))])
    assert (whole.stop, whole.tokens) == ("length", 8)
    assert (stopped.stop, stopped.text) == ("stop_string", whole.text[: whole.text.index(stop)])


def test_each_sample_is_drawn_with_its_own_seed(opened: Open, tiny_tokenizer: Any) -> None:
    prompts = [_prompt(tiny_tokenizer, "the cat", seed=seed, temperature=1.0) for seed in (1, 2, 1)]
    found = opened().generate(prompts)
    assert [one.seed for one in found] == [1, 2, 1]
    assert found[0].text == found[2].text != found[1].text


def test_the_engine_gets_the_settings_and_a_window_for_one_token_more(
    opened: Open, engines: list[dict[str, Any]], tmp_path: Path
) -> None:
    backend = opened(max_length=100, dtype="bfloat16", seed=3, vllm={"tensor_parallel_size": 2})
    assert engines == [
        {"model": str(tmp_path), "tokenizer": str(tmp_path), "dtype": "bfloat16", "seed": 3, "max_model_len": 102,
         "tensor_parallel_size": 2}
    ]  # fmt: skip
    assert backend.max_length == 100
    assert backend.engine == 'vllm 9.9 {"tensor_parallel_size": 2}'
    assert opened().max_length == 510


def test_a_prompt_of_the_whole_window_is_scored(opened: Open) -> None:
    backend = opened(max_length=20)
    request = Request(tuple(range(5, 21)), tuple(range(5, 10)))  # all but the last token fit into 20
    (batch,) = backend.score_batches([request])
    assert len(backend.score([request], batch)) == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"vllm": {"quantization": "none-such"}}, "vLLM cannot run .*Unknown quantization method"),
        ({"vllm": {"seed": 1}}, r"evaluate.vllm.seed has a place of its own"),
    ],
)
def test_what_the_engine_cannot_do_is_one_line(opened: Open, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        opened(**settings)


def test_settings_that_the_engine_does_not_take_are_refused(opened: Open, tiny_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="num_beams"):
        opened().generate([_prompt(tiny_tokenizer, "the cat", other=(("num_beams", 4),))])


def test_without_vllm_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    spec = EvaluateSpec(backend="vllm", tasks=[TaskSpec(task="any")])
    with pytest.raises(UserError, match=r"needs the package vllm.*pip install '\.\[vllm\]'` in halfbyte's repository"):
        open_vllm(tmp_path, tiny_tokenizer, spec)
