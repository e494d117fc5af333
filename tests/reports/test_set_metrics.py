"""Claims about figures of a whole set: shown in every report, never in the way of a verdict, and never one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from record_factory import flipped, write_record

from halfbyte.main import main
from halfbyte.records.errors import UserError
from halfbyte.records.record import Metric
from halfbyte.reports.compare import compare
from halfbyte.reports.comparison import Comparison, load_comparisons
from halfbyte.reports.html import render_html
from halfbyte.reports.junit import junit
from halfbyte.reports.policy import Policy, load_policy
from halfbyte.reports.text import render_markdown, render_text
from halfbyte.reports.write import write_reports

Line = dict[str, Any]


def without_values(metric: str) -> Callable[[list[Line]], list[Line]]:
    """The lines as a metric leaves them that has no value a question."""

    def edit(lines: list[Line]) -> list[Line]:
        return [{key: value for key, value in line.items() if key != metric} | {"metrics": []} for line in lines]

    return edit


def with_parts(lines: list[Line]) -> list[Line]:
    """The lines as lm-eval writes those of word_perplexity: log-likelihood and words of each document."""
    return [line | {"word_perplexity": [-120.5, 31]} for line in lines]


def images(folder: Path, fid: dict[str, float], edit: Any = None, **more: Any) -> None:
    for side, format in (("b", "bfloat16"), ("c", "NVFP4")):
        write_record(
            folder / side / "fid", [0.0] * 50, task="photos", metric="fid", higher_is_better=False, format=format,
            reported=fid[side], edit=edit or without_values("fid"), **more,
        )  # fmt: skip


def answers(folder: Path) -> None:
    for side, format in (("b", "bfloat16"), ("c", "NVFP4")):
        values = flipped(3000, 2000, 5, 5)[side == "c"]
        write_record(folder / side / "answers", values, task="answers", format=format)


def gated(folder: Path, **fields: Any) -> Comparison:
    policy = Policy.model_validate(load_policy("release").model_dump() | fields)
    return compare(folder / "b", folder / "c", policy)


def test_a_figure_without_a_value_a_question_is_shown_and_does_not_decide(tmp_path: Path) -> None:
    images(tmp_path, {"b": 20.3, "c": 23.1})
    answers(tmp_path)
    found = gated(tmp_path)
    assert found.verdict is not None
    assert found.verdict.verdict == "pass"
    assert found.verdict.decided_by == "answers"
    (one,) = found.set_metrics
    assert (one.metric, one.baseline, one.candidate, one.main) == ("fid", 20.3, 23.1, True)
    assert one.loss == pytest.approx(2.8)
    assert [row.task for row in found.tasks] == ["answers"]
    for text in (render_text([found]), render_markdown([found]), render_html([found])):
        assert "23.1000" in text
        assert "2.8000" in text
        assert "has no interval and does not decide" in text
    skipped = ElementTree.fromstring(junit([found])).find(".//testcase[@name='photos fid']/skipped")
    assert skipped is not None
    write_reports([found], tmp_path / "out")
    assert load_comparisons(tmp_path / "out") == [found]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"primary": ["photos"]}, "decides on fid of photos, which is one figure for the whole set"),
        ({"primary": ["photos", "answers"]}, "decides on fid of photos, which is one figure for the whole set"),
        ({"margins": {"fid": 1.0}}, "decides on fid of photos, which is one figure for the whole set"),
        ({"margins": {"photos": 1.0}}, "decides on fid of photos, which is one figure for the whole set"),
    ],
)
def test_a_policy_that_names_one_is_refused_in_one_line(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    images(tmp_path, {"b": 20.3, "c": 20.3})
    answers(tmp_path)
    with pytest.raises(UserError, match=said):
        gated(tmp_path, **fields)


def test_alone_it_can_be_compared_and_not_gated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images(tmp_path, {"b": 20.3, "c": 19.0})
    found = compare(tmp_path / "b", tmp_path / "c")
    assert found.tasks == []
    assert found.set_metrics[0].loss == pytest.approx(-1.3)
    text = render_text([found])
    assert "photos fid" in text.splitlines()[0]
    assert render_html([found]).count("19.0000") == 2
    assert "19.0000" in render_markdown([found])
    assert main(["gate", str(tmp_path / "b"), str(tmp_path / "c"), "--policy", "release"]) == 2
    assert "has nothing to decide on: fid of photos, of which no question has a value" in capsys.readouterr().err
    with pytest.raises(UserError, match="nothing to decide on"):
        gated(tmp_path)


def test_parts_of_a_figure_are_no_values(tmp_path: Path) -> None:
    for side, value in (("b", 21.5), ("c", 24.0)):
        write_record(
            tmp_path / side, [0.0] * 60, task="wikitext", metric="word_perplexity", higher_is_better=False,
            reported=value, edit=with_parts, format={"b": "bfloat16", "c": "NVFP4"}[side],
        )  # fmt: skip
    (one,) = compare(tmp_path / "b", tmp_path / "c").set_metrics
    assert (one.task, one.loss, one.questions) == ("wikitext", 2.5, 60)


def test_another_figure_of_a_task_stands_beside_its_losses(tmp_path: Path) -> None:
    for side, bleu in (("b", 31.0), ("c", 30.0)):
        more = Metric(subtask="texts", metric="bleu", filter="none", value=bleu, higher_is_better=True, questions=100)
        write_record(
            tmp_path / side, [1.0, 0.0] * 50, task="texts", more=[more],
            format={"b": "bfloat16", "c": "FP8"}[side],
        )  # fmt: skip
    found = compare(tmp_path / "b", tmp_path / "c")
    assert [row.task for row in found.tasks] == ["texts"]
    assert [(row.metric, row.loss, row.main) for row in found.set_metrics] == [("bleu", 1.0, False)]


def test_a_share_without_values_is_still_refused_and_so_is_one_side_without(tmp_path: Path) -> None:
    for side in ("b", "c"):
        write_record(tmp_path / side, [1.0] * 50, edit=without_values("acc"), format={"b": "FP8", "c": "NVFP4"}[side])
    with pytest.raises(UserError, match="no number for the metric acc"):
        compare(tmp_path / "b", tmp_path / "c")
    for side, edit in (("b2", None), ("c2", without_values("psnr"))):
        write_record(tmp_path / side, [1.0] * 50, metric="psnr", edit=edit, format={"b2": "FP8", "c2": "NVFP4"}[side])
    with pytest.raises(UserError, match="no number for the metric psnr"):
        compare(tmp_path / "b2", tmp_path / "c2")


def test_different_questions_are_refused_for_a_whole_set_too(tmp_path: Path) -> None:
    for side, texts in (("b", "photo {}"), ("c", "drawing {}")):
        write_record(
            tmp_path / side, [0.0] * 50, task="photos", metric="fid", higher_is_better=False, reported=20.0,
            edit=without_values("fid"), format={"b": "FP8", "c": "NVFP4"}[side], questions=texts.format,
        )  # fmt: skip
    with pytest.raises(UserError, match=r"are not comparable"):
        compare(tmp_path / "b", tmp_path / "c")


@pytest.mark.parametrize("having", ["b", "c"])
def test_a_figure_that_one_side_lacks_is_refused(tmp_path: Path, having: str) -> None:
    bleu = Metric(subtask="texts", metric="bleu", filter="none", value=31.0, higher_is_better=True, questions=100)
    for side, format in (("b", "bfloat16"), ("c", "FP8")):
        more = [bleu] if side == having else []
        write_record(tmp_path / side, [1.0, 0.0] * 50, task="texts", more=more, format=format)
    with pytest.raises(UserError, match=r"the record in .* has no bleu of texts"):
        compare(tmp_path / "b", tmp_path / "c")
