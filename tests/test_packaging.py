"""The repository is what its documents say, and the wheel holds all of it."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.metadata
import re
import shutil
import statistics
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import halfbyte

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]
MODULES = {
    f"{package}.{path.stem}": path
    for package, folder in FOLDERS.items()
    for path in sorted((ROOT / folder).glob("*.py"))
    if path.stem not in ("__init__", "__main__")
}
# What a wheel must hold beside Python code: everything else that lies in a package folder.
DATA_SUFFIXES = {".yaml", ".txt", ".jsonl", ".j2", ".typed"}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_every_package_folder_is_listed() -> None:
    found = {
        path.parent.relative_to(ROOT).as_posix()
        for folder in FOLDERS.values()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(FOLDERS.values())
    assert set(FOLDERS) == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_no_module_of_the_front_door_hides_a_room() -> None:
    rooms = {package.rpartition(".")[2] for package in FOLDERS if "." in package}
    front = {path.stem for path in (ROOT / FOLDERS["halfbyte"]).glob("*.py")}
    assert not rooms & front


def test_the_version_is_the_installed_one() -> None:
    assert halfbyte.__version__ == importlib.metadata.version("halfbyte") == PYPROJECT["project"]["version"]


def test_the_wheel_holds_every_module_and_data_file(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, because a build leaves folders behind
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *FOLDERS.values()):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
        metadata = {name.rpartition("/")[2] for name in archive.namelist()} - {name.rpartition("/")[2] for name in held}
    wanted = {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", *DATA_SUFFIXES} and "measured" not in path.parts
    }
    assert held == wanted
    assert "LICENSE" in metadata


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_hold(name: str) -> None:
    # By import name: a doctest by path would import the file a second time under another name.
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_module_opens_with_a_sentence() -> None:
    paths = [
        *MODULES.values(),
        *(ROOT / folder / "__init__.py" for folder in FOLDERS.values()),
        *(ROOT / "tests").rglob("*.py"),
    ]
    bad = [str(path.relative_to(ROOT)) for path in paths if not _sentence(ast.get_docstring(parsed(path)))]
    assert bad == []


def _sentence(docstring: str | None) -> bool:
    return docstring is not None and docstring.split("\n\n")[0].rstrip().endswith((".", ":"))


def test_modules_and_functions_stay_short() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > 450} == {}
    assert statistics.median(lengths.values()) <= 200
    long = {
        f"{name}.{node.name}": node.end_lineno - node.lineno + 1
        for name, path in MODULES.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None and node.end_lineno - node.lineno >= 100
    }
    assert long == {}


def test_the_readme_names_every_file_of_the_rooms() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.partition("<!-- tree -->")[2].partition("<!-- end of tree -->")[0]
    named = set(re.findall(r"^ {2,}(\S+\.\w+) ", tree, flags=re.MULTILINE))
    files = {
        path.name
        for folder in FOLDERS.values()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", *DATA_SUFFIXES}
        and path.name not in ("__init__.py", "py.typed")
        and "measured" not in path.parts
    }
    assert named == files, "run `make tree`"


def test_the_pinned_versions_satisfy_pyproject() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        canonicalize_name(r.name): r for r in map(Requirement, (line for line in lines if not line.startswith("#")))
    }
    extras = PYPROJECT["project"]["optional-dependencies"]
    for text in [*PYPROJECT["project"]["dependencies"], *extras["dev"], *extras["docs"], *extras["gguf"]]:
        wanted = Requirement(text)
        pin = pins[canonicalize_name(wanted.name)]
        (version,) = (specifier.version for specifier in pin.specifier)
        assert wanted.specifier.contains(version), text
