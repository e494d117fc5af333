"""halfbyte train: the same from the front door, in one line where it cannot, and by accelerate launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from training import write_training

from halfbyte.main import main
from halfbyte.records.training import load_training


@pytest.fixture
def recipe(tmp_path: Path, tiny_model_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: ARG001
    monkeypatch.chdir(tmp_path)
    return write_training(tmp_path / "recipe", tiny_model_folder)


def test_what_training_changed_is_printed_and_the_questions_were_looked_for(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe), "--device", "cpu", "--quiet", "--json"]) == 0
    out = capsys.readouterr()
    printed: dict[str, Any] = json.loads(out.out)
    assert printed["training"]["best"]["kl"] < printed["training"]["start"]["kl"]
    assert printed["training"]["overlap"]["found"] == 0
    assert printed["training"]["overlap"]["questions"] > 0
    assert (Path(printed["checkpoint"]) / "hf_quant_config.json").is_file()
    assert main(["train", str(recipe), "--device", "cpu", "--quiet"]) == 0
    assert "qad, 8 steps, " in capsys.readouterr().out


def test_quantize_trains_a_recipe_with_a_train_block_too(recipe: Path) -> None:
    assert main(["quantize", str(recipe), "--device", "cpu", "--quiet", "--output", "out"]) == 0
    assert load_training(Path("out/training")).steps == 8


def test_a_dry_run_prints_how_it_would_train_and_writes_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe), "--device", "cpu", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["training"]["method"], plan["training"]["steps"]) == ("qad", 8)
    assert not Path("runs").exists()


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*arguments, "--device", "cpu", "--quiet"]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    lines = [line for line in out.err.splitlines() if line.startswith("halfbyte: error: ")]
    assert len(lines) == 1
    return lines[0]


def test_a_recipe_without_a_train_block_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no train block" in refusal(["train", str(recipe), "--set", "train=null"], capsys)


def test_a_dry_run_plans_learned_scales_where_there_are_static_ones_and_refuses_them_elsewhere(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(recipe), "--dry-run", "--set", "train.learned_scales=true"]
    assert "learned_scales needs weights with static block scales" in refusal(command, capsys)
    static = ["--set", "quantize.preset=NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG", "--device", "cpu", "--json"]
    assert main([*command, *static]) == 0
    assert json.loads(capsys.readouterr().out)["training"]["memory"]["total"] > 0


def test_training_on_what_is_evaluated_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = yaml.safe_load(recipe.read_text())
    content["train"]["sources"] = [{"dataset": "texts.txt"}]  # fidelity is measured on it
    recipe.write_text(yaml.safe_dump(content))
    assert "words in a row of" in refusal(["train", str(recipe)], capsys)


def test_another_learning_rate_does_not_go_on_in_the_same_folder(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe), "--device", "cpu", "--quiet"]) == 0
    capsys.readouterr()
    changed = ["train", str(recipe), "--set", "train.learning_rate=2e-3"]
    assert "another model, quantize or train block" in refusal(changed, capsys)
    assert main([*changed, "--device", "cpu", "--quiet", "--force"]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.lora={targets: [nope]}", "match no linear"),
        ("train.learned_scales=true", "static block scales"),
        ("train.sources=[{dataset: recipe/texts.txt}]", "words in a row of"),
    ],
)
def test_a_mistake_with_force_loses_nothing_and_a_folder_where_nothing_came_of_it_is_free(
    recipe: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    command = ["train", str(recipe), "--device", "cpu", "--quiet"]
    assert main(command) == 0
    files = {path for path in Path("runs/tiny-nvfp4").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert message in refusal([*command, "--force", "--set", change], capsys)
    assert {path for path in Path("runs/tiny-nvfp4").rglob("*") if path.is_file()} == files
    assert main(command) == 0
    capsys.readouterr()
    elsewhere = ["--output", "new"]
    assert message in refusal([*command, *elsewhere, "--set", change], capsys)
    assert main([*command, *elsewhere]) == 0


def test_a_training_that_diverges_is_one_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--set", "train.learning_rate=100.0", "--set", "train.max_steps=40"]
    line = refusal(["train", str(recipe), *changes], capsys)
    assert line.startswith("halfbyte: error: training has diverged: ")
    assert not Path("runs/tiny-nvfp4/checkpoint").exists()


def test_accelerate_launch_trains_it(recipe: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu", "-m", "halfbyte"]
    command = [*launch, "train", str(recipe), "--device", "cpu", "--quiet", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["training"]["steps"] == 8
