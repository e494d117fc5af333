"""CLIPScore and CLIP-IQA, computed on transformers' CLIP: the figures of torchmetrics, for prompts of any length.

torchmetrics cuts a prompt of more than 77 tokens together with the end token that CLIP reads the prompt at, so that its
score falls by a third, and gives transformers' output objects to torch; here the end token stays, and what is cut is
counted. Values are float32, whatever the model's own type.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch

from halfbyte.eval.image_metrics import Images, Metric
from halfbyte.eval.metric_weights import find_weights, missing_weights, weights_identity
from halfbyte.records.image_metrics import CLIP

FILES = ["config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json|vocab.json"]
ALSO = ["merges.txt", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"]
"""Files of a tokenizer that some copies have."""
ANCHORS = ["Good photo.", "Bad photo."]
"""CLIP-IQA's prompts of the property "quality"."""


class Clip:
    """CLIP's embeddings of images and texts, of length 1."""

    def __init__(self, model: Any, processor: Any, tokenizer: Any, device: str) -> None:
        self.model = model.float().eval().to(device)
        self.processor = processor
        self.tokenizer = tokenizer
        self.device = device
        self.longest = int(model.config.text_config.max_position_embeddings)
        """Tokens that the text encoder takes, its begin and end tokens among them: 77."""

    @torch.inference_mode()
    def images(self, images: Images) -> torch.Tensor:
        """Shape (images, width). The processor takes pixels of 0 to 255 and scales them itself."""
        given = self.processor(images=[image.convert("RGB") for image in images], return_tensors="pt")
        return _unit(self.model.get_image_features(pixel_values=given["pixel_values"].to(self.device)))

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Shape (texts, width); a long text is cut, and its end token stays."""
        given = self.tokenizer(list(texts), return_tensors="pt", padding=True, truncation=True, max_length=self.longest)
        found = self.model.get_text_features(
            input_ids=given["input_ids"].to(self.device), attention_mask=given["attention_mask"].to(self.device)
        )
        return _unit(found)

    def cut(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text that the encoder does not see."""
        return [max(0, len(self.tokenizer(text)["input_ids"]) - self.longest) for text in texts]


@lru_cache(maxsize=1)  # CLIPScore and CLIP-IQA look through the same network
def open_clip(folder: Path, device: str) -> Clip:
    """CLIP from a folder in transformers' layout.

    Raises:
        UserError: when a weight is missing, which transformers would fill with random numbers.
    """
    from transformers import AutoTokenizer, CLIPModel

    model, info = cast(Any, CLIPModel).from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    lacking = [*info["missing_keys"], *info.get("mismatched_keys", [])]
    if lacking:
        raise missing_weights("clip_score", CLIP, f"the copy in {folder} lacks {len(lacking)} of them ({lacking[0]})")
    return Clip(model, _image_processor(folder), AutoTokenizer.from_pretrained(folder), device)


def _image_processor(folder: Path) -> Any:
    """The one that resizes with PIL: another one's pixels differ a little, and torchvision need not be there."""
    try:
        module = import_module("transformers.models.clip.image_processing_pil_clip")
        return module.CLIPImageProcessorPil.from_pretrained(folder)
    except ModuleNotFoundError:  # transformers 4, whose CLIPImageProcessor is the one with PIL
        return cast(Any, import_module("transformers")).CLIPImageProcessor.from_pretrained(folder)


def _unit(features: Any) -> torch.Tensor:
    # transformers 5 gives an object with the projected embedding in the place of the pooled one
    found = features if isinstance(features, torch.Tensor) else features.pooler_output
    return cast(torch.Tensor, found / found.norm(dim=-1, keepdim=True))


class _ClipMetric(Metric):
    def __init__(self, name: str, clip: Clip, identity: str = "") -> None:
        super().__init__(name)
        self.clip = clip
        self.identity = identity


def _opened(metric: str, local: str | None, device: str) -> tuple[Clip, str]:
    folder = find_weights(metric, CLIP, FILES, local, also=ALSO)
    return open_clip(folder.resolve(), device), weights_identity(folder, FILES)


class ClipScore(_ClipMetric):
    """100 x the cosine between CLIP's embeddings of an image and its prompt.

    As in torchmetrics, but for its rounding up of a negative mean to 0, which would hide a broken model.
    """

    @classmethod
    def open(cls, local: str | None, device: str) -> ClipScore:
        """See open_metric."""
        return cls("clip_score", *_opened("clip_score", local, device))

    def cut(self, prompts: Sequence[str]) -> list[int]:
        """Tokens of each prompt beyond CLIP's 77."""
        return self.clip.cut(prompts)

    def _batch(self, images: Images, prompts: Sequence[str], references: Images | None) -> list[float]:
        del references
        cosine = (self.clip.images(images) * self.clip.texts(prompts)).sum(dim=-1)
        return cast(list[float], (100 * cosine).clamp(-100, 100).tolist())


class ClipIqa(_ClipMetric):
    """How much more an image is like "Good photo." than like "Bad photo." to CLIP, between 0 and 1."""

    @classmethod
    def open(cls, local: str | None, device: str) -> ClipIqa:
        """See open_metric."""
        return cls("clip_iqa", *_opened("clip_iqa", local, device))

    def _batch(self, images: Images, prompts: Sequence[str], references: Images | None) -> list[float]:
        del prompts, references
        logits = 100 * self.clip.images(images) @ self.clip.texts(ANCHORS).T
        return cast(list[float], logits.softmax(dim=-1)[:, 0].tolist())
