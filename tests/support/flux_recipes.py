"""The shipped Flux recipes, pointed at a tiny pipeline and cut to some steps of a few prompts."""

from __future__ import annotations

import json
from pathlib import Path

from halfbyte.recipes.find import load_recipe, shipped_files
from halfbyte.recipes.schema import Recipe

PROMPTS = ("a red circle", "two blue squares", "a large green triangle left of a small red circle")
SIZE, LENGTH = 16, 16


def flux_recipes() -> list[str]:
    """The names of the shipped recipes of FLUX.1."""
    return [name for name in shipped_files() if name.startswith("flux1-")]


def control_images(folder: Path) -> Path:
    """A prompt file whose every prompt has a control image beside it."""
    from PIL import Image

    lines = []
    for number, prompt in enumerate(PROMPTS):
        Image.new("RGB", (SIZE, SIZE), (40 * number, 90, 200 - 40 * number)).save(folder / f"{number}.png")
        lines.append(json.dumps({"prompt": prompt, "control_image": f"{number}.png"}))
    path = folder / "controlled.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tiny_recipe(name: str, pipeline: Path, prompts: Path, *, steps: int = 2, more: tuple[str, ...] = ()) -> Recipe:
    """A shipped recipe for a tiny pipeline; SVDQuant's branch is made small enough to leave something to quantize."""
    settings = [
        f"model.id={pipeline}",
        f"quantize.calibration.sources=[{{dataset: {prompts}}}]",
        f"evaluate.images.prompts={prompts}",
    ]
    for block in ("quantize.calibration.images", "evaluate.images"):
        settings += [f"{block}.steps={steps}", f"{block}.size={SIZE}", f"{block}.max_sequence_length={LENGTH}"]
    if name.endswith("svdquant"):
        settings.append("quantize.algorithm.lowrank=4")
    return load_recipe(name, [*settings, *more])
