"""Finds a recipe by name or path, lays it over its base and under the overrides, and validates it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from halfbyte.recipes.data import folder_digest
from halfbyte.recipes.problems import validation_error
from halfbyte.recipes.schema import EvaluateSpec, Recipe
from halfbyte.records.digests import text_identity, value_digest
from halfbyte.records.errors import UserError, unknown_name

SUFFIXES = (".yaml", ".yml")
_NO_CHANGES = ("base", "name", "facts", "published")

# Fields whose value may be a file or folder that lies beside the recipe.
_PATH_FIELDS = ("id", "dataset", "recipe", "policy", "prompts", "control_images", "include_path")


def shipped_files() -> dict[str, Path]:
    """The shipped recipes: name to file, sorted by name."""
    root = Path(str(files("halfbyte.recipes")))
    found = [path for kind in ("llm", "image") for path in (root / kind).glob("*.yaml")]
    return {path.stem: path for path in sorted(found, key=lambda path: path.stem)}


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe: a path ends in .yaml or .yml, anything else is a shipped name (demo-fp8, llm/demo-fp8).

    Raises:
        UserError: for a name that is not shipped or a path that is no file.
    """
    if name_or_path.endswith(SUFFIXES):
        path = Path(name_or_path)
        if not path.is_file():
            raise UserError(f"recipe file {path} does not exist", "`halfbyte recipes` lists the shipped recipes")
        return path
    shipped = shipped_files()
    kind, _, name = name_or_path.rpartition("/")
    path_of_name = shipped.get(name)
    if path_of_name is None or kind not in ("", path_of_name.parent.name):
        raise unknown_name("recipe", name_or_path, shipped)
    return path_of_name


def list_recipes() -> list[tuple[str, str]]:
    """Name and one-line description of each shipped recipe, sorted by name."""
    return [(name, _description(_read(path))) for name, path in shipped_files().items()]


def recipe_text(name_or_path: str) -> str:
    """A recipe as its file has it, comments included.

    Raises:
        UserError: when there is none of that name, or it is not UTF-8.
    """
    return _text(find_recipe(name_or_path))


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads, completes and validates a recipe.

    A relative path inside a recipe (a calibration file, a model folder, a policy) is looked for beside the
    recipe file first; what is not there is left as it is, relative to the current folder or a hub id. The texts of
    the shipped recipes are found from everywhere.

    Args:
        name_or_path: A shipped name (demo-fp8) or the path of a .yaml file, relative to the current folder.
        overrides: `a.b=value` each, as given to --set; the value is YAML, an index picks a list element
            (evaluate.tasks.0.limit=100).

    Raises:
        UserError: one line for an unknown name, wrong YAML, an unknown field or a value that is not allowed.
    """
    path = find_recipe(name_or_path)
    content = _override(_with_base(path, ()), overrides, path)
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise validation_error(error, str(path), [text.partition("=")[0] for text in overrides]) from None


class _Evaluation(BaseModel):
    model_config = ConfigDict(extra="forbid")
    evaluate: EvaluateSpec


def load_evaluation(content: dict[str, Any], overrides: Sequence[str] = ()) -> EvaluateSpec:
    """An evaluate block that is not from a recipe, under the overrides a recipe takes: `evaluate.backend=vllm`.

    Args:
        content: The block.
        overrides: As for load_recipe.

    Raises:
        UserError: one line for an unknown field or a value that is not allowed.
    """
    whole = _override({"evaluate": content}, overrides, Path("the command line"))
    try:
        return _Evaluation.model_validate(whole).evaluate
    except ValidationError as error:
        raise validation_error(error, "the command line", [text.partition("=")[0] for text in overrides]) from None


def with_limit(recipe: Recipe, limit: int | None) -> Recipe:
    """The recipe with each task cut to its first `limit` questions or prompts; unchanged for None."""
    if limit is None:
        return recipe
    content = recipe.model_dump()
    images = content["evaluate"]["images"]
    for task in [*content["evaluate"]["tasks"], *([images] if images else [])]:
        task["limit"] = limit
    return Recipe.model_validate(content)


def resolved_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML, defaults, base and overrides included; `load_recipe` reads it back to an equal one."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def require_distinct(settings: EvaluateSpec) -> None:
    """Refuses a task that is named twice, since each has one folder.

    Raises:
        UserError: naming it.
    """
    names = [spec.task for spec in settings.tasks]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f"task '{min(twice)}' is named twice", "a record holds one evaluation of a task")


def require_supported(recipe: Recipe) -> None:
    """Refuses a recipe that is known not to run as it is.

    Raises:
        UserError: with the reason that its facts give.
    """
    reason = unsupported(recipe)
    if reason is not None:
        raise UserError(
            f"{recipe.name} cannot be run: {reason}",
            "take another recipe; with --set facts.unsupported=null it is tried all the same",
        )


def unsupported(recipe: Recipe) -> str | None:
    """Why a recipe cannot be run as it is; None where nothing is known against it."""
    return None if recipe.facts is None else recipe.facts.unsupported


def recipe_digest(recipe: Recipe) -> str:
    """SHA-256 of what a recipe asks for.

    A local text counts by its content, so the digest is the same on another machine and changes with the text.
    The description and the facts do not count.
    """
    content = recipe.model_dump(mode="json", exclude={"description", "facts"})
    fidelity = content["evaluate"]["fidelity"]
    train = content["train"] or {"sources": [], "sampled": None}
    sampled = [train["sampled"]["prompts"]] if train["sampled"] and train["sampled"]["prompts"] else []
    others = [*train["sources"], *sampled, *([fidelity["source"]] if fidelity else [])]
    for source in [*content["quantize"]["calibration"]["sources"], *others]:
        source["dataset"] = text_identity(source["dataset"])
    own_tasks = content["evaluate"].pop("include_path")
    if own_tasks is not None:
        content["evaluate"]["include_path"] = folder_digest(Path(own_tasks).expanduser())
    if content["evaluate"]["images"]:
        content["evaluate"]["images"]["prompts"] = text_identity(content["evaluate"]["images"]["prompts"])
    return value_digest(content)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"recipe {path} is not UTF-8 text: {error}", "save it as UTF-8") from None


def _read(path: Path) -> dict[str, Any]:
    """The top-level mapping of a YAML file; numbers as OmegaConf reads them (1e-4 is a number)."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        content = OmegaConf.to_container(OmegaConf.create(_text(path)), resolve=False)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}", "write a plain ${ as \\${") from None
    if not isinstance(content, dict) or not content:
        raise UserError(f"{path} holds no recipe", "a recipe is a YAML mapping; `halfbyte recipes demo-fp8` prints one")
    return cast("dict[str, Any]", content)


def _with_base(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """A recipe laid over the one its `base` names: mappings are merged, everything else replaces.

    Its name, unless it gives one, is its file's; the facts of a shipped recipe are of the model they were written for.
    """
    if path in above:
        chain = " -> ".join(str(one) for one in (*above, path))
        raise UserError(f"recipes are each other's base: {chain}", "take one `base` line out")
    content = _read(path)
    described = _description(content)
    base = content.pop("base", None)
    content = cast("dict[str, Any]", _beside(content, path.parent))
    if base is None:
        return content
    if not isinstance(base, str):
        raise UserError(f"{path}: base is {base!r}: it must be the name or path of a recipe")
    content = {"name": path.stem, "description": described, **content}
    near = path.parent / base
    under = near if base.endswith(SUFFIXES) and near.is_file() else find_recipe(base)
    below = _with_base(under, (*above, path))
    if "model" in content and path.resolve() not in map(Path.resolve, shipped_files().values()):
        below.pop("facts", None)
    return _merged(below, content)


def _description(content: dict[str, Any]) -> str:
    """A recipe's own, or what it changes of its base."""
    if "description" in content or "base" not in content:
        return str(content.get("description", ""))
    changed = [f"{key} {value}" for key, value in _leaves(content) if key.partition(".")[0] not in _NO_CHANGES]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    base = Path(str(content["base"])).name.removesuffix(".yaml").removesuffix(".yml")
    return f"{base} with {', '.join(changed[:3]) or 'nothing changed'}{more}."


def _leaves(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", "of its own"
        elif value is not None:  # what is taken out, something else replaces
            yield f"{prefix}{key}", value


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def _beside(value: Any, folder: Path, key: str | None = None) -> Any:
    """Makes the relative paths that exist beside the recipe absolute, wherever they stand in it.

    A text that is neither there nor in the current folder is looked for beside the shipped recipes, so that a copy
    of one of these runs anywhere.
    """
    if isinstance(value, dict):
        return {name: _beside(one, folder, name) for name, one in value.items()}
    if isinstance(value, list):
        return [_beside(one, folder, key) for one in value]
    if isinstance(value, str) and value and key in _PATH_FIELDS:
        path = folder / value
        # Only models, control images and own tasks may be folders, and a file's name has a suffix, so that a hub id or
        # the name of a policy is not taken for a folder that happens to lie there.
        if (path.is_file() and path.suffix) or (key in ("id", "control_images", "include_path") and path.is_dir()):
            return str(path.resolve())
        if key in ("dataset", "prompts") and path.suffix == ".txt" and not Path(value).exists():
            root = Path(str(files("halfbyte.recipes")))
            shipped = [root / kind / value for kind in ("llm", "image")]
            return str(next((file for file in shipped if file.is_file()), value))
    return value


def _override(content: dict[str, Any], overrides: Sequence[str], path: Path) -> dict[str, Any]:
    if not overrides:
        return content
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = OmegaConf.create(content)
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key:
            raise UserError(f"--set {text} is not of the form field=value", "for example --set evaluate.batch_size=8")
        try:
            value = OmegaConf.from_dotlist([f"value{text[len(key) :]}"])["value"]
            OmegaConf.update(config, key, value, merge=False)
        except yaml.YAMLError as error:
            problem = " ".join(str(error).split())
            raise UserError(f"--set {text}: the value is not valid YAML: {problem}", "quote the value") from None
        except (OmegaConfBaseException, IndexError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"--set {text} does not fit the recipe {path}: {reason}") from None
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
