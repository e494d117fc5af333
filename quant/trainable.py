"""What can be known to stop a training before a weight is read."""

from __future__ import annotations

import torch

from halfbyte.quant.models import Source, device_of, empty_model, has_tokenizer, locate, open_tokenizer
from halfbyte.recipes.schema import Recipe
from halfbyte.recipes.texts import require_local
from halfbyte.recipes.training import TrainSpec
from halfbyte.records.digests import text_identity
from halfbyte.records.errors import UserError


def require_trainable(recipe: Recipe, source: Source, *, weights: bool = True) -> Source | None:
    """Looks at a recipe's train block.

    Args:
        recipe: The recipe.
        source: The model it trains.
        weights: Whether the teacher's weights must be there, and its device here.

    Returns:
        The teacher's files; None where the recipe does not train, or without a teacher.

    Raises:
        UserError: for a text longer than the model takes, a local file that cannot be read, a device that is not here,
            or a teacher with another vocabulary or that takes shorter texts.
    """
    spec = recipe.train
    if spec is None:
        return None
    for entry in spec.sources:
        require_local(entry, entry.columns)
    if spec.sampled is not None and spec.sampled.prompts is not None:
        require_local(spec.sampled.prompts)
    with torch.device("meta"):
        config, _ = empty_model(source)
    longest = getattr(config, "max_position_embeddings", None)
    _require_length(spec, longest, "the model")
    if spec.teacher is None:
        return None
    if spec.teacher.device is not None and weights:
        device_of(spec.teacher.device)
    theirs = spec.teacher.model
    if theirs is None:
        return source
    teacher = locate(
        theirs.id, revision=theirs.revision, gguf_file=theirs.gguf_file, dtype=theirs.dtype, weights=weights
    )
    if not weights and not (has_tokenizer(source) and has_tokenizer(teacher)):
        return teacher
    _require_same_tokens(source, teacher)
    with torch.device("meta"):
        config, model = empty_model(teacher)
    _require_length(spec, getattr(config, "max_position_embeddings", None), f"the teacher {teacher.name}")
    tokens, rows = open_tokenizer(source).vocab_size, int(model.get_input_embeddings().weight.shape[0])  # type: ignore[index]
    if tokens > rows:
        raise UserError(
            f"the teacher {teacher.name} has embeddings of {rows} tokens, and {source.name} has {tokens}",
            "distil from a model with the same vocabulary",
        )
    return teacher


def _require_length(spec: TrainSpec, longest: int | None, whose: str) -> None:
    wanted = {"train.length": spec.length} | ({"train.sampled.length": spec.sampled.length} if spec.sampled else {})
    for name, length in wanted.items():
        if longest is not None and length > longest:
            raise UserError(f"{name} is {length} tokens and {whose} takes {longest}", f"set it to at most {longest}")


def _require_same_tokens(student: Source, teacher: Source) -> None:
    ours, theirs = (open_tokenizer(source).get_vocab() for source in (student, teacher))
    if ours == theirs:
        return
    first = next((token for token, number in sorted(ours.items()) if theirs.get(token) != number), None)
    example = f"token {first!r} is {ours[first]} and {theirs.get(first)}" if first is not None else "it has more"
    raise UserError(
        f"the teacher {teacher.name} has another vocabulary than {student.name}: {len(theirs)} and {len(ours)} tokens, "
        f"{example}",
        "distil from a model with the same tokenizer, or leave train.teacher.model out for the model itself",
    )


def identity(spec: TrainSpec, teacher: Source | None, student: Source) -> dict[str, object]:
    """What decides a training beside the model, the quantization and the versions of the packages."""
    prompts = spec.sampled.prompts if spec.sampled else None
    entries = [*spec.sources, *(one for one in (prompts, spec.drawn.prompts if spec.drawn else None) if one)]
    return {
        "train": spec.model_dump(mode="json"),
        "training_texts": [text_identity(entry.dataset) for entry in entries],
        "teacher": teacher.digest if teacher is not None and teacher != student else None,
    }
