"""The HTML report: one file without network that says on its first screen what happened and what to do.

Nothing in it needs a script; where images are compared, a line of one lets the border between two of them be moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from halfbyte.records.record import Fingerprint
from halfbyte.reports import figures
from halfbyte.reports.appendix import (
    layers_tables,
    lengths_table,
    manifest_table,
    published_overlays,
    speed_note,
    speed_table,
)
from halfbyte.reports.comparison import Comparison, FidelityResult, Flip, TaskResult
from halfbyte.reports.contact_sheet import contact_sheet
from halfbyte.reports.curves import training_plots
from halfbyte.reports.flips import fit_into_page
from halfbyte.reports.forest import forest_plots
from halfbyte.reports.latents import latent_plots
from halfbyte.reports.metrics import SHARE
from halfbyte.reports.notes import all_notes
from halfbyte.reports.tables import (
    WORDS,
    Table,
    how_to_read,
    labels,
    losses_table,
    models_table,
    references_table,
    row_word,
    seeds_table,
    set_metrics_table,
)
from halfbyte.reports.training import gains_tables, training_lines, training_table


def render_html(comparisons: Sequence[Comparison]) -> str:
    """The report on one or several candidates of one baseline.

    Raises:
        UserError: when there is no comparison, or they have different baselines.
    """
    models = models_table(comparisons)
    baseline, names = labels(comparisons)
    environment = Environment(
        loader=PackageLoader("halfbyte.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Our own drawings, escaped where they are made.
    plots = [(caption, Markup(svg)) for caption, svg in forest_plots(comparisons)]
    curves = [(caption, Markup(svg)) for caption, svg in training_plots(comparisons)]
    judged = all(one.verdict is not None for one in comparisons)
    title = "; ".join(
        f"{label}: {WORDS[one.verdict.verdict] if one.verdict else 'compared'}"
        for label, one in zip(names, comparisons, strict=True)
    )
    return environment.get_template("report.html.j2").render(
        title=title,
        created=figures.time(max(one.created for one in comparisons)),
        baseline_label=baseline,
        baseline=comparisons[0].baseline,
        cards=[_card(label, one) for label, one in zip(names, comparisons, strict=True)],
        judged=judged,
        shares=any(row.bounds == SHARE for one in comparisons for row in one.tasks),
        models=models,
        seeds=seeds_table(comparisons),
        curves=curves,
        training=training_table(comparisons),
        training_lines=[
            line for label, one in zip(names, comparisons, strict=True) for line in training_lines(one, label)
        ],
        gains=gains_tables(comparisons),
        whole_sets=set_metrics_table(comparisons),
        unit=_unit(comparisons),
        references=references_table(comparisons),
        latents=[(caption, Markup(svg)) for caption, svg in latent_plots(comparisons)],
        contact=contact_sheet(comparisons),
        candidates=[
            {
                "label": label,
                "table": losses_table(one, label, baseline) if one.tasks else None,
                "tasks": [
                    _task(row, flips) for row, flips in zip(one.tasks, fitted, strict=True) if row.flips or row.subtasks
                ],
                "model": one.candidate,
            }
            for label, one, fitted in zip(names, comparisons, fit_into_page(comparisons), strict=True)
        ],
        plots=plots,
        how_to_read=how_to_read(comparisons[0]),
        fidelity=_fidelity_table(comparisons, names),
        notes=all_notes(comparisons),
        settings=_settings_table(comparisons),
        origin=_origin_table(comparisons, baseline, names),
        digests=[(baseline, comparisons[0].baseline)]
        + [(label, one.candidate) for label, one in zip(names, comparisons, strict=True)],
        speed=speed_table(comparisons),
        speed_note=speed_note(comparisons),
        lengths=lengths_table(comparisons),
        published=published_overlays(comparisons),
        layers=layers_tables(comparisons),
        manifest=manifest_table(comparisons),
        policies=list({one.policy.name: one.policy for one in comparisons if one.policy}.values()),
    )


def _unit(comparisons: Sequence[Comparison]) -> str:
    """What lost and gained count: questions, images, or both."""
    return " or ".join(sorted({row.unit for one in comparisons for row in one.tasks}, reverse=True)) or "questions"


def _card(label: str, comparison: Comparison) -> dict[str, str]:
    verdict = comparison.verdict
    if verdict is None:
        return {
            "kind": "unjudged",
            "word": "COMPARED",
            "label": label,
            "headline": "Compared, not judged",
            "sentence": "No policy was asked for, so nothing says how much loss is tolerated.",
            "next_step": "Run halfbyte gate on the same two folders to get a verdict.",
        }
    ratio = comparison.policy is not None and comparison.policy.ratio is not None
    unproven = "MLPerf's rule holds" if ratio else "Smoke test passed"
    headlines = {
        "pass": "May be released" if verdict.release_evidence else unproven,
        "fail": "Do not release",
        "inconclusive": "Not enough evidence",
        "anomaly": "Something is broken",
    }
    return {
        "kind": verdict.verdict,
        "word": WORDS[verdict.verdict],
        "label": label,
        "headline": headlines[verdict.verdict],
        "sentence": verdict.sentence,
        "next_step": verdict.next_step,
    }


def _task(row: TaskResult, flips: list[Flip]) -> dict[str, Any]:
    shown = {change: sum(flip.change == change for flip in flips) for change in ("lost", "gained")}
    subtasks = Table(
        "",
        ["subtask", "questions", "baseline", "candidate", "lost", "gained"],
        [
            [
                one.subtask,
                figures.count(one.questions),
                figures.figure(one.baseline),
                figures.figure(one.candidate),
                figures.count(one.lost),
                figures.count(one.gained),
            ]
            for one in row.subtasks
        ],
    )
    counts = [
        f"{figures.count(total)} {change}" + (f" ({shown[change]} shown)" if shown[change] < total else "")
        for change, total in (("lost", row.result.lost), ("gained", row.result.gained))
    ]
    return {"name": row.task, "counts": ", ".join(counts), "flips": flips, "subtasks": subtasks}


def _fidelity_table(comparisons: Sequence[Comparison], names: list[str]) -> Table | None:
    found = [(label, one.fidelity) for label, one in zip(names, comparisons, strict=True) if one.fidelity]
    if not found:
        return None
    headers = ["model", "text", "tokens", "windows", "KL (nats per token)", "top-1 agreement", "baseline perplexity"]
    headers += ["perplexity", "ratio", "interval of the ratio", "verdict"]
    return Table("Fidelity", headers, [_fidelity_row(label, one) for label, one in found], labels=2)


def _fidelity_row(label: str, one: FidelityResult) -> list[str]:
    return [
        label,
        one.text,
        figures.count(one.tokens),
        figures.count(one.windows),
        figures.figure(one.kl),
        figures.share(one.top1_agreement),
        figures.figure(one.baseline_perplexity, 2),
        figures.figure(one.candidate_perplexity, 2),
        figures.figure(one.ratio),
        figures.interval(one.ratio_interval),
        row_word(one.judgement) if one.judgement else "advisory",
    ]


def _settings_table(comparisons: Sequence[Comparison]) -> Table:
    """What both sides were asked, once a task: pairing has made sure that it is the same."""
    prints: dict[str, Fingerprint] = {}
    for one in comparisons:
        prints |= {row.settings.task: row.settings for row in one.tasks}
    headers = ["task", "few-shot", "limit", "chat template", "generation", "dtype", "backend", "BOS", "longest input"]
    return Table("Settings", headers, [_settings_row(task, print_) for task, print_ in sorted(prints.items())], 9)


def _settings_row(task: str, print_: Fingerprint) -> list[str]:
    shots = sorted({subtask.num_fewshot for subtask in print_.subtasks.values()})
    generation = {
        ", ".join(f"{key} {value}" for key, value in sorted(subtask.generation.items()))
        for subtask in print_.subtasks.values()
        if subtask.generation
    }
    return [
        task,
        ", ".join(str(number) for number in shots),
        "all questions" if print_.limit is None else str(print_.limit),
        "none" if print_.chat_template is None else print_.chat_template[:12],
        "; ".join(sorted(generation)) or "none",
        print_.dtype,
        print_.backend,
        ", ".join(str(number) for number in print_.bos_per_prompt) or figures.NONE,
        "the model's own" if print_.max_length is None else f"{print_.max_length} tokens",
    ]


def _origin_table(comparisons: Sequence[Comparison], baseline: str, names: list[str]) -> Table:
    """Package versions and hardware of every side."""
    sides = [(comparisons[0].packages["baseline"], comparisons[0].hardware["baseline"])]
    sides += [(one.packages["candidate"], one.hardware["candidate"]) for one in comparisons]
    rows = [
        [name, *(str(packages.get(name) or figures.NONE) for packages, _ in sides)]
        for name in sorted({name for packages, _ in sides for name in packages})
    ]
    rows += [
        [name, *(_words(hardware.get(name)) for _, hardware in sides)]
        for name in sorted({name for _, hardware in sides for name in hardware})
    ]
    return Table("Software and hardware", ["", baseline, *names], rows, labels=1 + len(sides))


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(one) for one in value) or "none"
    return figures.NONE if value is None else str(value)
