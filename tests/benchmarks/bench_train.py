"""What fake quantization costs a training step, in time and memory, beside the same step without quantizers.

On CUDA the model has the shape of Llama 3.1 8B: whole where weights and optimizer are in bfloat16, which is what fits
one GPU of 139 GiB, and 8 of its 32 layers with its embeddings where they are in float32.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from halfbyte.quant import configs
from halfbyte.quant.backend import register
from halfbyte.quant.training_memory import Step, build, compute_type
from halfbyte.recipes.schema import QuantizeSpec
from halfbyte.recipes.training import TrainSpec

pytestmark = pytest.mark.bench
BOUND = 1.35
LAYERS = {"float32": 8, "bfloat16": 32}
SHAPES: dict[str, dict[str, int]] = {
    "cuda": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "cpu": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    },
}  # fmt: skip
ROWS = {"cuda": (2, 2048), "cpu": (2, 64)}
STEPS = {"cuda": 8, "cpu": 3}


def _step(device: str, preset: str | None, checkpointing: bool, weights: str) -> Step:
    batch, length = ROWS[device]
    spec = TrainSpec.model_validate({
        "method": "qat", "teacher": None, "sources": [{"dataset": "unused"}], "max_steps": 1, "packing": False,
        "batch_size": batch, "length": length, "gradient_checkpointing": checkpointing, "weights_dtype": weights,
    })  # fmt: skip
    block = {"preset": preset or "nvfp4", "calibration": {"sources": [{"dataset": "unused.txt"}]}}
    config = configs.quant_config(QuantizeSpec.model_validate(block))
    if preset is None:
        config = {**config, "quant_cfg": [{"quantizer_name": "*", "enable": False}]}
    shape, where = LlamaConfig(**SHAPES[device]), torch.device(device)  # type: ignore[arg-type]
    shape.num_hidden_layers = min(shape.num_hidden_layers, LAYERS[weights])

    def make_model(dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_config(shape, dtype=dtype)

    return build(make_model, config, spec, where, compute=compute_type(spec, where), teacher_here=False)


def _measured(step: Step) -> tuple[float, int, str]:
    """Seconds of the quickest step, bytes of tensors at the peak (CUDA), and where a step spends its time."""
    optimizer = step.make_optimizer()
    on_cuda = step.device.type == "cuda"
    step.run(optimizer)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    found = []
    for _ in range(STEPS[step.device.type]):
        start = time.perf_counter()
        step.run(optimizer)
        if on_cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities, acc_events=True) as watched:
        step.run(optimizer)
    by = "self_cuda_time_total" if on_cuda else "self_cpu_time_total"
    return min(found), peak, watched.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=70)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_training_step_with_nvfp4(weights: str, checkpointing: bool, device: str) -> None:
    if device == "cpu" and weights == "bfloat16":
        pytest.skip("a CPU multiplies bfloat16 slowly, which hides what quantizers cost")
    register()
    seconds, peaks, profiles = {}, {}, {}
    for name, preset in (("plain", None), ("quantized", "nvfp4"), ("plain again", None)):
        torch.manual_seed(0)
        step = _step(device, preset, checkpointing, weights)
        seconds[name], peaks[name], profiles[name] = _measured(step)
        del step
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    plain = min(seconds["plain"], seconds["plain again"])
    ratio = seconds["quantized"] / plain
    (batch, length), shape = ROWS[device], SHAPES[device]
    layers = min(LAYERS[weights], shape["num_hidden_layers"])
    memory = (
        f", memory {peaks['quantized'] / peaks['plain']:.2f} x of {peaks['plain'] / 1e9:.1f} GB"
        if peaks["plain"]
        else ""
    )
    print(
        f"\n{layers} layers of {shape['hidden_size']} on {device}, {batch} x "
        f"{length} tokens, weights in {weights}, gradient checkpointing {checkpointing}: plain {plain * 1e3:.1f} ms, "
        f"NVFP4 {seconds['quantized'] * 1e3:.1f} ms, {ratio:.2f} x{memory}"
    )
    if device == "cuda":
        if ratio > BOUND:
            print(f"plain:\n{profiles['plain']}\nNVFP4:\n{profiles['quantized']}")
        assert ratio <= BOUND
