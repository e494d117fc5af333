"""Prompts for models that draw: a text file with one a line, or JSON lines that name a control image too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from halfbyte.records.digests import file_digest, value_digest
from halfbyte.records.errors import UserError

SHOWN = 60
"""Characters of a prompt in a message."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one image is to show."""

    text: str
    line: int
    """In its file, from 1."""
    control: Path | None = None
    """The control image; None where the file names none."""


def load_prompts(path: str, limit: int | None = None, control_images: str | None = None) -> list[Prompt]:
    """Reads the prompts of a file, in its order; empty lines are left out, and so is space around a prompt.

    Args:
        path: A .txt file with a prompt a line, or a .jsonl file whose lines have `prompt` and may have `control_image`.
        limit: First prompts only; None for all.
        control_images: Folder of the control images; None for the folder of the file.

    Raises:
        UserError: for a file that is missing, empty, not UTF-8 or not JSON lines, for a prompt that is there twice, and
            for a control image that is missing.
    """
    file = Path(path).expanduser()
    found = _read(file, Path(control_images).expanduser() if control_images else file.parent)
    if not found:
        raise UserError(f"{file} holds no prompt", "write one a line")
    seen: dict[tuple[str, Path | None], Prompt] = {}
    for prompt in found:
        first = seen.setdefault((prompt.text, prompt.control), prompt)
        if first is not prompt:
            raise UserError(
                f"{file}:{prompt.line} repeats line {first.line}: {shown(prompt.text)}",
                "the same prompt and seed draw the same image, which is no further evidence: take it out, or give "
                "more seeds",
            )
    return found if limit is None else found[:limit]


def prompts_digest(prompts: list[Prompt]) -> str:
    """SHA-256 over the prompts in their order and their control images."""
    return value_digest([[one.text, one.control and file_digest(one.control)] for one in prompts])


def shown(text: str) -> str:
    """A prompt as messages show it."""
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")


def _read(file: Path, images: Path) -> list[Prompt]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise UserError(f"prompt file {file} does not exist", "give a .txt file with a prompt a line") from None
    except IsADirectoryError:
        raise UserError(f"prompt file {file} is a folder", "give a .txt file with a prompt a line") from None
    except UnicodeDecodeError as error:
        raise UserError(f"prompt file {file} is not UTF-8 text: {error}", "save it as UTF-8") from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if file.suffix == ".jsonl":
        return [_of_json(file, number, line, images) for number, line in numbered]
    return [Prompt(line, number) for number, line in numbered]


def _of_json(file: Path, number: int, line: str, images: Path) -> Prompt:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise UserError(f"{file}:{number} is not JSON: {error}") from None
    text = content.get("prompt") if isinstance(content, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{file}:{number} has no prompt", 'write {"prompt": "..."} a line')
    name = content.get("control_image")
    if name is None:
        return Prompt(text.strip(), number)
    control = images / str(name)
    if not control.is_file():
        raise UserError(
            f"{file}:{number} names control image {control}, which does not exist",
            "set evaluate.images.control_images to their folder",
        )
    return Prompt(text.strip(), number, control)
