"""The corruption matrix: each kind of damage is caught by the check that is meant for it, which names the culprit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import every, shard
from damage_cases import CASES, Case
from tiny import export, spec

from halfbyte.quant.verify import RULES, SOURCE_RULES, verify
from halfbyte.recipes.find import resolved_yaml
from halfbyte.recipes.schema import QuantizeSpec, Recipe
from halfbyte.records.digests import model_digest
from halfbyte.records.manifest import Manifest

KINDS = {
    "nvfp4": ("llama", "nvfp4", "fp8"),
    "fp8": ("qwen2", "fp8", None),
    "channel": ("qwen2", "fp8_per_channel_per_token", None),
    "mxfp4": ("qwen2", "mxfp4_default", None),
    "mxfp8": ("qwen2", "mxfp8_default", None),
    "svd": ("qwen2", "nvfp4_svdquant_default", None),
    "w4a8": ("qwen2", "w4a8_nvfp4_fp8", None),
    "moe": ("qwen3_moe", "nvfp4", None),
    "moe-fp8": ("qwen3_moe", "fp8", None),
    "mixtral": ("mixtral", "nvfp4", None),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Callable[[str], Path]:
    """A good checkpoint of a kind, made at first use, with its source beside it; one in shards; one in a run."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            if kind in ("sharded", "run"):
                shutil.copytree(make("nvfp4").parent, folder, dirs_exist_ok=True)
                (shard if kind == "sharded" else _as_run)(folder / "checkpoint")
            else:
                family, preset, kv_cache = KINDS[kind]
                export(family, spec(preset, kv_cache), tiny_tokenizer, folder)
            made[kind] = folder / "checkpoint"
        return made[kind]

    return make


def _as_run(checkpoint: Path, block: QuantizeSpec | None = None) -> None:
    quantize = (block or spec("nvfp4", "fp8")).model_dump()
    recipe = Recipe.model_validate(
        {"name": "tiny", "description": "d", "model": {"id": "m"}, "quantize": quantize,
         "evaluate": {"tasks": [{"task": "smoke"}]}, "gate": {"policy": "smoke"}}
    )  # fmt: skip
    (checkpoint.parent / "recipe.yaml").write_text(resolved_yaml(recipe), encoding="utf-8")
    digest = model_digest(checkpoint)
    manifest = Manifest(recipe="tiny", recipe_digest="", model="m", model_digest="", checkpoint_digest=digest)
    manifest.save(checkpoint.parent / "manifest.json")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.kind}")
def test_damage_is_caught_by_name(case: Case, good: Callable[[str], Path], tmp_path: Path) -> None:
    original = good(case.kind)
    source = original.parent / "source" if case.source else None
    shutil.copytree(original.parent, tmp_path / "made", ignore=lambda *_: ["source"])
    folder = tmp_path / "made" / "checkpoint"
    case.damage(folder)
    failed = {check.name: check.faults for check in verify(folder, source) if not check.passed}
    assert case.check in failed
    assert any(case.culprit in fault for fault in failed[case.check]), failed


@pytest.mark.parametrize("kind", [*KINDS, "sharded", "run"])
def test_what_was_damaged_was_good(kind: str, good: Callable[[str], Path]) -> None:
    folder = good(kind)
    assert [str(check) for check in verify(folder, folder.parent / "source") if not check.passed] == []


@pytest.mark.parametrize("recipe", ["nvfp4_experts_only_input_scale1-kv_fp8_cast", "nvfp4_default-kv_fp8_cast"])
def test_input_scales_of_1_pass_where_the_recipe_of_the_run_sets_them(
    recipe: str, good: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(good("nvfp4"), tmp_path / "checkpoint")
    every(".input_scale", 1.0)(folder)
    _as_run(folder, spec(None, recipe=f"general/ptq/{recipe}"))
    failed = [check.name for check in verify(folder) if not check.passed]
    assert failed == ([] if "input_scale1" in recipe else ["calibrated"])


def test_every_check_catches_something() -> None:
    assert {rule.name for rule in (*RULES, *SOURCE_RULES)} == {case.check for case in CASES}


def test_the_matrix_holds_what_was_promised() -> None:
    assert len(CASES) >= 100
    assert len({(case.name, case.kind) for case in CASES}) == len(CASES)
