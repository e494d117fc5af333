"""Pictures of coloured shapes with their captions, each drawn from a seed and a number: what the small Flux learns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from halfbyte.eval.shape_prompts import BACKGROUNDS, COLOURS, RELATIONS, SHAPES, SIZES, Group, Wanted

SIDE = 64
"""Pixels of a picture's side."""
RADII = {"small": (5.5, 7.0), "large": (10.5, 12.0)}
"""Pixels, from the centre of a circle; squares and triangles have about its area."""
GAP = 3.0
"""Pixels between two things, and between a thing and the border."""
_OVERSAMPLED = 4
_NUMBERS = {1: ("a", "one", "1"), 2: ("two", "2"), 3: ("three", "3"), 4: ("four", "4")}
_BEGINNINGS = ("", "", "", "a picture of ", "draw ", "please draw ", "i want ", "show me ")


@dataclass(frozen=True)
class Placed:
    """A thing in a picture; x, y and radius in pixels."""

    x: float
    y: float
    radius: float
    shape: str
    colour: str


@dataclass(frozen=True)
class Scene:
    """What is in a picture, and what a caption may say of it."""

    wanted: Wanted
    things: tuple[Placed, ...]
    background: str


def make_scene(seed: int, number: int) -> Scene:
    """The scene of this number; the same for the same two numbers, whichever others are made."""
    random = np.random.default_rng((seed, number))
    while True:
        scene = _two_kinds(random) if random.random() < 0.3 else _one_kind(random)
        if scene is not None:
            return scene


def draw(scene: Scene) -> Image.Image:
    """The picture, RGB, SIDE x SIDE, with smooth edges."""
    scale = _OVERSAMPLED
    image = Image.new("RGB", (SIDE * scale, SIDE * scale), BACKGROUNDS[scene.background])
    pen = ImageDraw.Draw(image)
    for thing in scene.things:
        colour, x, y, radius = COLOURS[thing.colour], thing.x * scale, thing.y * scale, thing.radius * scale
        if thing.shape == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        elif thing.shape == "square":
            half = 0.9 * radius
            pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)
        else:
            reach = 1.3 * radius  # from the centre of mass to a corner
            corners = [math.radians(angle) for angle in (-90, 30, 150)]
            pen.polygon([(x + reach * math.cos(a), y + reach * math.sin(a)) for a in corners], fill=colour)
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def caption(scene: Scene, seed: int, number: int) -> str:
    """A caption of it as a person would write it; other numbers give other words for the same."""
    random = np.random.default_rng((seed, number, 1))
    wanted = scene.wanted
    parts = [_words_of(group, random) for group in wanted.groups]
    if len(parts) == 2:
        joint = str(random.choice(RELATIONS[wanted.relation])) if wanted.relation else "and"
        text = f"{parts[0]} {joint} {parts[1]}"
    else:
        text = parts[0]
    if wanted.background == "black" or random.random() < 0.2:
        text += f" on a {scene.background} background"
    beginning = str(random.choice(_BEGINNINGS))
    if not beginning and random.random() < 0.2:
        beginning = "there is " if wanted.groups[0].count == 1 else "there are "
    text = beginning + text
    if random.random() < 0.3:
        text = text[0].upper() + text[1:] + "."
    return text


def _words_of(group: Group, random: np.random.Generator) -> str:
    words = [str(random.choice(_NUMBERS[group.count]))]
    if group.size is not None:
        words.append(str(random.choice(SIZES[group.size])))
    words += [group.colour or "", group.shape + ("s" if group.count > 1 else "")]
    if words[0] == "a" and words[1][0] in "aeiou":
        words[0] = "an"
    row, column = group.row, group.column
    if (row, column) == ("middle", "middle"):
        words.append(f"in the {random.choice(['middle', 'center', 'centre'])}")
    elif row in ("top", "bottom") and column in ("left", "right"):
        other = {"top": "upper", "bottom": "lower"}[row]
        words.append(str(random.choice([f"at the {row} {column}", f"in the {other} {column} corner"])))
    elif row in ("top", "bottom"):
        words.append(f"at the {row}")
    elif column is not None:
        words.append(f"on the {column}")
    return " ".join(words)


def _one_kind(random: np.random.Generator) -> Scene | None:
    count, size = int(random.integers(1, 5)), str(random.choice(list(SIZES)))
    shape, colour = str(random.choice(SHAPES)), str(random.choice(list(COLOURS)))
    row = column = None
    if count == 1:
        row, column = (
            str(random.choice(names)) for names in (("top", "middle", "bottom"), ("left", "middle", "right"))
        )
    elif size == "small" and random.random() < 0.5:
        side = str(random.choice(("top", "bottom", "left", "right")))
        row, column = (side, None) if side in ("top", "bottom") else (None, side)
    placed: list[Placed] = []
    for _ in range(count):
        radius = random.uniform(*RADII[size])
        found = _free_place(random, radius, placed, _span(column, radius), _span(row, radius))
        if found is None:
            return None
        placed.append(Placed(*found, radius, shape, colour))
    background = "black" if random.random() < 0.3 else "white"
    # "at the top" is what is said of the middle of the top.
    said_row = None if row == "middle" and column in ("left", "right") else row
    said_column = None if column == "middle" and row in ("top", "bottom") else column
    group = Group(count, shape, colour, size, said_row, said_column)
    return Scene(Wanted((group,), background="black" if background == "black" else None), tuple(placed), background)


def _two_kinds(random: np.random.Generator) -> Scene | None:
    groups, placed = [], []
    for _ in range(2):
        size = str(random.choice(list(SIZES)))
        shape, colour = str(random.choice(SHAPES)), str(random.choice(list(COLOURS)))
        radius = random.uniform(*RADII[size])
        found = _free_place(random, radius, placed, _span(None, radius), _span(None, radius))
        if found is None:
            return None
        groups.append(Group(1, shape, colour, size))
        placed.append(Placed(*found, radius, shape, colour))
    if (groups[0].shape, groups[0].colour) == (groups[1].shape, groups[1].colour):
        return None
    apart_x, apart_y = placed[0].x - placed[1].x, placed[0].y - placed[1].y
    relation = None
    if max(abs(apart_x), abs(apart_y)) > 0.3 * SIDE and random.random() < 0.8:
        across = abs(apart_x) > abs(apart_y)
        relation = ("left" if apart_x < 0 else "right") if across else ("above" if apart_y < 0 else "below")
    background = "black" if random.random() < 0.3 else "white"
    said = Wanted(tuple(groups), relation, "black" if background == "black" else None)
    return Scene(said, tuple(placed), background)


def _reach(radius: float) -> float:
    return 1.3 * radius + GAP / 2


def _span(place: str | None, radius: float) -> tuple[float, float]:
    """From where to where a centre may be on one axis."""
    low, high = _reach(radius), SIDE - _reach(radius)
    if place in ("left", "top"):
        return low, max(low + 0.5, 0.36 * SIDE)
    if place in ("right", "bottom"):
        return min(high - 0.5, 0.64 * SIDE), high
    if place == "middle":
        return 0.44 * SIDE, 0.56 * SIDE
    return low, high


def _free_place(
    random: np.random.Generator,
    radius: float,
    placed: list[Placed],
    across: tuple[float, float],
    down: tuple[float, float],
) -> tuple[float, float] | None:
    for _ in range(60):
        x, y = random.uniform(*across), random.uniform(*down)
        if all(math.hypot(x - one.x, y - one.y) > 1.15 * (radius + one.radius) + GAP for one in placed):
            return x, y
    return None
