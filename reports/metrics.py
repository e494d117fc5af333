"""What a metric is by its definition: which direction is better, and between which bounds a question's value lies."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from halfbyte.records.errors import UserError
from halfbyte.records.image_metrics import IMAGE_METRICS, ImageMetric
from halfbyte.records.record import EvaluationRecord

Bounds = tuple[float, float]
"""The smallest and the largest value of one question."""
SHARE: Bounds = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric."""

    higher_is_better: bool
    bounds: Bounds | None
    """Smallest and largest value of one question; None where there is none, or it is not known."""
    crosses_zero: bool = False
    """Whether a ratio of two scores says nothing."""
    of_set: bool = False
    """Whether a task may have it as a figure of all its questions together that is no mean of theirs."""
    range: tuple[float | None, float | None] = (None, None)
    """What no value of one question can lie outside of, where that is more than bounds say: values come nowhere near
    the ends, so that nothing can be proven by them."""
    declared: bool = False
    """Whether a policy says the bounds, and not the definition."""

    def refuse(self, value: float) -> str | None:
        """Why a question cannot have this value; None where it can."""
        low, high = self.bounds or self.range
        if (low is None or value >= low) and (high is None or value <= high):
            return None
        if low is None or high is None:
            return f"at least {low:g}" if low is not None else f"at most {high:g}"
        return f"between {low:g} and {high:g}"


def _of_images(metric: ImageMetric) -> Definition:
    low, high = metric.range
    bounds = (low, high) if metric.proves and low is not None and high is not None else None
    return Definition(metric.higher_is_better, bounds, crosses_zero=metric.crosses_zero, range=metric.range)


_SHARE = Definition(True, SHARE)
_LOWER_OF_SET = Definition(False, None, of_set=True)
_HIGHER_OF_SET = Definition(True, None, of_set=True)

KNOWN: dict[str, Definition] = {
    # shares of questions, or of one question's samples, answers or words
    **dict.fromkeys(
        (
            "acc", "acc_norm", "acc_mutual_info", "acc_bytes", "acc_all", "exact_match", "exact", "em", "contains",
            "f1", "token_f1", "resolved", "prompt_level_strict_acc", "prompt_level_loose_acc", "pass_at_1", "correct",
            "math_verify", "accuracy",
        ),
        _SHARE,
    ),
    # less is better
    **dict.fromkeys(
        ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "ter", "wer", "fid", "kid"), _LOWER_OF_SET
    ),
    **dict.fromkeys(("bleu", "chrf", "mcc", "inception_score"), _HIGHER_OF_SET),
    "brier_score": Definition(False, (0.0, 2.0)),
    **{name: _of_images(one) for name, one in IMAGE_METRICS.items()},
}  # fmt: skip
_OF_SAMPLES = re.compile(r"(pass|maj|avg|cov|majority|mean)[@_](k|\d+)(:\d+)?")


def refuse_bounds(metric: str, bounds: Bounds) -> str | None:
    """Why a policy cannot say that a question's value lies between two numbers; None where it can."""
    low, high = bounds
    if not (math.isfinite(low) and math.isfinite(high) and math.isfinite(high - low)):
        return f"{low:g} and {high:g} are no two finite numbers"
    if low >= high:
        return f"the lowest value of a question comes first, and {low:g} is not below {high:g}"
    known = _known(metric)
    if known is None or (known.bounds is None and known.range == (None, None)):
        return None
    ends = zip(("at least", "at most"), known.bounds or known.range, strict=True)
    limits = [f"{word} {end:g}" for word, end in ends if end is not None]
    return f"by its definition {metric} is {' and '.join(limits)}"


def bounds_of(metric: str, declared: Mapping[str, Bounds]) -> Bounds | None:
    """Those of a metric by its name, or those that a policy declares; None where there are none, or not known."""
    known = _known(metric)
    return declared.get(metric) if known is None or known.bounds is None else known.bounds


def definition(metric: str, recorded_direction: bool, declared: Mapping[str, Bounds] | None = None) -> Definition:
    """The definition of a metric by its name; one that is not known here has the direction of its task's definition.

    Args:
        metric: The name in the record, such as acc, exact_match or pass@1.
        recorded_direction: What the task's definition says: whether higher is better.
        declared: The bounds that a policy gives metrics which have none by their definition.

    Raises:
        UserError: when the record contradicts the definition.
    """
    found = _known(metric) or Definition(recorded_direction, None)
    said = (declared or {}).get(metric)
    if found.bounds is None and said is not None:
        found = replace(found, bounds=said, declared=True)
    if found.higher_is_better != recorded_direction:
        words = {True: "higher", False: "lower"}
        raise UserError(
            f"the record says of {metric} that {words[recorded_direction]} is better, and by its definition "
            f"{words[found.higher_is_better]} is",
            "correct higher_is_better in the task's definition and evaluate again",
        )
    return found


def _known(metric: str) -> Definition | None:
    return _SHARE if _OF_SAMPLES.fullmatch(metric) else KNOWN.get(metric)


def judged_metrics(record: EvaluationRecord) -> list[str]:
    """The metrics of a record of images that the baseline has too, in its order: all that need no reference."""
    names = dict.fromkeys(figure.metric for figure in record.metrics if figure.filter == record.primary[1])
    return [name for name in names if name not in IMAGE_METRICS or not IMAGE_METRICS[name].needs_reference]
