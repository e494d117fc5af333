"""Models of the shipped recipes on the meta device, from small public configurations: no weight, no network."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

from halfbyte.quant.attention import UNREACHED
from halfbyte.quant.checkpoint import torch_dtype
from halfbyte.quant.configs import quant_config
from halfbyte.quant.models import Source
from halfbyte.quant.pipeline_plan import pipeline_plan_of
from halfbyte.quant.pipelines import empty_transformer
from halfbyte.quant.plan import Plan, make_plan
from halfbyte.recipes.find import load_recipe, resolved_yaml
from halfbyte.recipes.schema import Recipe

CONFIGS = Path(__file__).parents[1] / "public_configs"
_OTHER_NAMES = {"DeepSeek-R1-0528": "DeepSeek-R1", "model": "small-flux"}


def configured(recipe: Recipe) -> Path:
    """The folder of the configuration of a recipe's model."""
    name = recipe.model.id.rpartition("/")[2].removesuffix("-bf16").removesuffix("-BF16")
    return CONFIGS / _OTHER_NAMES.get(name, name)


def public_plan(name: str) -> Plan:
    """What a shipped recipe will do, from its model's public configuration; recipes that do the same have one plan.

    Raises:
        UserError: where it is refused.
    """
    recipe = load_recipe(name)
    return _planned(configured(recipe), recipe.model.model_dump_json(exclude={"id"}), _Block(recipe))


class _Block:
    """A recipe's quantize block, equal to another that quantizes in the same way."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        content = resolved_yaml(recipe.model_copy(update={"description": "-", "facts": None}))
        self._key = content[content.index("quantize:") : content.index("  calibration:")]

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Block) and self._key == other._key


@cache
def _planned(folder: Path, _: str, block: _Block) -> Plan:
    recipe = block.recipe
    dtype, keep = torch_dtype(recipe.model.dtype), recipe.quantize.keep
    if recipe.model.kind == "causal-lm":
        return make_plan(Source(recipe.model.id, folder), quant_config(recipe.quantize), dtype, keep)
    transformer = empty_transformer(folder / "transformer", dtype)
    return pipeline_plan_of(transformer, quant_config(recipe.quantize, UNREACHED), keep)


def main_format(plan: Plan) -> str:
    """The format that most of the quantized weights have."""
    weights: Counter[str] = Counter()
    for layer in plan.quantized:
        weights[str(layer.format)] += layer.weights
    return weights.most_common(1)[0][0]
