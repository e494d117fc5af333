"""Each way in which another gate was found to release or block for the wrong reason, by name."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from record_factory import digest, flipped, model, write_record

from halfbyte.records.digests import value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.noise import noise_between
from halfbyte.records.record import Health, Metric, load_record
from halfbyte.reports.compare import compare
from halfbyte.reports.comparison import Comparison
from halfbyte.reports.policy import Policy, load_policy
from halfbyte.reports.write import write_reports

RELEASE = load_policy("release")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))


def both(tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any], policy: Policy = RELEASE) -> Comparison:
    """The gate on two records, each given by the arguments of write_record."""
    for side, format, record in (("baseline", "bfloat16", ours), ("candidate", "NVFP4", theirs)):
        record = {"format": format, **record}
        write_record(tmp_path / side, record.pop("values"), **record)
    return compare(tmp_path / "baseline", tmp_path / "candidate", policy)


def refused(tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any], policy: Policy = RELEASE) -> str:
    with pytest.raises(UserError) as error:
        both(tmp_path, ours, theirs, policy)
    assert error.value.exit_code == 2
    return str(error.value)


def verdict(comparison: Comparison) -> str:
    assert comparison.verdict is not None
    return comparison.verdict.verdict


def policy(**changes: Any) -> Policy:
    return Policy.model_validate({**RELEASE.model_dump(), **changes})


VALUES = [1.0, 1.0, 0.0] * 500


def test_two_empty_folders(tmp_path: Path) -> None:
    for side in ("baseline", "candidate"):
        (tmp_path / side).mkdir()
    with pytest.raises(UserError, match="no evaluation record"):
        compare(tmp_path / "baseline", tmp_path / "candidate", RELEASE)
    with pytest.raises(UserError, match="no folder to compare"):
        compare([], [], RELEASE)


def test_candidate_without_results(tmp_path: Path) -> None:
    write_record(tmp_path / "baseline", VALUES)
    (tmp_path / "candidate").mkdir()
    with pytest.raises(UserError, match=r"no evaluation record in .*candidate"):
        compare(tmp_path / "baseline", tmp_path / "candidate", RELEASE)
    assert "no answers to colours" in refused(
        tmp_path / "x", {"values": VALUES}, {"values": VALUES, "edit": lambda _: []}
    )


def test_candidate_that_drops_the_questions_it_would_fail(tmp_path: Path) -> None:
    """389 of 500 questions are there, all of them right."""
    message = refused(tmp_path, {"values": [1.0] * 500}, {"values": [1.0] * 389})
    assert "of 500 in the baseline the candidate lacks 111" in message
    message = refused(tmp_path / "after", {"values": [1.0] * 500}, {"values": [1.0] * 500, "edit": lambda x: x[:389]})
    assert "holds 389 of the 500 questions" in message


def test_different_questions_with_equal_indices(tmp_path: Path) -> None:
    message = refused(tmp_path, {"values": VALUES}, {"values": VALUES, "questions": lambda i: f"Another question {i}?"})
    assert "document of question 0 of colours" in message
    assert "Another question" in message


@pytest.mark.parametrize(("setting", "ours", "theirs"), [("generation", {"temperature": 0.0}, {"temperature": 0.6})])
def test_different_temperature(tmp_path: Path, setting: str, ours: Any, theirs: Any) -> None:
    message = refused(
        tmp_path,
        {"values": VALUES, "subtask": {setting: ours}},
        {"values": VALUES, "subtask": {setting: theirs}},
    )
    assert "'temperature': 0.0" in message
    assert "'temperature': 0.6" in message


def test_different_shots(tmp_path: Path) -> None:
    message = refused(tmp_path, {"values": VALUES}, {"values": VALUES, "subtask": {"num_fewshot": 5}})
    assert "num_fewshot of colours is 0 in the baseline and 5 in the candidate" in message


def test_different_template(tmp_path: Path) -> None:
    message = refused(tmp_path, {"values": VALUES}, {"values": VALUES, "chat_template": "3f2a"})
    assert "chat_template is None in the baseline and '3f2a' in the candidate" in message


def test_a_template_that_the_server_does_not_name(tmp_path: Path) -> None:
    sides: dict[str, Any] = {"values": VALUES, "chat_template": "unknown", "backend": "server"}
    assert "chat_template is 'unknown' in the baseline and 'unknown' in the candidate" in refused(
        tmp_path, sides, sides
    )
    assert verdict(both(tmp_path, sides, sides, policy(allow_unknown=["chat_template"]))) == "pass"


def test_baseline_limited_candidate_not(tmp_path: Path) -> None:
    message = refused(tmp_path, {"values": VALUES[:200], "limit": 200}, {"values": VALUES})
    assert "limit is 200 in the baseline and None in the candidate" in message
    smoke = load_policy("smoke")
    assert "limit is 200" in refused(
        tmp_path / "smoke", {"values": VALUES[:200], "limit": 200}, {"values": VALUES}, smoke
    )


def test_relative_guard_on_one_of_thirty(tmp_path: Path) -> None:
    """4 right of 30 become 3, 75 % of the baseline, which one unlucky question explains."""
    ours, theirs = flipped(30, 4, 1, 0)
    for name in ("release", "mlperf-99", "mlperf-99.9"):
        found = both(tmp_path / name, {"values": ours}, {"values": theirs}, load_policy(name))
        assert (verdict(found), found.verdict and found.verdict.exit_code) == ("inconclusive", 3)


def test_rounding_before_comparing(tmp_path: Path) -> None:
    """0.9457 of the baseline is not 0.95 of it."""
    ours, theirs = flipped(20_000, 10_000, 543, 0)
    found = both(
        tmp_path, {"values": ours}, {"values": theirs}, load_policy("mlperf-99").model_copy(update={"ratio": 0.95})
    )
    assert found.tasks[0].recovery == pytest.approx(94.57)
    assert verdict(found) != "pass"
    assert found.verdict is not None
    assert "94.57" in found.verdict.sentence or "94.5700" in found.verdict.sentence


def test_perplexity_direction(tmp_path: Path) -> None:
    """Perplexity rises from 6 to 9; and a record that says higher were better is no way out."""
    ours, theirs = ([base + i % step / 10 for i in range(60)] for base, step in ((6.0, 6), (9.1, 4)))
    rules = policy(margins={"perplexity": 0.1})
    sides = ({"values": values, "metric": "perplexity", "higher_is_better": False} for values in (ours, theirs))
    found = both(tmp_path, next(sides), next(sides), rules)
    assert (verdict(found), round(found.tasks[0].result.loss, 6)) == ("fail", 3.0)
    wrong = ({"values": values, "metric": "perplexity"} for values in (ours, theirs))
    assert "by its definition lower is" in refused(tmp_path / "wrong", next(wrong), next(wrong), rules)


def test_imagerewards_negative_scale(tmp_path: Path) -> None:
    """1.10 to 0.40 is a loss of 0.70 and no percentage, and so is -0.4 to -1.1."""
    for name, start in (("above", 1.1), ("below", -0.4)):
        sides = (
            {"values": [base + (i % 9 - 4) / 10 + i % 2 * noise for i in range(200)], "metric": "image_reward"}
            for base, noise in ((start, 0.0), (start - 0.7, 0.01))
        )
        found = both(tmp_path / name, next(sides), next(sides), load_policy("image"))
        assert (verdict(found), found.tasks[0].recovery) == ("fail", None)
        assert found.tasks[0].result.loss == pytest.approx(0.695)
    sides = ({"values": [0.1, -0.3, 0.5] * 9, "metric": "image_reward"} for _ in range(2))
    assert "a scale that crosses zero" in refused(
        tmp_path / "ratio", next(sides), next(sides), load_policy("mlperf-99")
    )
    sides = ({"values": [0.1, -0.3, 0.5] * 9, "metric": "image_reward"} for _ in range(2))
    assert "has no margin for image_reward" in refused(tmp_path / "release", next(sides), next(sides))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "NaN"])
def test_a_nan_metric(tmp_path: Path, value: float | str) -> None:
    def broken(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        lines[2]["acc"] = value
        return lines

    assert "acc of question 2 of colours" in refused(tmp_path, {"values": VALUES}, {"values": VALUES, "edit": broken})


def test_duplicate_questions(tmp_path: Path) -> None:
    message = refused(tmp_path, {"values": VALUES}, {"values": VALUES, "edit": lambda lines: [*lines, lines[0]]})
    assert "question 0 of colours is there twice" in message


def test_results_of_another_model_under_this_name(tmp_path: Path) -> None:
    other = model("NVFP4").model_copy(update={"digest": digest("another model")})
    for task, of in (("arc_easy", model("NVFP4")), ("mmlu", other)):
        write_record(tmp_path / "baseline" / task, VALUES, task=task)
        write_record(tmp_path / "candidate" / task, VALUES, task=task, of=of)
    with pytest.raises(UserError, match="records of the candidate are of 2 different models"):
        compare(tmp_path / "baseline", tmp_path / "candidate", RELEASE)


def test_results_that_were_edited_after_the_evaluation(tmp_path: Path) -> None:
    write_record(tmp_path / "baseline", VALUES)
    folder = write_record(tmp_path / "candidate", VALUES, format="NVFP4")
    path = next(folder.glob("samples_*.jsonl"))
    path.write_text(path.read_text(encoding="utf-8").replace('"acc": 0.0', '"acc": 1.0', 1), encoding="utf-8")
    with pytest.raises(UserError, match="has changed since it was written"):
        compare(tmp_path / "baseline", folder, RELEASE)


def waived(expires: str, **changes: Any) -> Policy:
    return policy(
        waivers=[
            {
                "task": "colours",
                "reason": "the loss is known and was accepted for the preview",
                "by": "R. Jansen",
                "granted": "2026-01-01",
                "expires": expires,
            }
        ],
        **changes,
    )


def with_another_task(tmp_path: Path) -> tuple[Path, Path]:
    """Records of one task that fails and one that passes."""
    lost = flipped(3000, 2000, 400, 0)
    same = flipped(3000, 2000, 0, 0)
    for task, values in (("colours", lost), ("shapes", same)):
        write_record(tmp_path / "baseline" / task, values[0], task=task)
        write_record(tmp_path / "candidate" / task, values[1], task=task, format="NVFP4")
    return tmp_path / "baseline", tmp_path / "candidate"


def test_a_clock_moved_back_on_a_waiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are of 2026-11-01; a clock set to March does not revive a waiver that ended in June."""
    folders = with_another_task(tmp_path)
    assert verdict(compare(*folders, waived("2099-12-31"))) == "pass"
    monkeypatch.setattr("halfbyte.reports.compare.now", lambda: "2026-03-01T00:00:00+00:00")
    found = compare(*folders, waived("2026-06-30"))
    assert verdict(found) == "fail"
    assert "it has expired" in found.waivers[0]
    assert any("waivers go by the later" in note for note in found.notes)


def test_a_clock_moved_back_behind_an_earlier_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records are older than the waiver's end, but a gate was asked after it."""
    folders = with_another_task(tmp_path)
    later, back = (datetime(2026, 12, 20, tzinfo=UTC) + timedelta(days=days) for days in (0, -30))
    monkeypatch.setattr("halfbyte.reports.compare.now", lambda: later.isoformat())
    assert verdict(compare(*folders, waived("2026-12-01"))) == "fail"
    monkeypatch.setattr("halfbyte.reports.compare.now", lambda: back.isoformat())
    assert verdict(compare(*folders, waived("2026-12-01"))) == "fail"


@pytest.mark.parametrize("created", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00", "yesterday"])
def test_a_record_of_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, created: str) -> None:
    monkeypatch.setattr("halfbyte.reports.compare.now", lambda: created)
    with pytest.raises(UserError, match="what is no time"):
        compare(*with_another_task(tmp_path), waived("2099-12-31"))


def test_a_task_without_an_answer_parsed(tmp_path: Path) -> None:
    """A parser that reads nothing scores 0, which is no loss of accuracy."""
    ours, theirs = flipped(1000, 700, 600, 0)
    found = both(
        tmp_path,
        {"values": ours, "health": Health(unanswered=20, samples=1000)},
        {"values": theirs, "health": Health(unanswered=800, samples=1000)},
    )
    assert found.verdict is not None
    assert (found.verdict.verdict, found.verdict.exit_code) == ("anomaly", 4)
    assert "no answer was found in 80.0%" in found.verdict.sentence


def test_answers_cut_at_the_token_limit(tmp_path: Path) -> None:
    ours, theirs = flipped(1000, 700, 100, 0)
    found = both(
        tmp_path,
        {"values": ours, "health": Health(hit_cap=30, samples=1000)},
        {"values": theirs, "health": Health(hit_cap=370, samples=1000)},
    )
    assert verdict(found) == "anomaly"
    assert found.verdict is not None
    assert "370 of 1,000 texts of the candidate were cut" in found.verdict.sentence
    assert "max_gen_toks" in found.verdict.next_step


def test_a_candidate_better_than_its_baseline_beyond_chance(tmp_path: Path) -> None:
    ours, theirs = flipped(3000, 1500, 20, 120)
    found = both(tmp_path, {"values": ours}, {"values": theirs})
    assert verdict(found) == "anomaly"
    assert found.verdict is not None
    assert "better than its baseline beyond chance" in found.verdict.sentence
    assert verdict(both(tmp_path, {"values": ours}, {"values": theirs}, policy(better_alpha=None))) == "pass"


def test_passing_by_luck_on_too_few_questions(tmp_path: Path) -> None:
    """Nine questions gained and none lost of 150: the interval says pass, and no candidate without a flip could."""
    ours, theirs = flipped(150, 80, 0, 9)
    found = both(tmp_path, {"values": ours}, {"values": theirs}, policy(better_alpha=None))
    interval = found.tasks[0].result.interval
    assert interval is not None
    assert interval.high < 0.01
    assert verdict(found) == "inconclusive"
    assert found.verdict is not None
    assert "too few for a margin" in found.verdict.sentence


def test_a_margin_in_percent_where_shares_are_meant(tmp_path: Path) -> None:
    """`margin: 1` for one point would tolerate the loss of everything."""
    ours, theirs = flipped(2000, 1500, 1000, 0)
    for wrong in (1, 0.5):
        message = refused(tmp_path / str(wrong), {"values": ours}, {"values": theirs}, policy(margin=wrong))
        assert "could not fail" in message
        assert "0.01 is one point" in message


def test_a_margin_for_a_task_that_is_misspelt(tmp_path: Path) -> None:
    found = both(tmp_path, {"values": VALUES}, {"values": VALUES}, policy(margins={"colour": 0.001}))
    assert any("margins for colour were of no use" in note for note in found.notes)


def rewritten(folder: Path, *, sealed: bool, **fields: Any) -> None:
    content = json.loads((folder / "record.json").read_text(encoding="utf-8")) | fields
    del content["seal"]
    if sealed:
        content["seal"] = value_digest(content)
    (folder / "record.json").write_text(json.dumps(content), encoding="utf-8")


def test_a_record_that_was_edited_after_the_evaluation(tmp_path: Path) -> None:
    """With its digests, or with its seal taken off."""
    write_record(tmp_path / "b", VALUES)
    for number, (change, message) in enumerate(
        (
            ({"files": {}, "seal": "0" * 64}, "record.json has changed"),
            ({"files": {}}, "record.json has changed"),
            ({"schema_version": 3}, "not a record of this version"),
        )
    ):
        folder = write_record(tmp_path / f"c{number}", VALUES, format="NVFP4")
        rewritten(folder, sealed=False, **change)
        with pytest.raises(UserError, match=message):
            compare(tmp_path / "b", folder, RELEASE)


def test_a_record_of_version_1_has_no_seal_and_that_is_said(tmp_path: Path) -> None:
    write_record(tmp_path / "b", VALUES)
    folder = write_record(tmp_path / "c", VALUES, format="NVFP4")
    rewritten(folder, sealed=False, schema_version=1, files={})
    found = compare(tmp_path / "b", folder, RELEASE)
    assert any("wrote no digests" in note for note in found.tasks[0].notes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"created": "yesterday"}, "what is no time"),
        ({"seconds": "NaN"}, "says that it took nan s"),
        ({"tokens": 10**400}, "more than can be: 1000"),
        ({"tokens": -1}, "counts less than nothing"),
        ({"memory_bytes": -1, "memory_kind": "cuda"}, "-1 bytes of memory"),
        ({"memory_bytes": float("nan"), "memory_kind": "cuda"}, "memory_bytes Input should be a finite number"),
        ({"samples_files": {"colours": "../b/samples_colours_2026-11-01T00-00-00.jsonl"}}, "outside of its folder"),
        ({"metrics": []}, "no figure for its metric"),
    ],
)
def test_a_record_that_says_what_cannot_be(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_record(tmp_path / "b", VALUES)
    folder = write_record(tmp_path / "c", VALUES, format="NVFP4")
    rewritten(folder, sealed=True, **fields)
    with pytest.raises(UserError, match=message):
        compare(tmp_path / "b", folder, RELEASE)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"acc": 10**400}, "is 1000"),
        ({"doc_id": 0.5}, "is not a sample line"),
        ({"doc_id": True}, "is not a sample line"),
        ({"filter": []}, "is not a sample line"),
        ({"generated": [{"tokens": -5}]}, "is not a sample line"),
        ({"generated": [{"tokens": float("nan")}]}, "is not a sample line"),
        ({"generated": [{"tokens": 5}, {"tokens": 5}]}, "has 2 samples, and its record speaks of 1"),
    ],
)
def test_a_sample_line_that_cannot_be(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    side = {"values": VALUES, "edit": lambda lines: [lines[0] | line, *lines[1:]]}
    assert message in refused(tmp_path, {"values": VALUES}, side)


@pytest.mark.parametrize(
    "line",
    [
        {"arguments": {"a": 1, "b": 2}},
        {"arguments": None},
        {"arguments": "text"},
        {"resps": None, "filtered_resps": None},
        {"filtered_resps": ["half a pair: \ud83d"], "target": "\udc00", "doc": {"question": "\ud800"}},
        {"doc": {"question": "\x00\x1b[31m\u202e"}, "filtered_resps": ["\x0b"]},
        {"doc": {"question": "字" * 1_000_000}, "filtered_resps": ["x" * 1_000_000]},
    ],
)
def test_texts_of_any_kind_are_reported(tmp_path: Path, line: dict[str, Any]) -> None:
    def edit(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [json.loads(json.dumps(lines[0] | line)), *lines[1:]]

    folder = write_record(tmp_path / "b", VALUES)
    other = write_record(tmp_path / "c", [0.0, *VALUES[1:]], format="NVFP4")
    path = next(other.glob("samples_*.jsonl"))
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("".join(json.dumps(one) + "\n" for one in edit(lines)), encoding="utf-8")
    load_record(other).save(other)
    write_reports([compare(folder, other, RELEASE)], tmp_path / "out")
    assert (tmp_path / "out" / "report.html").stat().st_size < 200_000


def test_a_noisy_baseline_of_few_questions_does_not_widen_the_margin_without_end(tmp_path: Path) -> None:
    """Two evaluations of 30 questions that differ by luck are no reason to tolerate a loss of ten points."""
    first, second = flipped(30, 15, 2, 2)
    folder = write_record(tmp_path / "b", first)
    noise_between(folder, write_record(tmp_path / "again", second)).save(folder)
    write_record(tmp_path / "c", flipped(30, 15, 1, 0)[1], format="NVFP4")
    (row,) = compare(folder, tmp_path / "c", load_policy("lossless")).tasks
    assert row.noise is not None
    assert row.noise.largest > 0.1
    assert row.judgement is not None
    assert (row.judgement.margin, row.judgement.verdict) == (pytest.approx(0.01), "inconclusive")


def test_a_ratio_that_holds_but_for_the_rounding_of_floats(tmp_path: Path) -> None:
    """99 of 104 is 0.99 of 100 of 104, and less than what a float makes of that."""
    ours, theirs = flipped(104, 100, 1, 0)
    assert 99 / 104 < 0.99 * (100 / 104)
    assert verdict(both(tmp_path, {"values": ours}, {"values": theirs}, load_policy("mlperf-99"))) == "pass"


def test_a_group_that_averages_its_subtasks_otherwise_is_said(tmp_path: Path) -> None:
    """The task's own figure is the mean over subtasks, and the gate counts each question once."""
    groups = {"mmlu_law": [1.0] * 400 + [0.0] * 100, "mmlu_art": [0.0] * 90 + [1.0] * 10}
    for side, format in (("b", "bfloat16"), ("c", "NVFP4")):
        folder = write_record(tmp_path / side, groups, task="mmlu", format=format)
        record = load_record(folder)
        record.metrics.append(
            Metric(subtask="mmlu", metric="acc", filter="none", value=0.45, higher_is_better=True, questions=600)
        )
        record.save(folder)
    (row,) = compare(tmp_path / "b", tmp_path / "c").tasks
    assert row.result.baseline == pytest.approx(410 / 600)
    assert any("to 0.4500; here each question counts once" in note for note in row.notes)


def test_a_second_between_two_looks_at_the_clock_is_no_clock_moved_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(f"2027-01-01T00:00:{second:02}+00:00" for second in range(60))
    monkeypatch.setattr("halfbyte.reports.compare.now", lambda: next(times))
    found = both(tmp_path, {"values": VALUES}, {"values": VALUES})
    assert not any("clock" in note for note in found.notes)
