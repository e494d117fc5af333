"""On a GPU, at the shape of Llama 3.1 8B: what read-back costs while running, folded and packed, in time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_quantize import LENGTH, RECIPE

from halfbyte.quant import produce
from halfbyte.quant.load import load
from halfbyte.quant.packed import QuantizedLinear
from halfbyte.recipes.find import load_recipe
from halfbyte.recipes.schema import ModelSpec
from halfbyte.records.run import RunFolder

pytestmark = pytest.mark.bench
TOKENS = {"cuda": (8, 512), "cpu": (1, 64)}


@torch.inference_mode()
def _seconds(model: Any, ids: torch.Tensor, times: int) -> float:
    """The quickest of several forward passes."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        model(ids, use_cache=False, logits_to_keep=1)
        if ids.device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found)


def _weight_bytes(model: Any) -> int:
    """Bytes of the tensors that hold quantized weights."""
    return sum(
        tensor.numel() * tensor.element_size()
        for module in model.modules()
        if isinstance(module, QuantizedLinear)
        for tensor in [*module.parameters(), *module.buffers()]
    )


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
@pytest.mark.parametrize("preset", ["FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG"])
def test_a_forward_pass_folded_and_packed(
    preset: str, device: str, tmp_path: Path, shaped: Callable[[str], Path]
) -> None:
    folder = shaped(device)
    (tmp_path / "recipe.yaml").write_text(
        RECIPE.format(folder=folder, preset=preset, samples=8, length=LENGTH, batch=8)
    )
    job = produce.prepare(load_recipe(str(tmp_path / "recipe.yaml")), device)
    run = RunFolder(tmp_path / "ours")
    with run.lock():
        produce.produce(job, run)
    ids = torch.randint(5, 300, TOKENS[device], generator=torch.Generator().manual_seed(0)).to(device)
    seconds, sizes, logits = {}, {}, {}
    for name in ("baseline", "folded", "packed", "baseline again"):
        spec = ModelSpec(id=str(folder / "model" if name.startswith("baseline") else run.checkpoint))
        weights: Any = name if name in ("folded", "packed") else "folded"
        model = load(spec, dtype="bfloat16", device=device, weights=weights).model
        seconds[name] = _seconds(model, ids, 10 if device == "cuda" else 3)
        sizes[name] = _weight_bytes(model)
        with torch.inference_mode():
            logits[name] = model(ids, use_cache=False, logits_to_keep=1).logits.cpu()
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    baseline = min(seconds["baseline"], seconds["baseline again"])
    print(
        f"\n{preset} on {device}, {ids.numel()} tokens: baseline {baseline * 1e3:.1f} ms; folded "
        f"{seconds['folded'] / baseline:.3f} x of it, packed {seconds['packed'] / seconds['folded']:.2f} x of folded; "
        f"quantized layers packed {sizes['packed'] / sizes['folded']:.3f} x of folded"
    )
    assert torch.equal(logits["folded"], logits["packed"])
    if device == "cuda":
        assert seconds["folded"] <= 1.05 * baseline
        assert seconds["packed"] <= 1.5 * seconds["folded"]
