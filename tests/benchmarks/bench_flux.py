"""Memory and time of FLUX.1-dev at its full size in bfloat16, FP8 and FP4, with all parts loaded and one at a time.

Memory does not depend on what the weights are, and time hardly does: they are random, made on the device from the
configurations of the transformer with its 12 billion weights, T5-XXL's encoder, CLIP-L's, and the VAE. Which layers are
quantized is what the shipped recipes say. On a CPU the shape is tiny, to try the benchmark out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import pytest
import torch
from tiny_flux import clip_tokenizer
from torch import nn

from halfbyte.eval.peaks import memory_table, peaks_of
from halfbyte.eval.pipeline_parts import Parts, quiet, weight_bytes
from halfbyte.eval.pipelines import STAGES, Pipeline, Request
from halfbyte.quant.attach import input_quantizer, prepare
from halfbyte.quant.attention import UNREACHED
from halfbyte.quant.configs import quant_config
from halfbyte.quant.layers import Layer
from halfbyte.quant.layouts import FORMATS
from halfbyte.quant.packed import Packed, QuantizedLinear
from halfbyte.quant.pipeline_plan import pipeline_plan_of
from halfbyte.recipes.find import load_recipe
from halfbyte.records.memory import MemoryRecord, MemoryRow

pytestmark = pytest.mark.bench

SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "transformer": {
            "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
            "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768,
            "guidance_embeds": True, "axes_dims_rope": (16, 56, 56),
        },
        "t5": {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_layers": 24, "num_heads": 64, "vocab_size": 32128},
        "clip": {
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
            "vocab_size": 49408, "projection_dim": 768,
        },
        "vae": {"latent_channels": 16, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2},
    },
    "cpu": {
        "transformer": {
            "in_channels": 16, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16,
            "num_attention_heads": 4, "joint_attention_dim": 64, "pooled_projection_dim": 32, "guidance_embeds": True,
            "axes_dims_rope": (4, 4, 8),
        },
        "t5": {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 320},
        "clip": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "vocab_size": 514, "projection_dim": 32,
        },
        "vae": {"latent_channels": 4, "block_out_channels": (32, 32), "layers_per_block": 1},
    },
}  # fmt: skip
SIDE = {"cuda": 1024, "cpu": 64}
TIMED = {"cuda": 6, "cpu": 3}
"""Steps that are timed, after as many as memory needs."""
STEPS = 30
"""Steps of an image, as published."""
RECIPES = {"FP8": "flux1-dev-fp8", "FP4": "flux1-dev-nvfp4", "FP4, modulation too": "flux1-dev-nvfp4-smallest"}


PARTS = ("text_encoder", "text_encoder_2", "transformer", "vae")


def _meta(device: str, part: str) -> nn.Module:
    """A part on the meta device."""
    from diffusers import AutoencoderKL, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    shapes = SHAPES[device]
    depth = len(shapes["vae"]["block_out_channels"])
    ends = {"bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    made: dict[str, Callable[[], nn.Module]] = {
        "text_encoder": lambda: CLIPTextModel(CLIPTextConfig(**shapes["clip"], **ends)),
        "text_encoder_2": lambda: T5EncoderModel(T5Config(**shapes["t5"], feed_forward_proj="gated-gelu")),
        "transformer": lambda: FluxTransformer2DModel(**shapes["transformer"]),
        "vae": lambda: AutoencoderKL(
            **shapes["vae"], norm_num_groups=32, use_quant_conv=False, use_post_quant_conv=False,
            scaling_factor=0.3611, shift_factor=0.1159, down_block_types=("DownEncoderBlock2D",) * depth,
            up_block_types=("UpDecoderBlock2D",) * depth,
        ),
    }  # fmt: skip
    with torch.device("meta"), quiet():
        return made[part]().to(torch.bfloat16).eval()


@cache
def _layers(device: str, recipe: str) -> list[Layer]:
    """The layers that a shipped recipe quantizes."""
    spec = load_recipe(recipe).quantize
    return pipeline_plan_of(_meta(device, "transformer"), quant_config(spec, UNREACHED), spec.keep).quantized


@torch.no_grad()
def _filled(part: nn.Module, device: torch.device) -> nn.Module:
    """A part of the meta device with random weights, made where they are to be; the same ones at each call."""
    torch.manual_seed(0)
    for module in part.modules():
        for name, value in module._parameters.items():
            if value is not None and value.is_meta:
                made = torch.zeros(value.shape, dtype=value.dtype, device=device)
                if value.dim() > 1:
                    made.normal_(std=0.02)
                elif name == "weight":  # of a norm
                    made.fill_(1.0)
                module._parameters[name] = nn.Parameter(made, requires_grad=False)
        for name, value in module._buffers.items():
            if value is not None and value.is_meta:  # position ids
                module._buffers[name] = torch.arange(value.numel(), dtype=value.dtype, device=device).view(value.shape)
    if hasattr(part, "tie_weights"):
        part.tie_weights()
    return part


def _quantized(linear: nn.Module, layer: Layer, device: torch.device) -> QuantizedLinear:
    """A linear with random codes, as read-back makes it of a checkpoint."""
    meant = FORMATS[str(layer.format)]
    rows, columns = layer.shape
    if meant.storage == "nvfp4":
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
        scale = torch.ones(rows, columns // layer.block, device=device).to(torch.float8_e4m3fn)
        packed = Packed("nvfp4", codes, scale, torch.tensor(0.006, device=device))
    else:
        values = torch.randn(rows, columns, dtype=torch.bfloat16, device=device) * 32
        packed = Packed("fp8", values.to(torch.float8_e4m3fn), torch.tensor(0.0006, device=device))
    quantizer = input_quantizer(
        meant.activations, torch.tensor(0.01, device=device), None, dtype=torch.bfloat16, device=device
    )
    bias: Any = linear.bias
    made = None if bias is None else torch.zeros(rows, dtype=torch.bfloat16, device=device)
    return QuantizedLinear(packed, made, torch.bfloat16, input_quantizer=quantizer).to(device)


def _transformer(device: str, recipe: str | None, *, fold: bool = False) -> nn.Module:
    """The transformer, quantized as a recipe says; the same random weights at each call."""
    where = torch.device(device)
    torch.manual_seed(1)
    model = _meta(device, "transformer")
    for layer in _layers(device, recipe) if recipe is not None else []:
        linear = _quantized(model.get_submodule(layer.name), layer, where)
        if fold:
            linear.fold()
        model.set_submodule(layer.name, linear)
    return _filled(model, where)


def _parts(device: str, opener: Callable[[], nn.Module]) -> Parts:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
    from transformers import T5TokenizerFast

    where, meta = torch.device(device), {name: _meta(device, name) for name in PARTS}
    tokenizer = T5TokenizerFast(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -1.0)], extra_ids=0)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    skeleton = FluxPipeline(scheduler=scheduler, tokenizer=clip_tokenizer(), tokenizer_2=tokenizer, **cast(Any, meta))
    openers: dict[str, Callable[[], nn.Module]] = {
        name: (lambda name=name: _filled(_meta(device, name), where)) for name in meta if name != "transformer"
    }
    return Parts(
        skeleton, {**openers, "transformer": opener}, {name: weight_bytes(part) for name, part in meta.items()}
    )


def _request(device: str, steps: int) -> Request:
    longest = 512 if device == "cuda" else 32
    return Request("a a a a", 0, steps, 3.5, SIDE[device], SIDE[device], longest)


def _seconds(device: str, opener: Callable[[], nn.Module]) -> tuple[float, torch.Tensor]:
    """Seconds of an image with all parts loaded, of STEPS steps of which fewer are timed; and its latents."""
    pipeline = Pipeline(_parts(device, opener), torch.device(device))
    found: dict[str, float] = {}
    latents = torch.empty(0)
    for steps in (2, TIMED[device]):  # the first compiles
        request = _request(device, steps)
        with pipeline.stage(STAGES[0]):
            start = time.perf_counter()
            encoded = pipeline.encode(request)
            found["encode"] = time.perf_counter() - start
        with pipeline.stage(STAGES[1]):
            start = time.perf_counter()
            latents = pipeline.denoise(request, encoded)  # on the CPU: all that was begun on the device is done
            found["step"] = (time.perf_counter() - start) / steps
        with pipeline.stage(STAGES[2]):
            start = time.perf_counter()
            pipeline.decode(request, latents)
            found["decode"] = time.perf_counter() - start
    pipeline.free()
    return found["encode"] + STEPS * found["step"] + found["decode"], latents


def _rows(device: str, name: str, weights: str, opener: Callable[[], nn.Module]) -> list[MemoryRow]:
    rows = []
    for low_vram in (False, True):
        sizes: list[int] = []

        def opened(sizes: list[int] = sizes) -> nn.Module:
            part = opener()
            sizes.append(weight_bytes(part))
            return part

        stages = peaks_of(Pipeline(_parts(device, opened), torch.device(device), low_vram), _request(device, 2))
        rows.append(
            MemoryRow(
                model="FLUX.1-dev, random weights", format=name, weights=weights, low_vram=low_vram, stages=stages,
                transformer_bytes=sizes[0],
            )
        )  # fmt: skip
    return rows


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def test_memory_and_time_in_each_format(device: str) -> None:
    prepare(torch.device(device))
    kinds: dict[str, str | None] = {"BF16": None, **RECIPES}
    seconds: dict[str, float] = {}
    rows: list[MemoryRow] = []
    for name, recipe in kinds.items():

        def packed(recipe: str | None = recipe) -> nn.Module:
            return _transformer(device, recipe)

        def folded(recipe: str | None = recipe) -> nn.Module:
            return _transformer(device, recipe, fold=True)

        rows += _rows(device, name, "original" if recipe is None else "packed", packed)
        way = name if recipe is None else f"{name} packed"
        seconds[way], latents = _seconds(device, packed)
        if name in ("FP8", "FP4"):
            seconds[f"{name} folded"], same = _seconds(device, folded)
            assert torch.equal(latents, same), f"{name}: packed and folded weights draw differently"
        print(f"\n{name}: {', '.join(f'{one} {value:.2f} s' for one, value in seconds.items() if name in one)}")
    kind = "cuda" if device == "cuda" else "process"
    record = MemoryRecord.model_validate({"height": SIDE[device], "width": SIDE[device], "kind": kind, "rows": rows})
    print(f"\n{SIDE[device]} x {SIDE[device]} pixels, {STEPS} steps, on {record.hardware['cuda'] or device}")
    for line in memory_table(rows):
        print(" | ".join(line))
    print(json.dumps({"seconds": seconds, "record": record.model_dump(mode="json")}))
    sizes = {row.format: row.transformer_bytes for row in rows}
    if device == "cuda":
        assert sizes["BF16"] > 23.5e9  # it is the whole size
        assert sizes["FP4, modulation too"] <= 0.30 * sizes["BF16"]
        peaks = {(row.format, row.low_vram): row.peak for row in rows}
        for low_vram in (False, True):
            assert peaks["FP4", low_vram] < peaks["FP8", low_vram] < peaks["BF16", low_vram]
