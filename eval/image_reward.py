"""ImageReward (Xu et al. 2023, arXiv:2304.05977) on transformers' BLIP classes, from the public checkpoint.

The package `image-reward` does not import under transformers 5. Its network is BLIP's image encoder, BLIP's text
encoder looking at the image's patches, and five linear layers on the text's first token; the names of the checkpoint's
tensors are translated here.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import nn

from halfbyte.eval.image_metrics import Images, Metric
from halfbyte.eval.metric_weights import find_weights, missing_weights, named_file, weights_identity
from halfbyte.records.digests import value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.image_metrics import IMAGE_REWARD, Weights

logger = logging.getLogger(__name__)

CHECKPOINT = "ImageReward.pt"
BERT = Weights("google-bert/bert-base-uncased", "https://huggingface.co/google-bert/bert-base-uncased")
"""Whose tokenizer reads the prompts."""
VOCABULARY = "vocab.txt"
LONGEST = 35
"""Tokens of a prompt that are read, [CLS] and [SEP] among them."""
MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the network's output on its training's images: a reward is in these deviations."""
HEAD_WIDTH = 64  # of an attention head, in both encoders
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)
_DROPOUT = (0.2, 0.2, 0.1)  # between the head's layers while training, which numbers them
_VISION = (
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks\.", "encoder.layers."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
)


class RewardNetwork(nn.Module):
    """The network, with its sizes read off the tensors of a checkpoint."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        super().__init__()
        width, _, patch, _ = tensors["vision.embeddings.patch_embedding.weight"].shape
        positions = tensors["vision.embeddings.position_embedding"].shape[1]
        self.image_size = patch * round((positions - 1) ** 0.5)
        """Pixels of a side: 224."""
        self.vision = BlipVisionModel(
            BlipVisionConfig(
                hidden_size=width,
                intermediate_size=tensors["vision.encoder.layers.0.mlp.fc1.weight"].shape[0],
                num_hidden_layers=_layers(tensors, "vision.encoder.layers."),
                num_attention_heads=width // HEAD_WIDTH,
                image_size=self.image_size,
                patch_size=patch,
                layer_norm_eps=1e-6,
            )
        )
        words, text_width = tensors["text.embeddings.word_embeddings.weight"].shape
        self.text = cast(Any, BlipTextModel)(
            BlipTextConfig(
                vocab_size=words,
                hidden_size=text_width,
                encoder_hidden_size=width,
                intermediate_size=tensors["text.encoder.layer.0.intermediate.dense.weight"].shape[0],
                num_hidden_layers=_layers(tensors, "text.encoder.layer."),
                num_attention_heads=text_width // HEAD_WIDTH,
                max_position_embeddings=tensors["text.embeddings.position_embeddings.weight"].shape[0],
            ),
            add_pooling_layer=False,
        )
        sizes = [text_width, *(tensors[f"head.{place}.weight"].shape[0] for place in (0, 2, 4, 6, 7))]
        layers: list[nn.Module] = []
        for place, (before, after) in enumerate(pairwise(sizes)):
            layers.append(nn.Linear(before, after))
            if place < len(_DROPOUT):
                layers.append(nn.Dropout(_DROPOUT[place]))
        self.head = nn.Sequential(*layers)

    def forward(self, pixels: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The reward of each image for its prompt.

        Args:
            pixels: Shape (images, 3, side, side), normalized.
            tokens: Shape (images, length).
            mask: The same; 0 for padding.
        """
        patches = self.vision(pixel_values=pixels).last_hidden_state
        seen = torch.ones(patches.shape[:2], dtype=torch.long, device=patches.device)
        states = self.text(
            input_ids=tokens, attention_mask=mask, encoder_hidden_states=patches, encoder_attention_mask=seen
        ).last_hidden_state
        return cast(torch.Tensor, (self.head(states[:, 0]).squeeze(-1) - MEAN) / STD)


def translated(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The public checkpoint's tensors under the names of RewardNetwork, as float32; others are left out."""
    found = {}
    for name, tensor in tensors.items():
        if name.startswith("blip.visual_encoder."):
            new = name.removeprefix("blip.visual_encoder.")
            for pattern, replacement in _VISION:
                new = re.sub(pattern, replacement, new)
            new = f"vision.{new}"
        elif name.startswith("blip.text_encoder."):
            new = "text." + name.removeprefix("blip.text_encoder.")
        elif name.startswith("mlp.layers."):
            new = "head." + name.removeprefix("mlp.layers.")
        else:
            new = ""
        if new and not new.endswith(".position_ids"):  # a row of numbers that older versions saved
            found[new] = tensor.float()
    return found


def load_network(path: Path) -> RewardNetwork:
    """The network from ImageReward.pt.

    Raises:
        UserError: when it is no such checkpoint, or lacks a tensor.
    """
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = f"{path} is no checkpoint that can be read: {str(error).strip().splitlines()[0]}"
        raise missing_weights("image_reward", IMAGE_REWARD, reason) from None
    tensors = translated(content) if isinstance(content, dict) else {}
    try:
        network = RewardNetwork(tensors)
    except (KeyError, ValueError) as error:
        reason = f"{path} is another network's ({error})"
        raise missing_weights("image_reward", IMAGE_REWARD, reason) from None
    wanted = {name: value.shape for name, value in network.state_dict().items()}
    wrong = [name for name, shape in wanted.items() if name not in tensors or tensors[name].shape != shape]
    if wrong:
        reason = f"{path} lacks {len(wrong)} of its tensors, or has them in another shape ({wrong[0]})"
        raise missing_weights("image_reward", IMAGE_REWARD, reason)
    if unused := sorted(tensors.keys() - wanted.keys()):
        logger.warning("%s holds %d tensors that ImageReward does not use, such as %s", path, len(unused), unused[0])
    network.load_state_dict({name: tensors[name] for name in wanted})
    return network.eval()


def _layers(tensors: dict[str, torch.Tensor], prefix: str) -> int:
    return len({name.removeprefix(prefix).split(".")[0] for name in tensors if name.startswith(prefix)})


class ImageReward(Metric):
    """What people would say of an image drawn from a prompt, in standard deviations; above 0 is better than usual."""

    def __init__(self, network: RewardNetwork, tokenizer: Any, device: str, identity: str = "") -> None:
        super().__init__("image_reward")
        self.network = network.to(device)
        self.tokenizer = tokenizer
        self.device = device
        self.identity = identity

    @classmethod
    def open(cls, local: str | None, device: str) -> ImageReward:
        """See open_metric."""
        folder = find_weights("image_reward", IMAGE_REWARD, [CHECKPOINT], local)
        has_words = (folder / VOCABULARY).is_file()
        words = folder if has_words else find_weights("image_reward", BERT, [VOCABULARY])
        identity = value_digest([weights_identity(folder, [CHECKPOINT]), weights_identity(words, [VOCABULARY])])
        network = load_network(named_file(folder, CHECKPOINT))
        return cls(network, open_tokenizer(named_file(words, VOCABULARY)), device, identity)

    def cut(self, prompts: Sequence[str]) -> list[int]:
        """Tokens of each prompt beyond the 35 that are read."""
        return [max(0, len(self.tokenizer(prompt)["input_ids"]) - LONGEST) for prompt in prompts]

    @torch.inference_mode()
    def _batch(self, images: Images, prompts: Sequence[str], references: Images | None) -> list[float]:
        del references
        given = self.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=LONGEST, return_tensors="pt"
        )
        pixels = torch.stack([prepared(image, self.network.image_size) for image in images])
        tokens, mask = (given[name].to(self.device) for name in ("input_ids", "attention_mask"))
        return cast(list[float], self.network(pixels.to(self.device), tokens, mask).tolist())


def open_tokenizer(vocabulary: Path) -> Any:
    """BERT's tokenizer in lower case, from vocab.txt.

    Raises:
        UserError: when the file holds no such vocabulary.
    """
    from transformers import BertTokenizer

    words = {word: place for place, word in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}
    if not words.keys() >= {"[PAD]", "[UNK]", "[CLS]", "[SEP]"}:
        raise UserError(f"{vocabulary} is not the vocabulary of bert-base-uncased", f"take it from {BERT.source}")
    return BertTokenizer.from_pretrained(vocabulary.parent, do_lower_case=True)


def prepared(image: Image.Image, side: int) -> torch.Tensor:
    """The middle of an image in the network's size, normalized, shape (3, side, side)."""
    width, height = image.size
    short = min(width, height)
    resized = image.resize((int(side * width / short), int(side * height / short)), Image.Resampling.BICUBIC)
    left, top = round((resized.width - side) / 2), round((resized.height - side) / 2)
    cropped = resized.crop((left, top, left + side, top + side)).convert("RGB")
    mean, deviation = np.array(PIXEL_MEAN, dtype=np.float32), np.array(PIXEL_STD, dtype=np.float32)
    array = (np.asarray(cropped, dtype=np.float32) / 255 - mean) / deviation
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()
