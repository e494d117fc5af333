"""Claims about the model card's section and its entries for .eval_results."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from record_factory import flipped, write_record

from halfbyte.records.errors import UserError
from halfbyte.reports.card import eval_results, model_card
from halfbyte.reports.compare import compare
from halfbyte.reports.comparison import Comparison
from halfbyte.reports.policy import load_policy


@pytest.fixture
def comparison(tmp_path: Path, cache: Path) -> Comparison:  # noqa: ARG001
    ours, theirs = flipped(3000, 2000, 5, 5)
    for task in ("mmlu", "mine"):
        write_record(tmp_path / "b" / task, ours, task=task, subtask={"num_fewshot": 5})
        write_record(tmp_path / "c" / task, theirs, task=task, format="NVFP4", subtask={"num_fewshot": 5})
    return compare(tmp_path / "b", tmp_path / "c", load_policy("release"))


def test_the_card_holds_the_table_and_the_verdict(comparison: Comparison) -> None:
    card = model_card([comparison])
    assert card.startswith("## Accuracy after quantization")
    assert "| mmlu | acc | 3,000 | 0.6667 | 0.6667 |" in card
    assert "Policy `release`: **pass**" in card
    with pytest.raises(UserError, match="no comparison"):
        model_card([])


def test_a_card_says_of_a_policy_that_proves_nothing_that_it_does(comparison: Comparison) -> None:
    words = "Passing this policy is no proof for a release."
    assert comparison.verdict is not None
    assert words not in model_card([comparison])
    weak = comparison.verdict.model_copy(update={"release_evidence": False})
    assert words in model_card([comparison.model_copy(update={"verdict": weak})])


def test_scores_on_data_sets_of_the_hub_become_entries(comparison: Comparison) -> None:
    (entry,) = yaml.safe_load(eval_results(comparison))
    assert entry["dataset"] == {"id": "cais/mmlu", "task_id": "mmlu"}
    assert entry["value"] == pytest.approx(2 / 3)
    assert entry["notes"] == "acc, 5-shot"
