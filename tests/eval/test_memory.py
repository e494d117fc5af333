"""Claims about the peak memory of an evaluation: it is of that evaluation alone, and says what it is of."""

from __future__ import annotations

import sys
from mmap import PAGESIZE, mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.eval.evaluate import evaluate_task
from halfbyte.eval.memory import PeakMemory
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.record import ModelSummary, load_record

MIB = 2**20


def backend(model: Any, name: str = "hf") -> Any:
    return SimpleNamespace(name=name, model=model)


def on(device: str) -> Any:
    return SimpleNamespace(device=torch.device(device))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not let a process forget its peak")
def test_what_was_taken_before_does_not_count_and_what_is_taken_meanwhile_does() -> None:
    before = bytearray(300 * MIB)
    del before
    peak = PeakMemory(backend(on("cpu")))
    start = peak.bytes()
    with mmap(-1, 200 * MIB) as meanwhile:  # no allocator gives it out of what an earlier test has let go of
        for page in range(0, 200 * MIB, PAGESIZE):
            meanwhile[page] = 1
    assert peak.kind == "process"
    assert start is not None
    assert peak.bytes() is not None
    assert 190 * MIB < (peak.bytes() or 0) - start < 230 * MIB


@pytest.mark.parametrize("name", ["vllm", "server"])
def test_nothing_is_said_of_a_model_that_another_process_holds(name: str) -> None:
    peak = PeakMemory(backend(on("cpu"), name))
    assert (peak.kind, peak.bytes()) == (None, None)
    assert PeakMemory(backend(None)).bytes() is None


def test_a_record_says_its_peak_and_one_that_is_found_again_keeps_it(
    tiny_llama: Any, tiny_tokenizer: Any, summary: ModelSummary, tiny_tasks: Path, tmp_path: Path, cache: Path
) -> None:
    assert tiny_tasks.is_dir()
    assert not cache.exists()
    spec = TaskSpec(task="tiny_choice", limit=4)
    settings = EvaluateSpec(tasks=[spec])
    first, again = (
        evaluate_task(tiny_llama, tiny_tokenizer, spec, settings, summary, tmp_path / "record") for _ in range(2)
    )
    assert first.memory_kind == "process"
    assert first.memory_bytes is not None
    assert 50 * MIB < first.memory_bytes < 2**40
    assert (again.memory_bytes, again.memory_kind) == (first.memory_bytes, "process")
    assert load_record(tmp_path / "record") == first


@pytest.mark.gpu
def test_on_cuda_it_is_what_the_allocator_gave_out() -> None:
    model = nn.Linear(1024, 1024, device="cuda")
    wrapped = SimpleNamespace(device=model.weight.device)
    before = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del before
    peak = PeakMemory(backend(wrapped))
    held = peak.bytes()
    meanwhile = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    del meanwhile
    assert peak.kind == "cuda"
    assert held is not None
    assert (peak.bytes() or 0) - held == 32 * MIB
