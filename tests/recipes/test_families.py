"""Tiny models of the published families that no other test makes are exported at the planned size and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import quantize_both, spec

from halfbyte.quant.configs import quant_config
from halfbyte.quant.models import locate
from halfbyte.quant.plan import make_plan

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 384,
}  # fmt: skip


def _nemotron() -> Any:
    from transformers import NemotronConfig, NemotronForCausalLM

    return NemotronForCausalLM(NemotronConfig(**SHAPE, intermediate_size=128))


def _nemotron_h() -> Any:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    experts = {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 128, "mlp_hidden_act": "relu2",
    }  # fmt: skip
    mamba = {
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
        "chunk_size": 16,
    }  # fmt: skip
    shape = {**SHAPE, "num_hidden_layers": 4, "hybrid_override_pattern": "ME*E", "intermediate_size": 64}
    return NemotronHForCausalLM(NemotronHConfig(**shape, **experts, **mamba))


MAKE = {"nemotron": _nemotron, "nemotron_h": _nemotron_h}


@pytest.mark.parametrize(
    ("family", "preset", "kv_cache"),
    [
        ("nemotron", "NVFP4_DEFAULT_CFG", None),
        ("nemotron_h", "MAMBA_MOE_NVFP4_CONSERVATIVE_CFG", "fp8"),
        ("nemotron_h", "MAMBA_MOE_FP8_AGGRESSIVE_CFG", "fp8"),
    ],
)
def test_a_model_of_the_family_is_read_back_with_the_same_answers(
    family: str, preset: str, kv_cache: str | None, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    torch.manual_seed(0)
    source, block = tmp_path / "model", spec(preset, kv_cache)
    MAKE[family]().to(torch.bfloat16).save_pretrained(source)
    plan = make_plan(locate(str(source)), quant_config(block), torch.bfloat16)
    inputs = torch.zeros(1, 4, dtype=torch.long)
    _, memory, read_back = quantize_both(source, tiny_tokenizer, tmp_path / "out", block, torch.float32, inputs)
    assert torch.equal(memory, read_back)
    content = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert plan.tensor_bytes == len(content) - 8 - int.from_bytes(content[:8], "little")
