"""What several benchmarks share: a random model of a given shape, written once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_quantize import write_model


@pytest.fixture(scope="session")
def shaped(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Callable[[str], Path]:
    """A folder with `model` and `texts.jsonl`, by the device whose shape is wanted; see bench_quantize.write_model."""
    made: dict[str, Path] = {}

    def make(device: str) -> Path:
        if device not in made:
            made[device] = tmp_path_factory.mktemp(f"shape-{device}")
            write_model(made[device], tiny_tokenizer, device)
        return made[device]

    return make
