"""A text ends where lm-eval's hf backend ends it: at the end token, the cap, or the first stop sequence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.eval.stops import Ending


def walk(ending: Ending, tokens: list[int]) -> tuple[int, Any]:
    """After how many tokens it ends, and why."""
    for count in range(1, len(tokens) + 1):
        stop = ending.of(tokens[:count])
        if stop is not None:
            return count, stop
    return len(tokens), None


def test_a_stop_sequence_may_lie_in_several_tokens(tiny_tokenizer: Any) -> None:
    tokens = tiny_tokenizer("the cat sees").input_ids + tiny_tokenizer(" the dog").input_ids
    words = [tiny_tokenizer.decode([token]) for token in tokens]
    stop = "es the d"
    assert not any(stop in word for word in words)
    ending = Ending(tiny_tokenizer, [stop], frozenset({1}), 100)
    count, why = walk(ending, tokens)
    assert why == "stop_string"
    assert stop in tiny_tokenizer.decode(tokens[:count])
    assert stop not in tiny_tokenizer.decode(tokens[: count - 1])
    assert ending.text(tokens[:count]) == "the cat se"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_piece_of_a_text_stops_it_at_the_token_that_completes_it(tiny_tokenizer: Any, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(5, len(tiny_tokenizer) - 1), min_size=1, max_size=12))
    text = tiny_tokenizer.decode(tokens)
    first = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[first : first + data.draw(st.integers(1, 8))]
    if not stop or "�" in stop:
        return
    ending = Ending(tiny_tokenizer, [stop], frozenset(), 1000)
    count, why = walk(ending, tokens)
    assert why == "stop_string"
    assert stop in tiny_tokenizer.decode(tokens[:count])
    assert stop not in tiny_tokenizer.decode(tokens[: count - 1])
    assert ending.text(tokens[:count]) == text.split(stop)[0]


def test_the_end_token_comes_before_the_cap(tiny_tokenizer: Any) -> None:
    ending = Ending(tiny_tokenizer, [], frozenset({1}), 3)
    assert walk(ending, [5, 6, 1]) == (3, "end_token")
    assert walk(ending, [5, 6, 7]) == (3, "length")
    assert walk(ending, [1]) == (1, "end_token")
    assert ending.text([1]) == ""


def test_the_end_tokens_own_text_ends_a_text_as_well(tiny_tokenizer: Any) -> None:
    tokens = tiny_tokenizer.convert_tokens_to_ids(list("<eos>"))
    if None in tokens:
        pytest.skip("the tokenizer cannot spell it")
    assert walk(Ending(tiny_tokenizer, [], frozenset({1}), 100), tokens) == (5, "stop_string")


def test_the_first_of_several_stop_sequences_cuts(tiny_tokenizer: Any) -> None:
    ending = Ending(tiny_tokenizer, ["dog", "cat"], frozenset(), 100)
    assert ending.text(tiny_tokenizer("the sun cat dog").input_ids) == "the sun "
