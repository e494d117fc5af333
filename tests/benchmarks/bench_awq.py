"""On a GPU: how long NVFP4 with AWQ's search takes on a small model, whose time is all launches and no arithmetic."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from halfbyte.quant import produce
from halfbyte.recipes.find import load_recipe
from halfbyte.records.run import RunFolder

pytestmark = [pytest.mark.bench, pytest.mark.gpu, pytest.mark.real]

RECIPE = """
name: awq
description: AWQ on a small model.
model: {{id: {model}}}
quantize:
  preset: NVFP4_AWQ_LITE_CFG
  calibration:
    sources:
      - {{dataset: openai/gsm8k, name: main, split: train, field: question, samples: 64}}
      - {{dataset: Salesforce/wikitext, name: wikitext-2-v1, split: validation, field: text, samples: 64}}
    length: 512
evaluate: {{tasks: [{{task: smoke}}]}}
"""


def test_awq_lite_on_128_texts(smollm2: Path, data_root: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=smollm2))
    start = time.perf_counter()
    job = produce.prepare(load_recipe(str(tmp_path / "recipe.yaml")), "cuda")
    run = RunFolder(tmp_path / "run")
    with run.lock():
        produce.produce(job, run, data_root=data_root)
    seconds = time.perf_counter() - start
    print(f"\nNVFP4_AWQ_LITE on SmolLM2-135M, 128 texts of up to 512 tokens: {seconds:.1f} s with loading and export")
    assert seconds <= 60
