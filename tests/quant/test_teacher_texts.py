"""Texts the teacher writes: the same for the same seed, whenever the work was cut short."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.quant import teacher_texts
from halfbyte.quant.teacher_texts import SAMPLED_FILE, sample_texts
from halfbyte.quant.training_texts import Sampled
from halfbyte.recipes.training import SampledTexts
from halfbyte.records.errors import UserError


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_texts, "BATCH", 4)


def sample(model: Any, tokenizer: Any, folder: Path, digest: str = "teacher", **block: Any) -> list[Sampled]:
    return sample_texts(model, tokenizer, SampledTexts(**{"samples": 10, "length": 24, **block}), folder, digest=digest)


@pytest.fixture
def prompts(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "prompts.txt"
    path.write_text("the cat\nhow many birds and fish\nis\n" + "one two three " * 20 + "\n")
    return {"dataset": str(path), "samples": 4}


def test_a_seed_gives_the_same_texts_and_another_seed_others(
    tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    torch.manual_seed(99)
    one = sample(tiny_llama, tiny_tokenizer, tmp_path / "a")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert sample(tiny_llama, tiny_tokenizer, tmp_path / "b") == one
    assert torch.equal(torch.get_rng_state(), before)
    assert sample(tiny_llama, tiny_tokenizer, tmp_path / "c", seed=7) != one
    assert len({tuple(text.tokens) for text in one}) == 10


def test_texts_begin_with_the_beginning_of_text_and_end_with_the_end_or_their_length(
    tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    for text in sample(tiny_llama, tiny_tokenizer, tmp_path, samples=40):
        assert text.tokens[0] == tiny_tokenizer.bos_token_id
        assert text.prompt == 1
        ended = tiny_tokenizer.eos_token_id in text.tokens
        assert text.tokens[-1] == tiny_tokenizer.eos_token_id if ended else len(text.tokens) == 24
        assert list(text.tokens).count(tiny_tokenizer.eos_token_id) <= 1
        assert text.text == tiny_tokenizer.decode(text.tokens, skip_special_tokens=True)


def test_prompts_are_gone_on_from_in_turn_and_long_ones_leave_half(
    tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any, prompts: dict[str, Any]
) -> None:
    from halfbyte.recipes.sources import TextSource

    found = sample(tiny_llama, tiny_tokenizer, tmp_path / "run", prompts=TextSource(**prompts))
    given = [tuple(text.tokens[: text.prompt]) for text in found]
    assert len(set(given)) == 4
    assert given[:4] == given[4:8]
    assert max(map(len, given)) == 12
    assert all(text.prompt < len(text.tokens) <= 24 for text in found)
    assert len({tuple(text.tokens) for text in found}) == 10


def test_a_prompt_in_a_batch_is_gone_on_from_as_if_it_were_not_padded(
    tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any, prompts: dict[str, Any]
) -> None:
    """At a temperature near zero sampling takes the likeliest token, which padding must not change."""
    from halfbyte.recipes.sources import TextSource

    model = copy.deepcopy(tiny_llama)
    with torch.no_grad():
        model.lm_head.weight.mul_(100)  # as if the temperature were a hundred times lower than the lowest there is
    block = {"prompts": TextSource(**prompts), "samples": 4, "temperature": 0.01}
    for text in sample(model, tiny_tokenizer, tmp_path / "run", **block):
        ids = list(text.tokens[: text.prompt])
        while len(ids) < len(text.tokens):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert ids == list(text.tokens)


def test_work_that_was_cut_short_gives_what_it_would_have_given(
    tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sample(tiny_llama, tiny_tokenizer, tmp_path / "whole")
    write, calls = teacher_texts._write, []

    def killed(*arguments: Any) -> list[list[int]]:
        calls.append(arguments[-1])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return write(*arguments)

    monkeypatch.setattr(teacher_texts, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        sample(tiny_llama, tiny_tokenizer, tmp_path / "cut")
    with (tmp_path / "cut" / SAMPLED_FILE).open("ab") as file:
        file.write(b'{"samples": [8')
    assert sample(tiny_llama, tiny_tokenizer, tmp_path / "cut") == whole
    assert calls == [0, 1, 2, 2]
    assert sample(tiny_llama, tiny_tokenizer, tmp_path / "cut") == whole
    assert len(calls) == 4
    sample(tiny_llama, tiny_tokenizer, tmp_path / "cut", "another teacher")
    assert len(calls) == 7


def test_the_models_own_sampling_settings_do_not_count(tmp_path: Path, llama_factory: Any, tiny_tokenizer: Any) -> None:
    model = llama_factory()
    one = sample(model, tiny_tokenizer, tmp_path / "a")
    model.generation_config.update(
        do_sample=True, top_k=1, top_p=0.1, temperature=0.1, repetition_penalty=2.0, min_p=0.9
    )
    assert sample(model, tiny_tokenizer, tmp_path / "b") == one


def test_samples_follow_the_models_distribution(tmp_path: Path, llama_factory: Any, tiny_tokenizer: Any) -> None:
    model = llama_factory(seed=4)
    found = sample(model, tiny_tokenizer, tmp_path, samples=600, length=2)
    with torch.no_grad():
        expected = model(torch.tensor([[tiny_tokenizer.bos_token_id]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([text.tokens[1] for text in found]), minlength=384)
    likeliest = int(expected.argmax())
    share = float(expected[likeliest])
    assert abs(int(counts[likeliest]) / 600 - share) < 4 * (share * (1 - share) / 600) ** 0.5


def test_a_model_without_a_token_to_begin_with_needs_prompts(
    tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    bare = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    with pytest.raises(UserError, match=r"neither a beginning-of-text token.*train.sampled.prompts"):
        sample(tiny_llama, bare, tmp_path)
