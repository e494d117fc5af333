"""The gate keeps its promises where the truth is known; reports/CALIBRATION.md has the table of 20,000 gates a cell."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_factory import write_record

from halfbyte.reports.compare import compare
from halfbyte.reports.policy import Policy, load_policy

ROOT = Path(__file__).resolve().parent.parent.parent
SIMULATION: dict[str, Any] = runpy.run_path(str(ROOT / "tests" / "gate_calibration.py"))
KINDS = SIMULATION["KINDS"]
GATES = 2000
CELLS = [(0.01, 0.0), (0.02, 0.01), (0.05, 0.002), (0.2, 0.05)]


def noise(rate: float, gates: int = GATES) -> float:
    """Four standard errors: one cell in thirty thousand lies beyond by chance."""
    return 4 * math.sqrt(rate * (1 - rate) / gates)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("questions", SIMULATION["QUESTIONS"])
def test_a_true_loss_at_the_margin_passes_in_at_most_five_percent(kind: Any, questions: int) -> None:
    for lost, gained in CELLS:
        rates = SIMULATION["simulate"](kind, questions, lost, gained, None, GATES)
        assert rates.passed <= 0.05 + noise(0.05), (lost, gained)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("questions", SIMULATION["QUESTIONS"])
def test_a_candidate_that_lost_nothing_fails_in_at_most_one_percent(kind: Any, questions: int) -> None:
    for rate in SIMULATION["GAINED"]:
        assert SIMULATION["simulate"](kind, questions, rate, rate, 0.01, GATES).failed <= 0.01 + noise(0.01), rate


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_with_too_few_questions_nothing_passes_and_with_enough_nearly_everything_does(kind: Any) -> None:
    for questions in (30, 198):
        for rate in SIMULATION["GAINED"]:
            rates = SIMULATION["simulate"](kind, questions, rate, rate, 0.01, GATES)
            assert rates.passed == 0
            assert rates.open >= 0.99 - noise(0.01), rate
    assert SIMULATION["simulate"](kind, 14_042, 0.01, 0.01, 0.01, GATES).passed > 0.95


def test_the_committed_table_keeps_the_promise_in_each_of_its_cells() -> None:
    text = (ROOT / "reports" / "CALIBRATION.md").read_text(encoding="utf-8")
    assert "20,000 simulated gates a cell" in text
    first, second = text.split("## Nothing is lost")
    rows = re.findall(r"^\| [\d.]+ \| [\d.]+ \| (.+) \|$", first, flags=re.MULTILINE)
    passed = [float(cell) for row in rows for cell in row.split(" | ")]
    assert len(passed) == len(KINDS) * len(list(SIMULATION["at_the_margin"]())) * len(SIMULATION["QUESTIONS"])
    assert max(passed) <= 100 * (0.05 + noise(0.05, 20_000)) + 0.05  # rounded to a tenth
    rows = re.findall(r"^\| [\d.]+ \| (.+/.+) \|$", second, flags=re.MULTILINE)
    cells = [[float(part) for part in cell.split(" / ")] for row in rows for cell in row.split(" | ")]
    assert len(cells) == len(KINDS) * len(SIMULATION["GAINED"]) * len(SIMULATION["QUESTIONS"])
    assert max(failed for _, failed, _ in cells) <= 100 * (0.01 + noise(0.01, 20_000)) + 0.05


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.name)
def test_the_gate_itself_decides_as_the_simulation(tmp_path: Path, cache: Path, kind: Any) -> None:  # noqa: ARG001
    policy = Policy.model_validate({**load_policy("release").model_dump(), "margin": 0.05, "better_alpha": None})
    rng = np.random.default_rng(6)
    seen = set()
    for number, (lost, gained) in enumerate([(0.0, 0.0), (0.02, 0.01), (0.05, 0.02), (0.06, 0.01), (0.12, 0.01)] * 2):
        questions = 40 if number > 7 else 250
        counts = rng.multinomial(questions, kind.chances(lost, gained))
        ours, theirs = [], []
        for loss, count in zip(kind.losses, counts, strict=True):
            ours += [max(loss, 0.0)] * int(count) if loss else [1.0] * int(count)
            theirs += [max(-loss, 0.0)] * int(count) if loss else [1.0] * int(count)
        write_record(tmp_path / f"b{number}", ours)
        write_record(tmp_path / f"c{number}", theirs, format="NVFP4")
        found = compare(tmp_path / f"b{number}", tmp_path / f"c{number}", policy)
        passed, failed = SIMULATION["decisions"](kind, counts[None].astype(float), 0.05)
        expected = "pass" if passed[0] else "fail" if failed[0] else "inconclusive"
        assert found.verdict is not None
        assert found.verdict.verdict == expected
        seen.add(expected)
    assert seen == {"pass", "fail", "inconclusive"}
