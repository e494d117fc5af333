"""The contact sheet: pairs of images beside each other with a map of their difference, small enough for one file.

Each image is in the page once, as a data URI, however often it is shown.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from PIL import Image, features

from halfbyte.records.image_metrics import IMAGE_METRICS
from halfbyte.reports import figures
from halfbyte.reports.comparison import Comparison
from halfbyte.reports.flips import spread_out
from halfbyte.reports.pictures import Picture, Pictures
from halfbyte.reports.tables import labels

BYTES = 2_000_000
"""Of all images of a page, as they are written: with the rest the report stays below 3 MB."""
SIDE = 352
"""Pixels of a thumbnail's longer side: a quarter of a laptop's page, sharp on a phone."""
WORST, OTHERS = 18, 6
"""Pairs of a candidate: the worst ones, and some evenly through the rest, so that the usual case is seen as well."""
FULL = 64
"""Difference of a pixel, of 255, from which on the map is at its brightest."""
_QUALITY = 80
_SMALL = 200  # pixels of a side below which an image is shown as squares and not blurred


@dataclass(frozen=True, slots=True)
class Stored:
    """An image as the page holds it."""

    id: str
    width: int
    height: int
    uri: str


@dataclass(frozen=True, slots=True)
class Tile:
    """One pair as the page shows it."""

    number: int
    prompt: str
    seed: int
    baseline: Stored
    candidate: Stored
    difference: Stored | None
    """None where the two have different sizes."""
    values: str
    worst: bool
    """Whether it is one of the worst, and not one of the others."""

    @property
    def small(self) -> bool:
        """Whether its pixels are few enough to be shown as squares."""
        return max(self.baseline.width, self.baseline.height) < _SMALL


@dataclass(frozen=True, slots=True)
class Sheet:
    """The pairs of one candidate."""

    label: str
    counts: str
    order: str
    """By what the pairs are sorted."""
    tiles: list[Tile]
    absent: str | None
    """Why there are no tiles."""


@dataclass(slots=True)
class ContactSheet:
    """All candidates' pairs, and the images that they show."""

    sheets: list[Sheet] = field(default_factory=list)
    stored: dict[str, Stored] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of the images in the page."""
        return sum(len(one.uri) for one in self.stored.values())


def contact_sheet(comparisons: Sequence[Comparison], room: int = BYTES) -> ContactSheet:
    """The sheets of all comparisons that hold images; as many pairs of each as there is room for.

    Args:
        comparisons: Candidates of one baseline.
        room: Bytes for all images together.
    """
    _, names = labels(comparisons)
    found = ContactSheet()
    every = [(label, one) for label, side in zip(names, comparisons, strict=True) for one in side.pictures]
    for place, (label, pictures) in enumerate(every):
        share = (room - found.bytes) // (len(every) - place)
        found.sheets.append(_sheet(label, pictures, found, f"sheet{place}", share))
    return found


def chosen(pairs: Sequence[Picture]) -> list[tuple[Picture, bool]]:
    """The pairs that a sheet shows as far as there is room, and whether each is one of the worst.

    The others come between them, so that some are shown even where not all of the worst ones fit.
    """
    worst, others = list(pairs[:WORST]), spread_out(list(pairs[WORST:]), OTHERS)
    each = WORST // OTHERS
    found: list[tuple[Picture, bool]] = []
    for place, pair in enumerate(worst, start=1):
        found.append((pair, True))
        if place % each == 0 and place // each <= len(others):
            found.append((others[place // each - 1], False))
    return found


def _sheet(label: str, pictures: Pictures, page: ContactSheet, name: str, room: int) -> Sheet:
    tiles: list[Tile] = []
    for pair, worst in chosen(pictures.pairs):
        tile, new = _tile(pair, page, name, pictures.task, worst=worst)
        if tile is None:
            continue
        room -= sum(len(one.uri) for one in new)
        if room < 0:
            break
        page.stored |= {one.id: one for one in new}
        tiles.append(tile)
    total = figures.count(len(pictures.pairs))
    absent = None
    if not tiles:
        absent = "there is no room for it" if room < 0 else "its images are not where they were, or are others by now"
    tiles.sort(key=lambda tile: not tile.worst)  # keeps the order within both
    return Sheet(label, f"{figures.count(len(tiles))} of {total} pairs", _order(pictures), tiles, absent)


def _order(pictures: Pictures) -> str:
    apart = next((one.metric for one in pictures.references), None)
    more = f", and among equal ones those whose {_name(apart)} is worst" if apart else ""
    return f"The pairs that lost most {_name(pictures.primary)} come first{more}"


def _tile(pair: Picture, page: ContactSheet, sheet: str, task: str, *, worst: bool) -> tuple[Tile | None, list[Stored]]:
    """The pair, and what the page does not hold yet of it; None where an image cannot be read."""
    ours, theirs = _read(pair.baseline_file), _read(pair.candidate_file)
    if ours is None or theirs is None:
        return None, []
    name = f"{re.sub(r'[^A-Za-z0-9]', '-', task)}-{pair.index}"
    shared = f"baseline-{name}"  # it is the same for all candidates
    baseline = page.stored.get(shared) or _stored(shared, ours)
    candidate = _stored(f"{sheet}-{name}", theirs)
    difference = None
    if ours.size == theirs.size:
        difference = _stored(f"{sheet}-difference-{name}", difference_map(ours, theirs))
    new = [one for one in (baseline, candidate, difference) if one is not None and one.id not in page.stored]
    tile = Tile(pair.index, pair.prompt, pair.seed, baseline, candidate, difference, _values(pair), worst)
    return tile, new


def _values(pair: Picture) -> str:
    parts = [
        f"{_name(name)} {' → '.join(figures.apart(pair.baseline[name], value))}"
        if name in pair.baseline
        else f"{_name(name)} {figures.figure(value, 2)}"
        for name, value in pair.candidate.items()
    ]
    return " · ".join([*parts, *(["both images are equal"] if pair.equal else [])])


def _name(metric: str | None) -> str:
    known = {"psnr": "PSNR", "ssim": "SSIM", "lpips": "LPIPS", "clip_score": "CLIPScore", "clip_iqa": "CLIP-IQA"}
    known["image_reward"] = "ImageReward"
    return known.get(metric or "", metric or "") if metric in IMAGE_METRICS else str(metric)


def _read(path: Path | None) -> Image.Image | None:
    if path is None:
        return None
    try:
        with Image.open(path) as file:
            return file.convert("RGB")
    except OSError:  # it was there when the records were compared
        return None


def difference_map(ours: Image.Image, theirs: Image.Image) -> Image.Image:
    """How much each pixel differs, averaged over its three colours: dark where nothing, bright from FULL on."""
    one, other = (np.asarray(image, dtype=np.float32) for image in (ours, theirs))
    share = np.clip(np.abs(one - other).mean(axis=2) / FULL, 0, 1)
    colours = colormaps["magma"](share)[..., :3]
    return Image.fromarray((255 * colours).round().astype(np.uint8))


def _stored(name: str, image: Image.Image) -> Stored:
    image = image.copy()
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    kind = "webp" if features.check("webp") else "jpeg"
    image.save(buffer, kind, quality=_QUALITY)
    uri = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
    return Stored(name, image.width, image.height, uri)
