"""Verify: good checkpoints of every preset and family raise nothing, and the command says what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import damage
import pytest
import torch
from published import gpt_oss_checkpoint
from safetensors.torch import save_file
from tiny import export, spec

from halfbyte.main import main
from halfbyte.quant.checkpoint import quant_format
from halfbyte.quant.verify import RULES, SOURCE_RULES, verify
from halfbyte.records.errors import UserError

PRESETS = [
    ("fp8", None), ("fp8", "fp8"), ("fp8_per_channel_per_token", None), ("fp8_2d_blockwise_weight_only", None),
    ("nvfp4", None), ("nvfp4", "nvfp4"), ("nvfp4", "fp8_cast"), ("nvfp4_awq_lite", None),
    ("nvfp4_svdquant_default", None), ("nvfp4_four_over_six", None), ("nvfp4_w4a4_weight_mse_fp8_sweep", None),
    ("nvfp4_mlp_only", None), ("w4a16_nvfp4", None), ("w4a8_nvfp4_fp8", None), ("w4a8_mxfp4_fp8", None),
    ("mxfp4_default", None), ("mxfp8_default", None), ("nvfp4_w4a4_weight_local_hessian", None),
]  # fmt: skip
# ModelOpt smooths no experts.
EXPERTS = [*PRESETS[:3], PRESETS[4], ("nvfp4", "fp8"), ("nvfp4_experts_only", None), PRESETS[9], *PRESETS[12:16]]
KINDS = [("llama", *preset) for preset in PRESETS]
KINDS += [("qwen2", *preset) for preset in PRESETS if "sweep" not in preset[0]]
KINDS += [("gemma3", *preset) for preset in PRESETS[:8]]
KINDS += [(family, *preset) for family in ("qwen3_moe", "mixtral") for preset in EXPERTS]
KINDS += [("mixtral", "fp8_2d_blockwise_weight_only", None)]  # with the names of transformers, not those of the files


@pytest.mark.parametrize(("family", "preset", "kv_cache"), KINDS)
def test_good_checkpoints_raise_nothing(
    family: str, preset: str, kv_cache: str | None, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    checkpoint = export(family, spec(preset, kv_cache), tiny_tokenizer, tmp_path)
    checks = verify(checkpoint, tmp_path / "source")
    assert [str(check) for check in checks if not check.passed] == []
    assert [check.name for check in checks] == [rule.name for rule in (*RULES, *SOURCE_RULES)]


def test_an_affine_kv_cache_raises_nothing(tmp_path: Path, tiny_tokenizer: Any) -> None:
    import modelopt.torch.quantization as mtq

    both = [*mtq.FP8_DEFAULT_CFG["quant_cfg"], *mtq.NVFP4_AFFINE_KV_CFG["quant_cfg"]]
    block = spec(None, quant_cfg=both, algorithm="max")
    checkpoint = export("llama", block, tiny_tokenizer, tmp_path)
    assert [str(check) for check in verify(checkpoint, tmp_path / "source") if not check.passed] == []
    damage.drop("model.layers.0.self_attn.v_proj.v_bias")(checkpoint)
    failed = {check.name: check.faults for check in verify(checkpoint) if not check.passed}
    assert failed == {"kv cache": ["model.layers.0.self_attn.v_proj.v_bias is missing"]}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """A good checkpoint, with its source beside it."""
    return export("llama", spec("nvfp4", "fp8"), tiny_tokenizer, tmp_path_factory.mktemp("good"))


def test_without_the_source_nothing_is_compared_with_it(good: Path) -> None:
    assert [(check.name, check.faults) for check in verify(good)] == [(rule.name, []) for rule in RULES]


def test_gpt_oss_as_published_raises_nothing(tmp_path: Path, tiny_tokenizer: Any) -> None:
    folder = tmp_path / "gpt-oss-20b"
    gpt_oss_checkpoint(folder, tiny_tokenizer)
    (folder / "generation_config.json").write_text("{}")
    assert [str(check) for check in verify(folder) if not check.passed] == []
    name = "model.layers.0.mlp.experts.down_proj"
    damage.bits(f"{name}_scales", lambda value: value.index_fill(1, torch.tensor([2]), 255))(folder)
    failed = {check.name: check.faults for check in verify(folder) if not check.passed}
    assert failed["finite"] == [f"{name}_scales is not finite"]


def test_a_sharded_checkpoint_raises_nothing(good: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "checkpoint")
    damage.shard(folder)
    assert [str(check) for check in verify(folder, good.parent / "source") if not check.passed] == []


def test_the_command_says_what_is_wrong_and_exits_1(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(good), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    assert "weight error" not in out
    folder = shutil.copytree(good, tmp_path / "checkpoint")
    damage.scale("model.layers.1.mlp.up_proj.input_scale", 2)(folder)
    assert main(["verify", str(folder), "--json", "--quiet"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["check"] for row in rows if not row["passed"]] == ["fused"]
    assert "up_proj" in str(rows)


def test_the_command_compares_with_the_source(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(good.parent / "source")
    assert main(["verify", str(good), "--source", source, "--quiet"]) == 0
    assert "ok    weight error" in capsys.readouterr().out
    folder = shutil.copytree(good, tmp_path / "checkpoint")
    damage.swap("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")(folder)
    assert main(["verify", str(folder), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["verify", str(folder), "--source", source, "--quiet"]) == 1
    assert "FAIL  weight error: model.layers.0.mlp.down_proj.weight" in capsys.readouterr().out


def test_a_run_folder_stands_for_the_checkpoint_in_it(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "checkpoint")
    assert main(["verify", str(tmp_path), "--quiet"]) == 2
    (tmp_path / "recipe.yaml").write_text("name: a\n", encoding="utf-8")
    damage.drop("model.norm.weight")(tmp_path / "checkpoint")
    assert main(["verify", str(tmp_path), "--quiet"]) == 1


@pytest.mark.parametrize("change", [{"head_dim": 0}, {"vocab_size": None}, {"hidden_act": "foo"}])
def test_a_configuration_that_transformers_refuses_is_no_unknown_model(
    change: dict[str, Any], good: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(good, tmp_path / "checkpoint")
    damage.configure("config.json", **change)(folder)
    failed = {check.name: check.faults for check in verify(folder) if not check.passed}
    assert "transformers cannot open" in failed["model"][0]
    damage.configure("config.json", model_type="halfbyte-unknown")(folder)
    assert "model" not in {check.name for check in verify(folder) if not check.passed}


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_may_have_another_name_than_lm_head(tied: bool, tmp_path: Path, tiny_tokenizer: Any) -> None:
    from stored import write
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    write(
        GPTNeoXForCausalLM(GPTNeoXConfig(**shape, vocab_size=384, tie_word_embeddings=tied)).to(torch.bfloat16),
        tmp_path / "checkpoint",
        lambda name: "NVFP4" if ".layers." in f".{name}" and "norm" not in name else None,
        own_file={"quant_algo": "NVFP4", "exclude_modules": ["embed_out"]},
        tokenizer=tiny_tokenizer,
    )
    checks = {check.name: check.faults for check in verify(tmp_path / "checkpoint")}
    assert checks["tied"] == checks["model"] == []
    if not tied:
        damage.drop("embed_out.weight")(tmp_path / "checkpoint")
        checks = {check.name: check.faults for check in verify(tmp_path / "checkpoint")}
        assert checks["tied"][0].startswith("lm_head.weight is missing")


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "exclude_modules": [1]}}, "exclude_modules"),
        ("config.json", {"quantization_config": []}, "quantization_config is no mapping"),
        ("config.json", {"text_config": 3}, "text_config is no mapping"),
    ],
)
def test_a_declaration_of_another_type_is_refused(
    file: str, change: dict[str, Any], told: str, good: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(good, tmp_path / "checkpoint")
    damage.configure(file, **change)(folder)
    with pytest.raises(UserError, match=told):
        quant_format(folder)


@pytest.mark.parametrize("source", ["source", "nowhere"])
def test_a_folder_that_is_no_checkpoint_is_refused(source: str, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(good.parent / source), "--quiet"]) == 2
    assert str(good.parent / source) in capsys.readouterr().err


def test_a_source_that_is_a_checkpoint_itself_is_refused(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(good), "--source", str(good), "--quiet"]) == 2
    assert "quantized" in capsys.readouterr().err


def test_a_file_that_shrinks_while_it_is_read_is_an_error(good: Path) -> None:
    from halfbyte.quant.shards import open_shards

    folder = good.parent / "shrinking"
    shutil.copytree(good, folder)
    shards = open_shards(folder)
    name = list(shards)[-1]
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="ends too early"):
        list(shards.chunks(name))
    with pytest.raises(UserError, match="ends too early"):
        shards[name]


def test_memory_stays_small(tmp_path: Path) -> None:
    """The peak of Python's and numpy's allocations while a tensor of 64 MiB is surveyed."""
    import tracemalloc

    from halfbyte.quant.shards import open_shards
    from halfbyte.quant.survey import survey

    save_file({"a.weight": torch.ones(1 << 25, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    tracemalloc.start()
    found = survey(open_shards(tmp_path), [], set())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.kept["a.weight"].values == 1 << 25
    assert peak < 8 << 20
