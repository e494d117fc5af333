"""Drops from executed notebooks what they wrote on stderr (progress, warnings), and the times that cells took.

python tests/notebooks/tidy.py notebooks/*.ipynb
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat

from halfbyte.records.files import write_text


def tidied(notebook: Any) -> Any:
    """The notebook, changed in place."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main(paths: list[str]) -> None:
    """Tidies each file."""
    for path in map(Path, paths):
        write_text(path, nbformat.writes(tidied(nbformat.read(path, as_version=4))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
