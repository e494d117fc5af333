"""Random Flux pipelines of some thousand weights, with diffusers' own classes: they draw in a fraction of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = "a the red green blue circle square triangle small large left right of and two three"


def transformer_config(*, channels: int = 16, control: bool = False, guidance: bool = True) -> dict[str, Any]:
    """A transformer of one double and two single blocks, whose linears all have multiples of 16 inputs."""
    return {
        "in_channels": channels * (2 if control else 1),
        "out_channels": channels,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "guidance_embeds": guidance,
        "axes_dims_rope": (4, 4, 8),
    }


def clip_tokenizer() -> Any:
    """CLIP's tokenizer with the byte alphabet alone: 512 tokens, begin and end."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*letters, *(f"{letter}</w>" for letter in letters)])}
    vocabulary |= {"<|startoftext|>": 512, "<|endoftext|>": 513}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def save_tiny_flux(folder: Path, *, control: bool = False, guidance: bool = True, seed: int = 0) -> Path:
    """Writes a whole FluxPipeline or FluxControlPipeline in bfloat16; returns its folder."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxControlPipeline,
        FluxPipeline,
        FluxTransformer2DModel,
    )
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        T5Config,
        T5EncoderModel,
        T5TokenizerFast,
    )

    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(**transformer_config(control=control, guidance=guidance))
    clip = CLIPTextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=514,
        bos_token_id=512, eos_token_id=513, pad_token_id=513, projection_dim=32,
    )  # fmt: skip
    t5 = T5Config(
        d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, vocab_size=320, feed_forward_proj="gated-gelu",
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", -3.0) for word in WORDS.split()]
    pieces += [(chr(code), -8.0) for code in range(97, 123)]
    tokenizer_2 = T5TokenizerFast(vocab=pieces, extra_ids=0)
    vae = AutoencoderKL(
        latent_channels=4, block_out_channels=(4,), norm_num_groups=1, use_quant_conv=False, use_post_quant_conv=False,
        shift_factor=0.0609, scaling_factor=1.5035,
    )  # fmt: skip
    kind: Any = FluxControlPipeline if control else FluxPipeline
    pipeline = kind(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=CLIPTextModel(clip),
        tokenizer=clip_tokenizer(),
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )
    pipeline.to(torch.bfloat16).save_pretrained(folder)
    return folder
