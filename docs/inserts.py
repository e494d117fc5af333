"""Fills in what a page takes from the project itself, while the site is built: tables, options, errors of formats.

A line such as `<!-- insert: policies -->` becomes what the function of that name gives, so that nothing that is known
elsewhere is typed into a page. mkdocs.yml names this file as a hook.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from halfbyte.parser import build_parser
from halfbyte.recipes.find import list_recipes, load_recipe, shipped_files
from halfbyte.recipes.schema import Recipe
from halfbyte.reports.policy import load_policy, shipped_policies
from halfbyte.reports.published import published_table, published_tables

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / ".docs-source"
INSERT = re.compile(r"^<!-- insert: (?P<name>[a-z-]+)(?: (?P<arguments>.+?))? -->$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!http)[^)]+\)")


def on_startup(**_: Any) -> None:
    """Lays the packages' folders out as they are imported, for the reader of docstrings; mkdocs calls it first.

    It follows no editable install of mapped folders (`[tool.setuptools.package-dir]`).
    """
    shutil.rmtree(SOURCE, ignore_errors=True)
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
    for package, folder in folders.items():
        place = SOURCE.joinpath(*package.split("."))
        place.mkdir(parents=True)
        for module in (ROOT / folder).glob("*.py"):
            (place / module.name).symlink_to(module)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What mkdocs calls with each page."""
    return filled(markdown)


def filled(markdown: str) -> str:
    """A page with its inserts.

    Raises:
        ValueError: for an insert that is not known, or that gives nothing.
    """
    return INSERT.sub(_insert, markdown)


def _insert(found: re.Match[str]) -> str:
    name, arguments = found["name"], (found["arguments"] or "").split(" ") if found["arguments"] else []
    if name not in INSERTS:
        raise ValueError(f"{found[0]}: known are {', '.join(INSERTS)}")
    text = INSERTS[name](*arguments)
    if not text.strip():
        raise ValueError(f"{found[0]} gives nothing")
    return text


def tables_of(path: Path) -> list[str]:
    """The Markdown tables of a file, in their order."""
    found = re.findall(r"^\|.*\|\n\|[ :|-]+\|\n(?:^\|.*\|\n?)+", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [table.strip() for table in found]


def table(path: str, number: str) -> str:
    """A table of a file of the repository, counted from 1. Links in it lead out of the site, so they become names."""
    return LINK.sub(r"`\1`", tables_of(ROOT / path)[int(number) - 1])


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    heads = list(head)
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *cells])


def recipes(kind: str) -> str:
    """The shipped recipes of one kind, `llm` or `image`."""
    there = {name for name, path in shipped_files().items() if path.parent.name == kind}
    return _table(("recipe", "what it is for"), ((f"`{name}`", text) for name, text in list_recipes() if name in there))


def policies() -> str:
    """The shipped policies."""
    return _table(
        ("policy", "what it asks"), ((f"`{name}`", load_policy(name).description) for name in shipped_policies())
    )


def policy(name: str) -> str:
    """The file of a shipped policy."""
    return f"```yaml\n{shipped_policies()[name].strip()}\n```"


def checks() -> str:
    """The checks of `halfbyte verify`."""
    from halfbyte.quant.verify import PIPELINE_RULES, RULES, SOURCE_RULES

    groups = (("always", RULES), ("with `--source`", SOURCE_RULES), ("pipelines", PIPELINE_RULES))
    return _table(
        ("check", "what holds in a sound checkpoint", "when"),
        ((rule.name, rule.asks, when) for when, rules in groups for rule in rules),
    )


def format_errors() -> str:
    """The error of each format, as docs/images/error.svg draws it."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import figures

    found = figures.errors()
    shapes = list(figures.weights())
    return _table(
        ("format", "bits a weight", *(f"error, {shape}" for shape in shapes)),
        (
            (kind.name, f"{kind.bits:g}", *(f"{found[kind.name][shape]:.1%}" for shape in shapes))
            for kind in figures.KINDS
        ),
    )


def commands() -> str:
    """What each command's --help says, without the options that all have."""
    parser = build_parser()
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = []
    for name, command in subparsers.choices.items():
        command.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100)
        parts.append(f"## {name}\n\n```text\n{command.format_help().strip()}\n```")
    return "\n\n".join(parts)


def published() -> str:
    """The published tables: figures seen, settings, source, and the recipes that are laid beside each."""
    beside: dict[str, list[str]] = {}
    for name, recipe in _with_facts():
        for one in recipe.facts.published if recipe.facts is not None else []:
            beside.setdefault(published_table(one).id, []).append(f"`{name}`")
    parts = []
    for one in published_tables().values():
        values = [value for row in one.rows.values() for value in row]
        seen = sum(value is not None for value in values)
        lines = [
            f"### {one.alias or one.id}",
            "",
            f"- **Model**: {one.model or 'several'}. **Benchmarks**: {', '.join(one.benchmarks)}.",
            f"- **Figures**: {seen} of {len(values)} are at hand; seen: {one.seen}; confidence: {one.confidence}.",
            f"- **What was said about how**: {_plain(one.settings)}",
            *([f"- **Careful**: {_plain(one.warning)}"] if one.warning else []),
            f"- **Source**: {'; '.join(_plain(source) for source in one.source) or 'none'}.",
            *([f"- **Recipes here**: {', '.join(beside[one.id])}."] if one.id in beside else []),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def facts() -> str:
    """What each recipe with facts follows, what of that was never said, and what a run of it takes."""
    parts = []
    for name, recipe in _with_facts():
        assert recipe.facts is not None
        lines = [line.split(": ", 1) for line in _unwrapped(recipe.facts.lines(trains=recipe.train is not None))]
        items = [f"- **{head[:1].upper()}{head[1:]}**: {_plain(rest)}" for head, rest in lines]
        parts.append("\n".join([f"### {name}", "", f"{_plain(recipe.description)} `{recipe.model.id}`", "", *items]))
    return "\n\n".join(parts)


def _with_facts() -> list[tuple[str, Recipe]]:
    found = ((name, load_recipe(name)) for name in shipped_files())
    return [(name, recipe) for name, recipe in found if recipe.facts is not None and recipe.facts.published]


def _unwrapped(lines: Iterable[str]) -> list[str]:
    """Paragraphs whose further lines are indented, each on one line."""
    found: list[str] = []
    for line in lines:
        if line.startswith("  ") and found:
            found[-1] += f" {line.strip()}"
        else:
            found.append(line)
    return found


def _plain(text: str) -> str:
    """A text from a data file, without what Markdown or HTML would read in it."""
    return re.sub(r"([\\`*_<>\[\]])", r"\\\1", " ".join(text.split()))


INSERTS: dict[str, Callable[..., str]] = {
    "table": table,
    "recipes": recipes,
    "policies": policies,
    "policy": policy,
    "checks": checks,
    "format-errors": format_errors,
    "commands": commands,
    "published": published,
    "facts": facts,
}
