"""The gate: judges each task of a comparison by a policy and says in one sentence what decided."""

from __future__ import annotations

from scipy.stats import binomtest

from halfbyte.records.errors import UserError
from halfbyte.reports import figures
from halfbyte.reports.comparison import (
    EXIT_CODES,
    Comparison,
    FidelityResult,
    Judgement,
    TaskResult,
    Verdict,
    Word,
)
from halfbyte.reports.policy import Policy
from halfbyte.reports.statistics import Interval, questions_to_settle

PERPLEXITY = "perplexity"
_AT_THE_FLOOR = "the baseline is too near to chance to lose more than is tolerated, so the task cannot show a loss"
MIN_WINDOWS = 20  # a percentile bootstrap over fewer promises more than it keeps


def word_of(interval: Interval | None, margin: float) -> Word:
    """Pass when the loss is proven below the margin, fail when proven above it, else inconclusive."""
    if interval is None:
        return "inconclusive"
    if interval.high < margin:
        return "pass"
    return "fail" if interval.low > margin else "inconclusive"


def judge(comparison: Comparison, policy: Policy) -> Comparison:
    """The comparison with the policy's judgement of every task and the verdict.

    Raises:
        UserError: when the policy does not apply: a limit it does not allow, primary tasks that were not evaluated,
            perplexity without a fidelity record, or intervals made for another alpha.
    """
    _refuse_what_does_not_apply(comparison, policy)
    tasks = [row.model_copy(update={"judgement": _judge_task(row, policy)}) for row in comparison.tasks]
    fidelity = comparison.fidelity
    if fidelity is not None:
        fidelity = fidelity.model_copy(update={"judgement": _judge_perplexity(fidelity, policy)})
    judged = comparison.model_copy(update={"tasks": tasks, "fidelity": fidelity, "policy": policy})
    return judged.model_copy(update={"verdict": _verdict(judged, policy)})


def decide(comparison: Comparison, policy: Policy) -> Verdict:
    """The verdict of a policy on a comparison; raises as `judge` does."""
    verdict = judge(comparison, policy).verdict
    assert verdict is not None
    return verdict


def worst(words: list[Word]) -> Word:
    """The verdict on several candidates together: fail over inconclusive over pass."""
    if not words:
        raise ValueError("no verdicts")
    return next(word for word in ("fail", "inconclusive", "pass") if word in words)


def _refuse_what_does_not_apply(comparison: Comparison, policy: Policy) -> None:
    evaluated = [row.task for row in comparison.tasks]
    if policy.primary != "all":
        missing = [task for task in policy.primary if task not in evaluated]
        if missing or not policy.primary:
            raise UserError(
                f"policy '{policy.name}' decides on {', '.join(policy.primary) or 'no task'}, and "
                f"{', '.join(missing) or 'nothing'} was not evaluated (evaluated: {', '.join(evaluated)})",
                "evaluate the missing tasks on both sides",
            )
    for row in comparison.tasks:
        if policy.decides(row.task):
            policy.refuse_limit(row.task, row.settings.limit)
        if row.result.interval is not None and abs(row.result.interval.level - (1 - 2 * policy.alpha)) > 1e-12:
            raise UserError(
                f"the comparison was made for an alpha of {(1 - row.result.interval.level) / 2:g}, policy "
                f"'{policy.name}' has {policy.alpha:g}",
                "compare again with this policy",
            )
    if policy.perplexity_margin is not None and comparison.fidelity is None:
        raise UserError(
            f"policy '{policy.name}' decides on perplexity, and there is no fidelity record",
            "evaluate the candidate's fidelity against the baseline first",
        )


def _judge_task(row: TaskResult, policy: Policy) -> Judgement:
    margin = policy.margin_of(row.task)
    word, reason = word_of(row.result.interval, margin), row.result.no_interval
    if row.higher_is_better and row.result.mcnemar_p is not None and _above_chance(row, policy.alpha) <= margin:
        word, reason = "inconclusive", _AT_THE_FLOOR
    return Judgement(
        margin=margin,
        primary=policy.decides(row.task),
        verdict=word,
        needed=questions_to_settle(row.result, margin, policy.alpha) if word == "inconclusive" and not reason else None,
        reason=reason,
    )


def _above_chance(row: TaskResult, alpha: float) -> float:
    """How much a 0/1 baseline can lose before it answers at random.

    With a known chance level this is a lower bound (Wilson), since a baseline may be above chance by luck.
    """
    parts = row.settings.subtasks.values()
    if not row.metric.startswith("acc") or any(part.chance is None for part in parts):
        return row.result.baseline
    chance = sum((part.chance or 0.0) * part.questions for part in parts) / sum(part.questions for part in parts)
    right = round(row.result.baseline * row.result.questions)
    interval = binomtest(right, row.result.questions).proportion_ci(1 - 2 * alpha, method="wilson")
    return float(interval.low) - chance


def _judge_perplexity(fidelity: FidelityResult, policy: Policy) -> Judgement | None:
    margin = policy.perplexity_margin
    if margin is None:
        return None
    word = word_of(fidelity.ratio_interval, 1 + margin)
    reason = None if fidelity.ratio_interval else "the windows carry no interval"
    if fidelity.windows < MIN_WINDOWS:
        word, reason = "inconclusive", f"{fidelity.windows} windows are too few, {MIN_WINDOWS} are needed"
    return Judgement(margin=margin, primary=True, verdict=word, reason=reason)


def _verdict(comparison: Comparison, policy: Policy) -> Verdict:
    rows = [(row, row.judgement) for row in comparison.tasks if row.judgement and row.judgement.primary]
    words: list[Word] = [judgement.verdict for _, judgement in rows]
    perplexity = comparison.fidelity.judgement if comparison.fidelity else None
    if perplexity is not None:
        words.append(perplexity.verdict)
    word = worst(words)
    label = figures.model_label(comparison.candidate)
    deciding = [(row, judgement) for row, judgement in rows if judgement.verdict == word]
    if deciding:
        # the task that decides: nearest to its margin on a pass, farthest beyond it otherwise
        row, judgement = max(deciding, key=lambda pair: _strain(*pair))
        decided_by, sentence, step = row.task, *_say(label, row, judgement, policy, len(words))
    else:
        assert comparison.fidelity is not None
        assert perplexity is not None
        decided_by, sentence, step = PERPLEXITY, *_say_perplexity(label, comparison.fidelity, perplexity)
    if word != "pass" and len(words) > 1:
        sentence += f" Of {len(words)} deciding tasks {_counted(words)}."
    if comparison.same_model:
        step = "Both sides are the same model, so this shows the noise floor: compare a candidate next."
    return Verdict(
        verdict=word,
        exit_code=EXIT_CODES[word],
        candidate=label,
        policy=policy.name,
        release_evidence=policy.release_evidence,
        decided_by=decided_by,
        sentence=sentence,
        next_step=step,
    )


def _counted(words: list[Word]) -> str:
    """How many tasks ended how: "1 fails, 2 are inconclusive"."""
    verbs: dict[Word, tuple[str, str]] = {
        "fail": ("fails", "fail"),
        "inconclusive": ("is inconclusive", "are inconclusive"),
        "pass": ("passes", "pass"),
    }
    counts = ((words.count(word), forms) for word, forms in verbs.items())
    return ", ".join(f"{count} {forms[count > 1]}" for count, forms in counts if count)


def _strain(row: TaskResult, judgement: Judgement) -> float:
    """The end of the interval that decides, in margins."""
    found = row.result.interval
    if found is None or judgement.reason:
        return float("inf")
    return (found.low if judgement.verdict == "fail" else found.high) / judgement.margin


def _say(label: str, row: TaskResult, judgement: Judgement, policy: Policy, tasks: int) -> tuple[str, str]:
    result, found, margin = row.result, row.result.interval, judgement.margin
    change = f"{'gained' if result.loss < 0 else 'lost'} {figures.figure(abs(result.loss))}"
    seen = (
        f"{label} {change} {row.metric} on {row.task} ({figures.figure(result.baseline)} to "
        f"{figures.figure(result.candidate)}; of {figures.count(result.questions)} questions "
        f"{figures.count(result.lost)} lost, {figures.count(result.gained)} gained)"
    )
    if judgement.reason == _AT_THE_FLOOR:
        return f"{seen}, which is no evidence: {judgement.reason}.", "Evaluate a task that the baseline can do."
    if found is None:
        return (
            f"{seen}, and no confidence interval can be given: {result.no_interval}.",
            "Evaluate on more questions, or on a task whose questions have 0/1 outcomes.",
        )
    high, limit = figures.apart(found.high, margin)
    low, same_limit = figures.apart(found.low, margin)
    sure = figures.level(1 - policy.alpha)
    if judgement.verdict == "fail":
        return (
            f"{seen}: a loss of at least {low} with {sure} confidence, where {same_limit} is tolerated.",
            "Do not release it. Read the lost questions, then quantize less (another recipe, more layers kept in "
            "higher precision) and run again.",
        )
    if judgement.verdict == "pass":
        others = {1: "", 2: "; the other deciding task is farther from its margin"}.get(
            tasks, f"; the other {tasks - 1} deciding tasks are farther from their margins"
        )
        return (
            f"{seen}: a loss of at most {high} with {sure} confidence, where {limit} is tolerated{others}.",
            f"It may be released under policy '{policy.name}'."
            if policy.release_evidence
            else "This was a smoke test and is no evidence for a release: run real benchmarks under policy 'release'.",
        )
    return (
        f"{seen}, which is not enough evidence: the loss may be anything from {figures.figure(found.low)} to {high}, "
        f"where {limit} is tolerated.",
        _next_step(row, judgement),
    )


def _next_step(row: TaskResult, judgement: Judgement) -> str:
    if row.settings.limit is not None:
        more = f"evaluate without the limit of {figures.count(row.settings.limit)}"
    else:
        more = "evaluate a larger task of the same kind, or sample each question several times"
    if judgement.needed is None:
        if row.settings.limit is None:
            more = "evaluate another task"
        return f"The measured loss lies on the margin, where more questions like these seldom settle it: {more}."
    return f"About {figures.rounded_up(judgement.needed)} questions like these would settle it: {more}."


def _say_perplexity(label: str, fidelity: FidelityResult, judgement: Judgement) -> tuple[str, str]:
    seen = (
        f"perplexity went from {figures.figure(fidelity.baseline_perplexity)} to "
        f"{figures.figure(fidelity.candidate_perplexity)} (lower is better), a ratio of "
        f"{figures.figure(fidelity.ratio)} [{figures.interval(fidelity.ratio_interval)}], where "
        f"{figures.figure(1 + judgement.margin)} is tolerated"
    )
    if judgement.verdict == "fail":
        return f"{label} loses too much: {seen}.", "Do not release it. Quantize less and run again."
    reason = f" ({judgement.reason})" if judgement.reason else ""
    return f"There is not enough evidence on {label}: {seen}{reason}.", "Measure fidelity on a longer text."
