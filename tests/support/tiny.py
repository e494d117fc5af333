"""Tiny random models of several families, and one call that quantizes, exports and reads one back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.quant import calibration, configs, ptq
from halfbyte.quant.checkpoint import quant_format
from halfbyte.quant.load import open_exported
from halfbyte.quant.models import locate, open_original
from halfbyte.recipes.schema import QuantizeSpec

CPU = torch.device("cpu")
FORMATS = [("fp8", None), ("nvfp4", None), ("nvfp4", "fp8"), ("nvfp4", "nvfp4"), ("w4a16_nvfp4", None)]


def spec(preset: str | None = "nvfp4", kv_cache: str | None = None, **more: Any) -> QuantizeSpec:
    """A quantize block whose calibration source is never read."""
    content = {"preset": preset, "kv_cache": kv_cache, "calibration": {"sources": [{"dataset": "unused.txt"}]}}
    return QuantizeSpec.model_validate({**content, **more})


def make_model(family: str, **changes: Any) -> Any:
    """A random model of 2 layers and 64 dimensions in bfloat16; `changes` are fields of its configuration."""
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        GptOssConfig,
        GptOssForCausalLM,
        Llama4ForCausalLM,
        Llama4TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    shape: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 384, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    untied = shape | {"tie_word_embeddings": False}
    if family == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**shape | {"tie_word_embeddings": True} | changes))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**untied | changes))
    elif family == "qwen3_moe":
        experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**untied | experts | changes))
    elif family == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**untied | {"num_local_experts": 4} | changes))
    elif family == "llama4":  # a dense layer, and one with experts and a shared one
        experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
        sizes = {"intermediate_size": 96, "intermediate_size_mlp": 128, "head_dim": 16, "pad_token_id": 1}
        others = {"attention_chunk_size": 32, "use_qk_norm": True}
        model = Llama4ForCausalLM(Llama4TextConfig(**shape | experts | sizes | others | changes))
    elif family == "gpt_oss":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}
        model = GptOssForCausalLM(GptOssConfig(**shape | experts | {"head_dim": 16, "sliding_window": 8} | changes))
        for name, parameter in model.named_parameters():
            if name.endswith(("_bias", "sinks")):
                torch.nn.init.normal_(parameter, std=0.1)
    else:
        layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 16}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**shape | layers | changes))
    return model.to(torch.bfloat16).eval()


def export(family: str, block: QuantizeSpec, tokenizer: Any, folder: Path) -> Path:
    """Quantizes a random model by `block`; the original is in folder / "source", what is returned is its checkpoint."""
    source = folder / "source"
    if not source.is_dir():
        make_model(family).save_pretrained(source)
        tokenizer.save_pretrained(source)
    model = open_original(locate(str(source)), weights=torch.bfloat16, compute=torch.float32, device=CPU)
    loop = calibration.forward_loop(sequences(), tokens_per_row=64, pack=True)
    ptq.calibrate(model, configs.quant_config(block), loop)
    unstable = ptq.settle(model)
    ptq.export(model, tokenizer, folder / "checkpoint", torch.bfloat16, unstable)
    return folder / "checkpoint"


def sequences(count: int = 6) -> list[list[int]]:
    """Token ids of texts of several lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 384, (5 + 7 * i,), generator=generator).tolist() for i in range(count)]


@dataclass
class Both:
    """A quantized model in memory and the same one read back from disk."""

    memory: Any
    weights: dict[str, torch.Tensor]
    """The fake-quantized weights in memory, by module."""
    folder: Path
    read_back: Any


def quantize_both(
    source: Path,
    tokenizer: Any,
    folder: Path,
    block: QuantizeSpec,
    compute: torch.dtype,
    inputs: torch.Tensor,
    *,
    weights_settled: bool = False,
) -> tuple[Both, torch.Tensor, torch.Tensor]:
    """Quantizes, exports and reads back; the logits of both on `inputs`.

    With `weights_settled` the model in memory uses its FP8 weights as settle() left them, and does not pass them
    through ModelOpt's quantizer again.
    """
    model = open_original(locate(str(source)), weights=torch.bfloat16, compute=compute, device=CPU)
    loop = calibration.forward_loop(sequences(), tokens_per_row=64, pack=True)
    ptq.calibrate(model, configs.quant_config(block), loop)
    unstable = ptq.settle(model)
    quantized = {
        name: module
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight_quantizer", None), "is_enabled", False)
    }
    with torch.no_grad():
        weights = {name: module.weight_quantizer(module.weight).clone() for name, module in quantized.items()}
        for module in quantized.values() if weights_settled else ():
            module.weight_quantizer.disable()
        memory_logits = model(inputs).logits
        for module in quantized.values():
            module.weight_quantizer.enable()
    ptq.export(model, tokenizer, folder, torch.bfloat16, unstable)
    declared = quant_format(folder)
    assert declared is not None
    read_back = open_exported(locate(str(folder)), declared, dtype=compute, device=CPU)
    with torch.no_grad():
        read_logits = read_back(inputs).logits
    return Both(model, weights, folder, read_back), memory_logits, read_logits
