"""How fast verify reads a checkpoint, beside `cat` of the same files; both from the disk, not from memory."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halfbyte.quant.numerics import nvfp4_quantize, nvfp4_scale_2
from halfbyte.quant.verify import verify

pytestmark = pytest.mark.bench

WIDTH, DEPTH = 4096, 6
LEAST = 0.5
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _nvfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, scale, scale_2 = nvfp4_quantize(weight, nvfp4_scale_2(weight.abs().amax()))
    parts = {"weight": codes, "weight_scale": scale, "weight_scale_2": scale_2, "input_scale": torch.tensor(0.01)}
    return {name: part.clone() for name, part in parts.items()}


def _fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax() / 448
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn),
        "weight_scale": scale,
        "input_scale": torch.tensor(0.01),
    }


def _make(folder: Path, algorithm: str) -> None:
    """Layers of a Llama-3.1-8B's width, one weight for all of them, in one file a layer."""
    quantize = _nvfp4 if algorithm == "NVFP4" else _fp8
    weight = torch.randn(WIDTH, WIDTH)
    parts = quantize(weight)
    where = {}
    for number in range(DEPTH):
        prefix = f"model.layers.{number}"
        modules = [*(f"self_attn.{name}" for name in ATTENTION), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        own = {f"{prefix}.{module}.{part}": value.clone() for module in modules for part, value in parts.items()}
        own |= {
            f"{prefix}.{norm}.weight": torch.ones(WIDTH) for norm in ("input_layernorm", "post_attention_layernorm")
        }
        if number == 0:
            own["model.embed_tokens.weight"] = weight.bfloat16()
        name = f"model-{number + 1:05}-of-{DEPTH:05}.safetensors"
        save_file(own, folder / name)
        where.update(dict.fromkeys(own, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    config = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "tie_word_embeddings": True, "vocab_size": WIDTH}
    (folder / "config.json").write_text(json.dumps(config))
    block = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["model.embed_tokens"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": block}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")


def _from_disk(files: list[Path], work: Callable[[], object]) -> float:
    """The least seconds of three, each after the files have been dropped from the page cache."""
    seconds = []
    for _ in range(3):
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8"])
def test_verify_reads_at_half_the_speed_of_cat_or_more(algorithm: str, tmp_path: Path) -> None:
    _make(tmp_path, algorithm)
    files = sorted(tmp_path.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files) / 1e9
    assert [str(check) for check in verify(tmp_path) if not check.passed] == []
    with Path(os.devnull).open("wb") as nowhere:
        cat = _from_disk(files, lambda: subprocess.run(["cat", *files], stdout=nowhere, check=True))
    ours = _from_disk(files, lambda: verify(tmp_path))
    rates = f"cat {size / cat:.2f} GB/s, verify {size / ours:.2f} GB/s"
    print(f"\n{algorithm}, {size:.2f} GB: {rates}, ratio {cat / ours:.2f}")
    assert cat / ours >= LEAST
