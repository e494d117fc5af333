"""Plans how requests are scored: what they share is computed once, and batches are cut by tokens, not by count.

Two things are shared. Requests of one context (a question among its answers) become one row: the context, then the
answers beside each other, each of which sees the context and itself. Rows that begin alike (the examples of a few-shot
task) become a group whose common prefix is computed once and kept as a KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

MIN_PREFIX = 32
"""Tokens: a shorter common beginning is not worth a forward pass of its own."""
MIN_SAVED = 512
"""Tokens a group must save."""
CACHED = 4
"""A forward pass may hold so many times its budget in keys and values, which each row has a copy of: at 16,384 tokens
and 128 KiB a token (Llama 3 8B) that is 8 GiB."""
MOST_PADDING = 0.05
"""A batch that is a quarter full takes no row that would make more of it padding than this."""


class Request(NamedTuple):
    """A continuation to be scored, as tokens."""

    context: tuple[int, ...]
    """At least one token."""
    continuation: tuple[int, ...]
    """At least one token."""


@dataclass
class Row:
    """One sequence of a forward pass: a context and, after it, branches that do not see each other."""

    context: tuple[int, ...]
    branches: list[tuple[int, ...]] = field(default_factory=list)
    """Continuations without their last token, which is only predicted; none that another one begins with."""
    members: list[int] = field(default_factory=list)
    """The requests answered here."""
    spots: list[list[int]] = field(default_factory=list)
    """For each of them, the positions in the row that predict its tokens."""

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.context) + sum(map(len, self.branches))

    @property
    def depth(self) -> int:
        """Tokens on the longest path, which is what a context window limits."""
        return len(self.context) + max(map(len, self.branches), default=0)


@dataclass
class Batch:
    """Rows of one forward pass, which all begin with the same `prefix` tokens."""

    prefix: int
    rows: list[Row]
    packed: bool = False
    """Whether they lie one after another in a single sequence, without padding."""

    @property
    def members(self) -> list[int]:
        """The requests answered, in the order in which they are."""
        return [at for row in self.rows for at in row.members]

    @property
    def width(self) -> int:
        """Tokens a row is padded to, without the prefix."""
        return max(row.length for row in self.rows) - self.prefix

    @property
    def tokens(self) -> int:
        """Tokens of the rows, without the prefix and padding."""
        return sum(row.length - self.prefix for row in self.rows)

    @property
    def computed(self) -> int:
        """Tokens of the pass, padding included and the prefix not."""
        return self.tokens if self.packed else len(self.rows) * self.width


def make_rows(requests: Sequence[Request], budget: int, *, branch: bool = True) -> list[Row]:
    """Rows that answer all requests: one for each context, or several where one would be long.

    A branch joins a row only where that saves more than it costs: where the context is at least as long as the branch.
    Windows of documents, which have no more than a token in common, get rows of their own.

    Args:
        requests: In any order.
        budget: Most tokens of a row with more than one branch.
        branch: Whether a row may have more than one.
    """
    rows: list[Row] = []
    open_rows: dict[tuple[int, ...], Row] = {}
    # Longest first: a shorter continuation may then be the beginning of a branch that is there.
    for at in sorted(range(len(requests)), key=lambda at: -len(requests[at].continuation)):
        context, continuation = requests[at]
        needed = continuation[:-1]
        row = open_rows.get(context)
        start = None if row is None else _start_of(row, needed)
        if row is None or start is None:
            fits = row is not None and branch and len(needed) <= len(context) and row.length + len(needed) <= budget
            if row is None or not fits:
                row = open_rows[context] = Row(context)
                rows.append(row)
            start = row.length
            if needed:
                row.branches.append(needed)
        row.members.append(at)
        row.spots.append([len(context) - 1, *range(start, start + len(needed))])
    return rows


def _start_of(row: Row, needed: tuple[int, ...]) -> int | None:
    """Where in a row a branch lies that begins with the tokens needed; anywhere where none is needed."""
    start = len(row.context)
    for branch in row.branches:
        if branch[: len(needed)] == needed:
            return start
        start += len(branch)
    return None if needed else start


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def make_groups(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    """Rows that share a prefix, with its length; those that share none come last, with 0.

    The sorted rows form a tree, cut again and again where neighbours have least in common; of its nodes, those become
    groups that save most tokens together, (rows - 1) x common prefix each.
    """
    ordered = sorted(rows, key=lambda row: row.context)
    # What two neighbours share, less one token where it is all of a context: its last position must be computed.
    shared = [
        min(_common(left.context, right.context), len(left.context) - 1, len(right.context) - 1)
        for left, right in pairwise(ordered)
    ]
    groups, alone = [], []
    for first, last in _best_cut(shared, len(ordered)):
        if last - first == 1:
            alone.append(ordered[first])
        else:
            groups.append((min(shared[first : last - 1]), ordered[first:last]))
    return [*groups, (0, alone)] if alone else groups


def _best_cut(shared: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Half-open ranges of rows: the groups, and the single rows between them.

    Args:
        shared: What each row has in common with the next.
        count: Rows, one more than `shared`.
    """
    if count < 2:
        return [(at, at + 1) for at in range(count)]
    ranges = _cut_tree(shared)
    saved: dict[tuple[int, int], int] = {}
    kept: set[tuple[int, int]] = set()
    for (first, last), cut in reversed(ranges.items()):  # children come after their parents
        apart = saved.get((first, cut + 1), 0) + saved.get((cut + 1, last), 0)
        together = (last - first - 1) * shared[cut] if shared[cut] >= MIN_PREFIX else 0
        if together >= MIN_SAVED and together > apart:
            kept.add((first, last))
        saved[first, last] = max(apart, together if (first, last) in kept else 0)
    found, waiting = [], [(0, count)]
    while waiting:
        first, last = waiting.pop()
        if last - first == 1 or (first, last) in kept:
            found.append((first, last))
        else:
            cut = ranges[first, last]
            waiting += [(cut + 1, last), (first, cut + 1)]
    return found


def _cut_tree(shared: Sequence[int]) -> dict[tuple[int, int], int]:
    """Each range of rows that can be a group, parents first, with the place where its neighbours share least.

    This is the Cartesian tree of `shared`, built with a stack in linear time (Gabow, Bentley and Tarjan, 1984).
    """
    left, right = [-1] * len(shared), [-1] * len(shared)
    stack: list[int] = []
    for at, value in enumerate(shared):
        below = -1
        while stack and shared[stack[-1]] > value:
            below = stack.pop()
        left[at] = below
        if stack:
            right[stack[-1]] = at
        stack.append(at)
    ranges: dict[tuple[int, int], int] = {}
    waiting = [(0, len(shared) + 1, stack[0])]
    while waiting:
        first, last, cut = waiting.pop()
        ranges[first, last] = cut
        if left[cut] >= 0:
            waiting.append((first, cut + 1, left[cut]))
        if right[cut] >= 0:
            waiting.append((cut + 1, last, right[cut]))
    return ranges


def plan(
    requests: Sequence[Request], budget: int, *, share: bool = True, branch: bool = True, pack: int | None = None
) -> list[Batch]:
    """Fixed batches, the longest first, so that a lack of memory shows at once; they depend on the requests alone.

    Args:
        requests: In lm-eval's order.
        budget: Most tokens a forward pass, padding included and the shared prefix not; a longer row gets its own.
        share: Whether the model reads prefixes from a cache exactly; else each row is whole.
        branch: Whether it keeps branches apart as well.
        pack: Tokens of a sequence in which rows are packed, those with a common prefix and those that would be padded
            much; None to pad all.
    """
    rows = make_rows(requests, budget, branch=share and branch)
    batches = []
    for prefix, group in make_groups(rows) if share else [(0, rows)]:
        if prefix and pack is not None:
            batches += [Batch(prefix, part, packed=True) for part in _fill(group, prefix, min(pack, budget))]
        else:
            padded = [Batch(prefix, part) for part in _cut(group, prefix, budget)]
            batches += [_packed_if_sparse(batch, pack) if share and branch and pack else batch for batch in padded]
    # The batches of a group stay neighbours, since its prefix is computed for the first and kept for the rest.
    longest: dict[tuple[int, ...], int] = {}
    for batch in batches:
        head = batch.rows[0].context[: batch.prefix]
        longest[head] = max(longest.get(head, 0), batch.prefix + batch.width)
    return sorted(batches, key=lambda batch: (-longest[head := batch.rows[0].context[: batch.prefix]], head))


def _packed_if_sparse(batch: Batch, pack: int) -> Batch:
    """A batch of few rows of unlike lengths, packed where there is room."""
    sparse = batch.tokens < (1 - MOST_PADDING) * batch.computed
    return Batch(batch.prefix, batch.rows, packed=True) if sparse and batch.tokens <= pack else batch


def _fill(rows: Sequence[Row], prefix: int, budget: int) -> list[list[Row]]:
    """Rows of a group by falling length, as many as the budget has room for beside each other."""
    parts: list[list[Row]] = []
    room = 0
    for row in sorted(rows, key=lambda row: -row.length):
        size = row.length - prefix
        if not parts or size > room:
            parts.append([])
            room = budget
        parts[-1].append(row)
        room -= size
    return parts


def _cut(rows: Sequence[Row], prefix: int, budget: int) -> list[list[Row]]:
    """Rows of a group by falling length, cut where the budget or the padding would be too much."""
    parts: list[list[Row]] = []
    width = used = 0
    for row in sorted(rows, key=lambda row: -row.length):
        size = row.length - prefix
        count = len(parts[-1]) + 1 if parts else 0
        padding = 1 - (used + size) / (width * count) if count else 0.0
        full = (
            count * width > budget
            or (prefix and count * (prefix + width) > CACHED * budget)
            or (padding > MOST_PADDING and used >= budget / 4)
        )
        if not parts or full:
            parts.append([])
            width, used = size, 0
        parts[-1].append(row)
        used += size
    return parts
