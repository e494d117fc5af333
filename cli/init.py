"""`halfbyte init`: a starter recipe for a model, after a look at its configuration, tokenizer and chat template."""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from pathlib import Path

from halfbyte.recipes.find import load_recipe
from halfbyte.records.errors import UserError, disk_full_is_a_user_error
from halfbyte.records.files import dumps, write_text


def run(args: Namespace) -> int:
    """Writes the recipe, and beside it the texts it calibrates with; prints the plan and how to go on."""
    if args.output is not None:
        _require_file(args.output)
    from halfbyte.quant import produce  # torch and ModelOpt take seconds
    from halfbyte.starter import calibration_lines, draws, look_at, pipeline_recipe, recipe_name, recipe_text

    looked, texts = None, ""
    if draws(args.model):
        name, _ = pipeline_recipe(args.model, "")
    else:
        looked = look_at(args.model)
        name = recipe_name(args.model, looked.format)
    path: Path = args.output or Path(f"{name}.yaml")
    _require_free(path)
    model = _named(args.model, path)
    if looked is None:
        _, text = pipeline_recipe(model, str(path))
    else:
        texts = f"{path.stem}-calibration.jsonl" if looked.chats else "demo-calibration.txt"
        text = recipe_text(looked, model, name, str(path), texts)
    chats = "" if looked is None else calibration_lines(looked)
    if chats:
        _require_free(path.with_name(texts))
    with tempfile.TemporaryDirectory() as folder:  # what is published has been read and planned
        draft = Path(folder) / path.name
        draft.write_text(text, encoding="utf-8")
        if chats:
            (draft.parent / texts).write_text(chats, encoding="utf-8")
        job = produce.prepare(load_recipe(str(draft)), read_ahead=False, weights=False)
    with disk_full_is_a_user_error(path):
        if chats:
            write_text(path.with_name(texts), chats)
        write_text(path, text)
    if args.json:
        calibration = str(path.with_name(texts)) if chats else None
        print(dumps({"recipe": str(path), "calibration": calibration, "name": name, **job.plan.as_dict()}), end="")
        return 0
    print(f"{job.plan}\nwrote {path}" + (f" and {path.with_name(texts)}" if chats else ""))
    print(f"next: halfbyte run {path} --dry-run")
    return 0


def _require_file(path: Path) -> None:
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"a recipe's file ends in .yaml, and {path} does not", f"--output {path}.yaml")
    _require_free(path)


def _require_free(path: Path) -> None:
    with disk_full_is_a_user_error(path):
        there = os.path.lexists(path) or path.exists()  # a link to nothing too; and a name may be too long to look for
    if there:
        raise UserError(f"{path} is there already, and is not replaced", "choose another --output, or delete it")


def _named(model: str, recipe: Path) -> str:
    """The model as the recipe names it: a local one absolute where the recipe is not in the current folder."""
    local = Path(model).expanduser()
    if not local.exists():
        return model
    return model if recipe.absolute().parent == Path.cwd() and not model.startswith("~") else str(local.resolve())
