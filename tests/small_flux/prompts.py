"""Writes the prompts of the demo-image recipes anew: captions of scenes that the small Flux was not trained on.

python tests/small_flux/prompts.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_flux.shapes import caption, make_scene
from small_flux.train import HELD_OUT

FOLDER = Path(__file__).parents[2] / "recipes" / "image"
FIRST = HELD_OUT + 1000
"""The scenes before it score a training."""
CALIBRATION, EVALUATION, TRAINING = 32, 64, 4096


def prompts(count: int, first: int = FIRST) -> list[str]:
    """So many captions, no two of which are alike."""
    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault(caption(make_scene(0, first), 0, first))
        first += 1
    return list(found)


def files() -> dict[str, str]:
    """Name and text of each file; no prompt is in two of them."""
    found = prompts(CALIBRATION + EVALUATION + TRAINING)
    parts = {
        "demo-image-calibration.txt": found[:CALIBRATION],
        "demo-image-prompts.txt": found[CALIBRATION : CALIBRATION + EVALUATION],
        "demo-image-training.txt": found[CALIBRATION + EVALUATION :],
    }
    return {name: "".join(f"{line}\n" for line in lines) for name, lines in parts.items()}


def main() -> None:
    """Writes the files."""
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
