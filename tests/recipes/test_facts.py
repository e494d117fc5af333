"""Every shipped recipe is planned from a public configuration, and says its size, memory, machine and gaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from public_models import configured, main_format, public_plan

import halfbyte
from halfbyte.main import main
from halfbyte.recipes.facts import FactsSpec
from halfbyte.recipes.find import find_recipe, load_recipe, recipe_digest, recipe_text, shipped_files
from halfbyte.recipes.schema import Recipe
from halfbyte.records.errors import UserError
from halfbyte.reports.published import published_table

NAMES = list(shipped_files())
FAMILIES = ("deepseek", "qwen3-30b", "qwen3-235b", "nemotron-3", "gpt-oss-120b", "llama-4", "nemotron-4-340b")
"""Whose thousands of experts, or size, take more than some seconds to build."""
PLANNED = [pytest.param(name, marks=pytest.mark.slow if name.startswith(FAMILIES) else ()) for name in NAMES]


def facts_of(recipe: Recipe) -> FactsSpec:
    assert recipe.facts is not None, f"{recipe.name} has no facts"
    return recipe.facts


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_says_what_is_known_and_what_is_not(name: str) -> None:
    recipe = load_recipe(name)
    facts = facts_of(recipe)
    assert facts.unknown
    assert set(facts.stages) >= {"quantize", "evaluate"} | ({"train"} if recipe.train else set())
    for table in [*facts.published, *([recipe.published] if recipe.published else [])]:
        published_table(table)
    assert configured(recipe).is_dir()


@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_of_every_recipe_is_as_it_says(name: str) -> None:
    recipe = load_recipe(name)
    facts = facts_of(recipe)
    plan = public_plan(name)
    assert plan.tensor_bytes / 1e9 == pytest.approx(facts.checkpoint_gb[main_format(plan)], rel=0.005)
    wide = 4 if facts.stages["quantize"].device == "CPU" else 2
    held = wide * plan.weights / 1e9
    for stage, bytes_held in (("quantize", held), ("evaluate", 2 * plan.weights / 1e9)):
        found = facts.stages[stage]  # type: ignore[index]
        assert bytes_held < found.needs_gb <= found.holds_gb, stage
        assert plan.weights < 1e9 or found.needs_gb < 3.5 * bytes_held, stage


KEPT = {"embed_tokens", "lm_head"}
EXPECTED = {
    # name: format, quantized layers, kept ones by the last part of their names, KV cache, bits a weight
    "llama-3.3-70b-nvfp4": ("NVFP4", 80 * 7, KEPT, "FP8", 4.84),
    "llama-3.3-70b-fp8": ("FP8", 80 * 7, KEPT, "FP8", 8.24),
    "llama-3.1-405b-nvfp4": ("NVFP4", 126 * 7, KEPT, "FP8", 4.62),
    "llama-3.1-8b-nvfp4": ("NVFP4", 32 * 7, KEPT, "FP8", 6.01),
    "qwen3-8b-fp8": ("FP8", 36 * 7, KEPT, "FP8", 9.22),
    "nemotron-4-15b-nvfp4": ("NVFP4", 32 * 6, KEPT, None, 6.82),
    "nemotron-4-340b-nvfp4": ("NVFP4", 96 * 6, KEPT, None, 4.82),
    "deepseek-r1-nvfp4": (
        "NVFP4",
        3 * 3 + 58 * 257 * 3,
        KEPT | {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
        None,
        4.73,
    ),
    "qwen3-30b-a3b-nvfp4": ("NVFP4", 48 * (4 + 3 * 128), KEPT, "FP8", 4.74),
    "qwen3-235b-a22b-fp8": ("FP8", 94 * (4 + 3 * 128), KEPT, "FP8", 8.04),
    "nemotron-3-nano-nvfp4": (
        "NVFP4",
        23 * 129 * 2,
        {"embeddings", "lm_head", "conv1d", "in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"},
        "FP8",
        5.14,
    ),
    "llama-4-scout-fp8": ("FP8", 48 * (4 + 2 + 3), KEPT, "FP8", 8.15),
    "llama-4-maverick-fp8": ("FP8", 24 * (4 + 2 + 3) + 24 * (4 + 3), KEPT, "FP8", 8.04),
    "gpt-oss-20b-mxfp4": (
        "W4A16_MXFP4",
        24 * 2,
        KEPT | {"q_proj", "k_proj", "v_proj", "o_proj"},
        None,
        5.26,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith(FAMILIES) else ()) for name in EXPECTED]
)
def test_layers_formats_and_bits_are_those_of_the_published_model(name: str) -> None:
    format_, count, kept, kv_cache, bits = EXPECTED[name]
    plan = public_plan(name)
    assert {layer.format for layer in plan.quantized} == {format_}
    assert len(plan.quantized) == count
    assert {layer.name.rsplit(".", 1)[-1] for layer in plan.layers if not layer.format} == kept
    assert plan.kv_cache == kv_cache
    assert plan.bits_per_weight == pytest.approx(bits, abs=0.005)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("llama-3.3-70b-nvfp4", "Llama-3.3-70B-Instruct-FP4 (nvidia)"),
        ("llama-3.1-405b-nvfp4", "Llama-3.1-405B-Instruct-FP4 (nvidia)"),
    ],
)
def test_published_sizes_are_met_within_3_percent(name: str, row: str) -> None:
    (published,) = published_table("ckpt_sizes_misc").rows[row]
    assert published is not None
    assert public_plan(name).tensor_bytes / 1e9 == pytest.approx(published, rel=0.03)


WEIGHTS = {
    "smollm2-135m-fp8": 0.1345, "llama-3.1-8b-fp8": 8.03, "llama-3.3-70b-fp8": 70.55, "llama-3.1-405b-fp8": 405.85,
    "qwen3-8b-fp8": 8.19, "nemotron-4-15b-nvfp4": 15.6, "flux1-dev-fp8": 11.9,
    "nemotron-4-340b-nvfp4": 341.0, "qwen3-30b-a3b-fp8": 30.5, "qwen3-235b-a22b-fp8": 235.1,
    "deepseek-r1-nvfp4": 671.0, "nemotron-3-nano-fp8": 31.6, "llama-4-scout-fp8": 107.8,
    "llama-4-maverick-fp8": 400.7, "gpt-oss-20b-mxfp4": 20.9, "gpt-oss-120b-mxfp4": 116.8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "billions"),
    [pytest.param(*row, marks=pytest.mark.slow if row[0].startswith(FAMILIES) else ()) for row in WEIGHTS.items()],
)
def test_the_public_configurations_have_as_many_weights_as_the_models(name: str, billions: float) -> None:
    assert public_plan(name).weights / 1e9 == pytest.approx(billions, rel=0.003)


def test_variants_are_two_lines_on_their_base() -> None:
    lines = [line for line in recipe_text("llama-3.3-70b-fp8").splitlines() if not line.startswith("#")]
    assert lines == ["base: llama-3.3-70b-nvfp4", "quantize: {recipe: general/ptq/fp8_default-kv_fp8}"]
    recipe, base = load_recipe("llama-3.3-70b-fp8"), load_recipe("llama-3.3-70b-nvfp4")
    assert recipe.name == "llama-3.3-70b-fp8"
    assert recipe.description == "llama-3.3-70b-nvfp4 with quantize.recipe general/ptq/fp8_default-kv_fp8."
    assert (recipe.model, recipe.evaluate, recipe.facts) == (base.model, base.evaluate, base.facts)


@pytest.mark.parametrize("name", ["llama-3.3-70b-fp8", "deepseek-r1-nvfp4"])
def test_the_command_shows_the_facts_and_is_still_the_recipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", name]) == 0
    shown = capsys.readouterr().out
    facts = facts_of(load_recipe(name))
    flat = " ".join(shown.replace("\n#", " ").split())
    assert f"not known: {facts.unknown[0]}" in flat
    assert f"quantize: {facts.stages['quantize'].needs_gb:,.4g} GB on {facts.stages['quantize'].machine}" in flat
    assert yaml.safe_load(shown) == yaml.safe_load(recipe_text(name))


def test_facts_change_no_run() -> None:
    recipe = load_recipe("demo-fp8")
    assert recipe_digest(recipe) == recipe_digest(recipe.model_copy(update={"facts": None}))


UNSUPPORTED = "nemotron-4-340b-nvfp4-qat"


@pytest.mark.parametrize("command", [["run"], ["quantize", "--output", "out"], ["train", "--dry-run"]])
def test_a_recipe_that_cannot_be_run_is_refused_with_its_reason_before_a_model_is_looked_for(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command
    assert main([name, UNSUPPORTED, *options, "--quiet"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"halfbyte: error: {UNSUPPORTED} cannot be run: {facts_of(load_recipe(UNSUPPORTED)).unsupported}"
    assert "facts.unsupported=null" in said[1]
    with pytest.raises(UserError, match="cannot be run: every process of a training loads the whole model"):
        halfbyte.quantize(UNSUPPORTED, tmp_path / "out")
    assert not any(tmp_path.iterdir())
    nowhere = ["--set", "facts.unsupported=null", "--set", f"model.id={tmp_path / 'nowhere'}"]
    assert main([name, UNSUPPORTED, *options, *nowhere, "--quiet"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_the_plan_of_a_recipe_that_cannot_be_run_says_so(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "the moon is full"
    asked = ["plan", "demo-fp8", "--device", "cpu", "--quiet", "--set", f"facts.unsupported={why}"]
    known = [*asked, "--set", f"model.id={tiny_model_folder}"]
    assert main(known) == 0
    assert capsys.readouterr().out.startswith(f"cannot be run: {why}\n")
    assert main([*known, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unsupported"] == why
    assert main([*asked, "--set", f"model.id={tmp_path / 'nowhere'}"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"halfbyte: error: demo-fp8 cannot be run: {why}"
    assert "nor planned here" in hint


def test_ones_own_model_does_not_take_the_facts_of_another(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: llama-3.3-70b-nvfp4\nmodel: {id: my/model}\n", encoding="utf-8")
    assert load_recipe(str(mine)).facts is None
    mine.write_text("base: llama-3.3-70b-nvfp4\nquantize: {recipe: null, preset: nvfp4_awq_lite}\n", encoding="utf-8")
    assert load_recipe(str(mine)).facts == load_recipe("llama-3.3-70b-nvfp4").facts


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("{device: H200, needs_gb: 200, hours: 1}", "does not fit one H200, which has 150.7 GB"),
        ("{device: CPU, needs_gb: 2, hours: 1}", "memory_gb is for a CPU"),
    ],
)
def test_a_recipe_cannot_name_a_machine_that_it_does_not_fit(stage: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_recipe("demo-fp8", [f"facts.stages.evaluate={stage}"])


def test_every_configuration_is_of_a_recipe() -> None:
    used = {configured(load_recipe(name)) for name in NAMES}
    assert {path for path in next(iter(used)).parent.iterdir() if path.is_dir()} == used
    assert all(find_recipe(name).is_file() for name in NAMES)
