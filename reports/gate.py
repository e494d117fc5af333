"""The gate: judges each task of a comparison by a policy, and the comparison by its tasks."""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.records.errors import UserError
from halfbyte.records.image_metrics import IMAGE_METRICS
from halfbyte.records.record import Health
from halfbyte.reports import figures
from halfbyte.reports.comparison import (
    Comparison,
    FidelityResult,
    Judgement,
    SetMetric,
    TaskResult,
    Word,
)
from halfbyte.reports.metrics import Bounds, definition
from halfbyte.reports.policy import Policy
from halfbyte.reports.power import Spread, fewest_questions, questions_to_settle, samples_needed
from halfbyte.reports.statistics import NOISE, Interval, holm, wilson_interval
from halfbyte.reports.verdict import PERPLEXITY, missing_rows, verdict
from halfbyte.reports.waivers import refuse_unknown_tasks, sentences, waiver_of

AT_THE_FLOOR = "the baseline is too near to chance to lose more than is tolerated, so the task cannot show a loss"
MIN_WINDOWS = 20  # a percentile bootstrap over fewer promises more than it keeps
_ORDER: tuple[Word, ...] = ("anomaly", "fail", "inconclusive", "pass")
_MIN_TEXTS = 20  # shares of fewer texts say nothing


def word_of(interval: Interval | None, wide: Interval | None, margin: float) -> Word:
    """Pass when the loss is proven below the margin, fail when proven above it, else inconclusive."""
    if interval is None or wide is None:
        return "inconclusive"
    if interval.high < margin:
        return "pass"
    return "fail" if wide.low > margin else "inconclusive"


def judge(comparison: Comparison, policy: Policy) -> Comparison:
    """The comparison with the policy's judgement of every task and the verdict.

    What the policy decides on and could not be measured leaves the verdict open at best.

    Raises:
        UserError: when both sides are one model, and when the policy does not apply: a limit it does not allow,
            primary tasks that were not evaluated or have one figure for the whole set, a metric without a margin,
            perplexity without a fidelity record, a noise floor without a second baseline, waivers of tasks that are not
            there, or intervals made for another error or other bounds.
    """
    _refuse_what_does_not_apply(comparison, policy)
    refuse_set_metrics(comparison.set_metrics, [row.task for row in comparison.tasks], policy)
    better = _better_beyond_chance(comparison, policy)
    tasks = []
    for row in comparison.tasks:
        judgement = _judge_task(row, policy, better=row.task in better)
        if judgement is not None:
            judgement = _waived(judgement, row.task, comparison, policy)
        tasks.append(row.model_copy(update={"judgement": judgement}))
    fidelity = comparison.fidelity
    if fidelity is not None:
        judgement_of_it = _judge_perplexity(fidelity, policy)
        if judgement_of_it is not None:
            judgement_of_it = _waived(judgement_of_it, PERPLEXITY, comparison, policy)
        fidelity = fidelity.model_copy(update={"judgement": judgement_of_it})
    judgements = [row.judgement for row in tasks] + ([fidelity.judgement] if fidelity else [])
    applied = [one.waiver for one in judgements if one is not None and one.waiver is not None]
    judged = comparison.model_copy(
        update={
            "tasks": tasks,
            "fidelity": fidelity,
            "policy": policy,
            "notes": list(dict.fromkeys(comparison.notes + _unused_margins(comparison, policy))),
            "waivers": sentences(policy, applied, comparison.candidate.digest, comparison.not_before),
        }
    )
    deciding = [one for one in judgements if one is not None and one.primary]
    if all(one.waiver is not None for one in deciding):
        raise UserError(
            f"policy '{policy.name}' waives every task that decides, so nothing would",
            "remove a waiver; a release on waivers alone is a decision for people",
        )
    words = [one.verdict for one in deciding if one.waiver is None]
    if missing_rows(comparison, policy):
        words.append("inconclusive")
    word = worst(words)
    return judged.model_copy(update={"verdict": verdict(judged, policy, word)})


def worst(words: list[Word]) -> Word:
    """The verdict on several together: anomaly over fail over inconclusive over pass."""
    if not words:
        raise ValueError("no verdicts")
    return next(word for word in _ORDER if word in words)


def _refuse_what_does_not_apply(comparison: Comparison, policy: Policy) -> None:
    tasks = [row.task for row in comparison.tasks]
    evaluated = list(dict.fromkeys([*tasks, *(row.task for row in comparison.set_metrics), *comparison.missing]))
    if comparison.same_model:
        raise UserError(
            f"both sides are one model ({comparison.candidate.name}, {comparison.candidate.digest[:12]}), which loses "
            "nothing against itself",
            "name the candidate's records; `halfbyte compare` shows what two evaluations of one model differ by",
        )
    if policy.primary != "all":
        of_images = {row.settings.task for row in comparison.tasks}
        missing = [task for task in policy.primary if task not in evaluated and task not in of_images]
        if missing or not policy.primary:
            raise UserError(
                f"policy '{policy.name}' decides on {', '.join(policy.primary) or 'no task'}, and "
                f"{', '.join(missing) or 'nothing'} was not evaluated (evaluated: {', '.join(evaluated)})",
                "evaluate the missing tasks on both sides",
            )
    refuse_unknown_tasks(policy, [*evaluated, PERPLEXITY])
    for row in comparison.tasks:
        if policy.decides(row.task):
            policy.refuse_limit(row.task, row.settings.limit)
        for interval, alpha in ((row.result.interval, policy.alpha), (row.result.wide, policy.fail_alpha)):
            if interval is not None and abs(interval.level - (1 - 2 * alpha)) > 1e-12:
                raise UserError(
                    f"the comparison was made for an alpha of {(1 - interval.level) / 2:g}, policy '{policy.name}' has "
                    f"{alpha:g}",
                    "compare again with this policy",
                )
        if definition(row.metric, row.higher_is_better, policy.bounds).bounds != row.bounds:
            raise UserError(
                f"the comparison was made for other bounds of {row.metric} than policy '{policy.name}' has",
                "compare again with this policy",
            )
        twice = "evaluate it twice: halfbyte eval BASELINE --repeat-baseline"
        policy.refuse_without_noise(row.task, row.noise, twice)
    if policy.perplexity_margin is not None and comparison.fidelity is None:
        raise UserError(
            f"policy '{policy.name}' decides on perplexity, and there is no fidelity record",
            "evaluate the candidate's fidelity against the baseline first",
        )


def refuse_set_metrics(set_metrics: Sequence[SetMetric], rows: Sequence[str], policy: Policy) -> None:
    """Raises a UserError where the policy decides on figures that nothing can be proven of.

    Where it names one, as a primary task or with a margin, it asks for what cannot be had; under `primary: all` such
    figures are shown and do not decide, unless nothing else would.

    Args:
        set_metrics: The figures.
        rows: The names of what has values of its own; see TaskResult.task.
        policy: The policy.
    """
    for one in set_metrics:
        named = policy.primary != "all" and one.main and one.task in policy.primary
        if named or one.metric in policy.margins or (one.main and one.task in policy.margins):
            raise UserError(
                f"policy '{policy.name}' decides on {one.metric} of {one.task}, which is one figure for the whole set: "
                "no question has a value, so nothing could prove that no more is lost than is tolerated",
                "take a metric that has a value a question (evaluate.tasks.N.metric), and leave this one out of the "
                "policy: it is shown all the same",
            )
    decided = policy.perplexity_margin is not None or any(policy.decides(row) for row in rows)
    if set_metrics and not decided:
        names = ", ".join(f"{one.metric} of {one.task}" for one in set_metrics)
        raise UserError(
            f"policy '{policy.name}' has nothing to decide on: {names}, of which no question has a value",
            "evaluate a task whose questions have values; `halfbyte compare` shows these figures",
        )


def _unused_margins(comparison: Comparison, policy: Policy) -> list[str]:
    """A margin by a name that nothing evaluated has may be a misspelling."""
    used = {name for row in comparison.tasks for name in (row.task, row.metric)}
    if any(row.draws for row in comparison.tasks):
        used |= IMAGE_METRICS.keys()  # which of them are measured is the recipe's choice
    unused = sorted(policy.margins.keys() - used)
    return [f"The policy's margins for {', '.join(unused)} were of no use: nothing of that name was evaluated."] * bool(
        unused
    )


def _better_beyond_chance(comparison: Comparison, policy: Policy) -> set[str]:
    """Tasks on which the candidate is better than luck among all of them would make it (Holm).

    None where it was trained: that explains it, and the report's notes say so.
    """
    if comparison.training is not None:
        return set()
    rows = [(row.task, row.result.p_better) for row in comparison.tasks if row.result.p_better is not None]
    if policy.better_alpha is None or not rows:
        return set()
    adjusted = holm([p for _, p in rows])
    return {task for (task, _), p in zip(rows, adjusted.tolist(), strict=True) if p < policy.better_alpha}


def _waived(judgement: Judgement, task: str, comparison: Comparison, policy: Policy) -> Judgement:
    """A fail or an open task may be waived for a while; an anomaly was not measured, so there is nothing to waive."""
    if judgement.verdict not in ("fail", "inconclusive"):
        return judgement
    found = waiver_of(policy, task, comparison.candidate.digest, comparison.not_before)
    return judgement.model_copy(update={"waiver": found})


def _judge_task(row: TaskResult, policy: Policy, *, better: bool) -> Judgement | None:
    """None for an advisory task that the policy has no margin for."""
    primary = policy.decides(row.task)
    margin = _ratio_margin(row, policy) if policy.ratio is not None else _margin(row, policy, primary)
    if margin is None:
        return None
    word, reason = _by_rule(row, policy, margin)
    anomaly = _broken(row, policy) or (_TOO_GOOD if better else None)
    if anomaly is not None:
        word, reason = "anomaly", anomaly
    open_ = word == "inconclusive" and reason is None
    return Judgement(
        margin=margin,
        primary=primary,
        verdict=word,
        needed=_more_questions(row, margin, policy) if open_ else None,
        samples_needed=_more_samples(row, margin, policy.alpha) if open_ else None,
        reason=reason,
    )


_TOO_GOOD = "the candidate is better than its baseline beyond chance, which quantization does not explain"


def _margin(row: TaskResult, policy: Policy, primary: bool) -> float | None:
    """The margin in the metric's units; None where an advisory task has none."""
    try:
        margin = policy.margin_of(row.task, row.metric, row.bounds)
    except UserError:
        if primary:
            raise
        return None
    if policy.noise_floor is not None and row.noise is not None:
        return max(margin, min(row.noise.largest, policy.noise_floor * margin))
    return margin


def _ratio_margin(row: TaskResult, policy: Policy) -> float | None:
    """The loss at which the candidate's score is just `ratio` of the baseline's."""
    assert policy.ratio is not None
    if row.recovery is None or row.result.baseline <= 0:
        if policy.decides(row.task):
            raise UserError(
                f"policy '{policy.name}' decides by a ratio, and {row.metric} of {row.task} has a scale that crosses "
                "zero, or a baseline of 0",
                "take a policy with margins in the metric's own units",
            )
        return None
    kept = policy.ratio if row.higher_is_better else 1 / policy.ratio
    return abs(row.result.baseline * (1 - kept))


def _by_rule(row: TaskResult, policy: Policy, margin: float) -> tuple[Word, str | None]:
    """The verdict, and why where that is not the interval beside the margin."""
    result = row.result
    if policy.ratio is not None:
        return _by_ratio(row, policy)
    if result.interval is None or result.wide is None:
        return "inconclusive", result.no_interval
    if policy.rule == "two-sided" and result.interval.low <= -margin:
        if result.wide.high < -margin:
            return "anomaly", _TOO_GOOD
        return "inconclusive", "the candidate may be better than its baseline by more than the bounds allow"
    word = word_of(result.interval, result.wide, margin)
    if row.bounds is not None and word != "fail" and _room(row, row.bounds, policy.alpha) <= margin:
        return "inconclusive", AT_THE_FLOOR
    if word == "pass" and row.bounds is not None:
        fewest = fewest_questions(margin, policy.alpha, row.bounds[1] - row.bounds[0])
        if result.questions < fewest:  # it passed by gaining questions, which is luck
            return "inconclusive", (
                f"{figures.count(result.questions)} questions are too few for a margin of {figures.figure(margin)}: a "
                f"candidate without a single flip would need {figures.count(fewest)}"
            )
    return word, None


def _by_ratio(row: TaskResult, policy: Policy) -> tuple[Word, str | None]:
    """MLPerf's rule on point estimates; a score below it that chance explains is open."""
    assert policy.ratio is not None
    result, bounds = row.result, policy.length_ratio
    if bounds is not None and row.generates:
        if row.baseline_length is None or row.candidate_length is None or row.baseline_length == 0:
            return "inconclusive", "the records do not say how long the generated texts are"
        length = row.candidate_length / row.baseline_length
        if not bounds[0] <= length <= bounds[1]:
            return "fail", (
                f"its texts have {figures.figure(row.candidate_length, 1)} tokens on average, "
                f"{figures.figure(length)} of the baseline's {figures.figure(row.baseline_length, 1)}, where "
                f"{bounds[0]:g} to {bounds[1]:g} is tolerated"
            )
    low, high = (result.candidate, result.baseline) if row.higher_is_better else (result.baseline, result.candidate)
    if low >= policy.ratio * high - NOISE:
        return "pass", None
    found = row.recovery_interval
    if found is None or found.high >= 100 * policy.ratio:
        return "inconclusive", None
    return "fail", None


def _broken(row: TaskResult, policy: Policy) -> str | None:
    """What makes the score of a task no measurement: texts cut at the limit, or answers that cannot be read."""
    sides = (("baseline", row.baseline_health), ("candidate", row.candidate_health))
    for side, health in sides:
        texts = _texts(row, health)
        if health.hit_cap is not None and texts >= _MIN_TEXTS and health.hit_cap > policy.max_cap_hits * texts:
            return (
                f"{figures.count(health.hit_cap)} of {figures.count(texts)} texts of the {side} were cut at the token "
                f"limit, where {figures.share(policy.max_cap_hits)} is tolerated"
            )
    ours, theirs = row.baseline_health, row.candidate_health
    if ours.unanswered is not None and theirs.unanswered is not None and _texts(row, theirs) >= _MIN_TEXTS:
        before, after = ours.unanswered / _texts(row, ours), theirs.unanswered / _texts(row, theirs)
        if after - before > policy.max_unanswered_rise:
            return (
                f"no answer was found in {figures.share(after)} of the candidate's texts, and in "
                f"{figures.share(before)} of the baseline's"
            )
    return None


def _texts(row: TaskResult, health: Health) -> int:
    return health.samples or row.result.questions * row.samples


def _more_questions(row: TaskResult, margin: float, policy: Policy) -> int | None:
    width = 0.0 if row.bounds is None else row.bounds[1] - row.bounds[0]
    return questions_to_settle(row.result, margin, policy.alpha, policy.fail_alpha, width=width)


def _more_samples(row: TaskResult, margin: float, alpha: float) -> int | None:
    if row.variances is None:
        return None
    found = Spread(row.variances["between"], row.variances["within"], row.samples)
    needed = samples_needed(found, row.result.questions, margin - row.result.loss, margin, alpha)
    return needed if needed is not None and needed > row.samples else None


def _room(row: TaskResult, bounds: Bounds, alpha: float) -> float:
    """How much a baseline can lose before it answers at random, or all its questions are worth the least they can be.

    A lower bound (Wilson's, with each question counted once: no values between the bounds spread farther), since a
    baseline may be above chance by luck.
    """
    parts = row.settings.subtasks.values()
    chance = sum((part.chance or 0.0) * part.questions for part in parts) / sum(part.questions for part in parts)
    if not row.metric.startswith("acc"):
        chance = 0.0
    low, high = bounds
    kept = row.result.baseline - low if row.higher_is_better else high - row.result.baseline
    right = round(kept / (high - low) * row.result.questions)
    return (high - low) * wilson_interval(right, row.result.questions, alpha).low - chance


def _judge_perplexity(fidelity: FidelityResult, policy: Policy) -> Judgement | None:
    margin = policy.perplexity_margin
    if margin is None:
        return None
    word = word_of(fidelity.ratio_interval, fidelity.ratio_wide, 1 + margin)
    reason = None if fidelity.ratio_interval else "the windows carry no interval"
    if fidelity.windows < MIN_WINDOWS:
        word, reason = "inconclusive", f"{fidelity.windows} windows are too few, {MIN_WINDOWS} are needed"
    return Judgement(margin=margin, primary=True, verdict=word, reason=reason)
