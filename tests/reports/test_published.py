"""Claims about published tables: each has a source, what is not at hand stays empty, and ours stand beside theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from record_factory import flipped, model, write_record, write_run, write_training

from halfbyte.main import main
from halfbyte.records.errors import UserError
from halfbyte.reports.compare import compare
from halfbyte.reports.evidence import compare_folders
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


@pytest.mark.parametrize("number", range(1, 6))
def test_the_tables_of_march_2025_have_names_by_their_number(number: int) -> None:
    table = published_table(f"march-2025-table-{number}")
    assert table.id.startswith(f"blog1_table{number}_")
    assert table == TABLES[table.id]


def test_no_name_stands_for_two_tables() -> None:
    names = [*TABLES, *(table.alias for table in TABLES.values() if table.alias is not None)]
    assert len(set(names)) == len(names)


def test_the_facts_are_those_that_were_gathered(data_root: Path) -> None:
    path = data_root.parent / "reference" / "published.yaml"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    gathered = yaml.safe_load(path.read_text(encoding="utf-8"))["tables"]
    assert len(gathered) > 40
    for one in gathered:
        ours = TABLES[one["id"]].model_dump()
        for key in ("model", "benchmarks", "rows", "n", "repeats", "seen", "confidence"):
            assert ours[key] == one.get(key), (one["id"], key)


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


@pytest.mark.parametrize("method", ["ptq", "qat", "qad"])
def test_ours_stands_beside_the_row_of_its_own_method_alone(method: str, tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    of = model("NVFP4", method)
    values = flipped(198, 120, 4, 1)
    run = write_run(tmp_path / method, values[1], of=of, baseline_values=values[0], task="gpqa_diamond")
    if method != "ptq":
        write_training(run.training, "qat" if method == "qat" else "qad")
    found = compare_folders(run.evaluations(model().digest), run.evaluations(of.digest), None, "qad_nano9b")
    (table,) = found.published
    assert {cell.row for cell in table.cells if cell.ours is not None} == {"BF16", f"NVFP4_{method.upper()}"}


@pytest.mark.parametrize(
    ("preset", "rows"),
    [("nvfp4_default", {"NVFP4_RTN"}), ("nvfp4_awq_lite", set()), ("general/ptq/nvfp4_gptq", {"NVFP4_GPTQ"})],
)
def test_a_row_of_another_algorithm_is_not_ours(preset: str, rows: set[str], tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    values, before, of = flipped(1000, 900, 4, 1), model("float16"), model("NVFP4")
    run = write_run(
        tmp_path / "run", values[1], of=of, baseline=before, baseline_values=values[0], preset=preset, task="hellaswag"
    )
    found = compare_folders(run.evaluations(before.digest), run.evaluations(of.digest), None, "mrgptq_llama31_8b")
    assert {cell.row for cell in found.published[0].cells if cell.ours is not None} == {"FP16"} | rows


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", {"Llama-3.3-70B BF16", "Llama-3.3-70B FP4"}),
        ("models/Llama-3.1-8B", set()),
    ],
)
def test_a_row_of_another_model_is_not_ours(name: str, rows: set[str], tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    for side, of in (("b", model(name=name)), ("c", model("NVFP4"))):
        write_record(tmp_path / side, [1.0, 0.0] * 50, task="mmlu", of=of)
    table = beside(published_table("blog1_table2_llama"), compare(tmp_path / "b", tmp_path / "c"))
    assert {cell.row for cell in table.cells if cell.ours is not None} == rows


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("Qwen/Qwen3-8B", {("Qwen3-8B", "BF16"), ("Qwen3-8B", "NVFP4_or_MXFP4")}),
        ("meta-llama/Llama-3.1-8B-Instruct", {("Llama-3.1-8B-Instruct", c) for c in ("BF16", "NVFP4_or_MXFP4")}),
        ("meta-llama/Llama-3.1-8B", {("Llama-3.1-8B", "BF16"), ("Llama-3.1-8B", "NVFP4_or_MXFP4")}),
        ("mine/Phi-5", set()),
    ],
)
def test_in_a_table_whose_columns_are_formats_the_row_of_our_model_is_ours(
    name: str,
    rows: set[tuple[str, str]],
    tmp_path: Path,
    cache: Path,  # noqa: ARG001
) -> None:
    for side, of in (("b", model(name=name)), ("c", model("NVFP4"))):
        write_record(tmp_path / side, [1.0, 0.0] * 50, task="mmlu", of=of)
    table = beside(published_table("trtllm_ci_mmlu"), compare(tmp_path / "b", tmp_path / "c"))
    assert {(cell.row, cell.benchmark) for cell in table.cells if cell.ours is not None} == rows


def test_a_task_of_a_similar_name_is_not_the_benchmark(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    for side, of in (("b", model("FP8")), ("c", model("NVFP4"))):
        write_record(tmp_path / side, [1.0, 0.0] * 50, task="mmlu_continuation", of=of)
    table = beside(published_table("blog1_table1_deepseek_r1"), compare(tmp_path / "b", tmp_path / "c"))
    assert all(cell.ours is None for cell in table.cells)


def test_ours_says_whose_it_is_and_how_it_was_asked_where_that_is_not_the_published_way(
    tmp_path: Path,
    cache: Path,  # noqa: ARG001
    capsys: pytest.CaptureFixture[str],
) -> None:
    for side, of in (("b", model(name="mine/Nano-30B")), ("c", model("NVFP4", name="mine/Nano-30B"))):
        one = tmp_path / side
        write_record(one / "gpqa", [1.0, 0.0] * 50, task="gpqa_diamond", of=of, subtask={"num_fewshot": 3}, limit=100)
        write_record(one / "pro", [1.0, 0.0] * 250, task="mmlu_pro", of=of)
    comparison = compare(tmp_path / "b", tmp_path / "c")
    table = beside(published_table("modelopt_nemotron3_nano_pruned"), comparison)
    assert {cell.row for cell in table.cells if cell.ours is not None} == {"official 30B BF16"}
    assert table.asked == [
        "ours, MMLU_Pro: task mmlu_pro, acc, 0 examples, no chat template, 500 questions",
        "ours, GPQA_Diamond: task gpqa_diamond, acc, 3 examples, no chat template, 100 questions (the first 100 alone);"
        " published otherwise: 8 samples of each",
    ]
    other = beside(published_table("qad_nano9b"), comparison)
    assert other.asked[0] == f"ours is of mine/Nano-30B, the published figures are of {other.model}"
    sides = (("mmlu-b", model(name="Nemotron-4-15B")), ("mmlu-c", model("NVFP4", name="Nemotron-4-15B")))
    shots = compare(*(write_record(tmp_path / name, [1.0, 0.0] * 50, task="mmlu", of=of) for name, of in sides))
    assert beside(published_table("march-2025-table-3"), shots).asked[-1].endswith("; published otherwise: 5 examples")
    write_reports([comparison], tmp_path / "report")
    assert main(["table", "modelopt_nemotron3_nano_pruned", "--with", str(tmp_path / "report")]) == 0
    assert capsys.readouterr().out.endswith("\n".join(table.asked) + "\n")


def test_another_set_of_questions_of_a_similar_name_is_not_the_benchmark(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    for side, of in (("b", model("FP8")), ("c", model("NVFP4"))):
        write_record(tmp_path / side, [1.0, 0.0] * 50, task="gsm8k_platinum_cot", of=of)
    table = beside(published_table("blog1_table1_deepseek_r1"), compare(tmp_path / "b", tmp_path / "c"))
    assert all(cell.ours is None for cell in table.cells)
    assert table.asked == []


def test_the_command_lists_prints_and_overlays(
    records: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reports([compare(*records)], tmp_path / "report")
    assert main(["table"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(TABLES)
    assert main(["table", "march-2025-table-1", "--with", str(tmp_path / "report")]) == 0
    shown = capsys.readouterr().out
    assert "seen: secondary, confidence high" in shown
    assert "-1.70" in shown
    file = tmp_path / "report" / "comparison.json"
    assert main(["table", "march-2025-table-1", "--with", str(file)]) == 0
    assert capsys.readouterr().out == shown
    assert main(["table", "march-2025-table-1", "--with", str(tmp_path)]) == 2
    assert "holds no comparison.json" in capsys.readouterr().err
    assert main(["table", "blog1_table1", "--json"]) == 2
