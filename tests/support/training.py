"""A tiny recipe that trains, and a child process that is killed at a chosen step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from line import write_recipe

# Not those of the recipe's fidelity: a training on these would be refused.
MORE = [
    f"{n} {size} {color} {thing} likes {other}" + (" day and night" if size == "big" else "")
    for n in ("one", "two", "three", "four")
    for size in ("big", "small")
    for color in ("red", "blue", "green")
    for thing, other in (("fish", "water"), ("bird", "fire"), ("book", "no cat"), ("tree", "the moon"))
]


def write_training(folder: Path, model: Path, **train: Any) -> Path:
    """The tiny recipe with a train block, of 8 steps of QAD unless something else is given; returns its path."""
    path = write_recipe(folder, model)
    (folder / "training.txt").write_text("\n".join(MORE) + "\n", encoding="utf-8")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    block: dict[str, Any] = {
        "method": "qad",
        "sources": [{"dataset": "training.txt"}],
        "length": 32,
        "max_steps": 8,
        "batch_size": 2,
        "learning_rate": 1e-3,
        "validation": {"share": 0.2, "every": 4},
    }
    content["train"] = block | train
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path
