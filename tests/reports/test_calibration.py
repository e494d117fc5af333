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
    first, exact, second = re.split("## The half question|## Nothing is lost", text)
    corrected = [
        float(cell) for cell in re.findall(r"^\| 0[.]\d+ (?:\|[^|]+){3}\| ([\d.]+) ", exact, flags=re.MULTILINE)
    ]
    assert len(corrected) == len(SIMULATION["EXACT_MARGINS"])
    assert max(corrected) <= 5
    rows = re.findall(r"^\| [\d.]+ \| [\d.]+ \| (.+) \|$", first, flags=re.MULTILINE)
    passed = [float(cell) for row in rows for cell in row.split(" | ")]
    assert len(passed) == len(KINDS) * len(list(SIMULATION["at_the_margin"]())) * len(SIMULATION["QUESTIONS"])
    assert max(passed) <= 100 * (0.05 + noise(0.05, 20_000)) + 0.05  # rounded to a tenth
    rows = re.findall(r"^\| [\d.]+ \| (.+/.+) \|$", second, flags=re.MULTILINE)
    cells = [[float(part) for part in cell.split(" / ")] for row in rows for cell in row.split(" | ")]
    assert len(cells) == len(KINDS) * len(SIMULATION["GAINED"]) * len(SIMULATION["QUESTIONS"])
    assert max(failed for _, failed, _ in cells) <= 100 * (0.01 + noise(0.01, 20_000)) + 0.05


@pytest.mark.parametrize("margin", [0.01, 0.05])
def test_no_number_of_questions_passes_a_loss_at_the_margin_in_more_than_five_percent(margin: float) -> None:
    """Exactly, as sums over all outcomes; Tango's test without the half question does in up to 7 %."""
    published, questions, gained = SIMULATION["worst_exact"](margin, 0.0)
    assert published > 0.065
    assert gained == 0
    assert questions == int(2.7055 * (1 / margin - 1)) + 1
    assert SIMULATION["worst_exact"](margin, 0.5)[0] <= 0.05


def test_the_simulation_agrees_with_the_exact_rate() -> None:
    for questions, lost, gained in ((500, 0.1, 0.05), (1319, 0.02, 0.0), (198, 0.2, 0.002)):
        exact = SIMULATION["exact_rate"](questions, lost, gained, lost - gained)
        found = SIMULATION["simulate"](KINDS[0], questions, lost, gained, None, 20_000).passed
        assert found == pytest.approx(exact, abs=noise(exact, 20_000))


@pytest.mark.parametrize("questions", [269, 319, 320, 350])
def test_samples_that_are_nearly_always_all_right_or_all_wrong_are_no_way_around_the_half_question(
    questions: int,
) -> None:
    """Means over 16 samples that hardly ever lie between 0 and 1 are counts of questions as well."""
    nearly = type(KINDS[0])(
        "nearly binary",
        np.array([-1.0, -1 / 16, 0.0, 1 / 16, 1.0]),
        lambda lost, gained: np.array([gained, 2e-4, 1 - lost - gained - 4e-4, 2e-4, lost]),
    )
    counts = np.random.default_rng(5).multinomial(questions, nearly.chances(0.01, 0.0), size=20_000).astype(float)
    passed, _ = SIMULATION["decisions"](nearly, counts, 0.01)
    assert passed.mean() <= 0.05 + noise(0.05, 20_000)


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
