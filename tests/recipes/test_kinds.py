"""A recipe says how its model is asked: one that draws by images, a language model by texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.recipes.find import load_recipe
from halfbyte.records.errors import UserError


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("flux1-dev-nvfp4", "quantize.calibration.images=null", "quantize.calibration.images is missing"),
        ("flux1-dev-nvfp4", "quantize.kv_cache=fp8", "a model that draws has no KV cache"),
        ("flux1-dev-nvfp4", "model.kind=causal-lm", "is for a model that draws"),
        ("demo-fp8", "model.kind=flux", "is missing: a model of kind flux draws"),
        ("flux1-dev-nvfp4", "quantize.calibration.images.size=1000", "multiples of 16 pixels"),
    ],
)
def test_the_blocks_of_a_recipe_are_of_one_kind(recipe: str, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_recipe(recipe, [override])
    assert ": : " not in caught.value.message


def test_a_recipe_of_another_model_keeps_the_format_of_its_base() -> None:
    dev, schnell = load_recipe("flux1-dev-nvfp4-svdquant"), load_recipe("flux1-schnell-nvfp4-svdquant")
    assert (schnell.quantize.quant_cfg, schnell.quantize.algorithm) == (dev.quantize.quant_cfg, dev.quantize.algorithm)
    assert schnell.quantize.calibration.images is not None
    assert schnell.quantize.calibration.images.steps == 4


def test_a_copy_of_a_shipped_recipe_finds_the_shipped_prompts(tmp_path: Path) -> None:
    copy = tmp_path / "mine.yaml"
    copy.write_text("base: flux1-dev-nvfp4\nname: mine\n", encoding="utf-8")
    recipe = load_recipe(str(copy))
    assert Path(recipe.quantize.calibration.sources[0].dataset).is_file()
    assert recipe.evaluate.images is not None
    assert Path(recipe.evaluate.images.prompts).is_file()
