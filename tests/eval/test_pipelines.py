"""Pipelines run stage by stage: the images are those of diffusers' own call, whatever is in memory when."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drawing import CPU, opened, save_tiny_unet
from PIL import Image
from torch import nn

from halfbyte.eval.pipeline_parts import Parts, open_parts, quiet
from halfbyte.eval.pipelines import STAGES, Pipeline, Request
from halfbyte.records.errors import Anomaly, UserError

RED = Image.new("RGB", (32, 32), "red")


def _request(control: Image.Image | None = None, seed: int = 7) -> Request:
    return Request("a red circle", seed, 3, 3.5, 32, 32, 16, control)


def _drawn(pipeline: Pipeline, request: Request) -> bytes:
    with pipeline.stage(STAGES[0]):
        encoded = pipeline.encode(request)
    with pipeline.stage(STAGES[1]):
        latents = pipeline.denoise(request, encoded)
    with pipeline.stage(STAGES[2]):
        return pipeline.decode(request, latents).tobytes()


def _upstream(folder: Path, kind: str, request: Request) -> bytes:
    import diffusers

    with quiet():
        pipeline = getattr(diffusers, kind).from_pretrained(folder, torch_dtype=torch.float32)
        pipeline.set_progress_bar_config(disable=True)
        more = {"control_image": request.control} if request.control else {}
        found: Any = pipeline(
            request.prompt, num_inference_steps=request.steps, guidance_scale=request.guidance, height=32, width=32,
            max_sequence_length=16, generator=torch.Generator("cpu").manual_seed(request.seed), **more,
        )  # fmt: skip
    pixels: bytes = found.images[0].tobytes()
    return pixels


@pytest.mark.parametrize("low_vram", [False, True])
def test_an_image_is_that_of_diffusers_own_call(tiny_flux: Path, low_vram: bool) -> None:
    assert _drawn(opened(tiny_flux, low_vram=low_vram), _request()) == _upstream(tiny_flux, "FluxPipeline", _request())


@pytest.mark.parametrize("low_vram", [False, True])
def test_a_control_image_goes_the_same_way(tiny_control: Path, low_vram: bool) -> None:
    expected = _upstream(tiny_control, "FluxControlPipeline", _request(RED))
    assert _drawn(opened(tiny_control, low_vram=low_vram), _request(RED)) == expected
    blue = _request(Image.new("RGB", (32, 32), "blue"))
    assert _drawn(opened(tiny_control, low_vram=low_vram), blue) != expected


def test_another_seed_draws_another_image_and_the_same_seed_the_same(tiny_flux: Path) -> None:
    pipeline = opened(tiny_flux)
    first = _drawn(pipeline, _request())
    assert _drawn(pipeline, _request(seed=8)) != first
    assert _drawn(pipeline, _request()) == first


def test_in_low_vram_only_the_parts_of_a_stage_are_in_memory(tiny_flux: Path) -> None:
    events: list[str] = []
    parts = open_parts(tiny_flux, dtype=torch.float32, device=CPU)

    def noted(name: str) -> nn.Module:
        events.append(name)
        return parts.openers[name]()

    watched = Parts(parts.skeleton, {name: (lambda name=name: noted(name)) for name in parts.openers}, parts.bytes)
    pipeline = Pipeline(watched, CPU, low_vram=True)
    assert not pipeline.loaded
    with pipeline.stage(STAGES[0]):
        assert events == ["text_encoder", "text_encoder_2"]
        encoded = pipeline.encode(_request())
    assert not pipeline.loaded
    with pipeline.stage(STAGES[1]):
        assert events[2:] == ["transformer"]
        pipeline.denoise(_request(), encoded)
    assert not pipeline.loaded
    with pipeline.stage(STAGES[2]):
        assert events[3:] == ["vae"]
    assert not pipeline.loaded
    assert set(pipeline.peaks) == set(STAGES)
    assert all(bytes_ > 0 for bytes_ in pipeline.peaks.values())


def test_what_stays_in_memory_is_loaded_once(tiny_flux: Path) -> None:
    count = 0
    parts = open_parts(tiny_flux, dtype=torch.float32, device=CPU)

    def noted(name: str) -> nn.Module:
        nonlocal count
        count += 1
        return parts.openers[name]()

    watched = Parts(parts.skeleton, {name: (lambda name=name: noted(name)) for name in parts.openers}, parts.bytes)
    pipeline = Pipeline(watched, CPU)
    _drawn(pipeline, _request())
    _drawn(pipeline, _request(seed=8))
    assert count == 4
    pipeline.free()
    assert not pipeline.loaded


def test_the_bytes_of_a_stage_are_those_of_its_weights(tiny_flux: Path) -> None:
    pipeline = opened(tiny_flux)
    stages = pipeline.stage_bytes()
    pipeline.load()
    found = pipeline._held
    texts = [found["text_encoder"], found["text_encoder_2"]]
    for stage, modules in zip(STAGES, (texts, [found["transformer"]], [found["vae"]]), strict=True):
        weights = sum(one.numel() * one.element_size() for part in modules for one in part.parameters())
        assert weights <= stages[stage] <= weights + 2048  # position ids are no weights


def test_the_latents_of_each_step_are_shown(tiny_flux: Path) -> None:
    pipeline, steps = opened(tiny_flux), []
    with pipeline.stage(STAGES[0]):
        encoded = pipeline.encode(_request())
    with pipeline.stage(STAGES[1]):
        pipeline.denoise(_request(), encoded, steps.append)
    assert len(steps) == 3
    assert not torch.equal(steps[0], steps[2])


def test_weights_that_are_no_numbers_are_an_anomaly(tiny_flux: Path) -> None:
    pipeline = opened(tiny_flux)
    with pipeline.stage(STAGES[0]):
        encoded = pipeline.encode(_request())
    with pipeline.stage(STAGES[1]):
        with torch.no_grad():
            next(pipeline._held["transformer"].parameters()).fill_(float("nan"))
        with pytest.raises(Anomaly, match="latents hold NaN"):
            pipeline.denoise(_request(), encoded)
    with pipeline.stage(STAGES[2]), pytest.raises(Anomaly, match="NaN or infinite pixels"):
        pipeline.decode(_request(), torch.full((1, 4, 32, 32), float("nan")))


def test_the_schedulers_digest_changes_with_its_settings(tiny_flux: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_flux, copy)
    assert opened(copy).scheduler_digest == opened(tiny_flux).scheduler_digest
    path = copy / "scheduler" / "scheduler_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "_diffusers_version": "0.1"}))
    assert opened(copy).scheduler_digest == opened(tiny_flux).scheduler_digest
    path.write_text(json.dumps({**config, "shift": 3.0}))
    assert opened(copy).scheduler_digest != opened(tiny_flux).scheduler_digest


def test_a_pipeline_with_a_unet_is_drawn_with_too(tmp_path: Path) -> None:
    save_tiny_unet(tmp_path / "sd")
    pipeline = opened(tmp_path / "sd", low_vram=True)
    assert pipeline.kind == "StableDiffusionPipeline"
    import diffusers

    with quiet():
        whole: Any = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "sd", torch_dtype=torch.float32)
        whole.set_progress_bar_config(disable=True)
        generator = torch.Generator("cpu").manual_seed(7)
        expected = whole(
            "a red circle", num_inference_steps=3, guidance_scale=3.5, height=32, width=32, generator=generator
        ).images[0]
    assert _drawn(pipeline, _request()) == expected.tobytes()


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda folder: (folder / "model_index.json").unlink(), "holds no pipeline"),
        (lambda folder: (folder / "model_index.json").write_text('{"_class_name": "Nothing"}'), "has no pipeline"),
        (lambda folder: shutil.rmtree(folder / "vae"), "does not exist"),
    ],
)
def test_a_folder_that_is_no_pipeline_is_refused(tiny_flux: Path, tmp_path: Path, break_it: Any, says: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_flux, copy)
    break_it(copy)
    with pytest.raises(UserError, match=says):
        opened(copy)


def test_damaged_weights_are_one_line(tiny_flux: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_flux, copy)
    next((copy / "vae").glob("*.safetensors")).write_bytes(b"nothing")
    pipeline = opened(copy)
    with pytest.raises(UserError, match="cannot open"), pipeline.stage(STAGES[0]):
        pass
