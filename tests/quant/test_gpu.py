"""On a GPU: read-back beside the model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_model, sequences, spec

from halfbyte.quant import calibration, configs, ptq
from halfbyte.quant.checkpoint import quant_format
from halfbyte.quant.load import open_exported
from halfbyte.quant.models import locate, open_original

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def test_an_fp8_checkpoint_answers_as_the_model_in_memory_did_before_anything_was_settled(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """In bfloat16, bit for bit: one unit in the last place of a weight is enough to change answers of a small model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=4096, initializer_range=0.05, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model = open_original(locate(str(tmp_path / "model")), weights=torch.bfloat16, compute=torch.bfloat16, device=CUDA)
    ptq.calibrate(
        model, configs.quant_config(spec("fp8")), calibration.forward_loop(sequences(), tokens_per_row=1, pack=False)
    )
    inputs = torch.randint(0, 4096, (4, 100), generator=torch.Generator().manual_seed(2)).to(CUDA)
    with torch.no_grad():
        memory = model(inputs, use_cache=False).logits
    weights = {
        name: module.weight_quantizer(module.weight).detach().clone()
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight_quantizer", None), "is_enabled", False)
    }
    ptq.export(model, tiny_tokenizer, tmp_path / "checkpoint", torch.bfloat16, ptq.settle(model))
    declared = quant_format(tmp_path / "checkpoint")
    assert declared is not None
    read_back = open_exported(locate(str(tmp_path / "checkpoint")), declared, dtype=torch.bfloat16, device=CUDA)
    parameters = dict(read_back.named_parameters())
    assert len(weights) == 12 * 7
    for name, weight in weights.items():
        assert torch.equal(weight, parameters[f"{name}.weight"]), name
    with torch.no_grad():
        assert torch.equal(memory, read_back(inputs, use_cache=False).logits)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize(("preset", "kv_cache"), [("fp8", None), ("nvfp4", None), ("nvfp4", "fp8"), ("fp8", "fp8")])
def test_read_back_on_cuda(family: str, preset: str, kv_cache: str | None, tmp_path: Path, tiny_tokenizer: Any) -> None:
    make_model(family).save_pretrained(tmp_path / "model")
    source = locate(str(tmp_path / "model"))
    inputs = torch.randint(0, 384, (3, 40), generator=torch.Generator().manual_seed(2)).to(CUDA)
    model = open_original(source, weights=torch.bfloat16, compute=torch.bfloat16, device=CUDA)
    loop = calibration.forward_loop(sequences(), tokens_per_row=64, pack=True)
    ptq.calibrate(model, configs.quant_config(spec(preset, kv_cache)), loop)
    unstable = ptq.settle(model)
    weights = {
        name: module.weight_quantizer(module.weight).detach().clone()
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight_quantizer", None), "is_enabled", False)
    }
    with torch.no_grad():
        memory = model(inputs).logits
    ptq.export(model, tiny_tokenizer, tmp_path / "checkpoint", torch.bfloat16, unstable)
    declared = quant_format(tmp_path / "checkpoint")
    assert declared is not None
    read_back = open_exported(locate(str(tmp_path / "checkpoint")), declared, dtype=torch.bfloat16, device=CUDA)
    parameters = dict(read_back.named_parameters())
    differing = total = 0
    for name, weight in weights.items():
        # FP8: ModelOpt multiplies by 1 / (448 / amax), the checkpoint stores amax / 448: at most one bfloat16 unit.
        torch.testing.assert_close(weight, parameters[f"{name}.weight"], rtol=2**-7, atol=0)
        differing += int((weight != parameters[f"{name}.weight"]).sum())
        total += weight.numel()
    with torch.no_grad():
        read = read_back(inputs).logits
    print(f"{family} {preset} {kv_cache}: {differing} of {total} weights differ by a bfloat16 unit")
    if differing == 0:
        assert torch.equal(memory, read)
    else:
        torch.testing.assert_close(memory, read, rtol=0.1, atol=0.1)
