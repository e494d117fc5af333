"""Experts in one tensor with one scale, as of Llama 4 and gpt-oss: made, verified, and read back with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CPU, make_model, quantize_both, spec

from halfbyte.quant import ptq
from halfbyte.quant.checkpoint import quant_format
from halfbyte.quant.configs import quant_config
from halfbyte.quant.dequantize import dequantize_checkpoint
from halfbyte.quant.layer_errors import layer_errors
from halfbyte.quant.load import open_exported
from halfbyte.quant.models import locate, open_original
from halfbyte.quant.packed import ExpertStack, Packed
from halfbyte.quant.plan import Plan, make_plan
from halfbyte.quant.rounding import quantized_weights
from halfbyte.quant.verify import verify
from halfbyte.recipes.schema import QuantizeSpec
from halfbyte.records.errors import UserError

INPUTS = torch.randint(0, 384, (2, 24), generator=torch.Generator().manual_seed(5))
MADE = [
    ("llama4", "FP8_DEFAULT_CFG"),
    ("llama4", "NVFP4_DEFAULT_CFG"),
    ("gpt_oss", "FP8_DEFAULT_CFG"),
    ("gpt_oss", "NVFP4_DEFAULT_CFG"),
    ("gpt_oss", "MXFP4_MLP_WEIGHT_ONLY_CFG"),
]


def _saved(model: Any, tokenizer: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _exported(family: str, block: QuantizeSpec, tokenizer: Any, folder: Path) -> Path:
    source = _saved(make_model(family), tokenizer, folder / "source")
    return quantize_both(source, tokenizer, folder / "checkpoint", block, torch.float32, INPUTS)[0].folder


def _faults(checkpoint: Path, source: Path | None = None) -> dict[str, list[str]]:
    return {check.name: check.faults for check in verify(checkpoint, source) if not check.passed}


def _planned(family: str, block: QuantizeSpec, folder: Path) -> Plan:
    make_model(family).save_pretrained(folder)
    return make_plan(locate(str(folder)), quant_config(block), torch.bfloat16, block.keep)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "preset"), MADE)
def test_memory_folded_and_packed_answer_alike_bit_for_bit(
    family: str, preset: str, compute: torch.dtype, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    source = _saved(make_model(family), tiny_tokenizer, tmp_path / "source")
    both, memory, folded = quantize_both(source, tiny_tokenizer, tmp_path / "checkpoint", spec(preset), compute, INPUTS)
    declared = quant_format(both.folder)
    assert declared is not None
    packed = open_exported(locate(str(both.folder)), declared, dtype=compute, device=CPU, weights="packed")
    stacks = [module for module in packed.modules() if isinstance(module, ExpertStack)]
    assert {type(part) for stack in stacks for part in stack.modules()} >= {Packed}
    with torch.no_grad():
        assert torch.equal(packed(INPUTS).logits, folded)
    assert torch.equal(memory, folded)
    assert bool(torch.isfinite(folded).all())
    assert not _faults(both.folder, source)


def test_tensors_have_the_names_and_shapes_of_nvidias_llama_4(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """nvidia/Llama-4-Maverick-17B-128E-Instruct-FP8, as vLLM's model_executor/models/mllama4.py renames them."""
    block = spec(None, recipe="general/ptq/fp8_default-kv_fp8")
    stored = load_file(_exported("llama4", block, tiny_tokenizer, tmp_path) / "model.safetensors")
    experts = "model.layers.1.feed_forward.experts."
    found = {name.removeprefix(experts): value for name, value in stored.items() if name.startswith(experts)}
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in found.items()}
    assert shapes == {
        "gate_up_proj": ((4, 64, 2 * 96), torch.float8_e4m3fn),
        "down_proj": ((4, 96, 64), torch.float8_e4m3fn),
        **{
            f"{tensor}_{scale}": ((), torch.float32)
            for tensor in ("gate_up_proj", "down_proj")
            for scale in ("weight_scale", "input_scale")
        },
    }
    assert {"model.layers.1.self_attn.k_proj.k_scale", "model.layers.1.self_attn.v_proj.v_scale"} <= stored.keys()


def test_the_language_model_of_one_that_also_sees_is_compared_with_it(tmp_path: Path, tiny_tokenizer: Any) -> None:
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32,
    }  # fmt: skip
    text = make_model("llama4")
    config = Llama4Config(text_config=text.config.to_dict(), vision_config=vision)
    model = Llama4ForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    model.language_model.load_state_dict(text.state_dict())
    source = _saved(model, tiny_tokenizer, tmp_path / "source")
    block = spec(None, recipe="general/ptq/fp8_default-kv_fp8")
    both, memory, folded = quantize_both(source, tiny_tokenizer, tmp_path / "out", block, torch.float32, INPUTS)
    assert torch.equal(memory, folded)
    assert not _faults(both.folder, source)
    stored = load_file(both.folder / "model.safetensors")
    lacking = {name: value for name, value in stored.items() if name != "model.norm.weight"}
    save_file(lacking, both.folder / "model.safetensors", {"format": "pt"})
    faults = _faults(both.folder, source)
    assert faults["kept weights"] == ["language_model.model.norm.weight is in the source and not in the checkpoint"]


def test_transformers_opens_gpt_oss_by_its_own_loader(tmp_path: Path, tiny_tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    folder = _exported("gpt_oss", spec("MXFP4_MLP_WEIGHT_ONLY_CFG"), tiny_tokenizer, tmp_path)
    declared = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert declared["quant_method"] == "mxfp4"
    assert {"lm_head", "model.layers.0.self_attn", "model.layers.1.mlp.router"} <= {*declared["modules_to_not_convert"]}
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    dequantize_checkpoint(locate(str(folder)), tmp_path / "plain", torch.bfloat16)
    ours = load_file(tmp_path / "plain" / "model.safetensors")
    assert all(torch.equal(theirs.state_dict()[name], value) for name, value in ours.items())


@pytest.mark.parametrize("family", ["llama4", "gpt_oss"])
def test_weights_near_the_smallest_scale_are_exported_as_they_were_rounded(
    family: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """Ever smaller blocks have scales below E4M3's normal numbers, which another rounding would move."""
    model = make_model(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("experts.down_proj"):
                parameter[1] *= torch.exp2(-torch.arange(96) / 4).unsqueeze(-1)
    source = _saved(model, tiny_tokenizer, tmp_path / "source")
    opened = open_original(locate(str(source)), weights=torch.bfloat16, compute=torch.float32, device=CPU)
    ptq.calibrate(opened, quant_config(spec("NVFP4_DEFAULT_CFG")), lambda m: m(INPUTS))
    unstable = ptq.settle(opened)
    assert any("down_proj.1" in entry.name for entry in unstable)
    weights = {weight.name: weight.values.clone() for weight in quantized_weights(opened)}
    ptq.export(opened, tiny_tokenizer, tmp_path / "checkpoint", torch.bfloat16, unstable)
    dequantize_checkpoint(locate(str(tmp_path / "checkpoint")), tmp_path / "plain", torch.float32)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for name, values in weights.items():
        stack, _, expert = name.rpartition(".")
        if ".experts." in name:
            assert torch.equal(plain[stack][int(expert)].mT, values), name


@pytest.mark.parametrize(("family", "preset"), MADE)
def test_errors_name_each_tensor_of_experts(family: str, preset: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    folder = _exported(family, spec(preset), tiny_tokenizer, tmp_path)
    found = {one.layer: one for one in layer_errors(folder, tmp_path / "source")}
    experts = "model.layers.1.feed_forward.experts" if family == "llama4" else "model.layers.1.mlp.experts"
    for tensor in ("gate_up_proj", "down_proj"):
        one = found[f"{experts}.{tensor}"]
        assert one.error == pytest.approx(one.expected, rel=0.01)


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (lambda tensors, stack: tensors.pop(f"{stack}_input_scale"), "input scales"),
        (lambda tensors, stack: tensors[f"{stack}_weight_scale"].mul_(2), "weight error"),
        (lambda tensors, stack: tensors[f"{stack}_weight_scale"].zero_(), "finite"),
        (lambda tensors, stack: tensors[f"{stack}_input_scale"].fill_(float("nan")), "finite"),
        (lambda tensors, stack: tensors[stack].view(torch.uint8)[1].zero_(), "weight error"),
        (lambda tensors, stack: tensors.update({stack: tensors[stack].flip(0).contiguous()}), "weight error"),
        (lambda tensors, stack: tensors.pop(f"{stack}_weight_scale"), "complete"),
    ],
)
def test_damage_to_experts_is_caught(damage: Any, check: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    folder = _exported("llama4", spec("FP8_DEFAULT_CFG"), tiny_tokenizer, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors, "model.layers.1.feed_forward.experts.gate_up_proj")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert check in _faults(folder, tmp_path / "source")


@pytest.mark.parametrize("preset", ["MXFP8_DEFAULT_CFG", "MXFP4_DEFAULT_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"])
def test_blocks_that_the_export_cuts_otherwise_are_refused(preset: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"experts\.gate_up_proj would be .*, whose blocks ModelOpt's export") as caught:
        _planned("llama4", spec(preset), tmp_path)
    kept = spec(preset, keep=["model.layers.1.feed_forward.experts"])
    assert caught.value.hint is not None
    assert f"quantize.keep={kept.keep}" in caught.value.hint
    assert "Experts" not in {layer.kind for layer in _planned("llama4", kept, tmp_path).quantized}


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (spec("MXFP4_MLP_WEIGHT_ONLY_CFG", "fp8"), "the KV cache would be FP8"),
        (
            spec(
                None,
                quant_cfg=[
                    {"quantizer_name": "*", "enable": False},
                    {
                        "quantizer_name": "*weight_quantizer",
                        "cfg": {
                            "num_bits": (2, 1),
                            "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)},
                        },
                    },
                    {"quantizer_name": "*router*", "enable": False},
                    {"quantizer_name": "*lm_head*", "enable": False},
                    {"quantizer_name": "*embed*", "enable": False},
                ],
            ),
            r"self_attn\.q_proj would be W4A16_MXFP4",
        ),
    ],
)
def test_gpt_oss_in_mxfp4_declares_its_experts_alone(block: QuantizeSpec, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{said}, and a checkpoint of gpt-oss .* declares nothing else"):
        _planned("gpt_oss", block, tmp_path)


def test_modelopt_itself_still_cuts_mx_blocks_across_the_outputs() -> None:
    """When this fails, expert_blocks can be left to ModelOpt, and MX formats need not be refused any more."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.unified_export_hf import _export_quantized_weight

    from halfbyte.quant.backend import register

    register()
    model = make_model("gpt_oss")
    mtq.quantize(model, mtq.MXFP4_MLP_WEIGHT_ONLY_CFG, lambda m: m(INPUTS))
    experts = model.model.layers[0].mlp.experts
    _export_quantized_weight(experts, torch.bfloat16, "down_proj")  # [experts, in, out] = [4, 96, 64]
    assert experts.down_proj.shape == (4, 96, 64 // 2)
    assert experts.down_proj_weight_scale.shape == (4, 96, 64 // 32)
