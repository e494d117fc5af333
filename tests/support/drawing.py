"""A tiny pipeline and what is drawn with it, as the tests of images need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from halfbyte.eval.pipeline_parts import open_parts, quiet
from halfbyte.eval.pipelines import Pipeline
from halfbyte.recipes.images import ImagesSpec
from halfbyte.records.record import ModelSummary

CPU = torch.device("cpu")
PROMPTS = ("a red circle", "a large blue square left of a green triangle", "two small green circles")


def opened(folder: Path, *, low_vram: bool = False) -> Pipeline:
    """A pipeline that computes in float32 on the CPU."""
    return Pipeline(open_parts(folder, dtype=torch.float32, device=CPU), CPU, low_vram)


def write_prompts(folder: Path, *prompts: str) -> Path:
    """A prompt file."""
    path = folder / "prompts.txt"
    path.write_text("".join(f"{prompt}\n" for prompt in prompts or PROMPTS), encoding="utf-8")
    return path


def asked(prompts: Path, **more: Any) -> ImagesSpec:
    """Images of 32 x 32 pixels in 2 steps."""
    content = {"prompts": str(prompts), "steps": 2, "size": 32, "max_sequence_length": 32, "metrics": ["fulfilment"]}
    return ImagesSpec.model_validate({**content, **more})


def summary(digest: str = "a") -> ModelSummary:
    """A model of that digest."""
    return ModelSummary(name="tiny", digest=digest * 64, format="bfloat16", bytes_on_disk=1000, bits_per_weight=16.0)


def save_tiny_unet(folder: Path) -> Path:
    """Writes a StableDiffusionPipeline, which draws with a U-Net; returns its folder."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from tiny_flux import clip_tokenizer
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    text = CLIPTextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=514,
        bos_token_id=512, eos_token_id=513, pad_token_id=513,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=32, block_out_channels=(8, 8), norm_num_groups=2, cross_attention_dim=32, layers_per_block=1,
        attention_head_dim=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    vae = AutoencoderKL(latent_channels=4, block_out_channels=(4,), norm_num_groups=1)
    with quiet():
        StableDiffusionPipeline(
            vae=vae, text_encoder=CLIPTextModel(text), tokenizer=clip_tokenizer(), unet=unet, scheduler=DDIMScheduler(),
            safety_checker=None, feature_extractor=None, requires_safety_checker=False,
        ).save_pretrained(folder)  # fmt: skip
    return folder
