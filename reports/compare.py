"""Comparing: the records of a candidate and its baseline, question by question, into one Comparison.

comparison = compare(Path("evaluations/base"), Path("evaluations/nvfp4"), policy=load_policy("release"))
print(render_text([comparison]))
sys.exit(comparison.verdict.exit_code)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from halfbyte.records.canary import CanaryRecord
from halfbyte.records.errors import UserError, unknown_name
from halfbyte.records.fidelity import FidelityRecord
from halfbyte.records.manifest import now
from halfbyte.records.noise import load_noise
from halfbyte.records.record import EvaluationRecord, Health, ModelSummary, find_records, is_of_images
from halfbyte.reports.applies import refuse_unknown_bounds
from halfbyte.reports.bootstrap import ratio_interval, recovery
from halfbyte.reports.comparison import Comparison, Cost, FidelityResult, Flip, NoiseFloor, SubtaskResult, TaskResult
from halfbyte.reports.differences import short
from halfbyte.reports.flips import read_flips, worse_and_better
from halfbyte.reports.gate import judge
from halfbyte.reports.images import image_notes, missing_metrics, read_pictures
from halfbyte.reports.loss import paired_loss
from halfbyte.reports.metrics import definition
from halfbyte.reports.pairing import Matched, Pairs, pair_all
from halfbyte.reports.policy import Policy
from halfbyte.reports.power import spread
from halfbyte.reports.statistics import ALPHA, FAIL_ALPHA, Array, Interval, NoSpread, holm, t_interval, tango_interval
from halfbyte.reports.waivers import latest_time, remember_time

DEGRADED_ALPHA = 0.05
_TOLERANCE = 1e-6
_MOST_TOKENS = 10**18

Folders = Path | Sequence[Path]


def compare(
    baseline: Folders,
    candidate: Folders,
    policy: Policy | None = None,
    fidelity: FidelityRecord | None = None,
    tasks: Sequence[str] | None = None,
    *,
    canary: CanaryRecord | None = None,
    few_flips: bool = False,
) -> Comparison:
    """Compares all tasks of two models; with a policy, judges them too.

    Args:
        baseline: A folder with records, or several.
        candidate: The same for the other model.
        policy: Gives the margins, the error level and the verdict; None compares without judging.
        fidelity: The candidate's fidelity against this baseline.
        tasks: Compare these tasks only; by default both sides must have the same ones.
        canary: What the canary saw of the candidate.
        few_flips: Read a handful of the flipped questions only, for those who want the verdict soon.

    Raises:
        UserError: when there is nothing to compare, when the sides are not comparable, when a side mixes models, and
            when the policy does not apply.
    """
    ours, theirs = record_folders(baseline), record_folders(candidate)
    allow, unknown = (policy.allow, policy.allow_unknown) if policy else ((), ())
    bounds = policy.bounds if policy else None
    common = _common_tasks(ours, theirs, tasks)
    if policy is not None:
        refuse_unknown_bounds(policy, ours.values())
    matched = [one for task in common for one in pair_all(ours[task], theirs[task], allow, unknown, bounds=bounds)]
    single = list({one.baseline.task: one for one in matched}.values())
    pairs = [one for one in matched if isinstance(one, Pairs)]
    first = _one_model([one.baseline for one in matched], "baseline")
    second = _one_model([one.candidate for one in matched], "candidate")
    alpha, fail_alpha = (policy.alpha, policy.fail_alpha) if policy is not None else (ALPHA, FAIL_ALPHA)
    costs = {
        "baseline": _cost([one.baseline for one in single], first),
        "candidate": _cost([one.candidate for one in single], first),
    }
    drawn = [read_pictures(ours[task], theirs[task], files=not few_flips) for task in common]
    noise = [_noise(one, ours[one.baseline.task], alpha) for one in pairs]
    flips = read_flips(pairs, few=few_flips)
    rows = _with_degraded(
        [_task(one, alpha, fail_alpha, some, floor) for one, some, floor in zip(pairs, flips, noise, strict=True)]
    )
    created = now()
    latest = latest_time([created, *(side.created for one in matched for side in (one.baseline, one.candidate))])
    if policy is not None and policy.waivers:
        remember_time(latest)
    comparison = Comparison(
        created=created,
        not_before=latest,
        baseline=first,
        candidate=second,
        same_model=first.digest == second.digest,
        tasks=rows,
        set_metrics=[figure for one in single for figure in one.set_metrics],
        missing={row: why for one in single for row, why in missing_metrics(one.baseline, one.candidate).items()},
        pictures=[one for one in drawn if one is not None],
        degraded=[row.task for row in rows if row.p_degraded is not None and row.p_degraded < DEGRADED_ALPHA],
        fidelity=None if fidelity is None else _fidelity(fidelity, first, second, alpha, fail_alpha),
        canary_failure=None if canary is None else _canary_failure(canary, first, second),
        allowed=list(
            dict.fromkeys(f"{one.baseline.task}: {difference}" for one in matched for difference in one.allowed)
        ),
        costs=costs,
        packages={"baseline": matched[0].baseline.packages, "candidate": matched[0].candidate.packages},
        hardware={"baseline": matched[0].baseline.hardware, "candidate": matched[0].candidate.hardware},
        notes=_notes(single) + _clock_notes(created, latest),
    )
    return comparison if policy is None else judge(comparison, policy)


def record_folders(folders: Folders) -> dict[str, Path]:
    """The record folders of one side, by task.

    Raises:
        UserError: when there is none, or two of one task.
    """
    found: dict[str, Path] = {}
    for folder in [folders] if isinstance(folders, Path) else folders:
        for task, path in find_records(folder).items():
            if task in found:
                raise UserError(f"two records of task '{task}': {found[task]} and {path}", "name one of the two")
            found[task] = path
    if not found:
        raise UserError("no folder to compare was given", "give a folder written by `halfbyte eval`")
    return found


def _common_tasks(ours: dict[str, Path], theirs: dict[str, Path], wanted: Sequence[str] | None) -> list[str]:
    if wanted is not None:
        if not wanted:
            raise UserError("no task to compare was named", f"the baseline has {', '.join(sorted(ours))}")
        for task in wanted:
            if task not in ours:
                raise unknown_name("task of the baseline", task, ours)
            if task not in theirs:
                raise unknown_name("task of the candidate", task, theirs)
        return list(dict.fromkeys(wanted))
    for side, missing in (("candidate", ours.keys() - theirs.keys()), ("baseline", theirs.keys() - ours.keys())):
        if missing:
            raise UserError(
                f"the {side} has no record of {', '.join(sorted(missing))}",
                "evaluate it there as well, or name the tasks to compare; a task that is left out is not a task passed",
            )
    return sorted(ours)


def _one_model(records: list[EvaluationRecord], side: str) -> ModelSummary:
    models = {record.model.digest: record.model for record in records}
    if len(models) > 1:
        names = ", ".join(f"{model.name} ({model.digest[:12]})" for model in models.values())
        raise UserError(f"the records of the {side} are of {len(models)} different models: {names}", "evaluate again")
    return records[0].model


def _canary_failure(canary: CanaryRecord, baseline: ModelSummary, candidate: ModelSummary) -> str | None:
    if (canary.baseline_digest, canary.candidate.digest) != (baseline.digest, candidate.digest):
        raise UserError(
            f"the canary's record is of other models ({canary.candidate.name}, {canary.candidate.digest[:12]}) than "
            f"the evaluations ({candidate.name}, {candidate.digest[:12]})",
            "send the canary through this candidate",
        )
    return canary.failure


def _noise(pairs: Pairs, folder: Path, alpha: float) -> NoiseFloor | None:
    """What the baseline's second evaluation differs by; None where it was evaluated once.

    Of means of samples only the counts are known, so that the margin it makes is the change itself and no interval.
    """
    found = load_noise(folder)
    if found is None:
        return None
    chosen = [one for one in found.flips if (one.metric, one.filter) == (pairs.metric, pairs.filter)]
    questions, lost, gained = found.of(pairs.metric, pairs.filter)
    if questions != len(pairs.keys):
        raise UserError(
            f"the noise floor of {pairs.baseline.task} is of {questions} questions, its record of {len(pairs.keys)}",
            "evaluate the baseline twice again",
        )
    loss = sum(one.change * one.questions for one in chosen) / questions * (-1 if pairs.higher_is_better else 1)
    if not pairs.higher_is_better:
        lost, gained = gained, lost
    ends = [loss]
    if pairs.bounds == (0, 1) and np.isin(pairs.baseline_values, (0, 1)).all():
        interval = tango_interval(lost, gained, questions, alpha)
        ends = [interval.low, interval.high]
    return NoiseFloor(questions=questions, lost=lost, gained=gained, loss=loss, largest=max(abs(end) for end in ends))


def _with_degraded(rows: list[TaskResult]) -> list[TaskResult]:
    """The rows with Holm's p of being worse: a claim on several tasks needs it, a verdict on all of them does not."""
    known = [row.result.p_worse for row in rows if row.result.p_worse is not None]
    adjusted = iter(holm(known).tolist() if known else [])
    return [
        row if row.result.p_worse is None else row.model_copy(update={"p_degraded": next(adjusted)}) for row in rows
    ]


def _task(pairs: Pairs, alpha: float, fail_alpha: float, flips: list[Flip], noise: NoiseFloor | None) -> TaskResult:
    record, other = pairs.baseline, pairs.candidate
    higher = pairs.higher_is_better
    result = paired_loss(
        pairs.baseline_values,
        pairs.candidate_values,
        higher_is_better=higher,
        bounds=pairs.bounds,
        alpha=alpha,
        fail_alpha=fail_alpha,
    )
    found, interval = None, None
    if not definition(pairs.metric, higher).crosses_zero:
        found, interval = recovery(pairs.baseline_values, pairs.candidate_values, higher_is_better=higher, alpha=alpha)
    repeats = {part.repeats for part in record.fingerprint.subtasks.values()}
    samples = max(repeats)
    between = None
    if samples > 1 and len(repeats) == 1 and pairs.bounds == (0, 1):
        split = spread(pairs.baseline_values, pairs.candidate_values, samples)
        between = {"between": split.between, "within": split.within}
    return TaskResult(
        task=pairs.row,
        metric=pairs.metric,
        filter=pairs.filter,
        higher_is_better=higher,
        bounds=pairs.bounds,
        samples=samples,
        result=result,
        recovery=found,
        recovery_interval=interval,
        clustered=_clustered(pairs, alpha),
        variances=between,
        noise=noise,
        baseline_length=pairs.lengths[0],
        candidate_length=pairs.lengths[1],
        baseline_seconds=record.seconds,
        candidate_seconds=other.seconds,
        baseline_tokens=record.tokens,
        candidate_tokens=other.tokens,
        subtasks=_subtasks(pairs),
        flips=flips,
        settings=record.fingerprint,
        baseline_health=record.health,
        candidate_health=other.health,
        notes=_task_notes(pairs),
    )


def _clustered(pairs: Pairs, alpha: float) -> Interval | None:
    """The interval over subtasks as clusters: wider than over questions where whole subtasks got worse."""
    if len(pairs.baseline.fingerprint.subtasks) < 2:
        return None
    losses = pairs.baseline_values - pairs.candidate_values
    try:
        return t_interval(losses if pairs.higher_is_better else -losses, alpha, [key[0] for key in pairs.keys])
    except NoSpread:
        return None


def _subtasks(pairs: Pairs) -> list[SubtaskResult]:
    if len(pairs.baseline.fingerprint.subtasks) < 2:
        return []
    lost, gained = ({key[0]: 0 for key in pairs.keys} for _ in range(2))
    for counts, keys in zip((lost, gained), worse_and_better(pairs), strict=True):
        for key in keys:
            counts[key[0]] += 1
    names = np.array([key[0] for key in pairs.keys])
    rows = []
    for name in sorted(lost):
        mask = names == name
        rows.append(
            SubtaskResult(
                subtask=name,
                questions=int(mask.sum()),
                baseline=float(pairs.baseline_values[mask].mean()),
                candidate=float(pairs.candidate_values[mask].mean()),
                lost=lost[name],
                gained=gained[name],
            )
        )
    return rows


def _task_notes(pairs: Pairs) -> list[str]:
    notes = []
    print_ = pairs.baseline.fingerprint
    if print_.limit is not None:
        notes.append(f"cut to the first {print_.limit} questions of each subtask")
    if pairs.baseline.seal == "" or pairs.candidate.seal == "":
        notes.append("a record is of a version that wrote no digests, so that a change of it would not be seen")
    notes += _group_notes(pairs)
    if any(number > 1 for number in print_.bos_per_prompt):
        notes.append("some prompts begin with two BOS tokens, which lowers scores")
    if is_of_images(pairs.candidate):
        return notes  # its prompts are cut for all metrics alike, or for one: see image_notes
    for side, health in (("baseline", pairs.baseline.health), ("candidate", pairs.candidate.health)):
        notes += [f"{side}: {note}" for note in _health_notes(health)]
    return notes


def _group_notes(pairs: Pairs) -> list[str]:
    """A group's own figure where it is not the mean over questions that is judged here."""
    found = []
    for side, record, values in (
        ("baseline", pairs.baseline, pairs.baseline_values),
        ("candidate", pairs.candidate, pairs.candidate_values),
    ):
        for one in record.metrics:
            if (one.subtask, one.metric, one.filter) != (record.task, pairs.metric, pairs.filter):
                continue
            if not abs(one.value - float(values.mean())) <= _TOLERANCE * max(1.0, abs(one.value)):
                found.append(
                    f"{side}: the task's own definition averages its subtasks otherwise, to {one.value:.4f}; here each "
                    "question counts once"
                )
    return found


def _health_notes(health: Health) -> Iterable[str]:
    counts = (
        (health.truncated, "prompts were cut to fit"),
        (health.doubled, "prompts hold a special token twice in a row"),
        (health.hit_cap, "answers ended at the token limit"),
        (health.empty, "answers are empty"),
        (health.unanswered, "answers hold nothing the filter could extract"),
        (health.unexpected_stops, "answers ended neither by a stop, nor at the token limit"),
    )
    return [f"{number} {what}" for number, what in counts if number]


def _notes(pairs: list[Matched]) -> list[str]:
    notes = [note for one in pairs if is_of_images(one.candidate) for note in image_notes(one.candidate)]
    if pairs[0].same_model:
        notes.append("Both sides are the same model: what the table shows is the noise floor.")
    for name in sorted(pairs[0].baseline.packages):
        versions = {str(one.baseline.packages.get(name)) for one in pairs}
        others = {str(one.candidate.packages.get(name)) for one in pairs}
        if versions != others:
            notes.append(
                f"The baseline was evaluated with {name} {', '.join(sorted(versions))} and the candidate with "
                f"{', '.join(sorted(others))}."
            )
    for name in ("machine", "processor", "cuda"):
        one, other = pairs[0].baseline.hardware.get(name), pairs[0].candidate.hardware.get(name)
        if one != other:
            notes.append(f"The sides were evaluated on different hardware ({name}: {one} and {other}).")
    return notes


def _cost(records: list[EvaluationRecord], baseline: ModelSummary) -> Cost:
    for record in records:
        if not 0 <= record.seconds < math.inf:
            raise UserError(f"the record of {record.task} says that it took {record.seconds} s", "evaluate again")
        if not 0 <= record.tokens < _MOST_TOKENS or (record.memory_bytes or 0) < 0:
            raise UserError(
                f"the record of {record.task} counts less than nothing, or more than can be: {short(record.tokens)} "
                f"tokens, {short(record.memory_bytes)} bytes of memory",
                "evaluate again",
            )
    seconds, tokens = sum(record.seconds for record in records), sum(record.tokens for record in records)
    peaks = [record.memory_bytes for record in records if record.memory_bytes is not None]
    kinds = {record.memory_kind for record in records}
    known = len(peaks) == len(records) and len(kinds) == 1
    return Cost(
        bytes_share=records[0].model.bytes_on_disk / baseline.bytes_on_disk if baseline.bytes_on_disk > 0 else None,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds > 0 else None,
        memory_bytes=max(peaks) if known else None,
        memory_kind=kinds.pop() if known else None,
    )


def _clock_notes(created: str, latest: str) -> list[str]:
    if latest == created:
        return []
    return [
        f"The clock says {created}, but a record or an earlier gate has seen {latest}: waivers go by the later time."
    ]


def _fidelity(
    record: FidelityRecord, baseline: ModelSummary, candidate: ModelSummary, alpha: float, fail_alpha: float
) -> FidelityResult:
    for side, ours, theirs in (("baseline", record.baseline, baseline), ("candidate", record.candidate, candidate)):
        if ours.digest != theirs.digest:
            raise UserError(
                f"the fidelity record is of another {side} ({ours.name}, {ours.digest[:12]}) than the evaluations "
                f"({theirs.name}, {theirs.digest[:12]})",
                "measure fidelity of these two models",
            )
    tokens = np.array([window.tokens for window in record.windows], dtype=np.float64)
    nll = np.array([[window.baseline_nll, window.candidate_nll] for window in record.windows], dtype=np.float64)
    sums = np.array([[window.kl, window.agree] for window in record.windows], dtype=np.float64)
    if not record.windows or not (tokens > 0).all() or not (np.isfinite(nll).all() and np.isfinite(sums).all()):
        raise UserError("the fidelity record holds no windows, empty windows, or NaN or infinite sums", "measure again")
    total = float(tokens.sum())
    kl, agreement = (float(value) for value in sums.sum(axis=0) / total)
    perplexities = [math.exp(float(value)) for value in nll.sum(axis=0) / total]
    claimed = (record.kl, record.top1_agreement, record.baseline_perplexity, record.candidate_perplexity)
    for value, claim in zip((kl, agreement, *perplexities), claimed, strict=True):
        if not abs(value - claim) <= _TOLERANCE * max(1.0, abs(value)):  # also when it is NaN
            raise UserError(
                f"the fidelity record claims {claim:g} where its windows sum to {value:g}", "measure fidelity again"
            )
    found, wide = (_of_perplexities(nll[:, 1] - nll[:, 0], tokens, error) for error in (alpha, fail_alpha))
    return FidelityResult(
        text=record.text,
        tokens=int(total),
        windows=len(record.windows),
        window=record.window,
        dtype=record.dtype,
        kl=kl,
        top1_agreement=agreement,
        baseline_perplexity=perplexities[0],
        candidate_perplexity=perplexities[1],
        ratio=perplexities[1] / perplexities[0],
        ratio_interval=found,
        ratio_wide=wide,
        text_digest=record.text_digest,
        sums=record.windows,
    )


def _of_perplexities(losses: Array, tokens: Array, alpha: float) -> Interval | None:
    found = ratio_interval(losses, tokens, alpha)
    if found is None:
        return None
    return Interval(math.exp(found.low), math.exp(found.high), found.level, "paired bootstrap over windows")
