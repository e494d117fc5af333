"""Before a training: the teacher is asked for logits or texts, and texts are searched for evaluation questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training import MORE, write_training

from halfbyte.quant import produce
from halfbyte.recipes.find import load_recipe
from halfbyte.records.errors import UserError
from halfbyte.records.run import RunFolder
from halfbyte.records.training import load_training, read_curves

FEW = {"max_steps": 6, "validation": {"share": 0.2, "every": 3}}


def trained(folder: Path, model: Path, questions: Any = None, **more: Any) -> RunFolder:
    """A run of a tiny recipe."""
    recipe = load_recipe(str(write_training(folder, model, **{**FEW, **more})))
    run = RunFolder(folder / "run")
    produce.produce(produce.prepare(recipe, "cpu"), run, questions=questions)
    return run


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_logits_of_the_whole_vocabulary_train_as_the_teacher_itself(
    tmp_path: Path, tiny_model_folder: Path, temperature: float
) -> None:
    teacher = {"temperature": temperature}
    beside = trained(tmp_path / "a", tiny_model_folder, method="qad", teacher=teacher)
    offline = trained(tmp_path / "b", tiny_model_folder, method="qad", teacher={**teacher, "offline_top_k": 384})
    one, other = read_curves(beside.training), read_curves(offline.training)
    assert [step.loss for step in other.steps] == pytest.approx([step.loss for step in one.steps], rel=1e-4)
    for name in ("validation_loss", "validation_kl"):
        values = [[getattr(line, name) for line in curve.validations] for curve in (one, other)]
        assert values[1] == pytest.approx(values[0], rel=1e-4)
    assert list((offline.training / "teacher").glob("*.safetensors"))
    assert not (beside.training / "teacher").exists()


@pytest.mark.usefixtures("cache")
def test_few_logits_bring_the_model_nearer_to_its_teacher(tmp_path: Path, tiny_model_folder: Path) -> None:
    settings = {"max_steps": 20, "validation": {"share": 0.2, "every": 10}, "learning_rate": 1e-3}
    run = trained(tmp_path, tiny_model_folder, method="qad", teacher={"offline_top_k": 16}, **settings)
    record = load_training(run.training)
    assert record.best.kl is not None
    assert record.start.kl is not None
    assert record.best.kl < record.start.kl


@pytest.mark.usefixtures("cache")
def test_a_model_is_trained_on_what_its_teacher_wrote(tmp_path: Path, tiny_model_folder: Path) -> None:
    sampled = {"samples": 40, "length": 32}
    run = trained(tmp_path / "a", tiny_model_folder, method="qad", sources=[], sampled=sampled)
    record = load_training(run.training)
    assert list(record.data) == ["sampled from the teacher"]
    assert (run.training / "sampled.jsonl").is_file()
    again = trained(tmp_path / "b", tiny_model_folder, method="qad", sources=[], sampled=sampled)
    assert load_training(again.training).data == record.data


@pytest.mark.usefixtures("cache")
def test_texts_that_hold_the_questions_are_refused_before_training(tmp_path: Path, tiny_model_folder: Path) -> None:
    question = next(text for text in MORE if len(text.split()) > 8)
    with pytest.raises(
        UserError, match=r"hold 13 words in a row of 1 of 1 questions of 'exam' \(100.0%, allowed 1.0%\)"
    ):
        trained(tmp_path / "run", tiny_model_folder, {"exam": {"0": question}})
    assert not (tmp_path / "run" / "run" / "training" / "checkpoints").exists()
    run = trained(tmp_path / "more", tiny_model_folder, {"exam": {"0": question}}, max_overlap=1.0)
    found = load_training(run.training).overlap
    assert found is not None
    assert (found.questions, found.found, found.bound) == (1, 1, 1.0)
