"""Every request is answered once, at the right positions, and the cut into groups saves most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfbyte.eval import sharing
from halfbyte.eval.sharing import Batch, Request, Row, make_groups, make_rows, plan

TOKENS = st.integers(0, 3)
REQUESTS = st.lists(
    st.builds(
        Request,
        st.lists(TOKENS, min_size=1, max_size=12).map(tuple),
        st.lists(TOKENS, min_size=1, max_size=4).map(tuple),
    ),
    max_size=40,
)


def paths(row: Row) -> list[tuple[int, ...]]:
    """For each position, the tokens that are seen there."""
    found = [row.context[: at + 1] for at in range(len(row.context))]
    for branch in row.branches:
        found += [row.context + branch[: at + 1] for at in range(len(branch))]
    return found


@given(REQUESTS, st.integers(1, 60), st.booleans(), st.booleans())
def test_every_request_is_predicted_from_exactly_what_precedes_it(
    requests: list[Request], budget: int, share: bool, branch: bool
) -> None:
    batches = plan(requests, budget, share=share, branch=branch)
    assert sorted(at for batch in batches for at in batch.members) == list(range(len(requests)))
    for batch in batches:
        for row in batch.rows:
            seen = paths(row)
            assert len(row.branches) <= 1 or (share and branch)
            for member, spots in zip(row.members, row.spots, strict=True):
                context, continuation = requests[member]
                assert [seen[spot] for spot in spots] == [
                    context + continuation[:at] for at in range(len(continuation))
                ]


@given(REQUESTS, st.integers(1, 60))
def test_a_batch_stays_within_its_budget_and_its_rows_begin_alike(requests: list[Request], budget: int) -> None:
    for batch in plan(requests, budget):
        assert len(batch.rows) == 1 or len(batch.rows) * batch.width <= budget
        assert len(batch.rows) == 1 or len(batch.rows) * (batch.prefix + batch.width) <= sharing.CACHED * budget
        assert len({row.context[: batch.prefix] for row in batch.rows}) == 1
        assert all(batch.prefix < len(row.context) for row in batch.rows)  # its last position is computed


def _saved(groups: list[tuple[int, list[Row]]]) -> int:
    return sum((len(rows) - 1) * prefix for prefix, rows in groups)


@given(st.sets(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), max_size=40), st.integers(1, 3))
def test_no_cut_at_one_depth_saves_more(contexts: set[tuple[int, ...]], least: int) -> None:
    ordered = sorted(contexts)
    rows = [Row(context) for context in contexts]
    before = sharing.MIN_PREFIX, sharing.MIN_SAVED
    sharing.MIN_PREFIX, sharing.MIN_SAVED = least, 1
    try:
        groups = make_groups(rows)
    finally:
        sharing.MIN_PREFIX, sharing.MIN_SAVED = before
    assert sorted(row.context for _, part in groups for row in part) == ordered
    for depth in range(least, 8):
        heads: dict[tuple[int, ...], int] = {}
        for context in ordered:
            if len(context) > depth:
                heads[context[:depth]] = heads.get(context[:depth], 0) + 1
        assert _saved(groups) >= sum((count - 1) * depth for count in heads.values())


def test_few_shot_prompts_are_computed_once_a_subject() -> None:
    subjects = [[subject, *range(10, 400)] for subject in range(3)]
    requests = [
        Request((*shots, 500 + question, 7, 8), (letter,))
        for shots in subjects
        for question in range(20)
        for letter in range(4)
    ]
    batches = plan(requests, 16384)
    assert [(batch.prefix, len(batch.rows), batch.width) for batch in batches] == [(391, 20, 3)] * 3


def test_a_question_among_its_answers_is_one_row() -> None:
    requests = [
        Request((1, 2, 3), (4, 5, 6)),
        Request((1, 2, 3), (4, 5)),
        Request((1, 2, 3), (7, 8)),
        Request((1, 2), (3,)),
    ]
    row, other = make_rows(requests, 100)
    assert (row.context, row.branches, row.members) == ((1, 2, 3), [(4, 5), (7,)], [0, 1, 2])
    assert row.spots == [[2, 3, 4], [2, 3], [2, 5]]
    assert (row.length, row.depth) == (6, 5)
    assert (other.context, other.spots) == ((1, 2), [[1]])


def test_windows_of_documents_get_rows_of_their_own() -> None:
    windows = [Request((1,), tuple(range(at, at + 40))) for at in range(5)]
    assert [len(row.branches) for row in make_rows(windows, 10_000)] == [1] * 5


def test_a_row_is_not_longer_than_the_budget_for_the_sake_of_sharing() -> None:
    answers = [Request(tuple(range(50)), (at, at, at, at)) for at in range(30)]
    rows = make_rows(answers, 80)
    assert [len(row.branches) for row in rows] == [10, 10, 10]
    assert {row.length for row in rows} == {80}


def test_padding_stays_small_where_there_is_much_to_do() -> None:
    requests = [Request((question, *range(5, 5 + question % 300)), (1,)) for question in range(6000)]
    batches: list[Batch] = plan(requests, 4096)
    padded = sum(len(batch.rows) * batch.width for batch in batches)
    assert 1 - sum(row.length for batch in batches for row in batch.rows) / padded < 0.05
    assert batches[0].width == max(batch.width for batch in batches)


def test_no_batch_is_padded_much_where_rows_may_be_packed() -> None:
    shots = tuple(range(1000, 1300))
    few_shot = [Request((*shots, *range(question, question + 5 + question * 3)), (1,)) for question in range(40)]
    alone = [Request((7, question, *range(5, 5 + question * 4)), (1,)) for question in range(9)]
    batches = plan([*few_shot, *alone], 2048, pack=384)
    assert {batch.prefix for batch in batches} == {0, 300}
    assert all(batch.tokens > 0.95 * batch.computed for batch in batches)
    assert all(batch.tokens <= 384 for batch in batches if batch.packed)


def test_nothing_to_score_is_no_batch() -> None:
    assert plan([], 100) == []
