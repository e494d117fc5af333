"""The check of a checkpoint against its architecture: transformers' model for its configuration, on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from halfbyte.quant.build import require_fitting
from halfbyte.quant.checkpoint import Tensors
from halfbyte.quant.checks import Checkpoint, Rule
from halfbyte.quant.models import Source, empty_model
from halfbyte.quant.places import find_places, renaming
from halfbyte.records.errors import UserError


def _model(at: Checkpoint) -> Iterator[str]:
    """Names and shapes; architectures that transformers does not know by itself are not looked at."""
    try:
        _, model = empty_model(Source(str(at.folder), at.folder))
    except UserError:
        return
    try:
        places = find_places(cast(Tensors, at.shards), at.declared, model)
        require_fitting(cast(Tensors, at.shards), places, model)
    except UserError as error:
        yield error.message
        return
    kind = type(model).__name__
    expected: dict[str, Any] = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    rename = renaming(model)
    stored = {rename(name): name for name in places.plain}
    quantized = {f"{name}.weight" for name in places.linears} | {rename(name) for name in places.others}
    quantized |= {f"{stack.module}.{stack.parameter}" for stack in [*places.stacks, *places.whole]}
    for name, original in stored.items():
        shape = at.shards.shape(original)
        if name not in expected:
            yield f"{original} belongs to no part of a {kind}"
        elif shape != expected[name]:
            yield f"{original} has shape {list(shape)}, a {kind} of this configuration {list(expected[name])}"
    for name in sorted(set(expected) - set(stored) - quantized):
        if not (at.tied and name.endswith("lm_head.weight")):
            yield f"{name} is missing"


RULES = (Rule("model", "the tensors are those of a model of this configuration", _model),)
