"""Calibrating by prompts: every step is seen, seeds are fixed, and a kill at any moment costs one prompt at most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flux_recipes import PROMPTS, control_images, tiny_recipe
from line import kill, run_child
from safetensors.torch import load_file
from tiny_flux import save_tiny_flux

from halfbyte.quant import produce
from halfbyte.quant.pipeline_calibration import DrawingLoop
from halfbyte.quant.pipeline_making import PipelineMaking
from halfbyte.quant.processes import Processes
from halfbyte.recipes.find import resolved_yaml
from halfbyte.records.errors import UserError
from halfbyte.records.manifest import load_manifest
from halfbyte.records.run import RunFolder

KEPT = "tensors.safetensors"


class Killed(BaseException):
    """In the place of a kill: nothing but what is on the disk is used after it."""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_flux(tmp_path_factory.mktemp("flux") / "dev")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return path


def making(pipeline: Path, prompts: Path, folder: Path, name: str = "flux1-dev-nvfp4", *more: str) -> PipelineMaking:
    job = produce.prepare(tiny_recipe(name, pipeline, prompts, more=more), "cpu")
    return PipelineMaking(job, RunFolder(folder), None, Processes(torch.device("cpu")))


def drawing(monkeypatch: pytest.MonkeyPatch, kill_at: int | None = None) -> list[int]:
    """The prompts drawn from now on; the one at `kill_at` of them is not finished."""
    drawn: list[int] = []
    real = DrawingLoop._draw

    def draw(self: DrawingLoop, numbers: range, device: torch.device) -> None:
        drawn.extend(numbers)
        real(self, numbers, device)
        if len(drawn) - 1 == kill_at:
            raise Killed

    monkeypatch.setattr(DrawingLoop, "_draw", draw)
    return drawn


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("name", "passes"), [("flux1-dev-nvfp4-fp8-attention", 1), ("flux1-dev-nvfp4-svdquant", 3)])
def test_a_kill_costs_one_prompt_and_changes_no_scale(
    name: str, passes: int, pipeline: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("quantize.calibration.images.steps=1",)
    making(pipeline, prompts, tmp_path / "whole", name, *steps).calibrated()
    lost = [passes * len(PROMPTS) - 2] if passes > 1 else [0, 1, 2]
    for kill_at in lost:
        folder = tmp_path / f"killed-{kill_at}"
        with monkeypatch.context() as patch:
            drawing(patch, kill_at)
            with pytest.raises(Killed):
                making(pipeline, prompts, folder, name, *steps).calibrated()
        with monkeypatch.context() as patch:
            drawn = drawing(patch)
            making(pipeline, prompts, folder, name, *steps).calibrated()
        assert len(drawn) == passes * len(PROMPTS) - kill_at
        one, other = (load_file(run / "calibration" / KEPT) for run in (tmp_path / "whole", folder))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert not (folder / "calibrating").exists()


def in_third_prompt() -> None:
    """With two prompts kept on the disk."""
    real = DrawingLoop._draw

    def draw(self: DrawingLoop, numbers: range, device: torch.device) -> None:
        real(self, numbers, device)
        if 2 in numbers:
            kill()

    DrawingLoop._draw = draw  # type: ignore[method-assign]


def test_a_real_kill_leaves_a_run_that_goes_on(
    pipeline: Path, prompts: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(resolved_yaml(tiny_recipe("flux1-dev-fp8", pipeline, prompts)), encoding="utf-8")
    command = ["quantize", str(recipe), "--output", str(tmp_path / "run"), "--device", "cpu", "--quiet"]
    assert run_child(command, tmp_path, cache, in_third_prompt) == -9
    drawn = drawing(monkeypatch)
    job, run = produce.prepare(tiny_recipe("flux1-dev-fp8", pipeline, prompts), "cpu"), RunFolder(tmp_path / "run")
    produce.require_own_folder(job, run, force=False)
    summary = produce.produce(job, run)
    assert drawn == [2]
    assert load_manifest(run.manifest).checkpoint_digest == summary.digest
    produce.produce(job, run)
    assert drawn == [2]


@pytest.mark.usefixtures("cache")
def test_all_timesteps_are_seen_with_fixed_seeds(
    pipeline: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, float]] = []
    real = PipelineMaking.open

    def opened(self: PipelineMaking) -> Any:
        model = real(self)

        def looked(_: Any, __: Any, given: dict[str, Any]) -> None:
            seen.append((round(float(given["timestep"][0]), 3), float(given["hidden_states"].sum())))

        model.register_forward_pre_hook(looked, with_kwargs=True)
        return model

    monkeypatch.setattr(PipelineMaking, "open", opened)
    making(pipeline, prompts, tmp_path / "one").calibrated()
    first, seen[:] = list(seen), []
    making(pipeline, prompts, tmp_path / "two").calibrated()
    assert first == seen
    assert len(first) == 2 * len(PROMPTS)
    assert len({timestep for timestep, _ in first}) == 2
    assert len({start for _, start in first[::2]}) == len(PROMPTS)
    seen.clear()
    making(pipeline, prompts, tmp_path / "three", "flux1-dev-nvfp4", "quantize.calibration.seed=7").calibrated()
    assert first != seen


@pytest.mark.usefixtures("cache")
def test_a_control_pipeline_needs_a_control_image(prompts: Path, tmp_path: Path) -> None:
    control = save_tiny_flux(tmp_path / "control", control=True)
    with pytest.raises(UserError, match="has no control image"):
        making(control, prompts, tmp_path / "run", "flux1-depth-dev-nvfp4")
    making(control, control_images(tmp_path), tmp_path / "run", "flux1-depth-dev-nvfp4")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("a red circle\na dog\na red circle\n", "repeats line 1"),
    ],
)
def test_a_bad_prompt_file_is_told_before_anything_is_computed(
    content: str, message: str, pipeline: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        making(pipeline, bad, tmp_path / "run")


@pytest.mark.usefixtures("cache")
def test_chinese_and_long_prompts_are_calibrated_with(pipeline: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "一个红色的圆圈在蓝色的正方形左边"}, {"prompt": "a red circle and " * 100}]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    made = making(pipeline, path, tmp_path / "run")
    made.calibrated()
    assert len(made.data) == 1


@pytest.mark.usefixtures("cache")
def test_a_damaged_progress_file_is_told(pipeline: Path, prompts: Path, tmp_path: Path) -> None:
    made = making(pipeline, prompts, tmp_path / "run")
    folder = made.run.calibrating
    folder.mkdir(parents=True)
    (folder / "pass-0.pt").write_bytes(b"PK no more")
    with pytest.raises(UserError, match=r"pass-0\.pt is damaged"):
        made.calibrated()
