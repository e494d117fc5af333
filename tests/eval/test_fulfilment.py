"""Fulfilment is exact on drawn images, lower for wrong captions, and stands blur and noise."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageFilter
from small_flux.shapes import Scene, caption, draw, make_scene

from halfbyte.eval.fulfilment import find_things, fulfilment
from halfbyte.eval.shape_prompts import COLOURS, SHAPES, Group, Wanted, read_prompt
from halfbyte.records.errors import UserError

DRAWN = 600
SCENES = [make_scene(7, number) for number in range(DRAWN)]
CAPTIONS = [caption(scene, 7, number) for number, scene in enumerate(SCENES)]
IMAGES = [draw(scene) for scene in SCENES]


def scores(images: list[Image.Image], prompts: list[str]) -> list[float]:
    return [fulfilment(image, prompt).score for image, prompt in zip(images, prompts, strict=True)]


def test_a_caption_is_read_as_the_scene_it_was_written_for() -> None:
    for scene, text in zip(SCENES, CAPTIONS, strict=True):
        wanted = read_prompt(text)
        assert wanted.groups == scene.wanted.groups, text
        assert wanted.relation == scene.wanted.relation, text
        assert wanted.background in (scene.background, None)


def test_every_drawn_image_fulfils_its_caption_in_each_attribute() -> None:
    seen: Counter[str] = Counter()
    for number, (image, text) in enumerate(zip(IMAGES, CAPTIONS, strict=True)):
        parts = fulfilment(image, text).parts
        assert set(parts.values()) == {1.0}, (number, text, parts, find_things(image))
        seen.update(parts)
    assert seen["count"] == DRAWN
    assert min(seen.values()) > 80  # each attribute is said often enough for this to mean something


def test_things_are_found_where_they_were_drawn() -> None:
    for scene, image in zip(SCENES[:100], IMAGES, strict=False):
        found, background = find_things(image)
        assert background == scene.background
        drawn = sorted((thing.x / 64, thing.y / 64, thing.colour, thing.shape) for thing in scene.things)
        for one, (x, y, colour, shape) in zip(sorted(found, key=lambda thing: thing.x), drawn, strict=True):
            assert one.x == pytest.approx(x, abs=0.01)
            assert one.y == pytest.approx(y, abs=0.015)
            assert (one.colour, one.shape) == (colour, shape)


def _wrong(group: Group) -> list[tuple[str, Group]]:
    other = {"small": "large", "large": "small"}
    colours, shapes = list(COLOURS), list(SHAPES)
    wrong = [
        ("count", replace(group, count=group.count % 4 + 1)),
        ("colour", replace(group, colour=colours[(colours.index(group.colour or "red") + 1) % len(colours)])),
        ("shape", replace(group, shape=shapes[(shapes.index(group.shape) + 1) % len(shapes)])),
        ("size", replace(group, size=other[group.size or "small"])),
    ]
    if group.row in ("top", "bottom"):
        wrong.append(("position", replace(group, row={"top": "bottom", "bottom": "top"}[group.row])))
    return wrong


def test_a_caption_that_is_wrong_in_one_attribute_scores_lower_and_says_in_which() -> None:
    tried: Counter[str] = Counter()
    for number, (scene, image) in enumerate(zip(SCENES, IMAGES, strict=True)):
        if len(scene.wanted.groups) != 1:
            continue
        for attribute, group in _wrong(scene.wanted.groups[0]):
            text = caption(replace(scene, wanted=replace(scene.wanted, groups=(group,))), 7, number)
            found = fulfilment(image, text)
            assert found.score < 1.0, (text, found)
            assert found.parts[attribute] < 1.0, (text, found)
            if attribute != "count":
                assert found.parts[attribute] == 0.0, (text, found)
                rest = [value for name, value in found.parts.items() if name != attribute]
                assert rest == [1.0] * len(rest), (text, found)
            tried[attribute] += 1
    assert min(tried.values()) > 80


def test_a_turned_relation_is_not_fulfilled() -> None:
    turned = {"left": "right", "right": "left", "above": "below", "below": "above"}
    pairs = [(scene, image) for scene, image in zip(SCENES, IMAGES, strict=True) if scene.wanted.relation]
    assert len(pairs) > 60
    for scene, image in pairs:
        wanted = replace(scene.wanted, relation=turned[scene.wanted.relation or ""])
        assert fulfilment(image, caption(replace(scene, wanted=wanted), 7, 0)).parts["relation"] == 0.0


def test_the_caption_of_another_image_scores_far_lower() -> None:
    others = CAPTIONS[1:] + CAPTIONS[:1]
    assert np.mean(scores(IMAGES, CAPTIONS)) == 1.0
    assert np.mean(scores(IMAGES, others)) < 0.5


@pytest.mark.parametrize("damage", ["blur", "noise", "both", "jpeg-like levels"])
def test_a_blurred_or_noisy_image_keeps_its_score(damage: str) -> None:
    random = np.random.default_rng(0)
    damaged = []
    for image in IMAGES[:300]:
        if damage in ("blur", "both"):
            image = image.filter(ImageFilter.GaussianBlur(1.0))
        values = np.asarray(image, dtype=np.float64)
        if damage in ("noise", "both"):
            values = values + random.normal(0, 20, values.shape)
        if damage == "jpeg-like levels":
            values = np.round(values / 32) * 32
        damaged.append(Image.fromarray(np.clip(values, 0, 255).astype(np.uint8)))
    kept = np.array(scores(damaged, CAPTIONS[:300]))
    assert kept.mean() > 0.98
    assert (kept == 1.0).mean() > {"blur": 0.92, "both": 0.88}.get(damage, 0.98)


def test_nothing_and_noise_fulfil_next_to_nothing() -> None:
    random = np.random.default_rng(1)
    empty = Image.new("RGB", (64, 64), (255, 255, 255))
    noise = [Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8)) for _ in range(20)]
    assert fulfilment(empty, "a red circle at the top").score == 0.0
    assert np.mean(scores(noise, CAPTIONS[:20])) < 0.3


@pytest.mark.parametrize("side", [32, 128, 256])
def test_the_size_of_the_image_does_not_matter(side: int) -> None:
    larger = [image.resize((side, side), Image.Resampling.BICUBIC) for image in IMAGES[:40]]
    assert np.mean(scores(larger, CAPTIONS[:40])) > 0.99


def test_touching_things_of_two_colours_are_two() -> None:
    scene = make_scene(0, 0)
    one = replace(scene.things[0], x=20.0, y=32.0, radius=11.0, shape="square", colour="red")
    two = replace(one, x=20.0 + 19.8, colour="blue")
    things, _ = find_things(draw(Scene(Wanted((Group(2, "square"),)), (one, two), "white")))
    assert sorted((thing.colour, thing.shape) for thing in things) == [("blue", "square"), ("red", "square")]


@pytest.mark.parametrize(
    "prompt",
    ["a photo of a cat", "", "red", "a red hexagon", "no red circle", "a red circle without a blue square",
     "five red circles", "circles", "a red circle and a blue square and a green triangle",
     "a red circle at the top at the left", "画一个红色的圆"],
)  # fmt: skip
def test_a_prompt_that_is_not_wholly_understood_is_refused(prompt: str) -> None:
    with pytest.raises(UserError):
        read_prompt(prompt)
