"""kill -9 at any point of a training: the next call goes on, and ends with the same weights bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from line import kill, run_child
from safetensors.torch import load_file
from training import write_training

from halfbyte.records.digests import model_digest
from halfbyte.records.training import load_training, read_curves

STEPS = 40
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "gradient_accumulation": 2,
    "validation": {"share": 0.2, "every": 10, "patience": 4, "keep": 2},
    "save_every": 3,
}


def kill_at(number: int) -> None:
    """Has this process killed at the so-and-so-many-th of the moments a training has, from where it begins now.

    These are each forward pass, each validation, and each part of saving a checkpoint.
    """
    from halfbyte.quant import trainer, whole

    moments = itertools.count(1)
    owners: list[tuple[Any, str]] = [
        (trainer.QuantizedTrainer, "training_step"),
        (trainer.QuantizedTrainer, "evaluate"),
        (trainer.QuantizedTrainer, "save_model"),
        (trainer.QuantizedTrainer, "_save_optimizer_and_scheduler"),
        (trainer.QuantizedTrainer, "_save_rng_state"),
        (whole.Checkpoints, "add"),
        (whole, "write_json"),
        (whole, "replace_folder"),
        (whole.shutil, "rmtree"),
    ]

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if next(moments) == number:
                kill()
            return real(*args, **kwargs)

        return counted

    for owner, name in owners:
        setattr(owner, name, watched(getattr(owner, name)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Any, tiny_tokenizer: Any) -> dict[str, Any]:
    """A training from start to end, its recipe, and what it ended with."""
    folder = tmp_path_factory.mktemp("undisturbed")
    model = folder / "model"
    tiny_llama.save_pretrained(model)
    tiny_tokenizer.save_pretrained(model)
    recipe = write_training(folder, model, **SETTINGS)
    assert run_child(["train", str(recipe), "--quiet"], folder, folder / "cache") == 0
    return {"recipe": recipe, "run": folder / "runs" / "tiny-nvfp4"}


def last_weights(run: Path) -> dict[str, Any]:
    return load_file(run / "training" / "checkpoints" / f"step-{STEPS}" / "trained.safetensors")


def test_a_training_killed_at_fifteen_points_ends_with_the_same_weights(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """Of one training, which goes on each time from its last whole checkpoint."""
    draw = random.Random(15)
    command = ["train", str(undisturbed["recipe"]), "--quiet"]
    run = tmp_path / "runs" / "tiny-nvfp4"
    for _ in range(15):
        assert run_child(command, tmp_path, tmp_path / "cache", partial(kill_at, draw.randint(1, 16))) == -9
    assert run_child(command, tmp_path, tmp_path / "cache") == 0
    ours, theirs = last_weights(run), last_weights(undisturbed["run"])
    assert ours.keys() == theirs.keys() != set()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
    assert model_digest(run / "checkpoint") == model_digest(undisturbed["run"] / "checkpoint")
    first, second = (read_curves(folder / "training") for folder in (run, undisturbed["run"]))
    assert first.validations == second.validations
    assert [(one.step, one.loss, one.grad_norm) for one in first.steps] == [
        (one.step, one.loss, one.grad_norm) for one in second.steps
    ]
    one, other = (load_training(folder / "training") for folder in (run, undisturbed["run"]))
    assert (one.best_step, one.best, one.tokens) == (other.best_step, other.best, other.tokens)
