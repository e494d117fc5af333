"""The verdict in words: one sentence that says what decided, on which task, with which numbers, and what to do next."""

from __future__ import annotations

from halfbyte.reports import figures
from halfbyte.reports.comparison import EXIT_CODES, Comparison, FidelityResult, Judgement, TaskResult, Verdict, Word
from halfbyte.reports.metrics import SHARE, refuse_bounds
from halfbyte.reports.policy import Policy
from halfbyte.reports.waivers import waiver_of

PERPLEXITY = "perplexity"
CANARY = "canary"
_DO_NOT = (
    "Do not release it. Read the lost questions, then quantize less (another recipe, more layers kept in higher "
    "precision) and run again."
)
_DO_NOT_OF_IMAGES = _DO_NOT.replace("Read the lost questions", "Look at the worst pairs of images")


def verdict(comparison: Comparison, policy: Policy, word: Word) -> Verdict:
    """The verdict `word` on a judged comparison, with its reason; a failed canary overrides it."""
    label = comparison.label
    if comparison.canary_failure is not None:
        word, decided_by = "anomaly", CANARY
        sentence = f"{label} is broken: {comparison.canary_failure}."
        step = "Do not release it and believe no score of it. Verify the checkpoint (halfbyte verify) and export again."
    else:
        decided_by, sentence, step = _decided(comparison, policy, word, label)
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


def _decided(comparison: Comparison, policy: Policy, word: Word, label: str) -> tuple[str, str, str]:
    rows = [(row, row.judgement) for row in comparison.tasks if row.judgement and row.judgement.primary]
    counted = [(row, judgement) for row, judgement in rows if judgement.waiver is None]
    words: list[Word] = [judgement.verdict for _, judgement in counted]
    perplexity = comparison.fidelity.judgement if comparison.fidelity else None
    if perplexity is not None and perplexity.waiver is None:
        words.append(perplexity.verdict)
    deciding = [(row, judgement) for row, judgement in counted if judgement.verdict == word]
    missing = missing_rows(comparison, policy)
    if missing and word == "inconclusive":
        decided_by, (sentence, step) = next(iter(missing)), _say_missing(label, missing)
    elif deciding:
        # the task that decides: nearest to its margin on a pass, farthest beyond it otherwise
        row, judgement = max(deciding, key=lambda pair: _strain(*pair))
        decided_by, (sentence, step) = row.task, _say(label, row, judgement, policy, len(words))
    else:
        assert comparison.fidelity is not None
        assert perplexity is not None
        decided_by, (sentence, step) = PERPLEXITY, _say_perplexity(label, comparison.fidelity, perplexity)
    if missing and word != "inconclusive":
        sentence += f" {', '.join(missing)} could not be measured."
    if word != "pass" and len(words) > 1:
        sentence += f" Of {len(words)} deciding tasks {_counted(words)}."
    waived = [row.task for row, judgement in rows if judgement.waiver is not None]
    if perplexity is not None and perplexity.waiver is not None:
        waived.append(PERPLEXITY)
    if waived:
        sentence += f" By waiver {', '.join(waived)} did not count."
    return decided_by, sentence, step


def missing_rows(comparison: Comparison, policy: Policy) -> dict[str, str]:
    """What the policy decides on, could not be measured, and is not waived, with the reason."""
    return {
        row: reason
        for row, reason in comparison.missing.items()
        if policy.decides(row) and waiver_of(policy, row, comparison.candidate.digest, comparison.not_before) is None
    }


def _say_missing(label: str, missing: dict[str, str]) -> tuple[str, str]:
    name, reason = next(iter(missing.items()))
    others = f" Nor could {', '.join(list(missing)[1:])}." if len(missing) > 1 else ""
    return (
        f"There is not enough evidence on {label}: {name} could not be measured: {reason}.{others}",
        "Put the weights where they are looked for and evaluate both sides again: the images are kept, and no gate "
        "passes on what is missing.",
    )


def _counted(words: list[Word]) -> str:
    """How many tasks ended how: "1 fails, 2 are inconclusive"."""
    verbs: dict[Word, tuple[str, str]] = {
        "anomaly": ("is an anomaly", "are anomalies"),
        "fail": ("fails", "fail"),
        "inconclusive": ("is inconclusive", "are inconclusive"),
        "pass": ("passes", "pass"),
    }
    counts = ((words.count(word), forms) for word, forms in verbs.items())
    return ", ".join(f"{count} {forms[count > 1]}" for count, forms in counts if count)


def _strain(row: TaskResult, judgement: Judgement) -> float:
    """The end of the interval that decides, in margins."""
    found, wide = row.result.interval, row.result.wide
    if found is None or wide is None or judgement.reason or judgement.margin == 0:
        return float("inf")
    return (wide.low if judgement.verdict == "fail" else found.high) / judgement.margin


def _seen(label: str, row: TaskResult) -> str:
    result = row.result
    before, after = figures.apart(result.baseline, result.candidate)
    change = f"{'gained' if result.loss < 0 else 'lost'} {figures.figure(abs(result.loss))} {row.metric}"
    if result.loss == 0:
        change = f"kept its {row.metric}"
    return (
        f"{label} {change} on {row.settings.task} ({before} to {after}; of {figures.count(result.questions)} "
        f"{row.unit} {figures.count(result.lost)} lost, {figures.count(result.gained)} gained)"
    )


def _say(label: str, row: TaskResult, judgement: Judgement, policy: Policy, tasks: int) -> tuple[str, str]:
    seen = _seen(label, row)
    if judgement.verdict == "anomaly":
        return _say_anomaly(seen, judgement)
    if policy.ratio is not None:
        return _say_ratio(seen, row, judgement, policy)
    if judgement.reason is not None or row.result.interval is None:
        return _say_reason(seen, row, judgement)
    return _say_interval(seen, row, judgement, policy, tasks)


def _say_anomaly(seen: str, judgement: Judgement) -> tuple[str, str]:
    reason = str(judgement.reason)
    if "token limit" in reason:
        step = "Raise the limit of generated tokens (gen_kwargs: max_gen_toks) and evaluate both sides again."
    elif "no answer" in reason:
        step = "Read some of the candidate's answers: fix the prompt or the answer's format, or find what broke it."
    else:
        step = "Find out why before you release it: check which models were evaluated, and their settings."
    return f"{seen}, which is no measurement of a loss: {reason}.", step


def _say_reason(seen: str, row: TaskResult, judgement: Judgement) -> tuple[str, str]:
    reason = judgement.reason or row.result.no_interval
    if row.result.interval is None:
        return (
            f"{seen}, and no confidence interval can be given: {reason}.",
            "Draw more prompts or seeds." if row.draws else _without_spread(row),
        )
    if "too near to chance" in str(reason):
        return f"{seen}, which is no evidence: {reason}.", "Evaluate a task that the baseline can do."
    step = "Evaluate a larger task of the same kind."
    if "better than its baseline" in str(reason):
        step = "Evaluate more prompts; if it stays better, find out why."
    return f"{seen}, which is not enough evidence: {reason}.", step


def _without_spread(row: TaskResult) -> str:
    if row.bounds is not None or refuse_bounds(row.metric, SHARE) is not None:
        return "Evaluate on more questions, or on a task whose questions have 0/1 outcomes."
    return (
        "Evaluate on more questions; or, if it is known what a question is worth at least and at most, say so in the "
        f"policy, as `bounds: {{{row.metric}: [0, 1]}}`, and judge the same records again."
    )


def _say_interval(seen: str, row: TaskResult, judgement: Judgement, policy: Policy, tasks: int) -> tuple[str, str]:
    found, wide, margin = row.result.interval, row.result.wide, judgement.margin
    assert found is not None
    assert wide is not None
    if judgement.verdict == "fail":
        low, limit = figures.apart(wide.low, margin)
        sure = figures.level(1 - policy.fail_alpha)
        step = _DO_NOT_OF_IMAGES if row.draws else _DO_NOT
        return f"{seen}: a loss of at least {low} with {sure} confidence, where {limit} is tolerated.", step
    high, limit = figures.apart(found.high, margin)
    if judgement.verdict == "pass":
        others = {1: "", 2: "; the other deciding task is farther from its margin"}.get(
            tasks, f"; the other {tasks - 1} deciding tasks are farther from their margins"
        )
        sure = figures.level(1 - policy.alpha)
        return (
            f"{seen}: a loss of at most {high} with {sure} confidence, where {limit} is tolerated{others}.",
            _release(policy),
        )
    return (
        f"{seen}, which is not enough evidence: the loss may be anything from {figures.figure(found.low)} to {high}, "
        f"where {limit} is tolerated.",
        _next_step(row, judgement),
    )


def _release(policy: Policy) -> str:
    if policy.release_evidence:
        return f"It may be released under policy '{policy.name}'."
    if policy.ratio is not None:
        return "MLPerf's rule holds. It looks at point estimates: for a proof run the gate under policy 'release'."
    return (
        "This was a smoke test and is no evidence for a release: evaluate real benchmarks, such as mmlu and gsm8k, and "
        "judge them with policy 'release'."
    )


def _next_step(row: TaskResult, judgement: Judgement) -> str:
    limit = row.settings.limit
    if limit is not None:
        more = f"evaluate without the limit of {figures.count(limit)}"
    elif judgement.samples_needed is not None:
        return (
            f"About {figures.count(judgement.samples_needed)} samples of each question would settle it, or about "
            f"{figures.rounded_up(judgement.needed)} questions like these."
            if judgement.needed is not None
            else f"About {figures.count(judgement.samples_needed)} samples of each question would settle it."
        )
    else:
        more = "draw more prompts or seeds" if row.draws else "evaluate a larger task of the same kind"
    if judgement.needed is None:
        if limit is None:
            more = "evaluate another task"
        return f"The measured loss lies on the margin, where more {row.unit} like these seldom settle it: {more}."
    return f"About {figures.rounded_up(judgement.needed)} {row.unit} like these would settle it: {more}."


def _say_ratio(seen: str, row: TaskResult, judgement: Judgement, policy: Policy) -> tuple[str, str]:
    assert policy.ratio is not None
    if judgement.reason is not None:
        step = _DO_NOT if judgement.verdict == "fail" else "Evaluate again, so that the records say it."
        return f"{seen}, and {judgement.reason}.", step
    kept, limit = figures.apart(row.recovery or 0.0, 100 * policy.ratio)
    found = row.recovery_interval
    says = "no interval can be given"
    if found is not None:
        proven = "proves" if found.low >= 100 * policy.ratio else "does not prove"
        says = f"its {figures.level(found.level)} interval, {figures.interval(found, 2)}%, {proven} it"
    if judgement.verdict == "pass":
        return f"{seen}: {kept}% of the baseline's score, where {limit}% is asked for; {says}.", _release(policy)
    if judgement.verdict == "fail":
        return (
            f"{seen}: {kept}% of the baseline's score, where {limit}% is asked for, and chance is no reason.",
            _DO_NOT,
        )
    return (
        f"{seen}: {kept}% of the baseline's score, where {limit}% is asked for, which chance explains as well: {says}.",
        "Evaluate a larger task of the same kind, or sample each question several times.",
    )


def _say_perplexity(label: str, fidelity: FidelityResult, judgement: Judgement) -> tuple[str, str]:
    shown = fidelity.ratio_wide if judgement.verdict == "fail" else fidelity.ratio_interval
    interval = "no interval" if shown is None else f"{figures.level(shown.level)} interval {figures.interval(shown)}"
    seen = (
        f"perplexity went from {figures.figure(fidelity.baseline_perplexity)} to "
        f"{figures.figure(fidelity.candidate_perplexity)} (lower is better), a ratio of "
        f"{figures.figure(fidelity.ratio)} ({interval}), where {figures.figure(1 + judgement.margin)} is tolerated"
    )
    if judgement.verdict == "fail":
        return f"{label} loses too much: {seen}.", "Do not release it. Quantize less and run again."
    if judgement.verdict == "pass":
        return f"{label} passes: {seen}.", "It may be released as far as perplexity goes; every other task was waived."
    reason = f" ({judgement.reason})" if judgement.reason else ""
    return f"There is not enough evidence on {label}: {seen}{reason}.", "Measure fidelity on a longer text."
