"""Claims about the written reports: escaped, alike in every format, readable without network or script."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest
from page_reader import page, written
from record_factory import fidelity, flipped, model, write_record

from halfbyte.records.errors import UserError
from halfbyte.records.record import Health
from halfbyte.reports import figures
from halfbyte.reports.compare import compare
from halfbyte.reports.comparison import Comparison, load_comparisons
from halfbyte.reports.forest import forest_plots
from halfbyte.reports.gate import judge
from halfbyte.reports.html import render_html
from halfbyte.reports.junit import junit
from halfbyte.reports.policy import load_policy
from halfbyte.reports.text import render_markdown, render_text
from halfbyte.reports.write import write_reports

NASTY = ("<script>alert(1)</script> & 'x'", "天空在晴天是什么颜色？", "ما لون السماء؟", "| pipe `code` $x_1$ *bold*")
FILES = {"comparison.json", "report.html", "report.md", "model-card.md", "verdict.json", "junit.xml"}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of BF16, FP8 and NVFP4 on a single task and a group, with texts that mean harm."""
    folder = tmp_path_factory.mktemp("records")
    for format, flips in {"bfloat16": (0, 0), "FP8": (69, 55), "NVFP4": (273, 143)}.items():
        values = flipped(2376, 1225, *flips)[1]
        write_record(
            folder / format / "arc", values, task="arc_easy", format=format, questions=lambda i: f"{NASTY[i % 4]} {i}"
        )
        group = {"mmlu_law": values[:300], "mmlu_art": values[1000:1400]}
        write_record(folder / format / "mmlu", group, task="mmlu", format=format, health=Health(truncated=3))
    return folder


@pytest.fixture(scope="module")
def comparisons(records: Path) -> list[Comparison]:
    """FP8 and NVFP4 beside one baseline."""
    policy = load_policy("release")
    return [
        compare(records / "bfloat16", records / format, policy, fidelity(candidate=model(format)))
        for format in ("FP8", "NVFP4")
    ]


def test_every_number_in_the_html_tables_is_one_of_the_json(tmp_path: Path, comparisons: list[Comparison]) -> None:
    write_reports(comparisons, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
    known = written(content) | {figures.NONE}
    numbers = page((tmp_path / "out" / "report.html").read_text(encoding="utf-8")).numbers
    assert len(numbers) > 60
    assert [number for number in numbers if number not in known] == []


def test_the_html_needs_no_network_and_no_script_and_balances(comparisons: list[Comparison]) -> None:
    html = render_html(comparisons)
    found = page(html)
    assert "script" not in found.tags
    assert all(link.startswith(("#", "data:")) for link in found.links)
    assert not re.search(r"@import|url\((?!#)", html)
    assert html.count("<svg") == html.count("</svg>") == 1
    assert found.tags.count("details") == html.count("</details>") == 4


def test_texts_of_questions_are_escaped_and_keep_their_own_direction(comparisons: list[Comparison]) -> None:
    html = render_html(comparisons)
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &#39;x&#39;" in html
    assert NASTY[1] in html
    assert f'dir="auto">{NASTY[2]}' in html


def test_names_of_models_and_tasks_are_escaped_in_every_format(tmp_path: Path) -> None:
    task = "<b>$x_1$|`"
    write_record(tmp_path / "b", [1.0, 0.0] * 300, task=task)
    write_record(tmp_path / "c", [1.0, 0.0] * 300, task=task, of=model("<i>NVFP4 & co</i>"))
    found = [compare(tmp_path / "b", tmp_path / "c", load_policy("release"))]
    html = render_html(found)
    assert "<b>$" not in html
    assert "<i>" not in html
    assert "&lt;b&gt;$x_1$|`" in html
    markdown = render_markdown(found)
    assert "<b>" not in markdown
    assert "\\|" in markdown
    ElementTree.fromstring(junit(found))


def test_the_first_words_of_the_page_are_verdict_reason_and_next_step(comparisons: list[Comparison]) -> None:
    html = render_html(comparisons)
    head = html[: html.index("<h2>Models</h2>")]
    for word in ("FAIL", "Do not release", "INCONCLUSIVE", "Not enough evidence", "Next:"):
        assert word in head
    for one in comparisons:
        assert one.verdict is not None
        assert one.verdict.sentence in head
        assert one.verdict.next_step in head.replace("&#39;", "'")


def test_text_and_markdown_hold_the_table_of_all_models_and_both_verdicts(comparisons: list[Comparison]) -> None:
    for text in (render_text(comparisons), render_markdown(comparisons)):
        assert re.search(r"BF16 \(baseline\)\W+0\.5156", text)
        assert re.search(r"NVFP4\W+0\.4609", text)
        assert "0.0406 to 0.0690" in text
        assert "FAIL: NVFP4" in text
        assert "INCONCLUSIVE: FP8" in text
        assert "3 prompts were cut to fit" in text
    rows = render_text(comparisons).split("\n\n")[0].splitlines()
    assert len({len(row) - len(re.split("  +", row)[-1]) for row in rows}) == 1  # the last column is aligned


def test_what_is_written_reads_back_and_the_worst_verdict_decides(
    tmp_path: Path, comparisons: list[Comparison]
) -> None:
    paths = write_reports(comparisons, tmp_path / "out")
    assert {path.name for path in paths} == {path.name for path in (tmp_path / "out").iterdir()} == FILES
    assert paths[-1].name == "verdict.json"
    assert load_comparisons(tmp_path / "out") == comparisons
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text(encoding="utf-8"))
    assert (verdict["verdict"], verdict["exit_code"]) == ("fail", 1)
    assert [one["verdict"] for one in verdict["candidates"]] == ["inconclusive", "fail"]


def test_a_comparison_without_a_policy_leaves_no_verdict_behind(
    tmp_path: Path, records: Path, comparisons: list[Comparison]
) -> None:
    write_reports(comparisons, tmp_path / "out")
    unjudged = [compare(records / "bfloat16", records / "FP8")]
    write_reports(unjudged, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == (FILES | {"eval_results.yaml"}) - {
        "verdict.json",
        "junit.xml",
    }
    assert "Compared, not judged" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "not judged" in render_text(unjudged)
    with pytest.raises(UserError, match="was not judged"):
        junit(unjudged)


def test_junit_counts_failures_and_open_tasks(comparisons: list[Comparison]) -> None:
    first, second = ElementTree.fromstring(junit(comparisons)).findall("testsuite")
    assert (second.get("tests"), second.get("failures")) == ("2", "2")
    assert (first.get("failures"), first.get("errors")) == ("0", "2")
    failure = second.find("testcase[@name='arc_easy']/failure")
    assert failure is not None
    assert "loss 0.0547, interval 0.0406 to 0.0690, margin 0.0100" in (failure.get("message") or "")


def test_a_failed_canary_is_an_error_in_junit_whatever_the_tasks_say(tmp_path: Path) -> None:
    ours, theirs = flipped(3000, 2000, 5, 5)
    folders = write_record(tmp_path / "b", ours), write_record(tmp_path / "c", theirs, format="NVFP4")
    found = compare(*folders, load_policy("release"))
    found = judge(found.model_copy(update={"canary_failure": "3 of 16 texts are empty\x00"}), load_policy("release"))
    (suite,) = ElementTree.fromstring(junit([found])).findall("testsuite")
    assert (suite.get("tests"), suite.get("errors"), suite.get("failures")) == ("2", "1", "0")
    error = suite.find("testcase[@name='canary']/error")
    assert error is not None
    assert error.get("message") == "3 of 16 texts are empty\N{REPLACEMENT CHARACTER}"


def test_junit_is_xml_whatever_the_name_of_the_policy(tmp_path: Path) -> None:
    ours, theirs = flipped(3000, 2000, 5, 5)
    folders = write_record(tmp_path / "b", ours), write_record(tmp_path / "c", theirs, format="NVFP4")
    policy = load_policy("release").model_copy(update={"name": 'a\x01 <b> & "c"'})
    (suite,) = ElementTree.fromstring(junit([compare(*folders, policy)])).findall("testsuite")
    assert suite.get("name") == 'NVFP4 (a\N{REPLACEMENT CHARACTER} <b> & "c")'


def test_an_advisory_task_that_fails_is_skipped_in_junit_and_bracketed_in_the_table(tmp_path: Path) -> None:
    for task, flips in (("good", (1, 1)), ("bad", (273, 143))):
        ours, theirs = flipped(2376, 1225, *flips)
        write_record(tmp_path / "b" / task, ours, task=task)
        write_record(tmp_path / "c" / task, theirs, task=task, format="FP8")
    policy = load_policy("release").model_copy(update={"primary": ["good"]})
    found = [compare(tmp_path / "b", tmp_path / "c", policy)]
    assert ElementTree.fromstring(junit(found)).find(".//testcase[@name='bad']/skipped") is not None
    assert "(fail)" in render_text(found)
    assert "PASS: FP8" in render_text(found)


def test_nothing_to_report_and_mixed_baselines_are_refused(tmp_path: Path, comparisons: list[Comparison]) -> None:
    for render in (render_text, render_markdown, render_html, junit):
        with pytest.raises(UserError, match="no comparison to report"):
            render([])
    with pytest.raises(UserError, match="no comparison to report"):
        write_reports([], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    other = comparisons[0].model_copy(update={"baseline": model("float16")})
    with pytest.raises(UserError, match="one baseline, not 2"):
        render_text([other, comparisons[1]])
    with pytest.raises(UserError, match="twice"):
        render_text([comparisons[0], comparisons[0]])


def test_a_report_of_sixty_tasks_stays_small(tmp_path: Path) -> None:
    for number in range(60):
        ours, theirs = flipped(100, 70, 20, 10)
        for side, values, format in (("b", ours, "bfloat16"), ("c", theirs, "NVFP4")):
            write_record(
                tmp_path / side / f"t{number}",
                values,
                task=f"task_{number:02}",
                format=format,
                questions=lambda i: f"{i} " + "many words " * 60,
            )
    found = [compare(tmp_path / "b", tmp_path / "c", load_policy("release"))]
    assert len(render_html(found).encode()) < 3_000_000
    assert 60 * 20 < sum(len(row.flips) for row in found[0].tasks) <= 60 * 30
    assert max(len(line) for line in render_text(found).splitlines()) < 160


def test_a_report_is_the_same_every_time(comparisons: list[Comparison]) -> None:
    assert render_html(comparisons) == render_html(comparisons)


def test_a_forest_plot_of_many_rows_comes_in_parts_that_fit_on_a_page(tmp_path: Path) -> None:
    for number in range(40):
        for side, format in (("b", "bfloat16"), ("c", "NVFP4")):
            write_record(tmp_path / side / f"t{number}", [1.0, 0.0] * 50, task=f"task_{number:02}", format=format)
    html = render_html([compare(tmp_path / "b", tmp_path / "c")])
    assert html.count("<svg") == 2
    assert "Loss of scores between 0 and 1, part 2 of 2" in html


@pytest.mark.parametrize(
    ("task", "shown", "size"),
    [
        ("mmlu_continuation", "mmlu_continuation", 10),
        ("t" * 40, "t" * 40, 7.75),
        (f"begin_{'x' * 80}_end", "…", 7),
        ("天空" * 10, "天空" * 10, 7.75),
    ],
)
def test_a_long_name_is_not_cut_off_at_the_edge_of_the_plot(tmp_path: Path, task: str, shown: str, size: float) -> None:
    for side, format in (("b", "bfloat16"), ("c", "NVFP4")):
        write_record(tmp_path / side, flipped(200, 120, 3, 2)[side == "c"], task=task, format=format)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib has no Chinese font, and need not have one
        ((_, drawing),) = forest_plots([compare(tmp_path / "b", tmp_path / "c")])
    texts = re.findall(r'<text style="([^"]*)"[^>]*>([^<]*)</text>', drawing)
    ((style, name),) = (text for text in texts if text[1][:4] == task[:4])
    assert shown in name
    assert name[-4:] == task[-4:]
    assert f"{size}px" in style


def test_each_cell_of_the_losses_and_each_figure_of_the_plot_is_that_of_its_task_in_the_json(
    tmp_path: Path, comparisons: list[Comparison]
) -> None:
    write_reports(comparisons, tmp_path / "out")
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    found = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))["comparisons"]
    drawn = re.findall(r"<text[^>]*>([^<]*\d[^<]*)</text>", html)
    for label, one in zip(("FP8", "NVFP4"), found, strict=True):
        table = html[html.index(f"<caption>{label} against BF16</caption>") :]
        table = table[: table.index("</table>")]
        rows = {row[0]: row for row in map(_cells, table.split("<tr>")[2:])}
        assert set(rows) == {task["task"] for task in one["tasks"]}
        for task in one["tasks"]:
            result, judgement = task["result"], task["judgement"]
            ends = [f"{result['interval'][end]:.4f}" for end in ("low", "high")]
            expected = [
                task["task"], task["metric"], f"{result['questions']:,}", f"{result['baseline']:.4f}",
                f"{result['candidate']:.4f}", f"{result['loss']:.4f}", " to ".join(ends), f"{judgement['margin']:.4f}",
                f"{task['recovery']:.1f}%", f"{result['lost']:,}", f"{result['gained']:,}",
                figures.p_value(result["mcnemar_p"]), judgement["verdict"],
            ]  # fmt: skip
            assert rows[task["task"]] == expected
            place = drawn.index(f"({' to '.join(ends)})")
            assert drawn[place - 1] == f"{result['loss']:.4f}"


def _cells(row: str) -> list[str]:
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, flags=re.DOTALL)
    return [re.sub(r"<[^>]*>", "", cell).strip().replace("&lt;", "<") for cell in cells]


def test_peak_memory_stands_beside_size_and_speed_and_says_what_it_is_of(tmp_path: Path) -> None:
    sizes: dict[str, int] = {"bfloat16": 1_310_000_000, "FP8": 1_250_000_000}
    for format, size in sizes.items():
        for task in ("one", "two"):
            write_record(
                tmp_path / format / task, [1.0, 0.0] * 50, task=task, format=format,
                memory=(size - (task == "one") * 100_000_000, "process"),
            )  # fmt: skip
    write_record(tmp_path / "NVFP4" / "one", [1.0, 0.0] * 50, task="one", format="NVFP4", memory=(2 * 10**9, "cuda"))
    write_record(tmp_path / "NVFP4" / "two", [1.0, 0.0] * 50, task="two", format="NVFP4")
    found = [compare(tmp_path / "bfloat16", tmp_path / format) for format in ("FP8", "NVFP4")]
    costs = found[0].costs["baseline"], found[0].costs["candidate"], found[1].costs["candidate"]
    assert [cost.memory_bytes for cost in costs] == [1_310_000_000, 1_250_000_000, None]
    for text in (render_html(found), render_markdown(found)):
        assert "1.31 GB" in text
        assert "1.25 GB" in text
        assert "2.00 GB" not in text
        assert "Peak memory is the largest resident size of the process, on a CPU." in text
    mixed = compare(tmp_path / "bfloat16" / "one", tmp_path / "NVFP4" / "one")
    assert "of NVFP4 the most that CUDA&#39;s allocator gave out: not to be compared" in render_html([mixed])
