"""Claims about published tables: each has a source, what is not at hand stays empty, and ours stand beside theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
from record_factory import flipped, model, write_record

from halfbyte.main import main
from halfbyte.records.errors import UserError
from halfbyte.reports.compare import compare
from halfbyte.reports.published import NOT_AT_HAND, Published, beside, published_rows, published_table, published_tables
from halfbyte.reports.write import write_reports

TABLES = published_tables()


@pytest.mark.parametrize("name", TABLES)
def test_every_table_says_where_it_is_from_and_how_surely_it_was_seen(name: str) -> None:
    table = TABLES[name]
    assert all(source.strip() for source in table.source)
    assert table.source
    assert table.seen in {"primary", "mirror", "secondary", "translation", "derived", "not seen"}
    assert table.confidence in {"high", "medium", "low", "none"}
    assert (table.seen == "not seen") == all(value is None for row in table.rows.values() for value in row)


def test_a_value_that_is_not_at_hand_is_shown_as_such() -> None:
    rows = published_rows(published_table("blog1_table2_llama")).rows
    assert {cell for row in rows for cell in row[1:]} == {NOT_AT_HAND}


def test_a_row_of_another_length_is_refused() -> None:
    content = TABLES["blog1_table1_deepseek_r1"].model_dump()
    content["rows"]["FP8"] = [1.0]
    with pytest.raises(ValueError, match="row FP8 has 1 values for 5 benchmarks"):
        Published.model_validate(content)


def test_an_unknown_table_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'blog1_table1_deepseek_r1'"):
        published_table("blog1_table1_deepseek")


@pytest.fixture
def records(tmp_path: Path, cache: Path) -> tuple[Path, Path]:  # noqa: ARG001
    for side, of in (("b", model("FP8")), ("c", model("NVFP4"))):
        for task, lost in (("mmlu", 10), ("gsm8k", 20)):
            values = flipped(1000, 900, lost if side == "c" else 0, 0)[1]
            write_record(tmp_path / side / task, values, task=task, of=of)
    return tmp_path / "b", tmp_path / "c"


def test_our_figures_stand_beside_those_of_the_same_format_and_benchmark(records: tuple[Path, Path]) -> None:
    table = beside(published_table("blog1_table1_deepseek_r1"), compare(*records))
    cells = {(cell.row, cell.benchmark): cell for cell in table.cells}
    ours = cells["FP4_PTQ_NVFP4", "MMLU"]
    assert (ours.value, ours.ours, ours.difference) == pytest.approx((90.7, 89.0, -1.7))
    assert cells["FP8", "GSM8K"].ours == pytest.approx(90.0)
    assert cells["FP8", "AIME_2024"].ours is None


def test_a_task_of_a_similar_name_is_not_the_benchmark(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    for side, of in (("b", model("FP8")), ("c", model("NVFP4"))):
        write_record(tmp_path / side, [1.0, 0.0] * 50, task="mmlu_continuation", of=of)
    table = beside(published_table("blog1_table1_deepseek_r1"), compare(tmp_path / "b", tmp_path / "c"))
    assert all(cell.ours is None for cell in table.cells)


def test_the_command_lists_prints_and_overlays(
    records: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reports([compare(*records)], tmp_path / "report")
    assert main(["table"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(TABLES)
    assert main(["table", "blog1_table1_deepseek_r1", "--run", str(tmp_path / "report")]) == 0
    shown = capsys.readouterr().out
    assert "seen: secondary, confidence high" in shown
    assert "-1.70" in shown
    assert main(["table", "blog1_table1_deepseek_r1", "--run", str(tmp_path)]) == 2
    assert "holds no comparison.json" in capsys.readouterr().err
    assert main(["table", "blog1_table1", "--json"]) == 2
