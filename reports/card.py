"""The section for a Hugging Face model card, with entries for .eval_results."""

from __future__ import annotations

from collections.abc import Sequence

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from halfbyte.reports import figures
from halfbyte.reports.comparison import Comparison
from halfbyte.reports.tables import check_one_baseline, how_to_read, labels, losses_table
from halfbyte.reports.text import escaped, piped
from halfbyte.reports.training import training_line

CARD_FILE = "model-card.md"
EVAL_RESULTS_FILE = "eval_results.yaml"
# The hub's data set behind a task, and the name of the task within it.
DATASETS = {
    "mmlu": ("cais/mmlu", "mmlu"),
    "mmlu_pro": ("TIGER-Lab/MMLU-Pro", "mmlu_pro"),
    "gsm8k": ("openai/gsm8k", "gsm8k"),
    "arc_easy": ("allenai/ai2_arc", "arc_easy"),
    "arc_challenge": ("allenai/ai2_arc", "arc_challenge"),
    "gpqa_diamond": ("Idavidrein/gpqa", "gpqa_diamond"),
    "math_500": ("HuggingFaceH4/MATH-500", "math_500"),
    "aime_2024": ("Maxwell-Jia/AIME_2024", "aime_2024"),
    "aime_2025": ("math-ai/aime25", "aime_2025"),
}


def model_card(comparisons: Sequence[Comparison]) -> str:
    """A section of Markdown on what the quantization cost, for the candidates' model cards.

    Raises:
        UserError: when there is no comparison, or they have different baselines.
    """
    check_one_baseline(comparisons)
    baseline, names = labels(comparisons)
    parts = ["## Accuracy after quantization"]
    for label, one in zip(names, comparisons, strict=True):
        size = f"{figures.size(one.candidate.bytes_on_disk)} instead of {figures.size(one.baseline.bytes_on_disk)}"
        parts.append(
            f"{escaped(label)} of {escaped(one.baseline.name)}: {size}, "
            f"{figures.figure(one.candidate.bits_per_weight, 2)} bits per weight."
        )
        if one.tasks:
            parts.append(piped(losses_table(one, label, baseline)))
        if one.training is not None:
            parts.append(escaped(training_line(one.training, label)))
        if one.verdict is not None:
            verdict = one.verdict
            part = f"Policy `{verdict.policy}`: **{verdict.verdict}**. {escaped(verdict.sentence)}"
            parts.append(part if verdict.release_evidence else f"{part} Passing this policy is no proof for a release.")
    parts.append(escaped(how_to_read(comparisons[0])))
    rows = [row for one in comparisons for row in one.tasks]
    if rows and all(row.draws for row in rows):
        parts.append("Measured by halfbyte on images of the same prompts and the same noise.")
    else:
        parts.append("Measured with [lm-eval](https://github.com/EleutherAI/lm-evaluation-harness) tasks by halfbyte.")
    return "\n\n".join(parts) + "\n"


def eval_results(comparison: Comparison) -> str:
    """The candidate's scores as YAML for a file in .eval_results/ of its repository; tasks of known data sets only."""
    entries = []
    for row in comparison.tasks:
        known = DATASETS.get(row.task)
        if known is None:
            continue
        shots = sorted({part.num_fewshot for part in row.settings.subtasks.values()})
        notes = f"{row.metric}, {'/'.join(str(number) for number in shots)}-shot"
        if row.samples > 1:
            notes += f", {row.samples} samples a question"
        if row.settings.limit is not None:
            notes += f", first {row.settings.limit} questions only"
        entries.append(
            EvalResultEntry(
                dataset_id=known[0],
                task_id=known[1],
                value=row.result.candidate,
                date=comparison.created,
                notes=notes,
            )
        )
    return yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
