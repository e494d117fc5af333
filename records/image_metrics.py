"""What each image metric is by its definition: direction, range, the weights it looks through, and its reference."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weights:
    """The trained network that a metric looks through."""

    id: str
    """Where it comes from: an id of the Hugging Face hub, or the name of a file."""
    source: str
    """For people: where a copy is to be had."""


CLIP = Weights("openai/clip-vit-large-patch14", "https://huggingface.co/openai/clip-vit-large-patch14")
IMAGE_REWARD = Weights("THUDM/ImageReward", "https://huggingface.co/THUDM/ImageReward")
ALEXNET = Weights("alexnet-owt-7be5be79.pth", "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth")


@dataclass(frozen=True, slots=True)
class ImageMetric:
    """One metric; an image has one value of it."""

    name: str
    higher_is_better: bool
    range: tuple[float | None, float | None]
    """Smallest and largest value an image can have; None where there is no end. A value outside is a mistake."""
    needs_reference: bool = False
    """Whether it compares with the baseline's image, so that the baseline itself has no value."""
    weights: Weights | None = None
    """None where nothing is trained."""
    crosses_zero: bool = False
    """Whether a ratio of two values says nothing."""
    proves: bool = False
    """Whether values go from one end of the range to the other, so that it bounds what an image can lose; a CLIPScore
    could lie between -100 and 100 and lies between 15 and 40."""

    @property
    def needs_weights(self) -> bool:
        """Whether it looks through a trained network."""
        return self.weights is not None


IMAGE_METRICS: dict[str, ImageMetric] = {
    one.name: one
    for one in (
        # 100 x the cosine of CLIP's embeddings of image and prompt (Hessel et al. 2021, arXiv:2104.08718)
        ImageMetric("clip_score", True, (-100.0, 100.0), weights=CLIP),
        # probability of "Good photo." beside "Bad photo." (Wang et al. 2023, arXiv:2207.12396)
        ImageMetric("clip_iqa", True, (0.0, 1.0), weights=CLIP),
        # learned from people's preferences (Xu et al. 2023, arXiv:2304.05977)
        ImageMetric("image_reward", True, (None, None), weights=IMAGE_REWARD, crosses_zero=True),
        # share of what a prompt asks for that is seen in the image's pixels
        ImageMetric("fulfilment", True, (0.0, 1.0), proves=True),
        ImageMetric("psnr", True, (0.0, 100.0), needs_reference=True),
        ImageMetric("ssim", True, (-1.0, 1.0), needs_reference=True, crosses_zero=True, proves=True),
        ImageMetric("lpips", False, (0.0, None), needs_reference=True, weights=ALEXNET),
    )
}
