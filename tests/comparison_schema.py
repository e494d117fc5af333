"""Writes reports/comparison.schema.json anew: the JSON Schema of comparison.json, with what each field means.

python tests/comparison_schema.py
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from halfbyte.records.files import dumps, write_text
from halfbyte.reports.comparison import ComparisonFile
from halfbyte.reports.loss import PairedLoss
from halfbyte.reports.statistics import Interval

OUTPUT = Path(__file__).resolve().parent.parent / "reports" / "comparison.schema.json"


def schema() -> dict[str, Any]:
    """The schema, each field described by the text below it in its class."""
    found = ComparisonFile.model_json_schema()
    for model in (*_models(BaseModel), PairedLoss, Interval):
        described = found["$defs"].get(model.__name__)
        if described is None:
            continue
        for name, text in _texts(model).items():
            if name in described.get("properties", {}):
                described["properties"][name]["description"] = text
    return found


def _models(base: type[Any]) -> list[type[Any]]:
    return [model for child in base.__subclasses__() for model in (child, *_models(child))]


def _texts(model: type[Any]) -> dict[str, str]:
    """The strings that stand below the fields of a class."""
    if not model.__module__.startswith("halfbyte."):
        return {}
    body = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[field.target.id] = " ".join(value.value.split())
    return found


if __name__ == "__main__":
    write_text(OUTPUT, dumps(schema()))
