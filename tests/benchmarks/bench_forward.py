"""How much slower a read-back checkpoint runs than its baseline, with its weights folded: the price of activations."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import spec

from halfbyte.quant import calibration, configs, ptq
from halfbyte.quant.load import load
from halfbyte.quant.models import locate, open_original, open_tokenizer
from halfbyte.recipes.schema import ModelSpec

pytestmark = [pytest.mark.bench, pytest.mark.real]
TOKENS = 512


@pytest.mark.parametrize("preset", ["fp8", "nvfp4"])
def test_a_forward_pass_of_512_tokens_on_a_cpu(preset: str, smollm2: Path, tmp_path: Path) -> None:
    source = locate(str(smollm2))
    tokenizer = open_tokenizer(source)
    where = torch.device("cpu")
    model = open_original(source, weights=torch.bfloat16, compute=torch.float32, device=where)
    texts = calibration.tokenize(["The quick brown fox jumps over the lazy dog. " * 8] * 4, tokenizer, 64)
    loop = calibration.forward_loop(texts, tokens_per_row=256, pack=True)
    ptq.calibrate(model, configs.quant_config(spec(preset, None)), loop)
    unstable = ptq.settle(model)
    ptq.export(model, tokenizer, tmp_path / "checkpoint", torch.bfloat16, unstable)
    baseline = load(ModelSpec(id=str(smollm2)), device="cpu").model
    candidate = load(ModelSpec(id=str(tmp_path / "checkpoint")), device="cpu").model
    ids = torch.arange(TOKENS).unsqueeze(0)
    pairs = [(_seconds(baseline, ids), _seconds(candidate, ids)) for _ in range(8)][1:]
    ratio = min(after for _, after in pairs) / min(before for before, _ in pairs)
    print(f"\n{preset}: {ratio:.2f} x the baseline's time, {min(pairs)[0]:.2f} s, {torch.get_num_threads()} threads")
    assert ratio <= 1.4


@torch.inference_mode()
def _seconds(model: Any, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    model(ids, use_cache=False)
    return time.perf_counter() - start
