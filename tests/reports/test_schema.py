"""Claims about the JSON: its schema is committed, current, and says what its fields mean."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def test_the_committed_schema_is_that_of_the_code() -> None:
    script = runpy.run_path(str(TESTS / "comparison_schema.py"))
    committed = json.loads((TESTS.parent / "reports" / "comparison.schema.json").read_text(encoding="utf-8"))
    assert committed == script["schema"](), "run python tests/comparison_schema.py"
    assert committed["$defs"]["Comparison"]["properties"]["schema_version"]["const"] == 2
    described = [field for field in committed["$defs"]["TaskResult"]["properties"].values() if "description" in field]
    assert len(described) >= 10
