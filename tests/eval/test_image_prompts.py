"""What text encoders see of prompts: what is cut or unknown is counted, and what nobody sees is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tiny_flux import clip_tokenizer

from halfbyte.eval.image_prompts import look_at, require_seen
from halfbyte.recipes.prompts import Prompt
from halfbyte.records.errors import UserError


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    """CLIP's with the byte alphabet, and a T5 one that knows small Latin letters."""
    from transformers import T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((chr(97 + i), -3.0) for i in range(26))]
    return {"tokenizer": clip_tokenizer(), "tokenizer_2": T5TokenizerFast(vocab=pieces, extra_ids=0)}


def _prompts(*texts: str) -> list[Prompt]:
    return [Prompt(text, line) for line, text in enumerate(texts, start=1)]


def test_tokens_beyond_each_limit_are_counted(tokenizers: dict[str, Any]) -> None:
    short, long = look_at(tokenizers, _prompts("abc", "a" * 100), 64)
    assert (short.clip_cut, short.t5_cut, short.cut_everywhere) == (0, 0, False)
    assert long.clip_cut == 100 + 2 - 77
    assert long.t5_cut == 100 + 2 - 64  # a space in front and the end
    assert long.cut_everywhere


def test_what_clip_alone_cuts_is_counted_and_drawn(tokenizers: dict[str, Any], caplog: Any) -> None:
    prompts = _prompts("abc", "a" * 100)
    seen = look_at(tokenizers, prompts, 512)
    assert [(one.clip_cut > 0, one.t5_cut) for one in seen] == [(False, 0), (True, 0)]
    with caplog.at_level(logging.WARNING):
        require_seen(prompts, seen, allow=False)
    assert "end of 1 of 2 prompts" in caplog.text


def test_a_prompt_whose_end_nobody_sees_is_refused_unless_allowed(tokenizers: dict[str, Any]) -> None:
    prompts = _prompts("abc", "a" * 100, "b" * 100)
    seen = look_at(tokenizers, prompts, 64)
    with pytest.raises(
        UserError, match=r"2 of 3 prompts are longer than every text encoder reads, the first on line 2"
    ):
        require_seen(prompts, seen, allow=False)
    require_seen(prompts, seen, allow=True)


def test_chinese_is_refused_where_the_encoder_does_not_know_it_unless_allowed(tokenizers: dict[str, Any]) -> None:
    prompts = _prompts("a cat", "一只红色的猫")
    seen = look_at(tokenizers, prompts, 64)
    assert [(one.unknown, one.letters) for one in seen] == [(0, 4), (6, 6)]
    with pytest.raises(UserError, match=r"1 of 2 prompts are written in letters .* on line 2: '一只红色的猫'"):
        require_seen(prompts, seen, allow=False)
    require_seen(prompts, seen, allow=True)


def test_some_unknown_characters_are_counted_and_drawn(tokenizers: dict[str, Any], caplog: Any) -> None:
    prompts = _prompts("a cat named 猫")
    seen = look_at(tokenizers, prompts, 64)
    assert seen[0].unknown == 1
    with caplog.at_level(logging.WARNING):
        require_seen(prompts, seen, allow=False)
    assert "1 of 1 prompts hold characters" in caplog.text


def test_chinese_is_drawn_where_the_encoder_knows_it(tokenizers: dict[str, Any]) -> None:
    clip = {"tokenizer": tokenizers["tokenizer"]}
    prompts = _prompts("一只红色的猫")
    require_seen(prompts, look_at(clip, prompts, 64), allow=False)  # as bytes
