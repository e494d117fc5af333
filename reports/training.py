"""What training did to a candidate, for reports: read from its run folder, as a table, as a sentence and as notes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halfbyte.records.errors import UserError
from halfbyte.records.training import CURVES_FILE, MEASURES, TRAINING_FILE, TrainingRecord, load_training, read_curves
from halfbyte.reports import figures
from halfbyte.reports.comparison import Comparison, FidelityGain, Training
from halfbyte.reports.flips import spread_out
from halfbyte.reports.statistics import holm
from halfbyte.reports.tables import Table, labels

_POINTS = 400  # of a drawn curve; a page has no room for more
_BETTER_ALPHA = 0.05
_STOPPED = {"max_steps": "all steps done", "patience": "no longer better"}


def read_training(folder: Path, key: str, settings: str = "") -> Training | None:
    """The training in a run's folder; None where there is none, or it has not ended.

    Args:
        folder: The run's training/.
        key: Of what made the checkpoint, which is that of its training.
        settings: See Training.

    Raises:
        UserError: when the record is of another training, or it and its curves are damaged or do not belong together.
    """
    path = folder / TRAINING_FILE
    if not path.is_file():
        return None
    record = load_training(folder)
    if record.key != key:
        raise UserError(f"{path} is of another training than the one that made the checkpoint", "train again")
    curves = read_curves(folder)
    known = {row.step for row in curves.validations}
    for step in (record.start.step, record.best_step):
        if step not in known:
            raise UserError(
                f"{folder / CURVES_FILE} lacks the validation at step {step} of {TRAINING_FILE}", "train again"
            )
    if curves.steps and curves.steps[-1].step > record.steps:
        raise UserError(
            f"{folder / CURVES_FILE} goes to step {curves.steps[-1].step}, and {TRAINING_FILE} ends at {record.steps}",
            "train again",
        )
    steps = spread_out(curves.steps, _POINTS)
    if steps and steps[-1] is not curves.steps[-1]:
        steps = [*steps, curves.steps[-1]]
    return Training(record=record, steps=steps, validations=curves.validations, settings=settings)


def training_table(comparisons: Sequence[Comparison]) -> Table | None:
    """One row a trained candidate; None where there is none."""
    _, names = labels(comparisons)
    rows = [
        _row(label, one.training.record)
        for label, one in zip(names, comparisons, strict=True)
        if one.training is not None
    ]
    if not rows:
        return None
    headers = [
        "model", "teacher", "stopped", "seed", "steps", "best step", "tokens", "seconds", "loss of PTQ", "at the best",
        "KL of PTQ", "at the best", "questions looked at", "overlap",
    ]  # fmt: skip
    return Table("Training", headers, rows, labels=3)


def _row(label: str, record: TrainingRecord) -> list[str]:
    overlap = record.overlap
    return [
        label,
        record.teacher or "none",
        _STOPPED.get(record.stopped, record.stopped),
        str(record.seed),
        figures.count(record.steps),
        figures.count(record.best_step),
        figures.count(record.tokens) + (" patches" if record.learned == "velocities" else ""),
        figures.figure(record.seconds, 1),
        figures.figure(record.start.loss),
        figures.figure(record.best.loss),
        figures.figure(record.start.kl),
        figures.figure(record.best.kl),
        figures.count(overlap.questions if overlap else None),
        figures.count(overlap.found if overlap else None),
    ]


def training_line(training: Training, label: str) -> str:
    """Training in one sentence, or two."""
    record = training.record
    stopped = {"max_steps": "", "patience": ", and stopped since it was no longer better"}.get(
        record.stopped, f", and stopped: {record.stopped}"
    )
    draws = record.learned == "velocities"
    text = (
        f"{label} was trained for {figures.count(record.steps)} steps ({figures.count(record.tokens)} "
        f"{'patches' if draws else 'tokens'}, "
        f"{figures.figure(record.seconds, 1)} s, seed {record.seed}){stopped}. Exported is step "
        f"{figures.count(record.best_step)}: {'mean squared error of the velocity' if draws else 'validation loss'} "
        f"{figures.figure(record.start.loss)} (PTQ) to "
        f"{figures.figure(record.best.loss)}"
    )
    if record.start.kl is not None and record.best.kl is not None:
        text += f", KL divergence {figures.figure(record.start.kl)} to {figures.figure(record.best.kl)} nats a token"
    if draws:
        return text + ", on prompts that were held out."
    if record.overlap is None:
        return text + "; whether its texts overlap with the evaluation was not looked at."
    return text + (
        f"; {figures.count(record.overlap.found)} of {figures.count(record.overlap.questions)} evaluation questions "
        "overlap with its texts."
    )


def fidelity_gain_line(gain: FidelityGain, label: str) -> str:
    """What training did to fidelity, in one sentence."""
    share = "" if gain.kl_share is None else f", {figures.share(gain.kl_share)} of it"
    level = next((figures.level(one.level) for one in (gain.kl_interval, gain.perplexity_interval) if one), "")
    return (
        f"On {gain.text} the KL divergence from the baseline is {figures.figure(gain.trained_kl)} nats a token for "
        f"{label}, and {figures.figure(gain.ptq_kl)} for PTQ{share}: a change of {figures.figure(gain.kl_change)} "
        f"({level} interval {figures.interval(gain.kl_interval)}). Its perplexity is "
        f"{figures.figure(gain.perplexity_ratio)} times PTQ's ({figures.interval(gain.perplexity_interval)})."
    )


def training_lines(one: Comparison, label: str) -> list[str]:
    """All sentences on a candidate's training; none where it was not trained."""
    if one.training is None:
        return []
    lines = [training_line(one.training, label)]
    return lines if one.fidelity_gain is None else [*lines, fidelity_gain_line(one.fidelity_gain, label)]


def gains_tables(comparisons: Sequence[Comparison]) -> list[Table]:
    """What training changed beside PTQ, a table for each trained candidate of which that is known."""
    _, names = labels(comparisons)
    found = []
    for label, one in zip(names, comparisons, strict=True):
        if not one.gains:
            continue
        level = next((figures.level(row.interval.level) for row in one.gains if row.interval), "")
        headers = ["task", "metric", "questions", "PTQ", label, "gain", f"{level} interval".strip(), "gained", "lost"]
        rows = [
            [
                row.task,
                figures.metric_label(row.metric, row.filter),
                figures.count(row.questions),
                figures.figure(row.ptq),
                figures.figure(row.trained),
                figures.figure(row.gain),
                figures.interval(row.interval),
                figures.count(row.gained),
                figures.count(row.lost),
                figures.p_value(row.p),
                row.says,
            ]
            for row in one.gains
        ]
        found.append(Table(f"{label} beside PTQ", [*headers, "p (Holm)", "beyond chance"], rows, labels=2))
    return found


def training_notes(one: Comparison) -> list[str]:
    """What a reader must know of a candidate's training: that it harmed, gave nothing, broke off, or saw the test."""
    if one.training is None:
        return []
    record, notes = one.training.record, []
    if record.stopped.startswith("diverged"):
        notes.append(f"training {record.stopped}; exported is the last good step, {figures.count(record.best_step)}")
    if record.best_step == 0:
        notes.append("training made nothing better by its validation, so that what is exported is PTQ")
    metric = "kl" if record.method == "qad" else "loss"
    before, after = record.start.value(metric), record.best.value(metric)
    if record.best_step and before is not None and after is not None and after >= before:
        notes.append(
            f"training has made its validation {MEASURES[metric]} worse: {before:.4f} before, {after:.4f} after"
        )
    if record.overlap is not None and record.overlap.found:
        notes.append(
            f"{figures.count(record.overlap.found)} of {figures.count(record.overlap.questions)} evaluation questions "
            "share a run of words with the training texts, so that its scores may be of what it has seen"
        )
    known = [(row.task, row.result.p_better) for row in one.tasks if row.result.p_better is not None]
    adjusted = holm([p for _, p in known]).tolist() if known else []
    better = [task for (task, _), p in zip(known, adjusted, strict=True) if p < _BETTER_ALPHA]
    if better:
        notes.append(
            f"better than its baseline beyond chance, at 5% for all tasks together (Holm): {', '.join(better)}; "
            "quantization does not explain that, and training may"
        )
    for says, what in (("worse", "made it worse than PTQ"), ("better", "made it better than PTQ")):
        tasks = [
            f"{row.task} ({figures.figure(row.gain)} {row.metric}, interval {figures.interval(row.interval)})"
            for row in one.gains
            if row.says == says
        ]
        if tasks:
            notes.append(f"training {what} beyond chance, at 5% for all tasks together (Holm): {', '.join(tasks)}")
    return notes
