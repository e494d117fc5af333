"""The plan of a distillation of a tiny Flux against what is allocated and written, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

from step_memory import allocated_by
from tiny_flux import save_tiny_flux

from halfbyte.main import main
from halfbyte.quant.drawing_plan import DrawingTrainingPlan, build, drawing_training_plan
from halfbyte.quant.flux_distill import attention_with_gradients
from halfbyte.quant.produce import Job, prepare, produce, require_space
from halfbyte.recipes.find import load_recipe
from halfbyte.records.errors import UserError
from halfbyte.records.run import RunFolder
from halfbyte.records.training import load_training

CPU = torch.device("cpu")
INSIDE = 2**22
"""Bytes that fake quantization on a CPU takes and gives back, half a million values at a time: it is not counted."""
PROMPTS = [f"a {colour} {shape}" for colour in ("red", "green", "blue") for shape in ("circle", "square")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny pipelines in dev/ and control/ and prompts."""
    folder = tmp_path_factory.mktemp("flux")
    save_tiny_flux(folder / "dev")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    return folder


def settings(folders: Path) -> list[str]:
    prompts = folders / "prompts.txt"
    drawn = ["steps=3", "size=32", "max_sequence_length=16"]
    blocks = ("quantize.calibration.images", "train.drawn.images", "evaluate.images")
    return [
        f"model.id={folders / 'dev'}", f"quantize.calibration.sources=[{{dataset: {prompts}}}]",
        f"train.drawn.prompts={{dataset: {prompts}}}", f"evaluate.images.prompts={prompts}", "train.max_steps=4",
        "train.batch_size=4", "train.validation.every=2", *(f"{block}.{one}" for block in blocks for one in drawn),
    ]  # fmt: skip


def job(folders: Path, *more: str) -> Job:
    return prepare(load_recipe("demo-image-nvfp4-qad", [*settings(folders), *more]), "cpu", read_ahead=False)


def plan(made: Job, **more: Any) -> DrawingTrainingPlan:
    spec, source = made.recipe.train, made.source
    assert spec is not None
    exported = made.plan.exported_bytes
    return drawing_training_plan(source, made.config, spec, device=CPU, exported=exported, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("train.batch_size=1", "train.gradient_accumulation=2"),
        ("train.gradient_checkpointing=true",),
        ("train.lora={rank: 4}",),
        ("train.weights_dtype=bfloat16",),
    ],
)
def test_the_planned_memory_is_what_a_step_allocates(folders: Path, more: tuple[str, ...]) -> None:
    made = job(folders, "train.batch_size=16", *more)
    spec = made.recipe.train
    assert spec is not None
    step = build(made.source, made.config, spec, CPU, torch.float32)  # type: ignore[arg-type]
    for part in (*step.model.parameters(), *step.model.buffers()):
        nn.init.constant_(part, 0.01)
    with attention_with_gradients():
        measured = allocated_by(step)
    memory = plan(made).memory
    assert memory is not None
    assert 0 <= measured - memory.total <= INSIDE


@pytest.mark.usefixtures("cache")
def test_files_and_steps_are_as_planned(folders: Path, tmp_path: Path) -> None:
    made, run = job(folders), RunFolder(tmp_path / "run")
    found = plan(made)
    produce(made, run)
    record = load_training(run.training)
    assert (found.steps, found.prompts) == (4, len(PROMPTS))
    assert found.tokens * 4 == record.tokens
    teacher = sum(path.stat().st_size for path in (run.training / "teacher").glob("*.safetensors"))
    assert teacher == pytest.approx(found.drawn, rel=0.1)  # each file's header is beside it
    sizes = {path: path.stat().st_size for path in (run.training / "checkpoints").rglob("*") if path.is_file()}
    checkpoints = [sum(size for path, size in sizes.items() if one in path.parents) for one in
                   {path.parent for path in sizes}]  # fmt: skip
    assert max(checkpoints) == pytest.approx(found.saved, rel=0.25)
    exported = sum(path.stat().st_size for path in run.checkpoint.rglob("*") if path.is_file())
    assert exported == pytest.approx(found.exported, rel=0.25)


def test_epochs_are_of_the_steps_of_all_prompts_that_are_not_held_out(folders: Path) -> None:
    found = plan(job(folders, "train.max_steps=null", "train.epochs=2", "train.validation.share=0.3"))
    assert found.steps == 2 * (len(PROMPTS) - 2) * 3 // 4


def test_what_would_make_it_fit_is_said(folders: Path) -> None:
    made = job(folders)
    whole = plan(made).memory
    assert whole is not None
    found = plan(made, capacity=whole.total)
    assert found.fits is False
    assert [change.setting.split("=")[0] for change in found.changes] == [
        "--set train.gradient_checkpointing", "--set train.batch_size", "--set train.weights_dtype",
        "--set 'train.lora",
    ]  # fmt: skip
    assert any(change.fits for change in found.changes)
    assert "would change that" in str(found)
    assert "draws 6 prompts of 3 steps before the training" in str(found)


def test_a_dry_run_prints_it(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "demo-image-nvfp4-qad", "--device", "cpu", "--dry-run"]
    for one in settings(folders):
        command += ["--set", one]
    assert main(command) == 0
    assert "draws 6 prompts" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    training = json.loads(capsys.readouterr().out)["training"]
    assert training["memory"]["total"] > 0
    assert training["patches_per_step"] == 4 * 256


def test_a_disk_that_is_too_small_for_it_is_told_before(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(folders)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": made.plan.exported_bytes + 1000}))
    with pytest.raises(UserError, match="for checkpoints of the training"):
        require_space(made, RunFolder(tmp_path / "run"))
