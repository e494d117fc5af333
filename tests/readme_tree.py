"""Writes the annotated tree of README.md anew, one phrase a file, out of the files' own first sentences.

python tests/readme_tree.py
"""

from __future__ import annotations

import ast
from pathlib import Path

import yaml

from halfbyte.recipes.find import list_recipes
from halfbyte.records.files import write_text

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("records", "recipes", "quant", "eval", "reports", "cli")
SUFFIXES = (".py", ".yaml", ".txt", ".jsonl", ".j2")
UNNAMED = ("__init__.py", "py.typed")
RECIPES = dict(list_recipes())
# Files that cannot say it themselves.
TEXTS = {
    "calibration-prompts.txt": "prompts that a model that draws is calibrated with",
    "evaluation-prompts.txt": "1,000 other prompts that both sides draw",
    "demo-image-calibration.txt": "prompts of coloured shapes that the demo of images is calibrated with",
    "demo-image-prompts.txt": "other such prompts, which both sides draw",
    "demo-image-training.txt": "and others, which QAD draws",
    "demo-calibration.txt": "plain paragraphs the demo's activations are measured on",
    "report.html.j2": "the page of the one-file HTML report",
    "smoke.jsonl": "its 200 questions, written for halfbyte",
    "demo-fidelity.txt": "other paragraphs the demo's KL and perplexity are measured on",
    "__main__.py": "`python -m halfbyte`",
}
BEGIN, END = "<!-- tree -->", "<!-- end of tree -->"


def phrase(path: Path) -> str:
    """What a file says about itself: a module's first sentence, a YAML's description, a template's first comment."""
    if path.name in TEXTS:
        return TEXTS[path.name]
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        sentence = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
        return " ".join(sentence.split()).rstrip(".")
    if path.suffix == ".yaml" and path.stem in RECIPES:
        return RECIPES[path.stem].rstrip(".")
    if path.suffix == ".yaml":
        described = next((line for line in text.splitlines() if line.startswith("description:")), None)
        if described is not None:
            return str(yaml.safe_load(described)["description"]).rstrip(".")
    first = text.lstrip().splitlines()[0]
    if not first.startswith(("#", "{#", "<!--")):
        raise SystemExit(f"{path} does not say what it is: begin it with a comment, or name it in TEXTS")
    return first.strip("#{}<!-> ").split(". ")[0].rstrip(".")


def tree() -> str:
    """The tree as text."""
    lines = []
    for room in ROOMS:
        lines.append(f"{room + '/':35}{phrase(ROOT / room / '__init__.py')}")
        for folder in (ROOT / room, *sorted(path for path in (ROOT / room).rglob("*/") if path != ROOT / room)):
            if "__pycache__" in folder.parts or "measured" in folder.parts:
                continue
            files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.name not in UNNAMED)
            depth = len(folder.relative_to(ROOT).parts)
            if depth > 1 and files:
                lines.append(f"{'  ' * (depth - 1)}{folder.name}/")
            lines += [f"{'  ' * depth + path.name:34} {phrase(path)}" for path in files]
    return "\n".join(lines)


def main() -> None:
    """Replaces what stands between the marks in README.md."""
    path = ROOT / "README.md"
    head, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    tail = rest.partition(END)[2]
    write_text(path, f"{head}{BEGIN}\n```text\n{tree()}\n```\n{END}{tail}")


if __name__ == "__main__":
    main()
