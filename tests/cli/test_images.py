"""Models that draw, through the command line: the whole line, a second run, kills, memory, and mistakes in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from drawing import PROMPTS, save_tiny_unet, write_prompts
from tiny_flux import save_tiny_flux

from halfbyte.main import main
from halfbyte.records.image_set import ImageSet
from halfbyte.records.memory import MEMORY_FILE

RECIPE = """
name: tiny-flux
description: A tiny Flux in FP8.
model: {{id: {folder}, kind: flux}}
quantize:
  quant_cfg:
    - {{quantizer_name: '*', enable: false}}
    - {{parent_class: nn.Linear, quantizer_name: '*weight_quantizer', cfg: {{num_bits: [4, 3], axis: null}}}}
    - {{parent_class: nn.Linear, quantizer_name: '*input_quantizer', cfg: {{num_bits: [4, 3], axis: null}}}}
  algorithm: max
  keep: [x_embedder, context_embedder, time_text_embed.*, '*norm*.linear', proj_out]
  calibration:
    sources: [{{dataset: prompts.txt, samples: 2}}]
    images: {{steps: 2, size: 32, max_sequence_length: 32}}
evaluate:
  images: {{prompts: prompts.txt, steps: 2, size: 32, max_sequence_length: 32, metrics: [fulfilment, psnr, ssim]}}
gate: {{policy: image}}
"""
DRAWN = ["--set", "evaluate.images.size=32", "--set", "evaluate.images.steps=2", "--set",
         "evaluate.images.metrics=[fulfilment]", "--set", "evaluate.images.max_sequence_length=32"]  # fmt: skip


class Line:
    """A folder with a tiny pipeline, a recipe for it, and what one run made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = save_tiny_flux(folder / "model")
        self.prompts = write_prompts(folder)
        self.recipe = folder / "tiny.yaml"
        self.recipe.write_text(RECIPE.format(folder=self.model))
        self.runs = folder / "runs"

    def run(self, *more: str) -> int:
        """The whole line."""
        return main(["run", str(self.recipe), "--output", str(self.runs), "--device", "cpu", "--quiet", *more])

    def sets(self) -> list[ImageSet]:
        """The sets of both sides."""
        found = sorted((self.runs / "tiny-flux" / "images").glob("*/*/images.jsonl"))
        return [ImageSet.load(path.parent) for path in found]

    def images(self) -> dict[Path, bytes]:
        """The bytes of all images."""
        return {one.path(entry): one.path(entry).read_bytes() for one in self.sets() for entry in one.entries}


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("images")
    before = os.environ.get("HALFBYTE_CACHE")
    os.environ["HALFBYTE_CACHE"] = str(folder / "cache")
    made = Line(folder)
    assert made.run() in (0, 1, 3)
    yield made
    os.environ.pop("HALFBYTE_CACHE")
    if before is not None:
        os.environ["HALFBYTE_CACHE"] = before


def test_both_sides_draw_every_prompt_from_the_same_latents(line: Line) -> None:
    ours, theirs = line.sets()
    assert [entry.prompt for entry in ours.entries] == list(PROMPTS)
    assert ours.settings.asked() == theirs.settings.asked()
    assert ours.settings.model_digest != theirs.settings.model_digest
    (comparison,) = json.loads((line.runs / "tiny-flux" / "comparison.json").read_text())["comparisons"]
    assert [row["metric"] for row in comparison["tasks"]] == ["fulfilment"]
    assert (line.runs / "tiny-flux" / "report.html").is_file()


def test_a_second_run_draws_nothing_and_has_the_same_bytes(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    before = line.images()
    monkeypatch.setattr("halfbyte.eval.pipelines.Pipeline.denoise", lambda *_: pytest.fail("drawn again"))
    assert line.run() in (0, 1, 3)
    assert line.images() == before


def test_drawn_anew_the_images_have_the_same_bytes(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    before = line.images()
    monkeypatch.setenv("HALFBYTE_CACHE", str(line.folder / "other-cache"))
    assert line.run("--force", "--set", "evaluate.images.low_vram=true") in (0, 1, 3)
    assert line.images() == before


def test_memory_is_measured_of_both_sides_in_both_modes(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", str(line.recipe), "--output", str(line.runs), "--device", "cpu", "--quiet"]) == 0
    record = json.loads((line.runs / "tiny-flux" / MEMORY_FILE).read_text())
    assert [(row["weights"], row["low_vram"]) for row in record["rows"]] == [
        ("original", False), ("original", True), ("packed", False), ("packed", True),
    ]  # fmt: skip
    assert all(set(row["stages"]) == {"text encoders", "transformer", "VAE"} for row in record["rows"])
    assert record["rows"][2]["transformer_bytes"] < record["rows"][0]["transformer_bytes"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[0] == "transformer"
    assert printed[1].startswith("bfloat16")
    assert printed[2].startswith("FP8")


def test_memory_needs_a_checkpoint(line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", str(line.recipe), "--output", str(tmp_path), "--device", "cpu"]) == 2
    assert "holds no checkpoint of this recipe" in capsys.readouterr().err


def test_the_plan_says_what_is_drawn_and_what_memory_it_takes(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    assert line.run("--dry-run") == 0
    printed = capsys.readouterr().out
    assert "3 on each side: 3 prompts x 1 seeds, 32 x 32 pixels, 2 steps" in printed
    assert "candidate evaluate.images.low_vram=true evaluate.weights=packed" in printed


def test_each_side_is_evaluated_alone_and_compared(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    def evaluated(model: Path, name: str, *more: str) -> None:
        output = ["--output", str(line.folder / name), "--device", "cpu", "--quiet"]
        assert main(["eval", str(model), "--prompts", str(line.prompts), *output, *DRAWN, *more]) == 0

    metrics = ("--set", "evaluate.images.metrics=[fulfilment,psnr]")
    evaluated(line.model, "ours", *metrics)
    evaluated(line.runs / "tiny-flux", "theirs", "--reference", str(line.folder / "ours"), *metrics)
    assert "psnr" in capsys.readouterr().out
    assert main(["compare", str(line.folder / "ours"), str(line.folder / "theirs"), "--quiet"]) == 0
    assert "fulfilment" in capsys.readouterr().out


def test_a_killed_evaluation_goes_on_with_the_next_image(line: Line) -> None:
    prompts = line.folder / "many.txt"
    colours, shapes = ("red", "green", "blue", "yellow"), ("circle", "square", "triangle")
    prompts.write_text("".join(f"a {colour} {shape}\n" for colour in colours for shape in shapes))
    command = [sys.executable, "-m", "halfbyte", "eval", str(line.model), "--prompts", str(prompts), "--quiet"]
    command += [*DRAWN, "--device", "cpu", "--set", "evaluate.images.steps=12", "--output"]
    killed = line.folder / "killed"
    process = subprocess.Popen([*command, str(killed)])
    while process.poll() is None and len(list(killed.rglob("*.png"))) < 3:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    drawn = {path.name: path.stat().st_mtime_ns for path in killed.rglob("*.png")}
    assert process.returncode == -signal.SIGKILL
    assert 3 <= len(drawn) < 12
    assert main([*command[3:], str(killed)]) == 0
    assert main([*command[3:], str(line.folder / "whole")]) == 0
    after = {path.name: path for path in killed.rglob("*.png")}
    again = [name for name, when in drawn.items() if after[name].stat().st_mtime_ns != when]
    assert len(again) <= 1  # the one that was being put in its place
    assert {name: path.read_bytes() for name, path in after.items()} == {
        path.name: path.read_bytes() for path in (line.folder / "whole").rglob("*.png")
    }


@pytest.mark.parametrize(
    ("content", "more", "says"),
    [
        ("", (), "holds no prompt"),
        ("a red circle\na red circle\n", (), ":2 repeats line 1"),
        ("一只红色的圆\n", ("--set", "evaluate.images.metrics=[psnr,clip_score]"), "letters that the text encoder"),
        ("a red circle " * 40, ("--set", "evaluate.images.metrics=[clip_score]"), "longer than every text encoder"),
        ("a red circle\n", ("--set", "evaluate.images.metrics=[clip]"), "unknown image metric 'clip'"),
        ("a red circle\n", ("--set", "evaluate.images.size=33"), "multiples of 16"),
        ("a red circle\n", ("--set", "evaluate.images.max_sequence_length=1024"), "reads 512 tokens at most"),
        ("a red circle\n", ("--num-fewshot", "2"), "--num-fewshot belongs to --tasks"),
        ("a red circle\n", ("--reference", "nowhere"), "nowhere holds no set of images"),
        ("a red circle\n", ("--tasks", "mmlu"), "exclude each other"),
    ],
)
def test_a_mistake_is_one_line(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, more: tuple[str, ...], says: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(content, encoding="utf-8")
    command = ["eval", str(line.model), "--prompts", str(prompts), "--output", str(tmp_path / "out"), "--quiet"]
    assert main([*command, *DRAWN, "--device", "cpu", *more]) == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if text.startswith("halfbyte: error:")]
    assert len(errors) == 1
    assert says in errors[0]


def test_a_control_pipeline_without_control_images_is_one_line(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control = save_tiny_flux(tmp_path / "control", control=True)
    command = ["eval", str(control), "--prompts", str(line.prompts), "--output", str(tmp_path / "out"), "--quiet"]
    assert main([*command, *DRAWN, "--device", "cpu"]) == 2
    assert "FluxControlPipeline needs a control image for each prompt" in capsys.readouterr().err


def test_a_pipeline_with_a_unet_is_evaluated_too(line: Line, tmp_path: Path) -> None:
    folder = save_tiny_unet(tmp_path / "sd")
    output = ["--output", str(tmp_path / "out"), "--device", "cpu", "--quiet"]
    assert main(["eval", str(folder), "--prompts", str(line.prompts), *output, *DRAWN]) == 0
    (images,) = (ImageSet.load(path.parent) for path in (tmp_path / "out").rglob("images.jsonl"))
    assert images.settings.pipeline == "StableDiffusionPipeline"
    assert len(images.entries) == 3


def test_nothing_to_evaluate_is_one_line(line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(line.model), "--output", str(tmp_path)]) == 2
    assert "give --tasks for a language model, or --prompts" in capsys.readouterr().err
