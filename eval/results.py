"""lm-eval's result and sample files, and what the record takes from them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm_eval.api.registry import is_higher_better
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import handle_non_serializable, hash_string, sanitize_list

from halfbyte.eval.answers import NO_ANSWER
from halfbyte.eval.backend import MAX_GEN_TOKS
from halfbyte.eval.lm import JournaledLM
from halfbyte.records.digests import text_digest, value_digest
from halfbyte.records.errors import UserError, unknown_name
from halfbyte.records.files import write_text
from halfbyte.records.record import Metric, SubtaskFingerprint

EXTRACTORS = ("regex", "regex_pos", "multi_choice_regex")
"""lm-eval's filters that look for an answer in a generated text and give a fallback where there is none."""


def _without_nan(value: Any) -> Any:
    """NaN and infinities as words: they are no JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(entry) for entry in value]
    return value


def _dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(
        _without_nan(value), indent=indent, default=handle_non_serializable, ensure_ascii=False, allow_nan=False
    )


def write_samples(folder: Path, date: str, samples: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Writes samples_<subtask>_<date>.jsonl as lm-eval does; returns the file names by subtask."""
    names: dict[str, str] = {}
    for subtask, rows in samples.items():
        lines = []
        for row in rows:
            arguments = {
                f"gen_args_{i}": {f"arg_{j}": part for j, part in enumerate(request)}
                for i, request in enumerate(row["arguments"])
            }
            texts = {
                "resps": sanitize_list(row["resps"]),
                "filtered_resps": sanitize_list(row["filtered_resps"]),
                "arguments": arguments,
                "target": str(row["target"]),
            }
            lines.append(_dumps({**row, **texts}) + "\n")
        names[subtask] = f"samples_{subtask.replace('/', '__')}_{date}.jsonl"
        write_text(folder / names[subtask], "".join(lines))
    return names


def write_results(folder: Path, date: str, results: dict[str, Any]) -> str:
    """Writes results_<date>.json with lm-eval's keys, without the samples; returns its name."""
    name = f"results_{date}.json"
    content = {key: value for key, value in results.items() if key != "samples"}
    for metrics in content["results"].values():
        for key, value in metrics.items():
            if "_stderr," in key and not (isinstance(value, float) and math.isfinite(value)):
                metrics[key] = "N/A"  # lm-eval's word for none; its table formats everything else as a number
    write_text(folder / name, _dumps(content, indent=2) + "\n")
    return name


def task_hashes(samples: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """lm-eval's hash of each subtask's questions, made as it makes it."""
    return {
        subtask: hash_string("".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows))
        for subtask, rows in samples.items()
    }


def _questions(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a question, in the order of doc_id: a question has a row for each filter."""
    return [row for _, row in sorted({int(row["doc_id"]): row for row in rows}.items())]


def generation_settings(task: Any) -> dict[str, Any]:
    """The generation settings of a task as applied."""
    found: dict[str, Any] = json.loads(_dumps(normalize_gen_kwargs(task.config.generation_kwargs or {}, MAX_GEN_TOKS)))
    return found


def subtask_fingerprint(task: Any, rows: list[dict[str, Any]]) -> SubtaskFingerprint:
    """What was asked in a subtask, from lm-eval's task object and its logged samples."""
    questions = _questions(rows)
    generation = None
    if task.OUTPUT_TYPE == "generate_until":
        generation = generation_settings(task)
    return SubtaskFingerprint(
        version=str(task.VERSION),
        num_fewshot=int(task.config.num_fewshot or 0),
        questions=len(questions),
        documents=value_digest([row["doc_hash"] for row in questions]),
        prompts=value_digest([row["prompt_hash"] for row in questions]),
        targets=value_digest([row["target_hash"] for row in questions]),
        output_type=str(task.OUTPUT_TYPE),
        generation=generation,
        repeats=int(task.config.repeats or 1),
        chance=_chance(questions) if task.OUTPUT_TYPE == "multiple_choice" else None,
    )


def _chance(questions: list[dict[str, Any]]) -> float:
    # lm-eval asks one request a choice; its mutual-information metrics ask each once more without the question.
    choices = [len({str(request[1]) for request in row["arguments"]}) for row in questions]
    return sum(1 / number for number in choices) / len(choices)


def metrics_of(results: dict[str, Any], task: str) -> list[Metric]:
    """All aggregated figures: those of `task` itself, then those of groups in it, then all others.

    Raises:
        UserError: when one of them is no number.
    """
    found: list[Metric] = []
    groups = results.get("groups", {})
    questions = {name: int(counts["effective"]) for name, counts in results["n-samples"].items()}
    for name in sorted(results["results"], key=lambda name: (name != task, name not in groups)):
        values = results["results"][name]
        directions = results["higher_is_better"].get(name, {})
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            if not math.isfinite(value):
                raise UserError(
                    f"{metric} of {name} is no number: {value}", "the model's answers are broken; verify it"
                )
            stderr = values.get(f"{metric}_stderr,{filter_name}")
            higher = directions.get(metric)
            found.append(
                Metric(
                    subtask=name,
                    metric=metric,
                    filter=filter_name,
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, float) and math.isfinite(stderr) else None,
                    higher_is_better=bool(is_higher_better(metric) if higher is None else higher),
                    questions=questions.get(name, int(values.get("sample_len") or 0)),
                )
            )
    return found


def primary_metric(wanted: str | None, metrics: list[Metric]) -> list[str]:
    """The [metric, filter] a verdict looks at first: the one wanted, else the first that lm-eval lists.

    Raises:
        UserError: when the task has no such metric; names those it has.
    """
    if wanted is None:
        return [metrics[0].metric, metrics[0].filter]
    for entry in metrics:
        if wanted in (entry.metric, f"{entry.metric},{entry.filter}"):
            return [entry.metric, entry.filter]
    raise unknown_name("metric", wanted, {f"{entry.metric},{entry.filter}" for entry in metrics})


def add_proof(tasks: dict[str, Any], samples: dict[str, list[dict[str, Any]]], lm: JournaledLM) -> None:
    """Adds to each sample row what the model was given, how its texts ended, and whether they hold an answer.

    See records.record.Sample for the keys: asked, generated, answered.
    """
    for subtask, rows in samples.items():
        task = tasks[subtask]
        for row in rows:
            question = (str(task.config.task), int(row["doc_id"]))
            row["asked"] = lm.book.asked[question].model_dump(mode="json")
            if task.OUTPUT_TYPE == "generate_until":
                row["generated"] = [
                    {"tokens": one.tokens, "stop": one.stop, "seed": one.seed} for one in lm.generated[question]
                ]
                row["answered"] = _answered(task, row)


def _answered(task: Any, row: dict[str, Any]) -> list[bool] | None:
    """Whether each answer that a filter gives was found in its text; None where the filter looks for none."""
    steps = [
        step
        for entry in task.config.filter_list or []
        for step in entry["filter"]
        if entry["name"] == row["filter"] and _extracts(step)
    ]
    answers = _flat(row["filtered_resps"])
    if not steps:
        return None
    nothing = {NO_ANSWER, *(step.get("fallback", "[invalid]") for step in steps)}
    return [answer not in nothing for answer in answers]


def _extracts(step: dict[str, Any]) -> bool:
    """Whether a step of a filter looks for an answer: lm-eval's extractors, and ours, which give NO_ANSWER."""
    ours = str(getattr(step.get("filter_fn"), "__module__", "")).startswith("halfbyte.eval.")
    return step["function"] in EXTRACTORS or (step["function"] == "custom" and ours)


def unanswered(samples: dict[str, list[dict[str, Any]]], filter_name: str) -> int | None:
    """Answers that the filter `filter_name` did not find; None where it looks for none."""
    found = [
        row["answered"]
        for rows in samples.values()
        for row in rows
        if row["filter"] == filter_name and row.get("answered") is not None
    ]
    return sum(not answered for row in found for answered in row) if found else None


def _flat(value: Any) -> list[Any]:
    return [leaf for entry in value for leaf in _flat(entry)] if isinstance(value, (list, tuple)) else [value]


def template_digest(template: str | None) -> str | None:
    """SHA-256 of a chat template or system prompt; None where there is none."""
    return text_digest(template) if template else None
