"""On a GPU, at the shape of Llama 3.1 8B: what read-back costs while running, folded and packed, in time and memory."""

from __future__ import annotations

import statistics
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
def _seconds(models: list[Any], ids: torch.Tensor, times: int) -> list[float]:
    """The median of several forward passes of each of two models, by turns.

    One model after the other would not do: an H200 that has worked for a second is 4 % slower than one that has
    rested, which is as much as what is measured. Neither would three by turns: a model that follows upon one that
    mostly waits for memory finds the GPU rested.
    """
    found: list[list[float]] = [[] for _ in models]
    for _ in range(times + 2):  # the first two are not counted: kernels are compiled, and the GPU gets warm
        for model, each in zip(models, found, strict=True):
            start = time.perf_counter()
            model(ids, use_cache=False, logits_to_keep=1)
            if ids.device.type == "cuda":
                torch.cuda.synchronize()
            each.append(time.perf_counter() - start)
    return [statistics.median(each[2:]) for each in found]


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
    opened: dict[str, Any] = {"baseline": (folder / "model", "folded")}
    opened |= {weights: (run.checkpoint, weights) for weights in ("folded", "packed")}
    models = {
        name: load(ModelSpec(id=str(path)), dtype="bfloat16", device=device, weights=weights).model
        for name, (path, weights) in opened.items()
    }
    times = 20 if device == "cuda" else 3
    baseline, folded = _seconds([models["baseline"], models["folded"]], ids, times)
    beside, packed = _seconds([models["folded"], models["packed"]], ids, times)
    sizes = {name: _weight_bytes(models[name]) for name in ("folded", "packed")}
    with torch.inference_mode():
        logits = {name: models[name](ids, use_cache=False, logits_to_keep=1).logits for name in sizes}
    print(
        f"\n{preset} on {device}, {ids.numel()} tokens: baseline {baseline * 1e3:.1f} ms; folded "
        f"{folded / baseline:.3f} x of it, packed {packed / beside:.2f} x of folded; "
        f"quantized layers packed {sizes['packed'] / sizes['folded']:.3f} x of folded"
    )
    assert torch.equal(logits["folded"], logits["packed"])
    if device == "cuda":
        assert folded <= 1.05 * baseline
        assert packed <= 1.5 * beside
