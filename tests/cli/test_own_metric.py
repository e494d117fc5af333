"""A metric of a user's own: what a policy says of it wrongly is found before the checkpoint is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from line import write_recipe
from own_task import write_orders

from halfbyte.main import main

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, tiny_model_folder: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a recipe with the task `orders` under a policy with these fields; returns exit code and stderr."""
    assert not cache.exists()
    rules, own = tmp_path / "ours.yaml", write_orders(tmp_path / "tasks")
    evaluate = {"batch_tokens": 64, "include_path": str(own), "tasks": [{"task": "orders"}]}
    recipe = write_recipe(tmp_path / "recipe", tiny_model_folder, evaluate=evaluate, gate={"policy": str(rules)})

    def call(*options: str, **fields: Any) -> tuple[int, str]:
        start = {"name": "ours", "description": "Ours.", "release_evidence": False, "margins": {"orders": 0.4}}
        rules.write_text(yaml.safe_dump({**start, **fields}), encoding="utf-8")
        code = main(["run", str(recipe), "--device", "cpu", "--output", str(tmp_path / "runs"), *options])
        return code, capfd.readouterr().err

    return call


@pytest.mark.parametrize(
    ("fields", "options", "expected"),
    [
        ({"bounds": {"worth": [2, 0]}}, ["--dry-run"], "bounds of worth: the lowest value of a question comes first"),
        ({"bounds": {"worht": [0, 2]}}, [], "policy 'ours' says the bounds of worht, which no task was evaluated by"),
        ({"bounds": {"worth": [0, 1]}}, [], "is 1.5, and the policy says that it is between 0 and 1"),
        (
            {"primary": ["orders"]},
            ["--set", "evaluate.tasks.0.metric=distinct"],
            "policy 'ours' decides on distinct of orders, which is one figure for the whole set",
        ),
    ],
)
def test_what_a_policy_says_wrongly_is_refused_before_the_checkpoint_is_made(
    tmp_path: Path, run: Run, fields: dict[str, Any], options: list[str], expected: str
) -> None:
    code, shown = run(*options, **fields)
    assert code == 2
    errors = [line for line in shown.splitlines() if line.startswith("halfbyte: error")]
    assert len(errors) == 1
    assert expected in errors[0]
    assert not list((tmp_path / "runs").rglob("*.safetensors"))


def test_without_a_flip_it_is_bounds_that_decide(run: Run) -> None:
    """Every answer is worth the same on both sides."""
    few = {"margins": {"orders": 0.5}, "alpha": 0.2, "fail_alpha": 0.2}
    assert run(**few)[0] == 3
    assert run(**few, bounds={"worth": [0, 2]})[0] == 0
