"""Claims about measured memory beside published tables: the same format in the same way, and nothing of a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfbyte.main import main
from halfbyte.records.errors import UserError
from halfbyte.records.memory import MEMORY_FILE, MemoryRecord, MemoryRow
from halfbyte.reports.memory import beside_memory, is_of_memory, memory_tables, read_memory
from halfbyte.reports.published import published_table, published_tables

PEAKS = {("bfloat16", False): 34.5, ("bfloat16", True): 24.5, ("NVFP4", False): 20.0, ("NVFP4", True): 10.0}
TENSORRT = "tensorrt_demo_flux_vram"


def record(kind: str = "cuda") -> MemoryRecord:
    rows = [
        MemoryRow(
            model="FLUX.1-dev", format=name, weights="packed", low_vram=low, transformer_bytes=1,
            stages={"text encoders": 1, "transformer": int(peak * 1e9), "VAE": 2},
        )
        for (name, low), peak in PEAKS.items()
    ]  # fmt: skip
    return MemoryRecord.model_validate({"height": 1024, "width": 1024, "kind": kind, "rows": rows})


def test_peaks_stand_beside_the_row_of_their_format_and_the_column_of_their_way() -> None:
    table = beside_memory(published_table(TENSORRT), record())
    ours = {(cell.row, cell.benchmark): (cell.ours, cell.difference) for cell in table.cells}
    assert ours["BF16", "VRAM_default"] == (34.5, pytest.approx(34.5 - 35.7))
    assert ours["FP4", "VRAM_low_vram"] == (10.0, pytest.approx(10.0 - 11.1))
    assert {row for (row, _), (value, _) in ours.items() if value is None} == {"FP16", "FP8"}
    assert all(cell.ours is None for cell in beside_memory(published_table(TENSORRT), record("process")).cells)


def test_tables_of_memory_are_those_of_the_model_alone() -> None:
    assert [one.id for one in published_tables().values() if is_of_memory(one)] == [TENSORRT, "blog1_table4_flux_vram"]
    assert len(memory_tables(record(), "black-forest-labs/FLUX.1-dev")) == 2
    assert [one.id for one in memory_tables(record(), "black-forest-labs/FLUX.1-schnell")] == [TENSORRT]
    assert memory_tables(record(), "models/small") == memory_tables(None, "black-forest-labs/FLUX.1-dev") == []


def test_the_command_lays_a_measurement_beside_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["table", "blog1_table4_flux_vram", "--with", str(tmp_path)]
    assert main(command) == 2
    assert "holds no memory.json" in capsys.readouterr().err
    record().save(tmp_path / MEMORY_FILE)
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "ours, as BF16" in shown
    assert "34.50" in shown
    assert main([*command, "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    assert sum(cell["ours"] is not None for cell in table["cells"]) == 4


def test_a_damaged_measurement_is_named(tmp_path: Path) -> None:
    assert read_memory(tmp_path) is None
    (tmp_path / MEMORY_FILE).write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="is not a measurement of memory"):
        read_memory(tmp_path)
