"""Thirty kills at random moments of evaluations: never a lost or doubled question, and the answers stay the same."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from killed import evaluate, write_tiny_tasks

from halfbyte.records.record import load_record, read_samples, verify_content

KILLS = 30
TASKS = ("tiny_choice", "tiny_generate", "tiny_rolling")


class Evaluation:
    """The command, and what it found."""

    def __init__(self, folder: Path, tiny_llama: Any, tiny_tokenizer: Any) -> None:
        self.folder = folder
        self.tasks = folder / "tasks"
        write_tiny_tasks(self.tasks)
        tiny_llama.save_pretrained(folder / "model")
        tiny_tokenizer.save_pretrained(folder / "model")

    def run(self, name: str, kill_after: float | None = None) -> int:
        """Into folders of this name; the cache is its own."""
        command = ["eval", str(self.folder / "model"), "--tasks", ",".join(TASKS), "--batch-size", "2", "--quiet"]
        output = ["--output", str(self.folder / name)]
        return evaluate([*command, *output], self.tasks, self.folder / f"cache-{name}", kill_after)

    def answers(self, name: str) -> dict[str, list[Any]]:
        """Of each task, all lines in order: what was asked, what was answered and what it was worth."""
        found = {}
        for task in TASKS:
            folder = self.folder / name / task
            record = verify_content(folder)
            assert record == load_record(folder)
            found[task] = [
                (
                    sample.key,
                    sample.raw["resps"],
                    sample.raw["filtered_resps"],
                    sample.metrics,
                    sample.asked,
                    sample.generated,
                )
                for sample in read_samples(folder, record)
            ]
        return found


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Any, tiny_tokenizer: Any) -> Evaluation:
    return Evaluation(tmp_path_factory.mktemp("kills"), tiny_llama, tiny_tokenizer)


def test_thirty_kills_lose_and_double_no_question(evaluation: Evaluation) -> None:
    assert evaluation.run("undisturbed") == 0  # the first child waits for the libraries
    expected = evaluation.answers("undisturbed")
    start = time.monotonic()
    assert evaluation.run("again") == 0
    whole = time.monotonic() - start
    assert evaluation.answers("again") == expected
    assert [len(lines) for lines in expected.values()] == [24, 48, 24]  # tiny_generate has two filters
    dice = random.Random(4)
    kills = finished = 0
    while kills < KILLS:
        code = evaluation.run(f"killed-{finished}", kill_after=dice.uniform(0, 0.8 * whole))
        assert code in (0, -9)
        kills += code == -9
        if code == 0:
            assert evaluation.answers(f"killed-{finished}") == expected
            finished += 1
    assert evaluation.run(f"killed-{finished}") == 0
    assert evaluation.answers(f"killed-{finished}") == expected
