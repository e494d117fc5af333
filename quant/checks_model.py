"""The check of a checkpoint against its architecture: transformers' model for its configuration, on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from halfbyte.quant.build import require_fitting
from halfbyte.quant.checkpoint import QuantFormat, Tensors
from halfbyte.quant.checks import Checkpoint, Rule
from halfbyte.quant.places import find_places, renaming
from halfbyte.records.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _model(at: Checkpoint) -> Iterator[str]:
    """Names and shapes; architectures that transformers does not know by itself are not looked at."""
    if isinstance(at.model, UserError):
        yield at.model.message
    elif at.model is not None:
        yield from misfits(cast(Tensors, at.shards), at.declared, at.model)


def misfits(tensors: Tensors, declared: QuantFormat, model: PreTrainedModel) -> Iterator[str]:
    """What of a checkpoint's names and shapes are not those of `model`, which may be on the meta device."""
    try:
        places = find_places(tensors, declared, model)
        require_fitting(tensors, places, model)
    except UserError as error:
        yield error.message
        return
    kind, head = type(model).__name__, f"{head_name(model)}.weight"
    expected: dict[str, Any] = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    rename = renaming(model)
    stored = {rename(name): name for name in places.plain}
    quantized = {f"{name}.weight" for name in places.linears} | {rename(name) for name in places.others}
    quantized |= {f"{stack.module}.{stack.parameter}" for stack in [*places.stacks, *places.whole]}
    for name, original in stored.items():
        shape = tensors.shape(original)
        if name not in expected:
            yield f"{original} belongs to no part of a {kind}"
        elif shape != expected[name]:
            yield f"{original} has shape {list(shape)}, a {kind} of this configuration {list(expected[name])}"
    for name in sorted(set(expected) - set(stored) - quantized):
        if not (model.config.tie_word_embeddings and name == head):
            yield f"{name} is missing"


def head_name(model: PreTrainedModel) -> str:
    """The module that gives the logits: lm_head in most models."""
    head = cast(Any, model).get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), "lm_head")


RULES = (Rule("model", "the tensors are those of a model of this configuration", _model),)
