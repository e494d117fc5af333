"""Tiny tasks in lm-eval's format, in place of the shipped ones, and a stand-in for lm-eval's look at the machine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tiny_flux import save_tiny_flux

from halfbyte.records.record import ModelSummary

CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {train: tiny_choice.jsonl, test: tiny_choice.jsonl}}
training_split: train
test_split: test
output_type: multiple_choice
doc_to_text: "question {{question}}\\nanswer"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 2.0}
"""

GENERATE = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {data_files: {test: tiny_choice.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "question {{question}}\\nanswer"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], do_sample: false, max_gen_toks: 6}
filter_list:
  - name: number
    filter: [{function: regex, regex_pattern: "([0-9]+)"}, {function: take_first}]
  - name: whole
    filter: [{function: take_first}]
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
metadata: {version: 1.0}
"""

ROLLING = """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: tiny_choice.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - {metric: bits_per_byte}
metadata: {version: 1.0}
"""

GROUP = """
group: tiny_group
task: [tiny_choice, tiny_other]
aggregate_metric_list:
  - {metric: acc, weight_by_size: true}
metadata: {version: 1.0}
"""


def write_tasks(folder: Path, questions: int = 24) -> None:
    """The tiny tasks and their questions."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(3)
    words = ["cat", "dog", "sun", "moon", "red", "blue", "one", "two", "fire", "tree", "the bird", "a big fish"]
    rows = [
        {
            "question": " ".join(dice.choices(words, k=dice.randint(2, 12))),
            "choices": dice.sample(words, 4),
            "answer": dice.randrange(4),
        }
        for _ in range(questions)
    ]
    (folder / "tiny_choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "tiny_choice.yaml").write_text(CHOICE, encoding="utf-8")
    (folder / "tiny_other.yaml").write_text(CHOICE.replace("task: tiny_choice", "task: tiny_other"), encoding="utf-8")
    (folder / "tiny_generate.yaml").write_text(GENERATE, encoding="utf-8")
    (folder / "tiny_rolling.yaml").write_text(ROLLING, encoding="utf-8")
    (folder / "tiny_group.yaml").write_text(GROUP, encoding="utf-8")


@pytest.fixture
def tiny_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny tasks in the place of the shipped ones: tiny_{choice,other,generate,rolling,group}."""
    from halfbyte.eval import evaluate, resolve

    folder = tmp_path / "tasks"
    write_tasks(folder)
    monkeypatch.setattr(evaluate, "TASKS", folder)
    monkeypatch.setattr(resolve, "TASKS", folder)
    monkeypatch.setattr(resolve, "task_manager", resolve.task_manager.__wrapped__)
    return folder


@pytest.fixture(autouse=True)
def _no_look_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval asks compilers and drivers for their versions, which takes seconds and tests nothing of ours."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: results.update(lm_eval_version="test"))


@pytest.fixture
def summary() -> ModelSummary:
    """A model's name and digest."""
    return ModelSummary(name="tiny", digest="0" * 64, format="float32", bytes_on_disk=1000, bits_per_weight=32.0)


@pytest.fixture
def write_tiny_tasks() -> Any:
    """`write_tasks`, for a test in another process."""
    return write_tasks


@pytest.fixture(scope="module")
def tiny_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Flux pipeline."""
    return save_tiny_flux(tmp_path_factory.mktemp("flux") / "pipeline")


@pytest.fixture(scope="module")
def tiny_control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Flux pipeline that draws from a control image."""
    return save_tiny_flux(tmp_path_factory.mktemp("flux") / "control", control=True)
