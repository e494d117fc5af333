"""The train block: what it refuses, and that a recipe without one is the same recipe as before."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from halfbyte.recipes.find import load_recipe, recipe_digest
from halfbyte.recipes.training import TrainingSource, TrainSpec

WHOLE: dict[str, Any] = {"method": "qad", "sources": [{"dataset": "a.txt"}], "max_steps": 4}


def test_a_small_block_is_enough() -> None:
    spec = TrainSpec.model_validate(WHOLE)
    assert (spec.metric, spec.validation.keep, spec.teacher is not None) == ("kl", 2, True)
    assert TrainSpec.model_validate({**WHOLE, "method": "qat"}).metric == "loss"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": []}, "exactly one of sources"),
        ({"sampled": {}}, "exactly one of sources"),
        ({"epochs": 1.0}, "exactly one of max_steps and epochs"),
        ({"max_steps": None}, "exactly one of max_steps and epochs"),
        ({"teacher": None}, "need a teacher"),
        ({"method": "qat", "teacher": None, "validation": {"metric": "kl"}}, "validation by kl needs a teacher"),
        ({"lora": {}, "learned_scales": True}, "give one"),
        ({"learning_rate": 0.0}, "greater than 0"),
        ({"warmup": 1.0}, "less than 1"),
        ({"max_steps": 10**9}, "give more than 134,217,728 rows"),
        ({"lora": {"targets": []}}, "at least 1 item"),
        ({"teacher": {"temperature": 1e-30}}, "greater than or equal to 0.01"),
        ({"seed": -1}, "greater than or equal to 0"),
    ],
)
def test_a_block_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainSpec.model_validate({**WHOLE, **change})


@pytest.mark.parametrize(
    "change", [{"prompt_field": "a"}, {"response_field": "b"}, {"field": "text", "messages_field": "messages"}]
)
def test_a_source_has_one_shape(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="give "):
        TrainingSource.model_validate({"dataset": "a.jsonl", **change})


def test_the_digest_of_a_recipe_holds_its_train_block() -> None:
    plain = load_recipe("demo-nvfp4")
    train = "train={method: qat, sources: [{dataset: a.txt}], max_steps: 4}"
    trained = [load_recipe("demo-nvfp4", [train, *more]) for more in ((), ("train.learning_rate=1e-4",))]
    assert len({recipe_digest(recipe) for recipe in (plain, *trained)}) == 3
