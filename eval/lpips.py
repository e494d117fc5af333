"""LPIPS (Zhang et al. 2018, arXiv:1801.03924): how different two images look to AlexNet; 0 for equal ones.

AlexNet's trained weights are torchvision's file alexnet-owt-7be5be79.pth, which is taken where it is at hand and never
fetched: from the recipe, from $HALFBYTE_WEIGHTS, or from torch's own cache. The weights of its layers are those that
torchmetrics brings along. torchvision itself is not needed.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import cast

import torch
from torch import nn

from halfbyte.eval.image_metrics import Images, Metric, pixels
from halfbyte.eval.metric_weights import WEIGHTS_VARIABLE, missing_weights
from halfbyte.records.digests import file_digest, value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.image_metrics import ALEXNET

SMALLEST = 32
"""Pixels of a side that AlexNet's last layers need."""
_CONVOLUTIONS = {0: (3, 64, 11, 4, 2), 3: (64, 192, 5, 1, 2), 6: (192, 384, 3, 1, 1), 8: (384, 256, 3, 1, 1)}
_CONVOLUTIONS[10] = (256, 256, 3, 1, 1)
"""Channels in and out, size, stride and padding, by torchvision's number of the layer."""
_POOLED = (3, 6)  # layers that a maximum over 3 x 3 pixels comes before
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


class LpipsNetwork(nn.Module):
    """AlexNet up to its fifth rectifier, and one weight for each channel of its five layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.ModuleDict(
            {str(place): nn.Conv2d(*shape[:3], stride=shape[3], padding=shape[4]) for place, shape in _sorted()}
        )
        self.channels = nn.ParameterList([torch.zeros(shape[1]) for _, shape in _sorted()])
        self.register_buffer("shift", torch.tensor(_SHIFT).view(3, 1, 1))
        self.register_buffer("scale", torch.tensor(_SCALE).view(3, 1, 1))

    def forward(self, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        """The distance of each pair of images, shape (pairs,), of pixels between 0 and 1, shape (pairs, 3, h, w)."""
        total = torch.zeros(len(ours), device=ours.device)
        for one, other, weight in zip(self._layers(ours), self._layers(theirs), self.channels, strict=True):
            squares = (_unit(one) - _unit(other)) ** 2 * weight.view(-1, 1, 1)
            total = total + squares.sum(dim=1).mean(dim=(1, 2))
        return total

    def _layers(self, images: torch.Tensor) -> list[torch.Tensor]:
        state = (2 * images - 1 - cast(torch.Tensor, self.shift)) / cast(torch.Tensor, self.scale)
        found = []
        for name, layer in self.features.items():
            if int(name) in _POOLED:
                state = nn.functional.max_pool2d(state, 3, 2)
            state = torch.relu(layer(state))
            found.append(state)
        return found


def _sorted() -> list[tuple[int, tuple[int, int, int, int, int]]]:
    return sorted(_CONVOLUTIONS.items())


def _unit(state: torch.Tensor) -> torch.Tensor:
    return state / (state.square().sum(dim=1, keepdim=True) + 1e-8).sqrt()


def load_network(path: Path) -> LpipsNetwork:
    """The network from torchvision's file of AlexNet.

    Raises:
        UserError: when it is no such file.
    """
    network = LpipsNetwork()
    with as_file(files("torchmetrics.functional.image").joinpath("lpips_models", "alex.pth")) as heads:
        weights = torch.load(heads, map_location="cpu", weights_only=True)
    for place, channel in enumerate(network.channels):
        channel.data = weights[f"lin{place}.model.1.weight"].flatten()
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        wanted = {f"features.{name}": name for name in network.features.state_dict()}
        network.features.load_state_dict({new: content[name] for name, new in wanted.items()})
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        reason = f"{path} is another file ({str(error).strip().splitlines()[0]})"
        raise missing_weights("lpips", ALEXNET, reason) from None
    return network.eval().requires_grad_(False)


class Lpips(Metric):
    """The distance of an image from the baseline's."""

    def __init__(self, network: LpipsNetwork, device: str, identity: str = "") -> None:
        super().__init__("lpips")
        self.network = network.to(device)
        self.device = device
        self.identity = identity

    @classmethod
    def open(cls, local: str | None, device: str) -> Lpips:
        """See open_metric."""
        path = _at_hand(local)
        return cls(load_network(path), device, value_digest([file_digest(path)]))

    @torch.inference_mode()
    def _batch(self, images: Images, prompts: Sequence[str], references: Images | None) -> list[float]:
        del prompts
        found = []
        for ours, theirs in zip(images, references or [], strict=True):
            if min(ours.size) < SMALLEST:
                raise UserError(
                    f"lpips needs images of {SMALLEST} x {SMALLEST} pixels, and one has {ours.width} x {ours.height}",
                    "leave lpips out, or draw larger images",
                )
            one, other = (pixels(image)[None].to(self.device) for image in (ours, theirs))
            found.append(float(self.network(one, other)))
        return found


def _at_hand(local: str | None) -> Path:
    if local is not None:
        path = Path(local).expanduser()
        path = path / ALEXNET.id if path.is_dir() else path
        if not path.is_file():
            raise missing_weights("lpips", ALEXNET, f"weights_of names {local} for it, and there is no such file")
        return path
    root = os.environ.get(WEIGHTS_VARIABLE)
    places = [Path(root).expanduser() / ALEXNET.id] if root else []
    places.append(Path(torch.hub.get_dir()) / "checkpoints" / ALEXNET.id)
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise missing_weights("lpips", ALEXNET, "they are in none of the places where they are looked for")
    return found
