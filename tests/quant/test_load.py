"""Read-back: an exported checkpoint answers as the quantized model in memory did, and damage is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored import write
from tiny import FORMATS, export, make_model, quantize_both, spec

from halfbyte.quant.checkpoint import quant_format, shard_files
from halfbyte.quant.load import load
from halfbyte.recipes.schema import ModelSpec
from halfbyte.records.errors import UserError

INPUTS = torch.randint(0, 384, (3, 40), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize(("preset", "kv_cache"), FORMATS)
def test_logits_read_back_equal_those_in_memory_bit_for_bit(
    family: str, preset: str, kv_cache: str | None, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    make_model(family).save_pretrained(tmp_path / "model")
    for compute in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(compute)
        # In memory ModelOpt multiplies FP8 codes by 1 / (448 / amax), where the checkpoint stores amax / 448: the two
        # are up to two float32 units apart, which rounding to bfloat16 hides. In float32 the weights are compared by
        # that bound, and the logits with the weights as they ship.
        apart = preset == "fp8" and compute is torch.float32
        both, memory, read = quantize_both(
            tmp_path / "model",
            tiny_tokenizer,
            folder,
            spec(preset, kv_cache),
            compute,
            INPUTS,
            weights_settled=apart,
        )
        parameters = dict(both.read_back.named_parameters())
        for name, weight in both.weights.items():
            torch.testing.assert_close(weight, parameters[f"{name}.weight"], rtol=3e-7 if apart else 0, atol=0)
        assert torch.equal(memory, read)


@pytest.mark.parametrize("preset", ["fp8", "nvfp4", "nvfp4_awq_lite"])
@pytest.mark.parametrize("family", ["Starcoder2", "Mamba2"])
def test_unusual_families_answer_as_in_memory(family: str, preset: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Starcoder2's norms are torch's LayerNorm, whose inputs no checkpoint rounds; Mamba2 initializes its children."""
    import transformers

    shape = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 384}
    more: dict[str, Any] = {
        "Starcoder2": {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
        "Mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    }[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**shape, **more)
    getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    _, memory, read = quantize_both(
        tmp_path / "model", tiny_tokenizer, tmp_path / "out", spec(preset), torch.bfloat16, INPUTS
    )
    assert torch.equal(memory, read)


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="the system does not list what a process maps")
def test_folded_weights_keep_no_file_mapped(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """In a process of its own, in which frames of the first imports outlive the call, with the scales of a KV cache."""
    folder = export("llama", spec("nvfp4", "fp8"), tiny_tokenizer, tmp_path)
    code = (
        "import sys; from halfbyte.quant.load import load_as_it_is; model = load_as_it_is(sys.argv[1], device='cpu');"
        " print(sum(sys.argv[1] in line for line in open('/proc/self/maps')))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("preset", ["fp8", "nvfp4", "w4a16_nvfp4", "mxfp8", "fp8_per_channel_per_token"])
def test_experts_read_back_answer_as_those_in_memory(
    family: str, preset: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    make_model(family).save_pretrained(tmp_path / "model")
    for compute in (torch.float32, torch.bfloat16):
        _, memory, read = quantize_both(
            tmp_path / "model", tiny_tokenizer, tmp_path / str(compute), spec(preset), compute, INPUTS
        )
        assert torch.equal(memory, read)


def test_a_quantized_head_that_is_tied_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    own = {"quant_algo": "W4A16_NVFP4", "exclude_modules": ["model.embed_tokens"]}
    model = make_model("qwen2")
    write(
        model,
        tmp_path / "checkpoint",
        lambda name: "W4A16_NVFP4" if name.endswith(("_proj", "head")) else None,
        own_file=own,
        tokenizer=tiny_tokenizer,
    )
    load(ModelSpec(id=str(tmp_path / "checkpoint")), device="cpu")
    path = tmp_path / "checkpoint" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(UserError, match="lm_head is quantized, but the configuration ties it"):
        load(ModelSpec(id=str(tmp_path / "checkpoint")), device="cpu")


def test_quantization_changes_the_answers(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Guards the test above: two models that were both left unquantized would agree as well."""
    model = make_model("llama")
    model.save_pretrained(tmp_path / "model")
    _, _, read = quantize_both(
        tmp_path / "model", tiny_tokenizer, tmp_path / "q", spec("nvfp4", "fp8"), torch.float32, INPUTS
    )
    with torch.no_grad():
        original = model.float()(INPUTS).logits
    assert (original - read).abs().mean() > 0.01 * original.std()
    assert torch.nn.functional.cosine_similarity(original.flatten(), read.flatten(), dim=0) > 0.5


@pytest.fixture
def exported(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    """An NVFP4 checkpoint with an FP8 KV cache."""
    make_model("llama").save_pretrained(tmp_path / "model")
    block = spec("nvfp4", "fp8")
    quantize_both(tmp_path / "model", tiny_tokenizer, tmp_path / "checkpoint", block, torch.float32, INPUTS)
    return tmp_path / "checkpoint"


def _change(folder: Path, name: str, value: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_file(tensors, path, metadata={"format": "pt"})


LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (f"{LAYER}.weight_scale", None, "without the scales"),
        (f"{LAYER}.input_scale", None, "declared as NVFP4"),
        (f"{LAYER}.input_scale", torch.tensor(0.0), "zero, negative or not finite"),
        (f"{LAYER}.weight_scale_2", torch.tensor(float("nan")), "zero, negative or not finite"),
        ("model.layers.0.self_attn.k_proj.k_scale", None, "KV-cache scales"),
        ("model.norm.weight", None, "missing_keys"),
        ("model.stray.weight", torch.zeros(4), "unexpected_keys"),
        ("model.norm.weight", torch.zeros(7), "mismatched"),
    ],
)
def test_damage_is_named(exported: Path, name: str, value: torch.Tensor | None, said: str) -> None:
    _change(exported, name, value)
    with pytest.raises(UserError, match=said):
        load(ModelSpec(id=str(exported)), device="cpu")


def test_a_cut_short_checkpoint_is_refused(exported: Path) -> None:
    path = exported / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="is damaged"):
        load(ModelSpec(id=str(exported)), device="cpu")


def test_a_missing_shard_is_named(exported: Path) -> None:
    tensors = load_file(exported / "model.safetensors")
    names = sorted(tensors)
    half = len(names) // 2
    parts = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, exported / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (exported / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (exported / "model.safetensors").unlink()
    assert len(shard_files(exported)) == 2
    load(ModelSpec(id=str(exported)), device="cpu")  # whole, in shards
    (exported / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks 1 of 2 shards: model-00002-of-00002"):
        load(ModelSpec(id=str(exported)), device="cpu")


def test_an_export_is_recognised_by_config_json_alone(exported: Path) -> None:
    """Published checkpoints may lack hf_quant_config.json; config.json carries the same facts."""
    both = quant_format(exported)
    (exported / "hf_quant_config.json").unlink()
    alone = quant_format(exported)
    assert alone is not None
    assert both is not None
    assert (alone.algorithm, alone.kv_cache, alone.exclude) == (both.algorithm, both.kv_cache, both.exclude)
    assert alone.label == "NVFP4 + FP8 KV"
    load(ModelSpec(id=str(exported)), device="cpu")


def test_the_summary_counts_packed_pairs_and_leaves_out_scales(exported: Path) -> None:
    summary = load(ModelSpec(id=str(exported)), device="cpu").summary
    model = make_model("llama")
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert summary.bits_per_weight == pytest.approx(8 * summary.bytes_on_disk / weights)
    assert summary.format == "NVFP4 + FP8 KV"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _: None, "does not exist"),
        (lambda folder: folder.mkdir(), "has no config.json"),
        (lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{")), "not valid JSON"),
        (lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{}")), "holds no safetensors"),
        (
            lambda folder: (
                folder.mkdir(),
                (folder / "config.json").write_text("{}"),
                (folder / "pytorch_model.bin").write_bytes(b"x"),
            ),
            "holds no safetensors",
        ),
    ],
)
def test_folders_that_are_no_models_are_named(make: Any, said: str, tmp_path: Path) -> None:
    make(tmp_path / "model")
    with pytest.raises(UserError, match=said):
        load(ModelSpec(id=str(tmp_path / "model")), device="cpu")


def test_an_unreadable_algorithm_is_refused_by_name(exported: Path) -> None:
    path = exported / "hf_quant_config.json"
    content = json.loads(path.read_text())
    content["quantization"]["quant_algo"] = "W4A8_AWQ"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="W4A8_AWQ, which cannot be read back"):
        load(ModelSpec(id=str(exported)), device="cpu")


def test_nvfp4_blocks_of_another_size_are_refused(exported: Path) -> None:
    path = exported / "hf_quant_config.json"
    path.write_text(path.read_text().replace('"group_size": 16', '"group_size": 32'))
    with pytest.raises(UserError, match="NVFP4 blocks of 32"):
        load(ModelSpec(id=str(exported)), device="cpu")


def test_an_unknown_device_is_refused_by_name(tiny_model_folder: Path) -> None:
    with pytest.raises(UserError, match="unknown device 'gpu'"):
        load(ModelSpec(id=str(tiny_model_folder)), device="gpu")
    with pytest.raises(UserError, match="not on this machine"):
        load(ModelSpec(id=str(tiny_model_folder)), device="cuda:63")
