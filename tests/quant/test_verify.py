"""Verify: good checkpoints raise nothing, and each kind of damage is caught by the check that is named for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FORMATS, make_model, quantize_both, spec

from halfbyte.main import main
from halfbyte.quant.verify import verify

INPUTS = torch.zeros(1, 4, dtype=torch.long)
GOOD = [*FORMATS, ("fp8", "fp8"), ("nvfp4", "fp8_cast"), ("nvfp4_mlp_only", None)]
KEPT = ["lm_head", "model.embed_tokens"]
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize(("preset", "kv_cache"), GOOD)
def test_good_checkpoints_raise_nothing(
    family: str, preset: str, kv_cache: str | None, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    make_model(family).save_pretrained(tmp_path / "model")
    block = spec(preset, kv_cache)
    quantize_both(tmp_path / "model", tiny_tokenizer, tmp_path / "out", block, torch.float32, INPUTS)
    assert [str(check) for check in verify(tmp_path / "out") if not check.passed] == []


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("good")
    make_model("llama").save_pretrained(folder / "model")
    quantize_both(folder / "model", tiny_tokenizer, folder / "checkpoint", spec("nvfp4", "fp8"), torch.float32, INPUTS)
    return folder / "checkpoint"


MLP = "model.layers.1.mlp"
ATTENTION = "model.layers.0.self_attn"


def _set(name: str, value: Any) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.as_tensor(value)})


def _drop(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def _scale(name: str, by: float) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: (tensors[name].float() * by).to(tensors[name].dtype)})


def _never_calibrated(tensors: Tensors) -> None:
    for name in tensors:
        if name.endswith(".input_scale"):
            tensors[name] = torch.ones(())


def _all_at_the_maximum(tensors: Tensors) -> None:
    tensors[f"{MLP}.down_proj.weight"].fill_(0x77)


def _router_quantized(tensors: Tensors) -> None:
    for leaf in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        tensors[f"{MLP}.router.{leaf}"] = tensors[f"{MLP}.down_proj.{leaf}"].clone()


DAMAGE = [
    ("complete", _drop(f"{MLP}.down_proj.weight_scale")),
    ("complete", _drop(f"{MLP}.down_proj.weight_scale_2")),
    ("declared", _drop(f"{MLP}.down_proj.input_scale")),
    ("shapes", lambda tensors: tensors.update({f"{MLP}.down_proj.weight_scale": torch.ones(3, 3)})),
    ("finite", _set(f"{MLP}.down_proj.weight_scale_2", float("nan"))),
    ("finite", _set(f"{MLP}.down_proj.input_scale", 0.0)),
    ("finite", _set(f"{MLP}.down_proj.input_scale", float("inf"))),
    ("finite", _scale(f"{MLP}.down_proj.weight_scale", 0.0)),
    ("finite", _set("model.norm.weight", [float("nan")] * 64)),
    ("calibrated", _never_calibrated),
    ("fused", _scale(f"{MLP}.up_proj.weight_scale_2", 2.0)),
    ("fused", _scale(f"{MLP}.up_proj.input_scale", 2.0)),
    ("fused", _scale(f"{ATTENTION}.v_proj.input_scale", 0.5)),
    ("kept", _router_quantized),
    ("kept", lambda tensors: tensors.update({f"{MLP}.extra_proj.weight": torch.ones(4, 4, dtype=torch.bfloat16)})),
    ("tied", lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})),
    ("kv cache", _drop(f"{ATTENTION}.k_proj.k_scale")),
    ("kv cache", _drop(f"{ATTENTION}.v_proj.v_scale")),
    ("saturation", _all_at_the_maximum),
]


@pytest.mark.parametrize(("name", "change"), DAMAGE, ids=lambda value: value if isinstance(value, str) else "")
def test_damage_is_caught_by_name(name: str, change: Callable[[Tensors], None], good: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert name in [check.name for check in verify(folder) if not check.passed]


def _quantization(folder: Path, **changes: Any) -> None:
    path = folder / "hf_quant_config.json"
    content = json.loads(path.read_text())
    content["quantization"] |= changes
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("declared", lambda folder: _quantization(folder, quant_algo="FP8")),
        (
            "exclude list",
            lambda folder: _quantization(folder, exclude_modules=[*KEPT, "mtp*"]),
        ),
        ("kept", lambda folder: _quantization(folder, exclude_modules=[*KEPT, "*down_proj"])),
        ("kv cache", lambda folder: _quantization(folder, kv_cache_quant_algo=None)),
        ("companions", lambda folder: (folder / "tokenizer.json").unlink()),
        ("companions", lambda folder: (folder / "generation_config.json").unlink()),
    ],
)
def test_wrong_declarations_are_caught_by_name(
    name: str, change: Callable[[Path], None], good: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(good, tmp_path / "checkpoint")
    change(folder)
    assert name in [check.name for check in verify(folder) if not check.passed]


def test_the_command_says_what_is_wrong_and_exits_1(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(good), "--quiet"]) == 0
    assert "FAIL" not in capsys.readouterr().out
    folder = shutil.copytree(good, tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{MLP}.up_proj.input_scale"] *= 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["verify", str(folder), "--json", "--quiet"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["check"] for row in rows if not row["passed"]] == ["fused"]
    assert "up_proj" in str(rows)
