"""PSNR, SSIM and LPIPS against torchmetrics, the latents' distance, and images that cannot be looked at."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from image_networks import images
from PIL import Image
from torch import nn
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from halfbyte.eval.image_metrics import PSNR_CAP, Metric, latent_distances, open_metric, pixels
from halfbyte.eval.lpips import load_network
from halfbyte.records.errors import UserError
from halfbyte.records.image_metrics import ALEXNET, IMAGE_METRICS

PROMPTS = ["a", "b", "c"]


class Fixed(Metric):
    """A metric that says what it was told to."""

    def __init__(self, name: str, value: float) -> None:
        super().__init__(name)
        self.value = value

    def _batch(self, images, *_):
        return [self.value] * len(images)


@pytest.mark.parametrize(
    ("name", "theirs"), [("psnr", peak_signal_noise_ratio), ("ssim", structural_similarity_index_measure)]
)
def test_psnr_and_ssim_equal_torchmetrics(name: str, theirs) -> None:
    ours, references = images(3), images(3, seed=1)
    found = open_metric(name).scores(ours, PROMPTS, references)
    for value, image, reference in zip(found, ours, references, strict=True):
        one, other = (torch.from_numpy(np.array(it)).permute(2, 0, 1)[None].double() for it in (image, reference))
        assert value == pytest.approx(float(theirs(one, other, data_range=255.0)), abs=1e-4)
    assert len(set(found)) == 3


def test_equal_images_have_the_cap_of_psnr_and_an_ssim_of_one() -> None:
    assert open_metric("psnr").scores(images(2), ["", ""], images(2)) == [PSNR_CAP] * 2
    assert open_metric("ssim").scores(images(2), ["", ""], images(2)) == pytest.approx([1.0] * 2, abs=1e-6)


def alexnet() -> nn.Sequential:
    """torchvision's layers, with random weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
    )  # fmt: skip


def test_lpips_equals_torchmetrics_on_the_same_alexnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchmetrics.functional.image.lpips as reference

    layers = alexnet()
    stored = {f"features.{name}": value for name, value in layers.state_dict().items()}
    torch.save(stored | {"classifier.1.weight": torch.zeros(3)}, tmp_path / ALEXNET.id)
    monkeypatch.setattr(reference, "_get_tv_model_features", lambda *_: layers)
    theirs = reference._LPIPS(net="alex")
    given, others = images(3, (64, 96)), images(3, (64, 96), seed=1)
    metric = open_metric("lpips", {"lpips": str(tmp_path)})
    found = metric.scores(given, PROMPTS, others)
    pairs = zip(given, others, strict=True)
    expected = [float(theirs(pixels(a)[None], pixels(b)[None], normalize=True)) for a, b in pairs]
    assert found == pytest.approx(expected, abs=1e-5)
    assert metric.scores(given, PROMPTS, given) == [0, 0, 0]
    assert metric.identity
    with pytest.raises(UserError, match="32 x 32 pixels, and one has 48 x 16"):
        metric.scores(images(1, (48, 16)), [""], images(1, (48, 16)))


def test_a_file_that_is_not_alexnets_is_refused(tmp_path: Path) -> None:
    torch.save({"features.0.weight": torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"other\.pth is another file"):
        load_network(tmp_path / "other.pth")


def test_latents_are_compared_step_by_step_as_a_share_of_the_baselines_norm() -> None:
    base = [torch.ones(4, 4), 2 * torch.ones(4, 4)]
    assert latent_distances([base[0], 3 * torch.ones(4, 4)], base) == pytest.approx([0, 0.5])
    assert latent_distances([torch.zeros(2)], [torch.zeros(2)]) == [0]
    for ours, message in (
        (base[:1], "latents of 1 steps and the baseline of 2"),
        ([torch.ones(4), base[1]], r"shapes \(4,\) and \(4, 4\)"),
        ([base[0], base[1] * torch.nan], "step 1 hold NaN"),
    ):
        with pytest.raises(UserError, match=message):
            latent_distances(ours, base)


def test_unequal_numbers_of_images_prompts_and_references_are_refused() -> None:
    psnr = open_metric("psnr")
    for given, prompts, others in ((2, 3, 2), (3, 2, 3), (3, 3, 2), (2, 2, 3), (9, 9, 10), (0, 1, 0)):
        with pytest.raises(UserError, match="unequal numbers"):
            psnr.scores(images(given), ["x"] * prompts, images(others))
    with pytest.raises(UserError, match="was given no images"):
        psnr.scores([], [], [])
    with pytest.raises(UserError, match="there are none"):
        psnr.scores(images(1), ["x"])
    with pytest.raises(UserError, match="image 1 is 8 x 40 pixels, and the baseline's 48 x 40"):
        psnr.scores([*images(1), *images(1, (8, 40))], ["x", "y"], images(2))


def test_images_are_taken_a_batch_at_a_time() -> None:
    taken = []

    def stream(count: int):
        for image in images(count):
            taken.append(len(taken))
            yield image

    class Watching(Fixed):
        def _batch(self, images, *others):
            assert len(taken) <= 8 * (len(self.seen) + 1)
            self.seen.append(len(images))
            return super()._batch(images, *others)

    metric = Watching("clip_score", 1.0)
    metric.seen = []
    assert metric.scores(stream(19), ["x"] * 19) == [1.0] * 19
    assert metric.seen == [8, 8, 3]


@pytest.mark.parametrize(
    ("name", "value"),
    [("clip_iqa", 1.5), ("clip_iqa", -0.1), ("clip_score", 3000.0), ("image_reward", float("nan")),
     ("image_reward", float("inf")), ("lpips", -0.5), ("ssim", 1.01)],
)  # fmt: skip
def test_a_value_that_is_no_number_or_out_of_range_is_an_error(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{name} of image 0 is"):
        Fixed(name, value).scores(images(1), [""], images(1))


def test_an_unknown_metric_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown image metric 'clipscore' .*did you mean 'clip_score'"):
        open_metric("clipscore")


def test_every_metric_that_is_known_can_be_opened_or_says_where_its_weights_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFBYTE_WEIGHTS", str(tmp_path))
    monkeypatch.setattr("halfbyte.eval.metric_weights.hub_is_reachable", lambda: False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))
    for name, definition in IMAGE_METRICS.items():
        if not definition.needs_weights:
            assert open_metric(name).name == name
            continue
        with pytest.raises(UserError) as caught:
            open_metric(name)
        assert str(definition.weights.source) in caught.value.message
        assert f"weights_of: {{{name}: PATH}}" in str(caught.value.hint)
        assert f"$HALFBYTE_WEIGHTS/{definition.weights.id}" in str(caught.value.hint)


def test_without_the_extra_packages_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.split(".")[0] == "torchmetrics"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchmetrics", types.ModuleType("torchmetrics"))
    monkeypatch.setitem(sys.modules, "torchmetrics.functional", None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"psnr needs torchmetrics.*pip install 'halfbyte\[image\]'"):
        open_metric("psnr").scores(images(1), [""], images(1))


def test_a_grey_and_a_transparent_image_are_looked_at_as_colours() -> None:
    for mode in ("L", "RGBA", "P"):
        assert pixels(Image.new(mode, (3, 2))).shape == (3, 2, 3)
