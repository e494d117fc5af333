"""What can be wrong with an exported pipeline, the check that catches it, and what it names."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from damage import Damage, bits, copy, drop, edit_json, every, put, scale, swap, tensors
from flux_recipes import tiny_recipe
from tiny_flux import save_tiny_flux

from halfbyte.main import main
from halfbyte.quant import produce
from halfbyte.quant.verify import PIPELINE_RULES, verify
from halfbyte.records.run import RunFolder

DOUBLE, SINGLE = "transformer_blocks.0.attn", "single_transformer_blocks.1"


class Case(NamedTuple):
    check: str
    culprit: str
    damage: Damage
    """Of the transformer's folder."""
    source: bool = False


def undeclared(folder: Path) -> None:
    edit_json(folder / "config.json", lambda content: content["quantization_config"].pop("kv_cache_scheme"))


def narrower(folder: Path) -> None:
    edit_json(folder / "config.json", lambda content: content.update(num_attention_heads=1))


def without_scheduler(folder: Path) -> None:
    shutil.rmtree(folder.parent / "scheduler")


def cut_encoder(folder: Path) -> None:
    path = folder.parent / "text_encoder" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def other_scheduler(folder: Path) -> None:
    edit_json(folder.parent / "scheduler" / "scheduler_config.json", lambda content: content.update(shift=2.0))


def cut_transformer(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])


CASES = {
    "truncated": Case("files", "diffusion_pytorch_model", cut_transformer),
    "a scale is missing": Case("complete", f"{SINGLE}.proj_out", drop(f"{SINGLE}.proj_out.weight_scale")),
    "no input scale": Case("input scales", f"{DOUBLE}.to_out.0", drop(f"{DOUBLE}.to_out.0.input_scale")),
    "a scale is not finite": Case(
        "finite", f"{SINGLE}.proj_mlp", put(f"{SINGLE}.proj_mlp.weight_scale_2", float("nan"))
    ),
    "fused scales differ": Case("fused", f"{DOUBLE}.to_k", scale(f"{DOUBLE}.to_k.weight_scale_2", 2)),
    "text's fused scales differ": Case("fused", f"{DOUBLE}.add_v_proj", scale(f"{DOUBLE}.add_v_proj.input_scale", 2)),
    "never calibrated": Case("calibrated", "input_scale", every("input_scale", 1.0)),
    "a kept layer is missing": Case("transformer", "x_embedder.bias is missing", drop("x_embedder.bias")),
    "a stray tensor": Case("transformer", "y_embedder.bias", copy("x_embedder.bias", "y_embedder.bias")),
    "another configuration": Case("transformer", "weight", narrower),
    "an attention without its scale": Case(
        "attention", f"{DOUBLE}.v_bmm_quantizer._amax", drop(f"{DOUBLE}.v_bmm_quantizer._amax")
    ),
    "an attention without any": Case(
        "attention",
        f"{SINGLE}.attn.q_bmm_quantizer._amax",
        drop(*(f"{SINGLE}.attn.{side}_quantizer._amax" for side in ("q_bmm", "k_bmm", "v_bmm", "bmm2_output"))),
    ),
    "an attention's scale is zero": Case(
        "attention", f"{SINGLE}.attn.q_bmm_quantizer._amax", put(f"{SINGLE}.attn.q_bmm_quantizer._amax", 0.0)
    ),
    "attention is not declared": Case("attention", DOUBLE, undeclared),
    "a part is missing": Case("parts", "scheduler is missing", without_scheduler),
    "a part is truncated": Case("parts", "text_encoder", cut_encoder),
    "a part is another's": Case("parts", "scheduler_config.json", other_scheduler, source=True),
    "the run's files have changed": Case("manifest", "manifest.json", other_scheduler),
    "layers are swapped": Case(
        "weight error",
        "single_transformer_blocks.0.proj_out.weight",
        swap("single_transformer_blocks.0.proj_out.", f"{SINGLE}.proj_out."),
        source=True,
    ),
    "nibbles are swapped": Case(
        "weight error",
        f"{SINGLE}.proj_mlp.weight",
        bits(f"{SINGLE}.proj_mlp.weight", lambda codes: (codes << 4) | (codes >> 4)),
        source=True,
    ),
    "a kept weight has changed": Case(
        "kept weights", "norm_out.linear.weight", scale("norm_out.linear.weight", 1.1), source=True
    ),
    "codes are dead": Case(
        "dead blocks",
        f"{DOUBLE}.to_q.weight",
        tensors(
            lambda values: values.update({f"{DOUBLE}.to_q.weight": torch.zeros_like(values[f"{DOUBLE}.to_q.weight"])})
        ),
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_flux(tmp_path_factory.mktemp("flux") / "dev")


@pytest.fixture(scope="module")
def good(source: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("good")
    (folder / "prompts.txt").write_text("a red circle\ntwo blue squares\n", encoding="utf-8")
    recipe = tiny_recipe("flux1-dev-nvfp4-fp8-attention", source, folder / "prompts.txt", steps=1)
    run = RunFolder(folder / "run")
    produce.produce(produce.prepare(recipe, "cpu"), run)
    return run


@pytest.mark.parametrize("name", CASES)
def test_damage_is_caught_by_name(name: str, good: RunFolder, source: Path, cache: Path, tmp_path: Path) -> None:  # noqa: ARG001
    case = CASES[name]
    shutil.copytree(good.root, tmp_path / "run")
    checkpoint = RunFolder(tmp_path / "run").checkpoint
    case.damage(checkpoint / "transformer")
    found = {check.name: check.faults for check in verify(checkpoint, source if case.source else None)}
    assert any(case.culprit in fault for fault in found[case.check]), found


def test_every_check_of_pipelines_catches_something() -> None:
    assert {rule.name for rule in PIPELINE_RULES} <= {case.check for case in CASES.values()}


@pytest.mark.usefixtures("cache")
def test_what_was_damaged_was_good(good: RunFolder, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(good.root), "--source", str(source)]) == 0
    assert "FAIL" not in capsys.readouterr().out
