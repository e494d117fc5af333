"""A dequantized checkpoint opens in transformers alone and answers as the packed one without rounding of inputs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import damage
import damage_cases
import pytest
import torch
from published import deepseek, gpt_oss_checkpoint
from safetensors.torch import load_file, save_file
from stored import STORE, logits_of, open_plain, without_rounding, write, write_all

from halfbyte.main import main
from halfbyte.quant import dequantize
from halfbyte.quant.checkpoint import quant_format
from halfbyte.quant.dequantize import dequantize_checkpoint
from halfbyte.quant.load import load
from halfbyte.quant.models import locate
from halfbyte.recipes.schema import ModelSpec
from halfbyte.records.errors import UserError


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("declared", sorted(STORE))
def test_values_are_written_that_transformers_alone_opens(
    declared: str, family: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    if family == "mixtral" and declared == "NVFP4_SVD":
        pytest.skip("ModelOpt has no low-rank branch for stacked experts")
    plain = write_all(tmp_path / "checkpoint", declared, family, tokenizer=tiny_tokenizer)
    written = dequantize_checkpoint(locate(str(tmp_path / "checkpoint")), tmp_path / "out", torch.float32)
    found, expected = load_file(tmp_path / "out" / "model.safetensors"), load_file(plain / "model.safetensors")
    assert set(found) == set(expected)
    assert written.tensors == len(found)
    for name, values in expected.items():
        assert torch.equal(found[name].float(), values), name
    assert torch.equal(logits_of(open_plain(tmp_path / "out")), logits_of(open_plain(plain)))


def test_gpt_oss_and_deepseek_are_written_as_transformers_names_them(tmp_path: Path, tiny_tokenizer: Any) -> None:
    gpt_oss = gpt_oss_checkpoint(tmp_path / "gpt-oss", tiny_tokenizer)
    r1 = write(
        deepseek(),
        tmp_path / "deepseek",
        lambda name: "NVFP4" if ".mlp." in name and name.endswith("_proj") else None,
        own_file={"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    )
    for name, plain in (("gpt-oss", gpt_oss), ("deepseek", r1)):
        dequantize_checkpoint(locate(str(tmp_path / name)), tmp_path / f"{name}.out", torch.float32)
        assert torch.equal(logits_of(open_plain(tmp_path / f"{name}.out")), logits_of(open_plain(plain)))


def test_everything_else_comes_along_and_the_quantization_is_gone(tmp_path: Path, tiny_tokenizer: Any) -> None:
    scales = {f"model.layers.{i}.self_attn.{s}_proj.{s}_scale": torch.ones(()) for i in (0, 1) for s in "kv"}
    write_all(tmp_path / "checkpoint", "NVFP4", tokenizer=tiny_tokenizer, more=scales)
    own = tmp_path / "checkpoint" / "hf_quant_config.json"
    own.write_text(own.read_text().replace('"quant_algo"', '"kv_cache_quant_algo": "FP8", "quant_algo"'))
    (tmp_path / "checkpoint" / "LICENSE").write_text("free")
    written = dequantize_checkpoint(locate(str(tmp_path / "checkpoint")), tmp_path / "out", torch.bfloat16)
    assert quant_format(tmp_path / "out") is None
    assert {"config.json", "tokenizer.json", "LICENSE", "model.safetensors"} <= {
        p.name for p in written.folder.iterdir()
    }
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    found = load(ModelSpec(id=str(tmp_path / "out")), dtype="bfloat16", device="cpu")
    packed = without_rounding(load(ModelSpec(id=str(tmp_path / "checkpoint")), dtype="bfloat16", device="cpu").model)
    assert torch.equal(logits_of(found.model), logits_of(packed))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in stored  # tied to the embeddings, and stays so
    assert {str(tensor.dtype) for tensor in stored.values()} == {"torch.bfloat16"}


def test_shards_hold_what_fits_and_the_index_lists_them(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write_all(tmp_path / "checkpoint", "NVFP4", tokenizer=tiny_tokenizer, shards=3)
    monkeypatch.setattr(dequantize, "SHARD_BYTES", 60_000)
    written = dequantize_checkpoint(locate(str(tmp_path / "checkpoint")), tmp_path / "out", torch.float32)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) == written.shards > 2
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        assert size <= 60_000 or len(tensors) == 1
        assert all(index["weight_map"][name] == file for name in tensors)
    assert torch.equal(logits_of(open_plain(tmp_path / "out")), logits_of(open_plain(plain)))


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the system does not tell a process's memory")
def test_memory_is_bounded_by_a_shard(tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of 112 MB in shards of 8 MB, no more than some shards are ever held, whichever shard is written."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 4}
    write(
        LlamaForCausalLM(LlamaConfig(**shape, vocab_size=384)).to(torch.bfloat16),
        tmp_path / "checkpoint",
        lambda name: "NVFP4" if name.endswith("_proj") else None,
        own_file={"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
        tokenizer=tiny_tokenizer,
    )
    held = []

    def save(*arguments: Any, **options: Any) -> None:
        lines = Path("/proc/self/status").read_text().splitlines()
        held.append(int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) // 1024)
        save_file(*arguments, **options)

    monkeypatch.setattr(dequantize, "save_file", save)
    monkeypatch.setattr(dequantize, "SHARD_BYTES", 8 * 2**20)
    written = dequantize_checkpoint(locate(str(tmp_path / "checkpoint")), tmp_path / "out", torch.bfloat16)
    assert written.bytes > 110 * 2**20
    assert len(held) > 14
    assert max(held) - held[0] < 32


def test_a_killed_attempt_leaves_nothing_under_the_final_name_and_is_started_anew(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    plain = write_all(tmp_path / "checkpoint", "NVFP4", tokenizer=tiny_tokenizer)
    code = f"""
import time
from halfbyte.quant import dequantize
from halfbyte.main import main
def slow(*arguments):
    print("writing", flush=True)
    time.sleep(60)
dequantize._write_config = slow
main(["dequantize", {str(tmp_path / "checkpoint")!r}, "--output", {str(tmp_path / "out")!r}, "--dtype", "float32"])
"""
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial" / "model.safetensors").is_file()
    dequantize_checkpoint(locate(str(tmp_path / "checkpoint")), tmp_path / "out", torch.float32)
    assert not (tmp_path / "out.partial").exists()
    assert torch.equal(logits_of(open_plain(tmp_path / "out")), logits_of(open_plain(plain)))


def test_the_command_says_what_it_wrote(
    tmp_path: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write_all(tmp_path / "checkpoint", "NVFP4", tokenizer=tiny_tokenizer)
    arguments = ["dequantize", str(tmp_path / "checkpoint"), "--quiet", "--output"]
    assert main([*arguments, str(tmp_path / "out"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["dtype"] == "bfloat16"
    assert said["folder"] == str(tmp_path / "out")
    assert main([*arguments, str(tmp_path / "two"), "--dtype", "float16"]) == 0
    assert "checkpoint: " in capsys.readouterr().out
    assert main([*arguments, str(tmp_path / "out")]) == 2
    assert "exists" in capsys.readouterr().err


def test_what_cannot_be_dequantized_is_refused(tmp_path: Path, tiny_tokenizer: Any, tiny_model_folder: Path) -> None:
    with pytest.raises(UserError, match="is not quantized"):
        dequantize_checkpoint(locate(str(tiny_model_folder)), tmp_path / "out", torch.bfloat16)
    write_all(tmp_path / "checkpoint", "NVFP4", tokenizer=tiny_tokenizer)
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * 1e6}, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"model.norm.weight has values that float16 cannot hold"):
        dequantize_checkpoint(locate(str(tmp_path / "checkpoint")), tmp_path / "out", torch.float16)
    assert not list(tmp_path.glob("out*"))
    save_file(tensors | {"model.layers.0.mlp.input_scale": torch.ones(())}, path, {"format": "pt"})
    with pytest.raises(UserError, match="belongs to no quantized layer"):
        dequantize_checkpoint(locate(str(tmp_path / "checkpoint")), tmp_path / "out", torch.bfloat16)


def test_values_that_float16_cannot_hold_are_refused_in_quantized_weights_too(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    write_all(tmp_path / "checkpoint", "NVFP4", tokenizer=tiny_tokenizer)
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight_scale_2"
    save_file(tensors | {name: tensors[name] * 1e6}, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"up_proj.weight has values that float16 cannot hold"):
        dequantize_checkpoint(locate(str(tmp_path / "checkpoint")), tmp_path / "out", torch.float16)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (damage_cases.without_layer(1), "is missing"),
        (damage.drop("model.norm.weight"), "model.norm.weight is missing"),
        (damage_cases.add("model.stray.weight", 4), "model.stray.weight belongs to no part"),
        (damage_cases.add("model.norm.weight", 4), "model.norm.weight has shape"),
        (
            damage_cases.reshape("model.layers.1.mlp.up_proj.weight", lambda value: value.T.contiguous()),
            "up_proj.weight",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_is_written(
    harm: damage.Damage, told: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    write_all(tmp_path / "checkpoint", "NVFP4", tokenizer=tiny_tokenizer)
    harm(tmp_path / "checkpoint")
    with pytest.raises(UserError, match=told):
        dequantize_checkpoint(locate(str(tmp_path / "checkpoint")), tmp_path / "out", torch.float32)
    assert not list(tmp_path.glob("out*"))
