"""A whole quantization beside the plain ModelOpt flow, on one machine in one run: wall time, and memory at its highest.

The plain flow is what ModelOpt's examples do: transformers' from_pretrained, mtq.quantize over texts of one length in
batches, export_hf_checkpoint. Both sides start from files that were just written, read the same texts, and end with a
checkpoint on disk; each runs in a process of its own, so that neither inherits memory or compiled kernels, and begins
when all that was written before is on the disk, so that none waits for the files of another. They take turns, and the
quicker time of each counts: half of either is imports, which the first process of a machine reads from a cold disk.
Bytecode is kept for both, as pip does for what it installs: where packages lie that came without it in a folder that
cannot be written, each process would compile torch, sympy and numpy anew, for a quarter of its time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.bench

# Llama 3.1 8B; the CPU's shape is only there to try the benchmark out.
SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 8192,
    },
    "cpu": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 2048,
    },
}  # fmt: skip
SAMPLES = {"cuda": 512, "cpu": 16}
LENGTH = 512
TURNS = 2


def write_model(folder: Path, tokenizer: Any, device: str) -> None:
    """A random model of the shape, and its texts, all of LENGTH tokens or more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = 128256 if device == "cuda" else len(tokenizer)
    torch.manual_seed(0)
    with torch.device(device):
        config = LlamaConfig(**SHAPES[device], vocab_size=vocabulary, tie_word_embeddings=False, dtype="bfloat16")
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model", max_shard_size="5GB")
    tokenizer.save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(1)
    lines = [tokenizer.decode(torch.randint(5, len(tokenizer), (2 * LENGTH,), generator=generator).tolist())
             for _ in range(SAMPLES[device])]  # fmt: skip
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")


PLAIN = """
import json, sys, time
start = time.perf_counter()
import torch, modelopt.torch.quantization as mtq
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, output, device, preset, batch, length = *sys.argv[1:5], int(sys.argv[5]), int(sys.argv[6])
seconds = {"import": time.perf_counter() - start}; start = time.perf_counter()
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
model = AutoModelForCausalLM.from_pretrained(folder + "/model", dtype=torch.bfloat16, device_map=device).eval()
seconds["load"] = time.perf_counter() - start; start = time.perf_counter()
texts = [json.loads(line)["text"] for line in open(folder + "/texts.jsonl")]
ids = torch.tensor(tokenizer(texts, truncation=True, max_length=length)["input_ids"])
def loop(model):
    with torch.no_grad():
        for part in ids.split(batch):
            model(part.to(model.device))
mtq.quantize(model, getattr(mtq, preset), loop)
seconds["calibrate"] = time.perf_counter() - start; start = time.perf_counter()
export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=output + "/plain")
seconds["export"] = time.perf_counter() - start
"""

OURS = """
import json, sys, time
start = time.perf_counter()
import torch
from pathlib import Path
from halfbyte.quant import produce
from halfbyte.recipes.find import load_recipe
from halfbyte.records.run import RunFolder
folder, device, name = sys.argv[1:4]
seconds = {"import": time.perf_counter() - start}; start = time.perf_counter()
job = produce.prepare(load_recipe(folder + "/recipe.yaml"), device)
seconds["prepare"] = time.perf_counter() - start; start = time.perf_counter()
run = RunFolder(Path(folder) / name)
with run.lock():
    produce.produce(job, run)
seconds["produce"] = time.perf_counter() - start
seconds |= {"of which " + name: value for name, value in json.loads(run.manifest.read_text())["seconds"].items()}
"""

MEASURE = """
import resource
seconds["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
seconds["cpu_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print("MEASURED", json.dumps(seconds))
"""

RECIPE = """
name: bench
description: One quantization.
model: {{id: {folder}/model}}
quantize:
  preset: {preset}
  calibration:
    sources: [{{dataset: {folder}/texts.jsonl, samples: {samples}}}]
    length: {length}
    batch_size: {batch}
evaluate: {{tasks: [{{task: smoke}}], canary: null}}
"""


@pytest.fixture(autouse=True)
def bytecode(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all processes keep what Python compiles in one folder."""
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.getbasetemp() / "bytecode"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")


def _measured(code: str, *arguments: Any) -> dict[str, float]:
    os.sync()
    start = time.perf_counter()
    command = [sys.executable, "-c", code + MEASURE, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("MEASURED"))
    figures: dict[str, float] = json.loads(line.removeprefix("MEASURED "))
    return {"wall": time.perf_counter() - start, **figures}


def _row(name: str, figures: dict[str, float]) -> str:
    return f"{name:16}" + "  ".join(f"{key} {value:.1f}" for key, value in figures.items())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
@pytest.mark.parametrize("preset", ["NVFP4_DEFAULT_CFG", "FP8_DEFAULT_CFG"])
def test_a_quantization_beside_the_plain_flow(
    preset: str, device: str, tmp_path: Path, shaped: Callable[[str], Path]
) -> None:
    folder = shaped(device)
    batch = 8
    sizes = [int(size) for size in os.environ.get("HALFBYTE_PLAIN_BATCHES", f"1,{batch}").split(",")]
    (tmp_path / "recipe.yaml").write_text(
        RECIPE.format(folder=folder, preset=preset, samples=SAMPLES[device], length=LENGTH, batch=batch)
    )
    print(f"\n{preset} on {device}, {SAMPLES[device]} texts of {LENGTH} tokens")
    plain, halfbyte = [], []
    for turn in range(TURNS):
        for size in sizes:
            plain.append(_measured(PLAIN, folder, tmp_path / f"plain-{turn}", device, preset, size, LENGTH))
            print(_row(f"plain, batch {size}", plain[-1]))
        halfbyte.append(_measured(OURS, tmp_path, device, f"ours-{turn}"))
        print(_row("halfbyte", halfbyte[-1]), flush=True)
    ours = min(halfbyte, key=itemgetter("wall"))
    best = min(figures["wall"] for figures in plain)
    memory = "gpu_gib" if device == "cuda" else "cpu_gib"
    least = min(figures[memory] for figures in plain)
    print(f"wall {ours['wall'] / best:.2f} x, memory {ours[memory] / least:.2f} x of the better plain flow")
    if device == "cuda":
        assert ours["wall"] <= 0.7 * best
        assert ours["gpu_gib"] <= least
