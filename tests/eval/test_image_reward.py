"""ImageReward's loader: the public checkpoint's names and shapes, and a forward written without transformers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from image_networks import images, random_reward, reward_shapes, save_reward
from torch.nn.functional import gelu, layer_norm

from halfbyte.eval.image_metrics import open_metric
from halfbyte.eval.image_reward import MEAN, STD, RewardNetwork, load_network, prepared, translated
from halfbyte.records.errors import UserError

PROMPTS = ["a red cube on the table", "two green balls", "A Blue zebra"]
SMALL = {"width": 128, "layers": 2, "side": 32, "text": 64, "text_layers": 2, "words": 64}


class Plain:
    """The network as its paper and BLIP's have it, on the checkpoint's own names, in float64."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}

    def linear(self, name: str, state: torch.Tensor) -> torch.Tensor:
        return state @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]

    def norm(self, name: str, state: torch.Tensor, eps: float) -> torch.Tensor:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return layer_norm(state, weight.shape, weight, bias, eps)

    @staticmethod
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        heads = q.shape[-1] // 64
        q, k, v = (one.unflatten(-1, (heads, 64)).transpose(1, 2) for one in (q, k, v))
        logits = q @ k.transpose(-1, -2) / 8
        if mask is not None:
            logits = logits.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
        return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def vision(self, pixels: torch.Tensor) -> torch.Tensor:
        name = "blip.visual_encoder."
        kernel = self.tensors[f"{name}patch_embed.proj.weight"]
        patches = pixels.double().unfold(2, 16, 16).unfold(3, 16, 16)  # (n, 3, rows, columns, 16, 16)
        state = torch.einsum("ncrwij,dcij->nrwd", patches, kernel).flatten(1, 2)
        state = state + self.tensors[f"{name}patch_embed.proj.bias"]
        first = self.tensors[f"{name}cls_token"].expand(len(state), -1, -1)
        state = torch.cat([first, state], dim=1) + self.tensors[f"{name}pos_embed"]
        layers = len({key.split(".")[3] for key in self.tensors if key.startswith(f"{name}blocks.")})
        for block in (f"{name}blocks.{place}" for place in range(layers)):
            q, k, v = self.linear(f"{block}.attn.qkv", self.norm(f"{block}.norm1", state, 1e-6)).chunk(3, dim=-1)
            state = state + self.linear(f"{block}.attn.proj", self.attention(q, k, v))
            inner = gelu(self.linear(f"{block}.mlp.fc1", self.norm(f"{block}.norm2", state, 1e-6)))
            state = state + self.linear(f"{block}.mlp.fc2", inner)
        return self.norm(f"{name}norm", state, 1e-6)

    def __call__(self, pixels: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen, name = self.vision(pixels), "blip.text_encoder."
        state = self.tensors[f"{name}embeddings.word_embeddings.weight"][tokens]
        state = state + self.tensors[f"{name}embeddings.position_embeddings.weight"][: tokens.shape[1]]
        state = self.norm(f"{name}embeddings.LayerNorm", state, 1e-12)
        layers = len({key.split(".")[4] for key in self.tensors if key.startswith(f"{name}encoder.layer.")})
        for layer in (f"{name}encoder.layer.{place}" for place in range(layers)):
            for part, other, hidden in (("attention", None, mask), ("crossattention", seen, None)):
                source = state if other is None else other
                q = self.linear(f"{layer}.{part}.self.query", state)
                k = self.linear(f"{layer}.{part}.self.key", source)
                v = self.linear(f"{layer}.{part}.self.value", source)
                found = self.linear(f"{layer}.{part}.output.dense", self.attention(q, k, v, hidden))
                state = self.norm(f"{layer}.{part}.output.LayerNorm", state + found, 1e-12)
            inner = self.linear(f"{layer}.output.dense", gelu(self.linear(f"{layer}.intermediate.dense", state)))
            state = self.norm(f"{layer}.output.LayerNorm", state + inner, 1e-12)
        state = state[:, 0]
        for place in (0, 2, 4, 6, 7):
            state = self.linear(f"mlp.layers.{place}", state)
        return (state[:, 0] - MEAN) / STD


def inputs(side: int, words: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, words, (3, 35), generator=generator)
    mask = (torch.arange(35)[None] < torch.tensor([[35], [7], [20]])).long()
    return torch.randn((3, 3, side, side), generator=generator), tokens, mask


def test_a_small_checkpoint_of_the_public_names_gives_the_rewards_of_an_independent_forward(tmp_path: Path) -> None:
    tensors = random_reward(reward_shapes(**SMALL))
    torch.save(tensors, tmp_path / "ImageReward.pt")
    given = inputs(32, 64)
    with torch.no_grad():
        ours, theirs = load_network(tmp_path / "ImageReward.pt")(*given), Plain(tensors)(*given)
    assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-4)
    assert float(theirs.std()) > 0.05


def test_names_and_shapes_of_the_network_are_those_of_the_public_checkpoint() -> None:
    shapes = reward_shapes()
    with torch.device("meta"):
        tensors = translated({name: torch.empty(shape) for name, shape in shapes.items()})
        network = RewardNetwork(tensors)
    found = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    assert found == {name: tuple(value.shape) for name, value in tensors.items()}
    assert network.image_size == 224
    assert 4 * sum(value.numel() for value in tensors.values()) == pytest.approx(1.79e9, rel=0.005)  # bytes of the file


@pytest.mark.gpu  # for its memory: 2 GB of weights, once more in float64
def test_a_checkpoint_of_the_public_size_gives_the_rewards_of_an_independent_forward(tmp_path: Path) -> None:
    tensors = random_reward(reward_shapes())
    torch.save(tensors, tmp_path / "ImageReward.pt")
    given = inputs(224, 30522)
    with torch.no_grad():
        ours, theirs = load_network(tmp_path / "ImageReward.pt")(*given), Plain(tensors)(*given)
    assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-4)
    assert float(theirs.std()) > 0.01


def test_the_metric_reads_prompts_in_lower_case_cut_at_35_tokens_and_counts_what_it_cuts(tmp_path: Path) -> None:
    metric = open_metric("image_reward", {"image_reward": str(save_reward(tmp_path))})
    given = images(3)
    values = metric.scores(given, PROMPTS)
    assert len(set(values)) == 3
    assert metric.scores(given, [prompt.upper() for prompt in PROMPTS]) == pytest.approx(values, abs=1e-5)
    assert metric.cut(["a " * 33, "a " * 40, "a cat"]) == [0, 7, 0]
    assert metric.scores(given[:1], ["a " * 40]) == metric.scores(given[:1], ["a " * 33])
    assert metric.scores(given[:1], ["a " * 32]) != metric.scores(given[:1], ["a " * 33])
    assert metric.identity


def test_an_image_is_cut_to_its_middle_square() -> None:
    wide = images(1, (90, 60))[0]
    assert prepared(wide, 32).shape == (3, 32, 32)
    middle = wide.resize((48, 32), 3).crop((8, 0, 40, 32))
    assert torch.equal(prepared(wide, 32), prepared(middle, 32))


@pytest.mark.parametrize("missing", ["mlp.layers.7.bias", "blip.visual_encoder.norm.weight", "blip.text_encoder."])
def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path, missing: str) -> None:
    tensors = {name: value for name, value in random_reward(reward_shapes(**SMALL)).items() if missing not in name}
    torch.save(tensors, tmp_path / "ImageReward.pt")
    with pytest.raises(UserError, match="image_reward needs THUDM/ImageReward"):
        load_network(tmp_path / "ImageReward.pt")


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04rubbish"])
def test_a_file_that_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ImageReward.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"no checkpoint that can be read"):
        load_network(tmp_path / "ImageReward.pt")


def test_a_checkpoint_that_would_run_code_is_not_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"blip": Evil()}, tmp_path / "ImageReward.pt")
    with pytest.raises(UserError, match="no checkpoint that can be read"):
        load_network(tmp_path / "ImageReward.pt")
    assert not (tmp_path / "ran").exists()
