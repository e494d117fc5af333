"""Claims about the training record: it reads back, and its curves hold each step once, whatever was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.records.errors import UserError
from halfbyte.records.files import read_json, write_json
from halfbyte.records.training import (
    CURVES_FILE,
    TRAINING_FILE,
    OverlapFound,
    TrainingRecord,
    Validation,
    load_training,
    read_curves,
)

RECORD = TrainingRecord(
    created="2026-11-01T00:00:00+00:00",
    method="qad",
    seed=1,
    steps=40,
    best_step=30,
    stopped="max_steps",
    start=Validation(step=0, loss=3.1, kl=0.4),
    best=Validation(step=30, loss=2.9, kl=0.1),
    tokens=40_000,
    seconds=12.5,
    teacher="models/bf16",
    overlap=OverlapFound(questions=100, found=0),
)


def test_a_record_reads_back_and_one_of_another_version_is_refused(tmp_path: Path) -> None:
    RECORD.save(tmp_path)
    assert load_training(tmp_path) == RECORD
    write_json(tmp_path / TRAINING_FILE, read_json(tmp_path / TRAINING_FILE) | {"schema_version": 2})
    with pytest.raises(UserError, match="is not a training record of this version"):
        load_training(tmp_path)


def test_a_step_that_was_done_again_after_a_kill_counts_once_and_a_loss_may_be_no_number(tmp_path: Path) -> None:
    step = '{{"step": {}, "tokens": {}, "loss": {}, "learning_rate": 1e-5, "grad_norm": null, "seconds": 1.0}}\n'
    validation = '{"step": 2, "tokens": 20, "validation_loss": 2.5, "validation_kl": 0.25}\n'
    lines = [step.format(2, 20, 2.0), validation, step.format(1, 10, 3.0), step.format(2, 20, "null")]
    (tmp_path / CURVES_FILE).write_text("".join(lines), encoding="utf-8")
    curves = read_curves(tmp_path)
    assert [(row.step, row.loss) for row in curves.steps] == [(1, 3.0), (2, None)]
    assert [(row.step, row.validation_kl) for row in curves.validations] == [(2, 0.25)]


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"step": 1}', '{"step": 1, "tokens": 1, "validation_loss": "x"}'])
def test_a_line_that_is_none_of_a_curve_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / CURVES_FILE).write_text(line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"curves\.jsonl:1 is no line of a training curve"):
        read_curves(tmp_path)
    with pytest.raises(UserError, match="missing"):
        read_curves(tmp_path / "elsewhere")
