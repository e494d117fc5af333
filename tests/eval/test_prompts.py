"""Batches are fixed, whole and sorted, whatever was answered before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfbyte.eval.prompts import Prompt, bos_count, plan_generation

PROMPTS = st.lists(st.builds(Prompt, st.integers(1, 50), st.just(0), st.sampled_from("abc")), max_size=60)


@given(PROMPTS, st.integers(1, 8))
def test_every_prompt_is_in_one_batch_of_at_most_size_with_equal_settings(prompts: list[Prompt], size: int) -> None:
    batches = plan_generation(prompts, size)
    assert sorted(at for batch in batches for at in batch) == list(range(len(prompts)))
    for batch in batches:
        assert 1 <= len(batch) <= size
        assert len({prompts[at].group for at in batch}) == 1


@given(PROMPTS, st.integers(1, 8))
def test_the_longest_prompts_come_first(prompts: list[Prompt], size: int) -> None:
    firsts = [prompts[batch[0]].length for batch in plan_generation(prompts, size)]
    assert firsts == sorted(firsts, reverse=True)


def test_bos_is_counted_at_the_head_alone() -> None:
    assert bos_count([0, 0, 5, 0], 0) == 2
    assert bos_count([5, 0], 0) == 0
    assert bos_count([0, 0], 0) == 2
    assert bos_count([0, 0], None) == 0
