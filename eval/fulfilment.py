"""Whether an image shows what its prompt asks for, found in the pixels alone, for prompts of coloured shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, optimize

from halfbyte.eval.shape_prompts import BACKGROUNDS, COLOURS, SHAPES, Group, Wanted, read_prompt

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.float64]

CONTRAST = 70.0
"""Distance from the background, of RGB in 0..255, from which on a pixel belongs to a thing."""
SMALLEST = 0.006
"""Part of the image that a thing covers at least; less is noise."""
LARGE = 0.23
"""Side of a square of a thing's area, as part of the image's side, from which on it is large."""
LIKENESS = 0.78
"""Overlap with the ideal shape (intersection over union) below which a thing is no shape at all."""
EDGES = {"low": 0.44, "high": 0.56}
"""Where top or left ends and bottom or right begins, as part of the side."""
MIDDLE = (0.34, 0.66)
APART = 0.08
"""How far one thing is left of another at least, as part of the side."""


@dataclass(frozen=True)
class Thing:
    """What was found in an image."""

    x: float
    """Of its centre of mass, as part of the image's width, from the left."""
    y: float
    """As part of the height, from the top."""
    size: float
    """Side of a square of its area, as part of the image's side."""
    colour: str
    shape: str | None
    """None where it is like none of the shapes."""


@dataclass(frozen=True)
class Fulfilment:
    """How far an image does what its prompt asks for."""

    parts: dict[str, float]
    """0..1 for each thing the prompt says: count, colour, shape, size, position, relation, background."""

    @property
    def score(self) -> float:
        """Mean of the parts, 0..1; 1 where all is as the prompt says."""
        return sum(self.parts.values()) / len(self.parts)


def fulfilment(image: Image, prompt: str) -> Fulfilment:
    """Looks at an image.

    Args:
        image: Of any size.
        prompt: As read_prompt reads it.

    Raises:
        UserError: for a prompt that asks for something else than coloured shapes.
    """
    wanted = read_prompt(prompt)
    things, background = find_things(image)
    return _compare(wanted, things, background)


def find_things(image: Image) -> tuple[list[Thing], str]:
    """The things in an image, and the colour of what is behind them.

    What lies behind is the middle colour of the border. A thing is a connected piece of pixels away from it; pieces of
    two colours are divided. Colour is the direction from the background in RGB, which blurred edges have too.
    """
    sharp = np.asarray(image.convert("RGB"), dtype=np.float64)
    rgb = np.stack([ndimage.median_filter(sharp[..., channel], size=3) for channel in range(3)], axis=-1)
    border = np.concatenate([rgb[0], rgb[-1], rgb[:, 0], rgb[:, -1]])
    behind = np.median(border, axis=0)
    name = min(BACKGROUNDS, key=lambda one: float(np.linalg.norm(behind - BACKGROUNDS[one])))
    away = np.linalg.norm(rgb - behind, axis=-1)
    things: list[Thing] = []
    for mask in _pieces(away > CONTRAST):
        for part, colour in _by_colour(rgb, mask, behind):
            things.append(_thing(sharp, part, colour, behind))
    return [thing for thing in things if thing.size**2 >= SMALLEST], name


def _pieces(mask: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    labels, count = cast(Any, ndimage.label(mask))
    least = SMALLEST * mask.size * 0.7  # a blurred edge is not all above the contrast
    return [labels == number for number in range(1, count + 1) if (labels == number).sum() >= least]


def _by_colour(rgb: Pixels, mask: NDArray[np.bool_], behind: Pixels) -> list[tuple[NDArray[np.bool_], str]]:
    """A piece divided into its colours, as far as each has a core of its own."""
    names = list(COLOURS)
    core = cast(NDArray[np.bool_], ndimage.binary_erosion(mask))
    if core.sum() < 4:
        core = mask
    palette = np.array([COLOURS[name] for name in names], dtype=np.float64)
    nearest = np.linalg.norm(rgb[core][:, None, :] - palette, axis=-1).argmin(axis=1)
    least = max(4.0, 0.15 * core.sum(), 0.3 * SMALLEST * mask.size)
    counts = np.bincount(nearest, minlength=len(names))
    present = [number for number in range(len(names)) if counts[number] >= least]
    if len(present) < 2:
        middle = np.median(rgb[core], axis=0)
        return [(mask, names[int(np.linalg.norm(palette - middle, axis=1).argmin())])]
    ways = palette[present] - behind
    towards = (rgb[mask] - behind) @ (ways / np.linalg.norm(ways, axis=1, keepdims=True)).T
    labels = np.full(mask.shape, -1)
    labels[mask] = towards.argmax(axis=1)
    near = np.linalg.norm(rgb[mask][:, None, :] - palette[present], axis=-1)
    inner = labels.copy()
    inner[mask] = near.argmin(axis=1)
    labels = np.where(core, inner, labels)
    return [
        (part, names[number])
        for index, number in enumerate(present)
        for part in _pieces(cast(NDArray[np.bool_], ndimage.binary_opening(labels == index)))
    ]


def _thing(rgb: Pixels, mask: NDArray[np.bool_], colour: str, behind: Pixels) -> Thing:
    """Measures a piece by how much of each pixel it covers, which smooth edges tell."""
    height, width = mask.shape
    way = np.median(rgb[mask], axis=0) - behind
    near = cast(NDArray[np.bool_], ndimage.binary_dilation(mask, iterations=2))
    (rows, columns) = window = ndimage.find_objects(near.astype(int))[0]
    covered = np.clip((rgb[window] - behind) @ way / (way @ way), 0.0, 1.0) * near[window]
    covered = np.where(covered < 0.15, 0.0, covered)
    down, across = np.mgrid[: covered.shape[0], : covered.shape[1]] + 0.5
    area = covered.sum()
    y, x = (covered * down).sum() / area, (covered * across).sum() / area
    likeness = {shape: _overlap(covered, _ideal(shape, x, y, area, covered.shape)) for shape in SHAPES}
    best = max(likeness, key=lambda shape: likeness[shape])
    return Thing(
        float((columns.start + x) / width),
        float((rows.start + y) / height),
        float(np.sqrt(area / (height * width))),
        colour,
        best if likeness[best] >= LIKENESS else None,
    )


def _overlap(one: Pixels, other: Pixels) -> float:
    return float(np.minimum(one, other).sum() / np.maximum(one, other).sum())


def _ideal(shape: str, x: float, y: float, area: float, size: tuple[int, ...], fine: int = 4) -> Pixels:
    """A shape of this area and centre of mass, in pixels: how much of each pixel it covers."""
    height, width = size
    rows, columns = (np.mgrid[: height * fine, : width * fine] + 0.5) / fine
    right, down = columns - x, rows - y
    if shape == "circle":
        inside = right**2 + down**2 <= area / np.pi
    elif shape == "square":
        half = np.sqrt(area) / 2
        inside = (np.abs(right) <= half) & (np.abs(down) <= half)
    else:  # equilateral, a corner at the top
        side = np.sqrt(4 * area / np.sqrt(3))
        floor = side / (2 * np.sqrt(3))
        inside = (down <= floor) & (np.sqrt(3) * np.abs(right) <= down + 2 * floor)
    return cast(Pixels, inside.reshape(height, fine, width, fine).mean(axis=(1, 3)))


def _compare(wanted: Wanted, things: list[Thing], background: str) -> Fulfilment:
    asked = [group for group in wanted.groups for _ in range(group.count)]
    most = max(len(asked), len(things))
    fits = [[_fit(group, thing) for thing in things] for group in asked]
    values = np.array([[sum(fit.values()) / len(fit) for fit in row] for row in fits]).reshape(len(asked), len(things))
    pairs = list(zip(*optimize.linear_sum_assignment(-values), strict=True))
    parts = {"count": max(0.0, 1 - abs(len(asked) - len(things)) / len(asked))}
    for name in ("colour", "shape", "size", "position"):
        saying = [number for number, group in enumerate(asked) if name in _said(group)]
        if saying:
            met = sum(fits[row][column].get(name, 0.0) for row, column in pairs)
            parts[name] = met / (len(saying) + most - len(asked))
    if wanted.relation is not None:
        first, second = (_centre(group, asked, things, pairs) for group in wanted.groups)
        parts["relation"] = float(first is not None and second is not None and _stands(wanted.relation, first, second))
    if wanted.background is not None:
        parts["background"] = float(background == wanted.background)
    return Fulfilment(parts)


def _said(group: Group) -> list[str]:
    said = {
        "colour": group.colour is not None,
        "shape": True,
        "size": group.size is not None,
        "position": group.row is not None or group.column is not None,
    }
    return [name for name, is_said in said.items() if is_said]


def _fit(group: Group, thing: Thing) -> dict[str, float]:
    """What of all that is said of a group holds for a thing, 0 or 1 each."""
    holds = {
        "colour": thing.colour == group.colour,
        "shape": thing.shape == group.shape,
        "size": ("large" if thing.size >= LARGE else "small") == group.size,
        "position": _lies(thing.y, group.row, "top") and _lies(thing.x, group.column, "left"),
    }
    return {name: float(holds[name]) for name in _said(group)}


def _lies(at: float, place: str | None, first: str) -> bool:
    if place is None:
        return True
    if place == "middle":
        return MIDDLE[0] <= at <= MIDDLE[1]
    return at <= EDGES["low"] if place == first else at >= EDGES["high"]


def _centre(
    group: Group, asked: list[Group], things: list[Thing], pairs: list[tuple[Any, Any]]
) -> tuple[float, float] | None:
    found = [things[column] for row, column in pairs if asked[row] is group]
    if not found:
        return None
    return sum(thing.x for thing in found) / len(found), sum(thing.y for thing in found) / len(found)


def _stands(relation: str, first: tuple[float, float], second: tuple[float, float]) -> bool:
    right, down = first[0] - second[0], first[1] - second[1]
    return {"left": -right, "right": right, "above": -down, "below": down}[relation] >= APART
