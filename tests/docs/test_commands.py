"""Every command of the README and of docs/ is one that halfbyte takes, and those that can run here do run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import PAGES, ROOT, Block, blocks, command_lines, halfbyte_arguments

from halfbyte.parser import build_parser
from halfbyte.recipes.find import load_recipe, shipped_files
from halfbyte.reports.policy import shipped_policies
from halfbyte.reports.published import published_table

EVERY = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in EVERY if block.is_shell]
CI = sorted((ROOT / "docs" / "ci").glob("*.yml"))
CAPITALS = re.compile(r"[A-Z][A-Z_]*|mine(\.yaml)?|runs/\S+|out/\S+")
"""Words that stand for a reader's own name."""


def subparsers() -> dict[str, ArgumentParser]:
    (found,) = (action for action in build_parser()._actions if isinstance(action, _SubParsersAction))
    return found.choices


def parsed(arguments: list[str], where: str, capsys: pytest.CaptureFixture[str]) -> Any:
    try:
        return build_parser().parse_args(arguments)
    except SystemExit as stop:
        if stop.code == 0:
            return None  # --help, --version
        pytest.fail(f"{where}: halfbyte {shlex.join(arguments)}: {capsys.readouterr().err.strip().splitlines()[-1]}")


def refer_to_what_there_is(arguments: Any, files: set[str], where: str) -> None:
    """Recipes, policies, tables and overridden fields that a command names are there."""
    recipes = getattr(arguments, "recipe", None)
    for name in [recipes] if isinstance(recipes, str) else recipes or []:
        if CAPITALS.fullmatch(name) or name in files or name.endswith((".yaml", ".yml")):
            continue
        assert name in shipped_files(), f"{where}: there is no recipe {name}"
        load_recipe(name, getattr(arguments, "set", []))
    policy = getattr(arguments, "policy", None)
    if policy and not policy.endswith(".yaml") and not CAPITALS.fullmatch(policy):
        assert policy in shipped_policies(), f"{where}: there is no policy {policy}"
    table = getattr(arguments, "table", None)
    if table and not CAPITALS.fullmatch(table):
        published_table(table)


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.where)
def test_every_command_is_one_that_halfbyte_takes(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    files = {one.title for one in blocks(block.page) if one.title}
    for command in command_lines(block.text):
        arguments = halfbyte_arguments(command)
        if arguments is not None:
            refer_to_what_there_is(parsed(arguments, block.where, capsys), files, block.where)
        words = shlex.split(command)
        if words[0] == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert words[1] in targets, f"{block.where}: the Makefile has no target {words[1]}"


def test_a_wrong_option_would_be_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pytest.fail.Exception, match="--no-such-option"):
        parsed(["run", "demo-fp8", "--no-such-option"], "here", capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_sentences_have_the_options_they_name(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    known = subparsers()
    for span in re.findall(r"`halfbyte ([^`]+)`", text):
        name, *words = span.split()
        if not name.islower():
            continue  # a class or a placeholder
        assert name in known, f"{page.name}: there is no command {name}"
        options = set(known[name]._option_string_actions)
        for word in words:
            assert not word.startswith("--") or word.partition("=")[0] in options, f"{page.name}: halfbyte {span}"


@pytest.mark.parametrize("path", CI, ids=lambda path: path.name)
def test_the_commands_of_the_ci_examples_are_ones_that_halfbyte_takes(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts: list[str] = []

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                if key in ("run", "script"):
                    scripts.extend([value] if isinstance(value, str) else value)
                else:
                    collect(value)
        elif isinstance(node, list):
            for value in node:
                collect(value)

    collect(yaml.safe_load(path.read_text(encoding="utf-8")))
    commands = [halfbyte_arguments(command) for script in scripts for command in command_lines(script)]
    found = [arguments for arguments in commands if arguments is not None]
    assert len(found) >= 2
    for arguments in found:
        parsed(arguments, path.name, capsys)


def test_what_is_not_run_says_why() -> None:
    assert [block.where for block in EVERY if block.not_run is not None and len(block.not_run) < 10] == []
    kept = [block for block in SHELL if block.not_run is None and block.page.parent.name == "docs"]
    assert len(kept) > 20


def sandbox(folder: Path, model: Callable[[Path], None], data: Path | None) -> dict[str, str]:
    """A folder as the documents assume it, with halfbyte on the path, and the environment to run in.

    A verdict is a result, and so is what the doctor finds: their exit codes do not end a page.
    """
    for name in ("models/SmolLM2-135M-Instruct", "in-house"):
        model(folder / name)
    (folder / "MODEL").symlink_to("in-house")
    if data is not None:
        (folder / "DATA").symlink_to(data)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    halfbyte = Path(sys.executable).parent / "halfbyte"
    (programs / "halfbyte").write_text(
        f'#!/bin/bash\n"{halfbyte}" "$@"\ncode=$?\n'
        'case "$1:$code" in run:[134] | gate:[134] | report:[134] | doctor:2) exit 0 ;; esac\n'
        "exit $code\n",
        encoding="utf-8",
    )
    (programs / "halfbyte").chmod(0o755)
    (programs / "activate").write_text("", encoding="utf-8")
    (programs / "python").write_text(f'#!/bin/bash\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    (programs / "python").chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HALFBYTE_", "GITHUB_"))}
    return inherited | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HALFBYTE_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def script_of(page: Path, folder: Path) -> str:
    """One script for a page: files that a reader saves, commands and Python, in their order."""
    parts = ["set -euo pipefail"]
    for number, block in enumerate(blocks(page)):
        if block.not_run is not None:
            continue
        note = f"echo '=== {block.where}' >&2"
        if block.title is not None and (block.language != "text" or block.title.endswith(".txt")):
            path = folder / f".block-{number}"
            path.write_text(block.text, encoding="utf-8")
            parts.append(f'mkdir -p "$(dirname {block.title})"; cp {path} {block.title}')
        elif block.is_shell:
            parts.append(f"{note}\n{block.text}")
        elif block.language == "python":
            path = folder / f".block-{number}.py"
            path.write_text(block.text, encoding="utf-8")
            parts.append(f"{note}\ncat {path} >> .page.py")
    if any(block.language == "python" and block.title is None and block.not_run is None for block in blocks(page)):
        parts.append(
            "python .page.py"
        )  # in one process, as in one notebook: a later block knows the names of an earlier
    return "\n".join(parts) + "\n"


RUN = [
    page for page in PAGES if any((b.is_shell or b.language == "python") and b.not_run is None for b in blocks(page))
]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_commands_of_a_page_run_as_they_are_written(
    page: Path, tmp_path: Path, llama_factory: Callable[..., Any], tokenizer_factory: Callable[..., Any]
) -> None:
    def model(folder: Path) -> None:
        llama_factory(max_length=2048).save_pretrained(folder)
        tokenizer_factory().save_pretrained(folder)

    data = os.environ.get("HALFBYTE_DATA")
    needs_data = any("DATA" in block.text for block in blocks(page) if block.is_shell and block.not_run is None)
    if needs_data and not data:
        pytest.skip("$HALFBYTE_DATA is not set")
    environment = sandbox(tmp_path, model, Path(data).resolve() if data else None)
    script = tmp_path / ".page.sh"
    script.write_text(script_of(page, tmp_path), encoding="utf-8")
    done = subprocess.run(
        [shutil.which("bash") or "bash", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
