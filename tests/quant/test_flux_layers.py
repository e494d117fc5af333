"""Which layers of FLUX.1 each shipped recipe quantizes, by name and count, at full size and without weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flux_recipes import flux_recipes

from halfbyte.quant.attention import UNREACHED
from halfbyte.quant.configs import quant_config
from halfbyte.quant.pipeline_plan import PipelinePlan, pipeline_plan_of
from halfbyte.recipes.find import load_recipe
from halfbyte.records.errors import UserError

DOUBLE, SINGLE = 19, 38

LINEARS = {
    **{f"transformer_blocks.*.attn.{name}": DOUBLE for name in ("to_q", "to_k", "to_v", "to_out.0", "to_add_out")},
    **{f"transformer_blocks.*.attn.add_{name}_proj": DOUBLE for name in "qkv"},
    **{f"transformer_blocks.*.{part}.net.{name}": DOUBLE for part in ("ff", "ff_context") for name in ("0.proj", "2")},
    **{f"single_transformer_blocks.*.attn.to_{name}": SINGLE for name in "qkv"},
    **{f"single_transformer_blocks.*.{name}": SINGLE for name in ("proj_mlp", "proj_out")},
}
MODULATION = {
    "transformer_blocks.*.norm1.linear": DOUBLE,
    "transformer_blocks.*.norm1_context.linear": DOUBLE,
    "single_transformer_blocks.*.norm.linear": SINGLE,
    "norm_out.linear": 1,
}
ENDS = dict.fromkeys(("x_embedder", "context_embedder", "proj_out"), 1) | {
    f"time_text_embed.{name}_embedder.linear_{number}": 1 for name in ("timestep", "text") for number in (1, 2)
}
GUIDANCE = {f"time_text_embed.guidance_embedder.linear_{number}": 1 for number in (1, 2)}


def plan_at_full_size(name: str, *more: str) -> PipelinePlan:
    from diffusers import FluxTransformer2DModel

    recipe = load_recipe(name, more)
    channels = 128 if "depth" in name or "canny" in name else 64
    with torch.device("meta"):
        kind: Any = FluxTransformer2DModel
        model = kind(in_channels=channels, out_channels=64, guidance_embeds="schnell" not in name).to(torch.bfloat16)
    return pipeline_plan_of(model, quant_config(recipe.quantize, UNREACHED), recipe.quantize.keep)


def format_of(name: str) -> str:
    return {"fp8": "FP8", "svdquant": "NVFP4_SVD"}.get(name.rpartition("-")[2], "NVFP4")


@pytest.mark.parametrize("name", flux_recipes())
def test_each_recipe_quantizes_the_published_layers(name: str) -> None:
    plan = plan_at_full_size(name)
    quantized = LINEARS | (MODULATION if name.endswith("smallest") else {})
    kept = ENDS | ({} if "schnell" in name else GUIDANCE) | ({} if name.endswith("smallest") else MODULATION)
    expected = {group: (format_of(name), count) for group, count in quantized.items()}
    assert plan.groups == expected | {group: (None, count) for group, count in kept.items()}
    assert len(plan.quantized) == sum(quantized.values()) == 418 + (77 if name.endswith("smallest") else 0)
    attention = (FP8, DOUBLE + SINGLE) if name.endswith("fp8-attention") else (None, 0)
    assert (plan.attention, plan.attention_layers) == attention


FP8 = "FP8"


def test_all_models_and_formats_have_a_recipe() -> None:
    models, formats = (
        ("dev", "schnell", "depth-dev", "canny-dev"),
        ("fp8", "nvfp4", "nvfp4-svdquant", "nvfp4-fp8-attention"),
    )
    assert {f"flux1-{model}-{kind}" for model in models for kind in formats} <= set(flux_recipes())


def test_the_smallest_recipe_takes_less_than_a_third_of_bfloat16() -> None:
    plan = plan_at_full_size("flux1-dev-nvfp4-smallest")
    assert plan.weights == 11_901_408_320
    assert plan.tensor_bytes / (2 * plan.weights) <= 0.30


def test_the_plan_names_each_group_with_its_format() -> None:
    text = str(plan_at_full_size("flux1-dev-nvfp4-fp8-attention"))
    kept = text.index("bfloat16")
    assert text.index("NVFP4") < text.index(" 38 single_transformer_blocks.*.proj_out\n") < kept
    assert kept < text.index(" 38 single_transformer_blocks.*.norm.linear\n")
    assert "FP8             57 attentions are computed in it" in text


def test_a_kept_pattern_that_matches_nothing_is_told() -> None:
    with pytest.raises(UserError, match="'proj_outs' matches no layer"):
        plan_at_full_size("flux1-dev-nvfp4", "quantize.keep=[proj_outs]")


def test_some_of_q_k_and_v_are_not_kept_alone() -> None:
    with pytest.raises(UserError, match="would have different formats"):
        plan_at_full_size("flux1-dev-nvfp4", "quantize.keep=['*.to_q']")


@pytest.mark.parametrize("algorithm", ["awq_lite", "local_hessian"])
def test_algorithms_whose_scales_have_no_place_in_a_pipeline_are_refused(algorithm: str) -> None:
    with pytest.raises(UserError, match="not supported for a model that draws"):
        plan_at_full_size("flux1-dev-nvfp4", f"quantize.algorithm={algorithm}")
