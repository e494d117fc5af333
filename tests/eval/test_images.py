"""Sets of images: paired, resumable image by image, and the same bytes for the same seeds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from drawing import PROMPTS, asked, opened, summary, write_prompts
from PIL import Image
from tiny_flux import save_tiny_flux

from halfbyte.eval.images import Drawing
from halfbyte.records.errors import UserError
from halfbyte.records.image_set import ImageSet


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def _drawing(folder: Path, prompts: Path, *, digest: str = "a", low_vram: bool = False, **more: Any) -> Drawing:
    options = {name: more.pop(name) for name in ("reference", "allow") if name in more}
    pipeline = opened(folder, low_vram=low_vram)
    return Drawing(pipeline, asked(prompts, **more), summary(digest), dtype="float32", **options)


def _bytes(images: ImageSet) -> dict[str, bytes]:
    return {entry.file: images.path(entry).read_bytes() for entry in images.entries}


def test_there_is_one_image_for_each_prompt_and_seed(tiny_flux: Path, tmp_path: Path) -> None:
    images = _drawing(tiny_flux, write_prompts(tmp_path), seeds=[3, 5]).draw(tmp_path / "images")
    assert [(one.index, one.prompt, one.seed) for one in images.entries] == [
        (0, PROMPTS[0], 3), (1, PROMPTS[0], 5), (2, PROMPTS[1], 3),
        (3, PROMPTS[1], 5), (4, PROMPTS[2], 3), (5, PROMPTS[2], 5),
    ]  # fmt: skip
    assert [one.file for one in images.entries][:2] == ["0000-3.png", "0001-5.png"]
    assert len(set(_bytes(images).values())) == 6
    images.verify()
    assert images.folder.parent == tmp_path / "images" / ("a" * 16)
    assert sorted(path.name for path in images.folder.iterdir()) == sorted(
        [one.file for one in images.entries] + ["images.jsonl", "settings.json"]
    )


@pytest.mark.parametrize("low_vram", [False, True])
def test_the_same_seeds_give_the_same_bytes_on_a_second_run(tiny_flux: Path, tmp_path: Path, low_vram: bool) -> None:
    prompts = write_prompts(tmp_path)
    first = _drawing(tiny_flux, prompts).draw(tmp_path / "first")
    second = _drawing(tiny_flux, prompts, low_vram=low_vram).draw(tmp_path / "second")
    assert _bytes(first) == _bytes(second)


def test_an_image_says_what_it_was_drawn_with(tiny_flux: Path, tmp_path: Path) -> None:
    images = _drawing(tiny_flux, write_prompts(tmp_path, "a red circle", "ein blauer Kreis für dich")).draw(tmp_path)
    with Image.open(images.path(images.entries[1])) as image:
        assert image.size == (32, 32)
        about: Any = image.info
        settings = json.loads(about["halfbyte"])
        assert about["prompt"] == "ein blauer Kreis für dich"
    assert (settings["seed"], settings["steps"], settings["pipeline"]) == (0, 2, "FluxPipeline")
    assert settings["scheduler"] == "FlowMatchEulerDiscreteScheduler"
    assert settings["model_digest"] == "a" * 64


# of three images, those that are denoised and decoded by the second process after a kill at the second of a stage
LEFT = {
    (False, "encode"): (2, 2), (False, "denoise"): (2, 2), (False, "decode"): (1, 2),
    (True, "encode"): (3, 3), (True, "denoise"): (2, 3), (True, "decode"): (0, 2),
}  # fmt: skip


@pytest.mark.parametrize(("low_vram", "stage"), LEFT)
def test_a_kill_loses_at_most_the_image_that_was_being_drawn(
    tiny_flux: Path, tmp_path: Path, stage: str, low_vram: bool
) -> None:
    prompts = write_prompts(tmp_path)
    expected = _bytes(_drawing(tiny_flux, prompts).draw(tmp_path / "whole"))
    killed, again = (_drawing(tiny_flux, prompts, low_vram=low_vram) for _ in range(2))
    _counted(killed, stage, deadly=2)
    with pytest.raises(Killed):
        killed.draw(tmp_path / "killed")
    denoised, decoded = _counted(again, "denoise"), _counted(again, "decode")
    assert _bytes(again.draw(tmp_path / "killed")) == expected
    assert (len(denoised), len(decoded)) == LEFT[low_vram, stage]


def _counted(drawing: Drawing, stage: str, deadly: int | None = None) -> list[None]:
    """A list that grows with each image of a stage, where the process is killed at one of them."""
    real, calls = getattr(drawing.pipeline, stage), []

    def method(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == deadly:
            raise Killed
        return real(*arguments)

    setattr(drawing.pipeline, stage, method)
    return calls


def test_what_is_there_is_not_drawn_again(tiny_flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = write_prompts(tmp_path)
    first = _drawing(tiny_flux, prompts).draw(tmp_path / "images")
    again = _drawing(tiny_flux, prompts)
    monkeypatch.setattr(again.pipeline, "load", lambda: pytest.fail("loaded"))
    assert _bytes(again.draw(tmp_path / "images")) == _bytes(first)


def test_a_damaged_or_lost_image_alone_is_drawn_again(tiny_flux: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path)
    first = _drawing(tiny_flux, prompts).draw(tmp_path / "images")
    expected = _bytes(first)
    first.path(first.entries[0]).write_bytes(b"damaged")
    first.path(first.entries[2]).unlink()
    again = _drawing(tiny_flux, prompts)
    drawn = _counted(again, "decode")
    assert _bytes(again.draw(tmp_path / "images")) == expected
    assert len(drawn) == 2


def test_other_settings_are_another_set(tiny_flux: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path)
    keys = {
        _drawing(tiny_flux, prompts, **more).settings.key
        for more in ({}, {"steps": 3}, {"guidance": 2.0}, {"seeds": [1]}, {"limit": 2}, {"size": 48}, {"digest": "b"})
    }
    assert len(keys) == 7
    metrics = _drawing(tiny_flux, prompts, metrics=["psnr"], low_vram=True).settings.key
    assert metrics == _drawing(tiny_flux, prompts).settings.key  # they change no image


def test_the_distance_of_the_latents_is_measured_at_each_step(tiny_flux: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, *PROMPTS[:2])
    baseline = _drawing(tiny_flux, prompts, latents=True).draw(tmp_path / "images")
    same = _drawing(tiny_flux, prompts, latents=True, digest="b", reference=baseline).draw(tmp_path / "images")
    assert [entry.latent_distances for entry in same.entries] == [[0.0, 0.0]] * 2
    other = save_tiny_flux(tmp_path / "other", seed=1)
    far = _drawing(other, prompts, latents=True, digest="c", reference=baseline).draw(tmp_path / "images")
    assert all(distance > 0 for entry in far.entries for distance in entry.latent_distances or [0.0])
    assert all(entry.latent_distances is None for entry in baseline.entries)


def test_a_candidate_with_another_scheduler_is_refused_before_it_draws(tiny_flux: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path)
    baseline = _drawing(tiny_flux, prompts).draw(tmp_path / "images")
    copy = tmp_path / "copy"
    shutil.copytree(tiny_flux, copy)
    path = copy / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shift": 3.0}))
    with pytest.raises(UserError, match="other settings: scheduler_digest is") as error:
        _drawing(copy, prompts, digest="b", reference=baseline)
    assert "scheduler folder" in str(error.value)


def test_a_control_pipeline_without_control_images_is_refused(tiny_control: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs a control image for each prompt, and 3 of 3 have none.*line 1"):
        _drawing(tiny_control, write_prompts(tmp_path))


def test_control_images_change_the_image_and_are_known_by_their_content(tiny_control: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    for colour in ("red", "blue"):
        Image.new("RGB", (32, 32), colour).save(tmp_path / f"{colour}.png")
    rows = [{"prompt": "a circle", "control_image": f"{colour}.png"} for colour in ("red", "blue")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    images = _drawing(tiny_control, prompts).draw(tmp_path / "images")
    assert len(set(_bytes(images).values())) == 2
    assert len({entry.control for entry in images.entries} - {None}) == 2
    before = images.settings.key
    Image.new("RGB", (32, 32), "green").save(tmp_path / "red.png")
    assert _drawing(tiny_control, prompts).settings.key != before


def test_a_pipeline_without_control_takes_no_control_image(tiny_flux: Path, tmp_path: Path) -> None:
    Image.new("RGB", (32, 32), "red").save(tmp_path / "red.png")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a circle", "control_image": "red.png"}\n')
    with pytest.raises(UserError, match="takes no control image"):
        _drawing(tiny_flux, prompts)


def test_a_size_the_pipeline_cannot_draw_is_refused(tiny_flux: Path, tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    copy = tmp_path / "copy"
    shutil.copytree(tiny_flux, copy)
    deeper = AutoencoderKL(
        latent_channels=4, block_out_channels=(4, 4, 4, 4, 4), norm_num_groups=1, use_quant_conv=False,
        use_post_quant_conv=False, down_block_types=("DownEncoderBlock2D",) * 5,
        up_block_types=("UpDecoderBlock2D",) * 5, shift_factor=0.0609, scaling_factor=1.5035,
    )  # fmt: skip
    shutil.rmtree(copy / "vae")
    deeper.save_pretrained(copy / "vae")
    with pytest.raises(UserError, match="draws 32 x 32 pixels where 48 x 48 were asked for"):
        _drawing(copy, write_prompts(tmp_path), size=48).draw(tmp_path / "images")


def test_a_second_process_is_kept_out(tiny_flux: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path)
    first, second = _drawing(tiny_flux, prompts), _drawing(tiny_flux, prompts)
    decode = first.pipeline.decode

    def meanwhile(*arguments: Any) -> Any:
        with pytest.raises(UserError, match="another process draws"):
            second.draw(tmp_path / "images")
        return decode(*arguments)

    first.pipeline.decode = meanwhile  # type: ignore[method-assign]
    first.draw(tmp_path / "images")
