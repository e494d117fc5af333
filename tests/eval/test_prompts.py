"""Batches are fixed, whole and sorted, whatever was answered before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfbyte.eval.prompts import Prompt, bos_count, plan

PROMPTS = st.lists(
    st.builds(Prompt, st.integers(1, 50), st.just(0), st.sampled_from("abcdef"), st.integers(0, 9)), max_size=60
)


@given(PROMPTS, st.integers(1, 8), st.booleans())
def test_every_request_is_in_one_batch_of_at_most_size_forward_passes(
    prompts: list[Prompt], size: int, mixed: bool
) -> None:
    batches = plan(prompts, size, mixed=mixed)
    assert sorted(at for batch in batches for at in batch) == list(range(len(prompts)))
    for batch in batches:
        groups = {prompts[at].group for at in batch}
        assert 1 <= len({(prompts[at].group, prompts[at].forward) for at in batch}) <= size
        assert mixed or len(groups) == 1


@given(PROMPTS, st.integers(1, 8))
def test_requests_that_share_a_forward_pass_share_a_batch(prompts: list[Prompt], size: int) -> None:
    where = {at: number for number, batch in enumerate(plan(prompts, size)) for at in batch}
    for one, prompt in enumerate(prompts):
        for other in range(one):
            if prompts[other][2:] == prompt[2:]:
                assert where[one] == where[other]


@given(PROMPTS, st.integers(1, 8))
def test_groups_with_the_longest_request_come_first(prompts: list[Prompt], size: int) -> None:
    order = [prompts[at] for batch in plan(prompts, size) for at in batch]
    longest = {prompt.group: max(p.length for p in prompts if p.group == prompt.group) for prompt in prompts}
    lengths = [longest[prompt.group] for prompt in order]
    assert lengths == sorted(lengths, reverse=True)


def test_bos_is_counted_at_the_head_alone() -> None:
    assert bos_count([0, 0, 5, 0], 0) == 2
    assert bos_count([5, 0], 0) == 0
    assert bos_count([0, 0], 0) == 2
    assert bos_count([0, 0], None) == 0
