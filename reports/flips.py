"""The questions that flipped, with what both sides answered: all of them, or as many as a report has room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from halfbyte.records.record import is_of_images
from halfbyte.reports.comparison import Comparison, Flip
from halfbyte.reports.pairing import Key, Pairs

T = TypeVar("T")
BYTES = 2_200_000
"""Of all flips of a report, as HTML: the report stays below 3 MB, which opens at once and can be sent by mail."""
_MARKUP = 450  # bytes that the page puts around one
_READ = 6000  # flips read at most; no report has room for as many
_FEW = 20


def worse_and_better(pairs: Pairs) -> tuple[list[Key], list[Key]]:
    """The questions that were lost and those that were gained, in order."""
    losses = pairs.baseline_values - pairs.candidate_values
    if not pairs.higher_is_better:
        losses = -losses
    lost = [key for key, loss in zip(pairs.keys, losses, strict=True) if loss > 0]
    return lost, [key for key, loss in zip(pairs.keys, losses, strict=True) if loss < 0]


def read_flips(pairs: Sequence[Pairs], *, few: bool) -> list[list[Flip]]:
    """The flips of each task; where not all fit, as large a part of each long list as there is room for.

    Images have none: two images always differ, and are looked at beside each other.

    Args:
        pairs: The tasks.
        few: Read a handful of each task only, for those who want the verdict soon.
    """
    found = [[] if is_of_images(one.baseline) else _read(one, _FEW if few else _READ) for one in pairs]
    return _fitted(found, BYTES)


def fit_into_page(comparisons: Sequence[Comparison]) -> list[list[list[Flip]]]:
    """The flips of each comparison and task, cut so that those of several comparisons fit into one page."""
    lists = [row.flips for one in comparisons for row in one.tasks]
    fitted = iter(_fitted(lists, BYTES))
    return [[next(fitted) for _ in one.tasks] for one in comparisons]


def _read(pairs: Pairs, most: int) -> list[Flip]:
    lost, gained = worse_and_better(pairs)
    flips = []
    for change, keys in (("lost", lost), ("gained", gained)):
        for key in spread_out(keys, most // 2 if len(lost) + len(gained) > most else most):
            ours, theirs = pairs.answers(key)
            flips.append(
                Flip.model_validate(
                    {
                        "subtask": key[0],
                        "doc_id": key[2],
                        "change": change,
                        "question": ours.question,
                        "target": ours.target,
                        "baseline": ours.given,
                        "candidate": theirs.given,
                    }
                )
            )
    return flips


def _fitted(lists: Sequence[list[Flip]], room: int) -> list[list[Flip]]:
    """The shorter lists whole, and of the longer ones an even part of what is left for each."""
    sizes = [sum(_size(flip) for flip in flips) for flips in lists]
    fitted: list[list[Flip]] = [[] for _ in lists]
    order = sorted(range(len(lists)), key=sizes.__getitem__)
    for place, i in enumerate(order):
        share = room // (len(order) - place)
        fitted[i] = lists[i] if sizes[i] <= share else spread_out(lists[i], len(lists[i]) * share // sizes[i])
        room -= min(sizes[i], share)
    return fitted


def _size(flip: Flip) -> int:
    texts = (flip.subtask, flip.question, flip.target, flip.baseline, flip.candidate)
    return _MARKUP + sum(len(text.encode("utf-8")) + 4 * sum(map(text.count, "&<>\"'")) for text in texts)


def spread_out(items: list[T], number: int) -> list[T]:
    """At most `number` of the items, evenly through the list, so that every subtask has a chance to be seen."""
    if len(items) <= number:
        return items
    return [items[i * len(items) // number] for i in range(number)]
