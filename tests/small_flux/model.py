"""The small Flux: FluxPipeline with diffusers' and transformers' own classes at 5 million weights, not yet trained."""

from __future__ import annotations

from typing import Any

import torch
from small_flux.shapes import SIDE, caption, make_scene
from torch import nn

PROMPT_TOKENS = 32
"""Of the T5 side, in training and so in drawing: max_sequence_length. The longest caption has 20."""
WIDTH = 128
"""Of the transformer: 4 heads of 32. All its inner linears have multiples of 128 inputs, so that blocks of 16, 32 and
128 fit."""


def make_pipeline(seed: int) -> Any:
    """An untrained FluxPipeline in float32 that draws SIDE x SIDE pixels from 8 x 8 patches.

    Args:
        seed: Of the random weights.
    """
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer()
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=4, num_single_layers=6, attention_head_dim=32, num_attention_heads=WIDTH // 32,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, guidance_embeds=True, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    _begin_as_identity(transformer)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(24, 48, 48), layers_per_block=1, latent_channels=4, norm_num_groups=8, sample_size=SIDE,
        use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=False,
        scaling_factor=1.0, shift_factor=0.0,
    )  # fmt: skip
    clip = CLIPTextConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=len(tokenizer), projection_dim=WIDTH, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    t5 = T5Config(
        d_model=WIDTH, d_ff=2 * WIDTH, d_kv=32, num_layers=3, num_heads=4, vocab_size=len(tokenizer_2),
        feed_forward_proj="gated-gelu", dropout_rate=0.0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(  # FLUX.1-dev's
            num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
            base_image_seq_len=256, max_image_seq_len=4096,
        ),
        vae=vae,
        text_encoder=CLIPTextModel(clip),
        tokenizer=tokenizer,
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )  # fmt: skip


def _begin_as_identity(transformer: nn.Module) -> None:
    """Zeroes what each block's modulation and the last projection say, as DiT does (Peebles and Xie 2022)."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and (
            name.endswith(("norm.linear", "norm1.linear", "norm1_context.linear"))
            or name in ("norm_out.linear", "proj_out")
        ):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)


def captions(count: int = 4000) -> list[str]:
    """Captions that hold every word there is."""
    return [caption(make_scene(0, number), 0, number) for number in range(count)]


def clip_tokenizer() -> Any:
    """CLIP's tokenizer: the byte alphabet, merges for the words of the captions, begin and end."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words = sorted({word for text in captions() for word in text.lower().replace(".", " .").split()})
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    learner.train_from_iterator(words * 2, trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    tokens = [*alphabet, *(f"{letter}</w>" for letter in alphabet), *("".join(pair) for pair in merges)]
    tokens = [*dict.fromkeys(tokens), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: at for at, token in enumerate(tokens)}, merges=merges, model_max_length=77)


def t5_tokenizer() -> Any:
    """T5's tokenizer: a unigram of the words of the captions, and letters for all others."""
    from transformers import T5TokenizerFast

    words = sorted({word.rstrip(".") for text in captions() for word in text.split()})
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0), (".", -3.0)]
    pieces += [(f"▁{word}", -3.0) for word in words]
    pieces += [(chr(code), -9.0) for code in (*range(48, 58), *range(65, 91), *range(97, 123))]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)
