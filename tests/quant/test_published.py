"""Checkpoints laid out as published ones are opened: names, types and declarations of four models, at tiny sizes.

Layouts are those of nvidia/Llama-3.1-8B-Instruct-FP8, nvidia/Llama-3.3-70B-Instruct-FP4, nvidia/DeepSeek-R1-FP4,
openai/gpt-oss-20b and deepseek-ai/DeepSeek-R1, as their index files, ModelOpt's examples/deepseek and the loaders of
vLLM (model_executor/layers/quantization/modelopt.py, models/gpt_oss.py) show them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published import deepseek, gpt_oss_checkpoint
from safetensors.torch import load_file, save_file
from stored import STORE, open_plain, without_rounding, write
from tiny import make_model

from halfbyte.quant import numerics as nm
from halfbyte.quant.checkpoint import Tensors, quant_format, summarize
from halfbyte.quant.load import load
from halfbyte.quant.packed import ExpertStack, QuantizedLinear
from halfbyte.recipes.schema import ModelSpec
from halfbyte.records.errors import UserError

IDS = torch.randint(0, 384, (2, 30), generator=torch.Generator().manual_seed(3))
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits  # type: ignore[no-any-return]


def _read(folder: Path, plain: Path) -> Any:
    """The model read back, after both ways of holding its weights gave the plain values' answers."""
    models = [load(ModelSpec(id=str(folder)), device="cpu", weights=weights).model for weights in ("packed", "folded")]  # type: ignore[arg-type]
    answers = [_logits(model) for model in models]
    assert torch.equal(*answers)
    expected = _logits(open_plain(plain))
    rounded = models[1]
    read = load(ModelSpec(id=str(folder)), device="cpu").model
    assert torch.equal(_logits(without_rounding(read)), expected)
    return rounded


def _names(folder: Path) -> dict[str, str]:
    with Tensors(folder) as tensors:
        return {name: tensors.dtype(name) for name in tensors}


def _kv_scales(layers: int, spelling: str = "{side}_proj.{side}_scale") -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{i}.self_attn.{spelling.format(side=side)}": torch.tensor(0.02 * (i + 1 + (side == "v")))
        for i in range(layers)
        for side in "kv"
    }


def _llama() -> Any:
    model = make_model("llama")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone() + 0.01)
    return model


def _linears(name: str) -> bool:
    return name.endswith("_proj")


def test_llama_8b_fp8_which_declares_in_a_file_of_its_own_only(tmp_path: Path, tiny_tokenizer: Any) -> None:
    folder = tmp_path / "Llama-3.1-8B-Instruct-FP8"
    plain = write(
        _llama(),
        folder,
        lambda name: "FP8" if _linears(name) else None,
        own_file={"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        more=_kv_scales(2),
        tokenizer=tiny_tokenizer,
        shards=2,
    )
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    names = _names(folder)
    assert names[f"{ATTENTION}.q_proj.weight"] == "F8_E4M3"
    assert names[f"{ATTENTION}.k_proj.k_scale"] == names[f"{MLP}.down_proj.input_scale"] == "F32"
    model = _read(folder, plain)
    quantizer = model.model.layers[1].self_attn.v_bmm_quantizer
    assert torch.equal(quantizer.amax / 448, torch.tensor(0.02 * 3))
    assert summarize(folder, "x").format == "FP8 + FP8 KV"


@pytest.mark.parametrize("spelling", ["{side}_scale", "attn.{side}_scale", "qkv_proj.{side}_scale"])
def test_kv_scales_are_found_where_other_exporters_put_them(spelling: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    folder = tmp_path / "checkpoint"
    write(
        _llama(),
        folder,
        lambda name: "FP8" if _linears(name) else None,
        own_file={"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        more=_kv_scales(2, spelling),
        tokenizer=tiny_tokenizer,
    )
    model = load(ModelSpec(id=str(folder)), device="cpu").model
    assert torch.equal(model.model.layers[0].self_attn.k_bmm_quantizer.amax / 448, torch.tensor(0.02))


def test_llama_70b_fp4_in_shards_that_part_weights_from_scales(tmp_path: Path, tiny_tokenizer: Any) -> None:
    folder = tmp_path / "Llama-3.3-70B-Instruct-FP4"
    plain = write(
        _llama(),
        folder,
        lambda name: "NVFP4" if _linears(name) else None,
        own_file={
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
        more=_kv_scales(2),
        tokenizer=tiny_tokenizer,
        shards=3,
    )
    names = _names(folder)
    assert [names[f"{MLP}.up_proj.{leaf}"] for leaf in ("weight", "weight_scale", "weight_scale_2", "input_scale")] == [
        "U8",
        "F8_E4M3",
        "F32",
        "F32",
    ]
    model = _read(folder, plain)
    linear = model.model.layers[0].mlp.up_proj
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert isinstance(linear, QuantizedLinear)
    assert torch.equal(linear.input_quantizer(x), nm.nvfp4_fake_quantize(x, torch.tensor(6.5)))  # type: ignore[misc]


def _mtp_layer(store: str) -> dict[str, torch.Tensor]:
    """The layer behind the last, which predicts one more token and which transformers leaves out."""
    parts, _ = STORE[store](torch.randn(48, 64, generator=torch.Generator().manual_seed(5)))
    layer = {f"model.layers.2.mlp.experts.0.gate_proj.{part}": value for part, value in parts.items()}
    plain = {
        "enorm.weight": torch.ones(64),
        "eh_proj.weight": torch.ones(64, 128),
        "shared_head.norm.weight": torch.ones(64),
    }
    return layer | {f"model.layers.2.{name}": value.bfloat16() for name, value in plain.items()}


def test_deepseek_r1_fp4_with_attention_kept_scales_per_expert_and_an_index_that_lacks_them(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    folder = tmp_path / "DeepSeek-R1-FP4"
    keep = ["lm_head", "*self_attn*", "*mlp.gate", "model.layers.2*"]
    plain = write(
        deepseek(),
        folder,
        lambda name: "NVFP4" if ".mlp." in name and _linears(name) else None,
        own_file={"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": keep},
        more=_mtp_layer("NVFP4"),
        tokenizer=tiny_tokenizer,
        shards=2,
        index=lambda name: "scale" not in name,
    )
    names = _names(folder)
    expert = "model.layers.1.mlp.experts.0"
    assert names[f"{expert}.gate_proj.weight_scale_2"] == names[f"{expert}.down_proj.input_scale"] == "F32"
    assert names["model.layers.1.mlp.gate.e_score_correction_bias"] in ("F32", "BF16")
    model = _read(folder, plain)
    stack = model.model.layers[1].mlp.experts.gate_up_proj
    assert isinstance(stack, ExpertStack)
    assert stack.weight is not None
    assert stack.weight.shape == (4, 96, 64)
    assert len(stack.input_quantizers) == 1
    path = next(path for path in folder.glob("*.safetensors") if f"{expert}.up_proj.input_scale" in load_file(path))
    tensors = load_file(path)
    tensors[f"{expert}.up_proj.input_scale"] *= 2
    save_file(tensors, path, {"format": "pt"})
    stack = load(ModelSpec(id=str(folder)), device="cpu").model.model.layers[1].mlp.experts.gate_up_proj
    scales = [float(quantizer.amax) for quantizer in stack.input_quantizers]
    assert scales == pytest.approx([13.0, 6.5, 6.5, 6.5])  # of gate and up, which share their input, the larger


@pytest.mark.parametrize("shape", ["small", "of several squares"])
def test_deepseek_r1_fp8_in_squares(shape: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    folder = tmp_path / "DeepSeek-R1"
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    model = deepseek()
    if shape == "of several squares":
        config_of = model.config
        config_of.intermediate_size = 288  # three squares, the last not full
        model = type(model)(config_of).to(torch.bfloat16).eval()
    plain = write(
        model,
        folder,
        lambda name: "FP8_BLOCK" if _linears(name) or name.endswith("kv_a_proj_with_mqa") else None,
        in_config=config,
        more=_mtp_layer("FP8_BLOCK"),
        tokenizer=tiny_tokenizer,
    )
    assert _names(folder)["model.layers.1.mlp.shared_experts.up_proj.weight_scale_inv"] == "F32"
    _read(folder, plain)
    declared = quant_format(folder)
    assert declared is not None
    assert declared.format_of("model.layers.0.mlp.up_proj") == "FP8_BLOCK"


def test_gpt_oss_20b_whose_experts_lie_in_blocks(tmp_path: Path, tiny_tokenizer: Any) -> None:
    folder = tmp_path / "gpt-oss-20b"
    plain = gpt_oss_checkpoint(folder, tiny_tokenizer)
    with Tensors(folder) as tensors:
        assert tensors.shape(f"{MLP}.experts.gate_up_proj_blocks") == (4, 192, 2, 16)
        assert tensors.shape(f"{MLP}.experts.down_proj_scales") == (4, 64, 3)
    model = _read(folder, plain)
    stack = model.model.layers[0].mlp.experts.down_proj
    assert isinstance(stack, ExpertStack)
    assert not stack.input_quantizers
    assert summarize(folder, "x").format == "W4A16_MXFP4"


def _without(part: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        del tensors[next(name for name in tensors if part in name)]
        save_file(tensors, path, {"format": "pt"})

    return change


def _declared(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "hf_quant_config.json"
        content = json.loads(path.read_text())
        content["quantization"] |= changes
        path.write_text(json.dumps(content))

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without("experts.3.up_proj.weight_scale_2"), "without the scales"),
        (_without("experts.3.up_proj.input_scale"), "stored as W4A16_NVFP4 but declared as NVFP4"),
        (_declared(exclude_modules=["*experts.2*"]), r"experts.2.* declared to be kept as it is"),
        (_declared(quant_algo="W4A16_NVFP4"), "stored as NVFP4 but declared as W4A16_NVFP4"),
        (_declared(quant_algo="MXFP8"), "declared as MXFP8"),
        (_declared(kv_cache_quant_algo="INT8"), "INT8 KV cache, which cannot be read back"),
    ],
)
def test_damage_to_experts_is_named(
    change: Callable[[Path], None], said: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    folder = tmp_path / "checkpoint"
    write(
        make_model("qwen3_moe"),
        folder,
        lambda name: "NVFP4" if "experts" in name else None,
        own_file={"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
        tokenizer=tiny_tokenizer,
    )
    change(folder)
    with pytest.raises(UserError, match=said):
        load(ModelSpec(id=str(folder)), device="cpu")


def test_a_missing_expert_is_named(tmp_path: Path, tiny_tokenizer: Any) -> None:
    folder = tmp_path / "checkpoint"
    write(
        make_model("mixtral"),
        folder,
        lambda name: "FP8" if "experts" in name else None,
        own_file={"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        tokenizer=tiny_tokenizer,
    )
    path = folder / "model.safetensors"
    kept = {
        name: value for name, value in load_file(path).items() if "layers.1.block_sparse_moe.experts.2.w3" not in name
    }
    save_file(kept, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"layers.1.mlp.experts: part 1 of gate_up_proj of expert 2 is missing"):
        load(ModelSpec(id=str(folder)), device="cpu")


def test_a_mixed_checkpoint_says_the_format_of_each_layer(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Experts are declared together, some layers are kept, and shared ones have another format."""
    formats = {"self_attn": "FP8", "layers.0.mlp": "NVFP4", "layers.1.mlp.experts": "W4A16_NVFP4"}

    def chosen(name: str) -> str | None:
        return next((kind for part, kind in formats.items() if part in name and _linears(name)), None)

    model = deepseek()
    folder = tmp_path / "checkpoint"
    layers = {f"model.layers.{i}.self_attn": {"quant_algo": "FP8"} for i in (0, 1)}
    layers |= {
        f"model.layers.0.mlp.{x}_proj": {"quant_algo": "NVFP4", "group_size": 16} for x in ("gate", "up", "down")
    }
    layers |= {"model.layers.1.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    own = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    plain = write(model, folder, chosen, own_file=own, tokenizer=tiny_tokenizer)
    read = _read(folder, plain)
    assert read.model.layers[0].self_attn.o_proj.input_quantizer.num_bits == (4, 3)
    assert read.model.layers[0].mlp.up_proj.input_quantizer.num_bits == (2, 1)
    assert not read.model.layers[1].mlp.experts.down_proj.input_quantizers
    del own["quantized_layers"]["model.layers.1.mlp.experts"]
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    with pytest.raises(UserError, match="declared to be kept as it is"):
        load(ModelSpec(id=str(folder)), device="cpu")


def test_experts_kept_beside_quantized_ones_are_read_as_they_are(tmp_path: Path, tiny_tokenizer: Any) -> None:
    folder = tmp_path / "checkpoint"
    plain = write(
        make_model("qwen3_moe"),
        folder,
        lambda name: "W4A16_NVFP4" if "experts" in name and "experts.1" not in name else None,
        own_file={"quant_algo": "W4A16_NVFP4", "exclude_modules": ["lm_head", "*experts.1*"]},
        tokenizer=tiny_tokenizer,
    )
    _read(folder, plain)
    shutil.rmtree(folder)


def test_gemma3_whose_language_model_has_other_names_in_the_file(tmp_path: Path, tiny_tokenizer: Any) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 384, "sliding_window": 8, "initializer_range": 0.3,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    folder = tmp_path / "gemma-3"
    plain = write(
        Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision)).to(torch.bfloat16),
        folder,
        lambda name: "NVFP4" if _linears(name) and "vision" not in name else None,
        own_file={
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "vision_tower*", "multi_modal_projector*"],
        },
        more={f"language_model.{name}": scale for name, scale in _kv_scales(2).items()},
        tokenizer=tiny_tokenizer,
    )
    assert "language_model.model.layers.0.mlp.up_proj.weight_scale" in _names(folder)
    model = _read(folder, plain)
    linear = model.get_submodule("model.language_model.layers.0.mlp.up_proj")
    assert isinstance(linear, QuantizedLinear)
