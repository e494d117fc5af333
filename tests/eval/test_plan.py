"""The time a plan expects is that of earlier records of some size on the same hardware, and else unknown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.eval.plan import TaskPlan, earlier_records, plan_task
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.errors import UserError
from halfbyte.records.record import EvaluationRecord, Health, Speed, load_record

sys.path.insert(0, str(Path(__file__).parent.parent / "reports"))

from record_factory import model, write_record


@pytest.fixture
def plan(llama_factory: Any, tiny_tokenizer: Any, tiny_tasks: Path) -> Any:
    assert tiny_tasks.is_dir()
    with torch.device("meta"):
        empty = type(llama_factory())(llama_factory().config)

    def run(task: str, known: list[EvaluationRecord], **options: Any) -> TaskPlan:
        spec = TaskSpec(task=task, **options)
        settings = EvaluateSpec(tasks=[spec])
        return plan_task(empty, tiny_tokenizer, spec, settings, None, device="cpu", known=known)

    return run


def earlier(folder: Path, task: str, **speed: Any) -> EvaluationRecord:
    write_record(folder / task, [1.0, 0.0], task=task, health=Health(samples=100))
    return load_record(folder / task).model_copy(update={"speed": Speed(**speed)})


def test_no_earlier_record_no_time(plan: Any) -> None:
    found = plan("tiny_choice", [])
    assert found.questions == 24
    assert (found.seconds, found.texts, found.expected_generated) == (None, 0, None)


def test_scored_tokens_take_their_time(plan: Any, tmp_path: Path) -> None:
    known = [earlier(tmp_path, "mmlu", distinct_tokens=10_000, scored_per_second=50.0)]
    found = plan("tiny_choice", known)
    assert found.seconds == found.distinct_tokens / 50


def test_the_speed_of_another_backend_says_nothing(plan: Any, tmp_path: Path) -> None:
    known = earlier(tmp_path, "mmlu", distinct_tokens=10_000, scored_per_second=50.0)
    known.fingerprint.backend = "vllm"
    assert plan("tiny_choice", [known]).seconds is None


def test_a_speed_over_a_few_tokens_is_none(plan: Any, tmp_path: Path) -> None:
    known = [earlier(tmp_path, "mmlu", distinct_tokens=4_000, scored_per_second=50.0)]
    assert plan("tiny_choice", known).seconds is None


def test_texts_are_expected_as_long_as_they_were(plan: Any, tmp_path: Path) -> None:
    options = {"limit": 10, "samples": 3, "gen_kwargs": {"temperature": 1.0}}
    other = earlier(tmp_path, "gsm8k", generated_per_second=20.0, generated_per_sample=100.0)
    found = plan("tiny_generate", [other], **options)
    assert (found.texts, found.most_generated, found.expected_generated) == (30, 180, None)
    assert found.seconds == 180 / 20
    same = earlier(tmp_path, "tiny_generate", generated_per_second=10.0, generated_per_sample=4.5)
    found = plan("tiny_generate", [other, same], **options)
    assert (found.expected_generated, found.generated) == (135, 135)
    assert found.seconds == 135 / 20  # at the speed of the larger record


def test_records_of_another_model_or_machine_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    write_record(folder / "a", [1.0], task="a")
    write_record(folder / "b", [1.0], task="b", format="NVFP4")
    digest, here = model().digest, {"machine": "x86_64"}
    assert [record.task for record in earlier_records([folder, tmp_path / "none"], digest, here)] == ["a"]
    assert earlier_records([folder], digest, {"cuda": ["a GPU"]}) == []


def test_settings_that_cannot_work_are_refused_before_the_night(plan: Any) -> None:
    with pytest.raises(UserError, match="leaves no room for a prompt"):
        plan("tiny_generate", [], gen_kwargs={"max_gen_toks": 512})
