"""Turns a failed validation of a recipe into one line: where, which field, which value, what is allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from halfbyte.recipes.schema import Recipe
from halfbyte.records.errors import UserError

LONGEST_VALUE = 80


def validation_error(error: ValidationError, file: str, overridden: Sequence[str] = ()) -> UserError:
    """The error to show for the first problem of a recipe, an unknown field before all others.

    Args:
        error: What pydantic found.
        file: The recipe's file, named in the message.
        overridden: Fields that came from --set, dotted; a problem in one names --set in the file's place.
    """
    # A misspelt field is reported as unknown and, where it is required, as missing: the first says what to mend.
    problems = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    first = problems[0]
    dotted = ".".join(str(part) for part in first["loc"])
    keys = [key.replace("[", ".").replace("]", "") for key in overridden]
    from_set = any(f"{dotted}.".startswith(f"{key}.") or key.startswith(f"{dotted}.") for key in keys)
    message, hint = _explained(first, dotted)
    if len(problems) > 1:
        more = f"{len(problems) - 1} more after this one"
        hint = f"{hint}; {more}" if hint else more
    return UserError(f"{'--set' if from_set else file}: {message}", hint)


def _explained(problem: ErrorDetails, dotted: str) -> tuple[str, str | None]:
    """Message and hint of one problem."""
    kind, loc = problem["type"], problem["loc"]
    if kind == "extra_forbidden":
        fields = sorted(_fields_at(loc[:-1]))
        near = get_close_matches(str(loc[-1]), fields, n=1, cutoff=0.5)
        known = f"known here: {', '.join(fields)}"
        return f"unknown field '{dotted}'", f"did you mean '{near[0]}'? {known}" if near else known
    if kind == "missing":
        return f"field '{dotted}' is missing", "`halfbyte recipes demo-fp8` prints a whole recipe"
    if kind == "value_error":  # raised by the schema itself, which names the values
        what = problem["msg"].removeprefix("Value error, ")
        return f"{dotted}: {what}" if dotted else what, None
    value = json.dumps(problem["input"], default=str)
    if len(value) > LONGEST_VALUE:
        value = value[:LONGEST_VALUE] + "..."
    wanted = {"model_type": "it should be a mapping", "none_required": "it can only be null"}
    allowed = wanted.get(kind) or problem["msg"].replace("Input should", "it should").replace(
        "String should", "it should"
    )
    return f"{dotted} is {value}: {allowed}", None


def _fields_at(loc: Sequence[int | str]) -> set[str]:
    """The fields of the mapping at a place in a recipe: ("evaluate", "tasks", 0) gives those of a task."""
    models: list[type[BaseModel]] = [Recipe]
    for part in loc:
        if isinstance(part, int):
            continue
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        models = [inner for field in fields for inner in _models_in(field.annotation)]
    return {name for model in models for name in model.model_fields}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models named in a type such as `list[TaskSpec]` or `FidelitySpec | None`."""
    if isinstance(annotation, type) and not get_args(annotation):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for inner in get_args(annotation):
        yield from _models_in(inner)
