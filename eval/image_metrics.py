"""Metrics of images: one value an image, from the image and its prompt, or from the baseline's image of the same seed.

metric = open_metric("clip_score")
values = metric.scores(images, prompts)          # a list of as many floats
cut = metric.cut(prompts)                        # tokens of each prompt that the metric's text encoder does not see
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np
import torch
from PIL import Image

from halfbyte.records.errors import UserError, unknown_name
from halfbyte.records.image_metrics import IMAGE_METRICS, ImageMetric

BATCH = 8
"""Images looked at together: enough for a GPU, and little beside the networks in memory."""
PSNR_CAP = 100.0
"""dB; of an image equal to its reference, whose ratio is infinite, and of which no mean could be taken."""

Images = Sequence[Image.Image]


class Metric(ABC):
    """One metric, ready to look at images; see open_metric."""

    batch: int = BATCH

    def __init__(self, name: str) -> None:
        self.definition: ImageMetric = IMAGE_METRICS[name]
        self.identity = ""
        """Digest of the weights, so that values through other weights are not compared; "" where nothing is trained."""

    @property
    def name(self) -> str:
        """As in a recipe and in records: clip_score."""
        return self.definition.name

    @property
    def higher_is_better(self) -> bool:
        """The direction."""
        return self.definition.higher_is_better

    @property
    def range(self) -> tuple[float | None, float | None]:
        """Smallest and largest value; None where there is no end."""
        return self.definition.range

    @property
    def needs_reference(self) -> bool:
        """Whether it compares with the baseline's image."""
        return self.definition.needs_reference

    @property
    def needs_weights(self) -> bool:
        """Whether it looks through a trained network."""
        return self.definition.needs_weights

    def scores(
        self, images: Iterable[Image.Image], prompts: Sequence[str], references: Iterable[Image.Image] | None = None
    ) -> list[float]:
        """One value an image, in order; images are taken from the iterables a batch at a time.

        Args:
            images: As many as prompts, of any size.
            prompts: What each was drawn from.
            references: The baseline's image of each, of the same size; for metrics that need them.

        Raises:
            UserError: for no images, unequal numbers or sizes, missing references, and a value that is no number or
                outside of the metric's range.
        """
        if self.needs_reference and references is None:
            raise UserError(
                f"{self.name} compares with the baseline's images, and there are none",
                "generate the baseline's images from the same prompts and seeds first",
            )
        found: list[float] = []
        others = iter(references) if references is not None and self.needs_reference else None
        for ours in _batches(images, self.batch):
            asked = prompts[len(found) : len(found) + len(ours)]
            theirs = None if others is None else list(islice(others, len(ours)))
            if len(asked) < len(ours) or (theirs is not None and len(theirs) < len(ours)):
                raise _unequal(self.name)
            if theirs is not None:
                _refuse_other_sizes(ours, theirs, len(found))
            values = self._batch(ours, asked, theirs)
            for place, value in enumerate(values, start=len(found)):
                self._refuse_no_value(value, place)
            found += values
        if len(found) != len(prompts) or (others is not None and next(others, None) is not None):
            raise _unequal(self.name)
        if not found:
            raise UserError(f"{self.name} was given no images", "generate some first")
        return found

    def cut(self, prompts: Sequence[str]) -> list[int]:
        """Tokens of each prompt beyond what the metric's text encoder takes; all 0 where it reads none."""
        return [0] * len(prompts)

    @abstractmethod
    def _batch(self, images: Images, prompts: Sequence[str], references: Images | None) -> list[float]:
        """The values of a few images."""

    def _refuse_no_value(self, value: float, place: int) -> None:
        low, high = self.range
        if not math.isfinite(value):
            raise UserError(
                f"{self.name} of image {place} is {value}", "look at the image, and at the metric's weights"
            )
        if (low is not None and value < low) or (high is not None and value > high):
            raise UserError(
                f"{self.name} of image {place} is {value:g}, which lies outside of its range, {low} to {high}",
                "look at the metric's weights",
            )


def open_metric(name: str, weights: Mapping[str, str] | None = None, device: str = "cpu") -> Metric:
    """A metric by its name, with its network loaded.

    Args:
        name: One of records.image_metrics.IMAGE_METRICS.
        weights: Local copies by metric, as in a recipe's evaluate.images.weights_of; see metric_weights.
        device: Where to compute.

    Raises:
        UserError: for an unknown name, and for weights that are not at hand, saying where they come from and how to
            point to a local copy; the other metrics can go on.
    """
    if name not in IMAGE_METRICS:
        raise unknown_name("image metric", name, IMAGE_METRICS)
    local = (weights or {}).get(name)
    if name in ("clip_score", "clip_iqa"):
        from halfbyte.eval.clip_scores import ClipIqa, ClipScore

        return (ClipScore if name == "clip_score" else ClipIqa).open(local, device)
    if name == "image_reward":
        from halfbyte.eval.image_reward import ImageReward

        return ImageReward.open(local, device)
    if name == "lpips":
        from halfbyte.eval.lpips import Lpips

        return Lpips.open(local, device)
    if name == "fulfilment":
        return Fulfilment()
    return Psnr(device) if name == "psnr" else Ssim(device)


def latent_distances(latents: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> list[float]:
    """How far the latents are from the baseline's after each step, as a share of the baseline's norm.

    Args:
        latents: One tensor a step, of any equal shapes.
        references: The baseline's.

    Raises:
        UserError: for unequal numbers of steps or shapes, and latents that are no numbers.
    """
    if len(latents) != len(references) or not latents:
        raise UserError(
            f"the candidate has the latents of {len(latents)} steps and the baseline of {len(references)}",
            "generate both sides with the same number of steps",
        )
    found = []
    for step, (ours, theirs) in enumerate(zip(latents, references, strict=True)):
        if ours.shape != theirs.shape:
            raise UserError(
                f"the latents of step {step} have the shapes {tuple(ours.shape)} and {tuple(theirs.shape)}",
                "generate both sides with the same size",
            )
        one, other = ours.double(), theirs.double()
        distance = float((one - other).norm() / other.norm().clamp_min(torch.finfo(torch.float64).tiny))
        if not math.isfinite(distance):
            raise UserError(f"the latents of step {step} hold NaN or infinite values", "verify the checkpoint")
        found.append(distance)
    return found


def pixels(image: Image.Image) -> torch.Tensor:
    """An image's pixels as float32 between 0 and 1, shape (3, height, width)."""
    array = np.asarray(image.convert("RGB"), dtype=np.float32) / 255
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


class Psnr(Metric):
    """Peak signal-to-noise ratio to the baseline's image, in dB; at most PSNR_CAP, which equal images have."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__("psnr")
        self.device = device

    def _batch(self, images: Images, prompts: Sequence[str], references: Images | None) -> list[float]:
        del prompts
        measure = _torchmetrics("psnr").peak_signal_noise_ratio
        return [
            min(PSNR_CAP, float(measure(ours, theirs, data_range=1.0)))
            for ours, theirs in _pairs(images, references, self.device)
        ]


class Ssim(Metric):
    """Structural similarity to the baseline's image (Wang et al. 2004): 1 for equal images."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__("ssim")
        self.device = device

    def _batch(self, images: Images, prompts: Sequence[str], references: Images | None) -> list[float]:
        del prompts
        measure = _torchmetrics("ssim").structural_similarity_index_measure
        return [  # of equal images rounding may say more than 1
            min(1.0, float(measure(ours, theirs, data_range=1.0)))
            for ours, theirs in _pairs(images, references, self.device)
        ]


class Fulfilment(Metric):
    """The share of what a prompt of coloured shapes asks for that is seen in the image's pixels; see fulfilment."""

    def __init__(self) -> None:
        super().__init__("fulfilment")

    def _batch(self, images: Images, prompts: Sequence[str], references: Images | None) -> list[float]:
        del references
        from halfbyte.eval.fulfilment import fulfilment

        return [fulfilment(image, prompt).score for image, prompt in zip(images, prompts, strict=True)]


def _torchmetrics(metric: str) -> Any:
    try:
        return import_module("torchmetrics.functional.image")
    except ModuleNotFoundError as error:
        raise UserError(f"{metric} needs {error.name or 'torchmetrics'}", "pip install 'halfbyte[image]'") from None


def _pairs(images: Images, references: Images | None, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for ours, theirs in zip(images, references or [], strict=True):
        yield pixels(ours)[None].to(device), pixels(theirs)[None].to(device)


def _batches(images: Iterable[Image.Image], size: int) -> Iterator[list[Image.Image]]:
    left = iter(images)
    while batch := list(islice(left, size)):
        yield batch


def _unequal(metric: str) -> UserError:
    return UserError(
        f"{metric} was given unequal numbers of images, prompts and references",
        "generate both sides from the same prompts and seeds",
    )


def _refuse_other_sizes(images: Images, references: Images, start: int) -> None:
    for place, (ours, theirs) in enumerate(zip(images, references, strict=True), start=start):
        if ours.size != theirs.size:
            raise UserError(
                f"image {place} is {ours.width} x {ours.height} pixels, and the baseline's {theirs.width} x "
                f"{theirs.height}",
                "generate both sides with the same size",
            )
