"""Tiny random networks in the layouts of the public ones that image metrics look through, and images to look at."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def images(count: int, size: tuple[int, int] = (48, 40), seed: int = 0) -> list[Image.Image]:
    """Smooth random images, (width, height) each."""
    random = np.random.default_rng(seed)
    return [
        Image.fromarray(random.integers(0, 256, (5, 5, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
        for _ in range(count)
    ]


def save_clip(folder: Path, seed: int = 0) -> Path:
    """A random CLIP of two layers in transformers' layout, whose tokenizer reads bytes."""
    from transformers import CLIPConfig, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    folder.mkdir(parents=True, exist_ok=True)
    units = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(unit) for unit in units] + [chr(256 + place) for place in range(256 - len(units))]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: place for place, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    special = {"bos_token": words[-2], "eos_token": words[-1], "unk_token": words[-1], "pad_token": words[-1]}
    tokenizer = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
    torch.manual_seed(seed)
    config = CLIPConfig(
        text_config={**sizes, **ends, "vocab_size": len(words), "max_position_embeddings": 77},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    model = CLIPModel(config)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    side = {"shortest_edge": 32}, {"height": 32, "width": 32}
    CLIPImageProcessorPil(size=side[0], crop_size=side[1]).save_pretrained(folder)
    return folder


def reward_shapes(
    *, width: int = 1024, layers: int = 24, side: int = 224, text: int = 768, text_layers: int = 12, words: int = 30524
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of ImageReward.pt; by default those of the public one."""
    vision, bert = "blip.visual_encoder.", "blip.text_encoder."
    found: dict[str, tuple[int, ...]] = {
        f"{vision}cls_token": (1, 1, width),
        f"{vision}pos_embed": (1, (side // 16) ** 2 + 1, width),
        f"{vision}patch_embed.proj.weight": (width, 3, 16, 16),
        f"{vision}patch_embed.proj.bias": (width,),
    }

    def linear(name: str, out: int, into: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (out, into), (out,)

    def norm(name: str, size: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (size,), (size,)

    for block in (f"{vision}blocks.{place}" for place in range(layers)):
        norm(f"{block}.norm1", width)
        linear(f"{block}.attn.qkv", 3 * width, width)
        linear(f"{block}.attn.proj", width, width)
        norm(f"{block}.norm2", width)
        linear(f"{block}.mlp.fc1", 4 * width, width)
        linear(f"{block}.mlp.fc2", width, 4 * width)
    norm(f"{vision}norm", width)
    found[f"{bert}embeddings.position_ids"] = (1, 512)
    found[f"{bert}embeddings.word_embeddings.weight"] = (words, text)
    found[f"{bert}embeddings.position_embeddings.weight"] = (512, text)
    norm(f"{bert}embeddings.LayerNorm", text)
    for layer in (f"{bert}encoder.layer.{place}" for place in range(text_layers)):
        for part, into in (("attention", text), ("crossattention", width)):
            linear(f"{layer}.{part}.self.query", text, text)
            linear(f"{layer}.{part}.self.key", text, into)
            linear(f"{layer}.{part}.self.value", text, into)
            linear(f"{layer}.{part}.output.dense", text, text)
            norm(f"{layer}.{part}.output.LayerNorm", text)
        linear(f"{layer}.intermediate.dense", 4 * text, text)
        linear(f"{layer}.output.dense", text, 4 * text)
        norm(f"{layer}.output.LayerNorm", text)
    for place, out, into in ((0, 1024, text), (2, 128, 1024), (4, 64, 128), (6, 16, 64), (7, 1, 16)):
        linear(f"mlp.layers.{place}", out, into)
    return found


def random_reward(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors of these shapes, scaled so that states neither vanish nor grow."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        if name.endswith("position_ids"):
            found[name] = torch.arange(512)[None]
        elif ("norm" in name.lower()) and name.endswith("weight"):
            found[name] = 1 + 0.2 * torch.randn(shape, generator=generator)
        else:
            scale = 1.5 * shape[-1] ** -0.5 if len(shape) == 2 else 0.1
            found[name] = scale * torch.randn(shape, generator=generator)
    return found


def save_reward(folder: Path, words: str = "a red cube on the blue table two green balls", seed: int = 0) -> Path:
    """A small random ImageReward.pt, with the vocabulary of its tokenizer beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = [*SPECIAL, *words.split(), *"abcdefghijklmnopqrstuvwxyz", *(f"##{one}" for one in "abcdefghijklmnop")]
    vocabulary = list(dict.fromkeys(vocabulary))
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    shapes = reward_shapes(width=128, layers=2, side=32, text=64, text_layers=2, words=len(vocabulary))
    torch.save(random_reward(shapes, seed), folder / "ImageReward.pt")
    return folder
