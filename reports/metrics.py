"""What a metric is by its definition: which direction is better, and between which bounds a question's value lies."""

from __future__ import annotations

import re
from dataclasses import dataclass

from halfbyte.records.errors import UserError
from halfbyte.records.image_metrics import IMAGE_METRICS, ImageMetric
from halfbyte.records.record import EvaluationRecord

SHARE = (0.0, 1.0)
SHARE_NAMES = "acc, exact_match or correct"
"""What a metric of a user's own may be called, so that a question's value is known to lie between 0 and 1."""


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric."""

    higher_is_better: bool
    bounds: tuple[float, float] | None
    """Smallest and largest value of one question; None where there is none, or it is not known."""
    crosses_zero: bool = False
    """Whether a ratio of two scores says nothing."""
    of_set: bool = False
    """Whether a task may have it as a figure of all its questions together that is no mean of theirs."""
    range: tuple[float | None, float | None] = (None, None)
    """What no value of one question can lie outside of, where that is more than bounds say: values come nowhere near
    the ends, so that nothing can be proven by them."""

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


def definition(metric: str, recorded_direction: bool) -> Definition:
    """The definition of a metric by its name; one that is not known here has the direction of its task's definition.

    Args:
        metric: The name in the record, such as acc, exact_match or pass@1.
        recorded_direction: What the task's definition says: whether higher is better.

    Raises:
        UserError: when the record contradicts the definition.
    """
    found = _SHARE if _OF_SAMPLES.fullmatch(metric) else KNOWN.get(metric)
    if found is None:
        return Definition(recorded_direction, None)
    if found.higher_is_better != recorded_direction:
        words = {True: "higher", False: "lower"}
        raise UserError(
            f"the record says of {metric} that {words[recorded_direction]} is better, and by its definition "
            f"{words[found.higher_is_better]} is",
            "correct higher_is_better in the task's definition and evaluate again",
        )
    return found


def judged_metrics(record: EvaluationRecord) -> list[str]:
    """The metrics of a record of images that the baseline has too, in its order: all that need no reference."""
    names = dict.fromkeys(figure.metric for figure in record.metrics if figure.filter == record.primary[1])
    return [name for name in names if name not in IMAGE_METRICS or not IMAGE_METRICS[name].needs_reference]
