"""LoRA trains linears whose factors can be merged, and refuses what it cannot export as it was validated."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import make_model, sequences
from tiny import spec as quantize_block

from halfbyte.quant import configs
from halfbyte.quant.calibration import forward_loop
from halfbyte.quant.lora import add_lora
from halfbyte.quant.ptq import calibrate
from halfbyte.recipes.training import LoraSpec
from halfbyte.records.errors import UserError


def spec(*targets: str, rank: int = 4) -> LoraSpec:
    return LoraSpec(rank=rank, targets=list(targets))


def quantized(family: str) -> Any:
    model = make_model(family).float()
    calibrate(model, configs.quant_config(quantize_block()), forward_loop(sequences(), tokens_per_row=64, pack=True))
    return model


@pytest.mark.parametrize(
    ("family", "wanted", "message"),
    [
        ("llama", spec("q_proj", "lm_head"), "lm_head, whose weight is the input embedding's too"),
        ("qwen2", spec("embed_tokens"), "embed_tokens, which is no linear but"),
        ("qwen2", spec("mlp"), "mlp, which is no linear but Qwen2MLP"),
        ("qwen2", spec("q_prj"), "lora.targets q_prj match no linear of the model"),
        ("qwen2", spec("q_proj", rank=65), "lora.rank is 65, and q_proj is 64 x 64"),
        ("qwen3_moe", spec("q_proj", "up_proj"), "up_proj, and fused experts cannot be trained by lora"),
    ],
)
def test_targets_that_cannot_be_merged_are_refused_before_training(family: str, wanted: LoraSpec, message: str) -> None:
    with pytest.raises(UserError, match=message):
        add_lora(quantized(family), wanted)


def test_a_target_that_matches_nothing_is_told_and_the_others_are_trained(caplog: pytest.LogCaptureFixture) -> None:
    model = quantized("qwen2")
    add_lora(model, spec("q_proj", "k_prj"))
    assert "k_prj matches nothing" in caplog.text
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("q_proj.lora_" in name for name in trained)


def test_attention_beside_fused_experts_is_trained() -> None:
    model = quantized("qwen3_moe")
    add_lora(model, spec("q_proj", "o_proj"))
    assert {name.split(".")[4] for name, one in model.named_parameters() if one.requires_grad} == {"q_proj", "o_proj"}
