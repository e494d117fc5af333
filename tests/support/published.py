"""Tiny models of two families whose published checkpoints are quantized, and gpt-oss's own layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from stored import write
from tiny import make_model

from halfbyte.quant import numerics as nm


def deepseek() -> Any:
    """DeepSeek-V3's shape: a dense layer and one with experts, and one more token predicted by a layer behind."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=384, hidden_size=64, intermediate_size=160, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, n_shared_experts=1, q_lora_rank=32, kv_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, initializer_range=0.3, tie_word_embeddings=False,
        num_nextn_predict_layers=1,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()


def gpt_oss_checkpoint(folder: Path, tokenizer: Any) -> Path:
    """gpt-oss with experts in MXFP4 blocks; returns the folder with the plain values."""
    keep = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": keep}
    plain = write(make_model("gpt_oss"), folder, lambda _: None, in_config=config, tokenizer=tokenizer)
    path = folder / "model.safetensors"
    stored, values = load_file(path), load_file(plain / "model.safetensors")
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        q = nm.mxfp4_quantize(stored.pop(name).float().mT.contiguous())  # [experts, out, in], as published
        stored[f"{name}_blocks"] = q.codes.unflatten(-1, (-1, 16))
        stored[f"{name}_scales"] = q.scale
        values[name] = nm.mxfp4_dequantize(q).mT.contiguous()
    save_file(stored, path, {"format": "pt"})
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    return plain
