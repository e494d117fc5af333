"""Claims about the rules of policies: MLPerf's ratio, the lossless margin, image bounds, waivers and canaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_factory import fidelity, flipped, model, write_record

from halfbyte.records.canary import CanaryRecord
from halfbyte.records.errors import UserError
from halfbyte.records.noise import noise_between
from halfbyte.reports.compare import compare
from halfbyte.reports.comparison import Comparison
from halfbyte.reports.policy import Policy, load_policy
from halfbyte.reports.text import render_markdown, render_text

WAIVER = {
    "task": "bad",
    "reason": "the loss is known and was accepted for the preview",
    "by": "R. Jansen",
    "granted": "2026-10-01",
    "expires": "2099-01-31",
}


@pytest.fixture(autouse=True)
def own_cache(cache: Path) -> Path:
    return cache


def word(comparison: Comparison) -> str:
    assert comparison.verdict is not None
    return comparison.verdict.verdict


def sentence(comparison: Comparison) -> str:
    assert comparison.verdict is not None
    return comparison.verdict.sentence


def two_sides(folder: Path, values: tuple[Any, Any], ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[Path, Path]:
    write_record(folder / "b", values[0], **ours)
    write_record(folder / "c", values[1], **{"format": "NVFP4", **theirs})
    return folder / "b", folder / "c"


def generating(tokens: float) -> dict[str, Any]:
    """Fields of a record whose texts have so many tokens on average."""
    return {
        "subtask": {"output_type": "generate_until", "generation": {"until": ["\n"]}},
        "edit": lambda lines: [
            line | {"generated": [{"tokens": int(tokens) + (i % 10 < 10 * (tokens % 1)), "stop": "end_token"}]}
            for i, line in enumerate(lines)
        ],
    }


@pytest.mark.parametrize(
    ("lost", "name", "expected"),
    [
        (10, "mlperf-99", "pass"),  # 99.0 % exactly
        (11, "mlperf-99", "inconclusive"),  # below it, and chance explains it
        (60, "mlperf-99", "fail"),
        (1, "mlperf-99.9", "pass"),
        (2, "mlperf-99.9", "inconclusive"),
    ],
)
def test_mlperfs_rule_is_a_point_estimate_and_the_interval_tells_fail_from_open(
    tmp_path: Path, lost: int, name: str, expected: str
) -> None:
    folders = two_sides(tmp_path, flipped(1250, 1000, lost, 0), {}, {})
    found = compare(*folders, load_policy(name))
    assert word(found) == expected
    assert "of the baseline's score" in sentence(found)
    if expected == "pass":
        assert "does not prove it" in sentence(found)
        assert found.verdict is not None
        assert not found.verdict.release_evidence
        assert "policy 'release'" in found.verdict.next_step


@pytest.mark.parametrize(("length", "expected"), [(100.0, "pass"), (110.0, "pass"), (110.5, "fail"), (89.5, "fail")])
def test_mlperf_bounds_the_length_of_generated_texts(tmp_path: Path, length: float, expected: str) -> None:
    folders = two_sides(tmp_path, flipped(1250, 1000, 0, 0), generating(100.0), generating(length))
    found = compare(*folders, load_policy("mlperf-99"))
    assert word(found) == expected
    assert (found.tasks[0].baseline_length, found.tasks[0].candidate_length) == (100.0, length)
    if expected == "fail":
        assert "0.9 to 1.1 is tolerated" in sentence(found)


def test_mlperf_cannot_judge_generated_texts_of_unknown_length(tmp_path: Path) -> None:
    generated = {"subtask": {"output_type": "generate_until", "generation": {"until": ["\n"]}}}
    found = compare(*two_sides(tmp_path, flipped(1250, 1000, 0, 0), generated, generated), load_policy("mlperf-99"))
    assert word(found) == "inconclusive"
    assert "do not say how long" in sentence(found)


def test_mlperf_turns_the_ratio_round_where_lower_is_better(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(5, 7, 400)
    lower: dict[str, Any] = {"metric": "word_perplexity", "higher_is_better": False}
    for factor, expected in ((1.005, "pass"), (1.05, "fail")):
        sides = (values.tolist(), (factor * values + rng.normal(0, 0.01, 400)).tolist())
        found = compare(*two_sides(tmp_path / expected, sides, lower, lower), load_policy("mlperf-99"))
        assert word(found) == expected


def test_lossless_needs_a_second_baseline_and_takes_what_it_differs_by_for_its_margin(tmp_path: Path) -> None:
    lossless = load_policy("lossless")
    folders = two_sides(tmp_path, flipped(3000, 2000, 15, 14), {}, {})
    with pytest.raises(UserError, match="--repeat-baseline"):
        compare(*folders, lossless)
    noise_between(folders[0], write_record(tmp_path / "again", flipped(3000, 2000, 19, 17)[1])).save(folders[0])
    found = compare(*folders, lossless)
    noise, judgement = found.tasks[0].noise, found.tasks[0].judgement
    assert noise is not None
    assert judgement is not None
    assert (noise.questions, noise.lost, noise.gained) == (3000, 19, 17)
    assert noise.loss == pytest.approx(2 / 3000)
    assert judgement.margin == noise.largest > 0.002
    assert word(found) == "pass"
    assert "19 lost and 17 gained" in " ".join(render_text([found]).split())
    write_record(tmp_path / "worse", flipped(3000, 2000, 70, 20)[1], format="FP8")
    assert word(compare(folders[0], tmp_path / "worse", lossless)) == "fail"


def test_a_noise_floor_of_other_questions_is_refused(tmp_path: Path) -> None:
    folders = two_sides(tmp_path, flipped(500, 300, 5, 5), {}, {})
    floor = noise_between(folders[0], folders[0])
    floor.flips[0].questions -= 1
    floor.save(folders[0])
    with pytest.raises(UserError, match="noise floor of colours is of 499 questions, its record of 500"):
        compare(*folders)


@pytest.mark.parametrize(
    ("shift", "expected"), [(0.0, "pass"), (-0.5, "fail"), (0.5, "anomaly"), (-0.06, "inconclusive")]
)
def test_images_are_bounded_on_both_sides(tmp_path: Path, shift: float, expected: str) -> None:
    rng = np.random.default_rng(1)
    ours = rng.normal(30, 2, 1000)
    theirs = ours + shift + rng.normal(0, 0.5, 1000)
    clip: dict[str, Any] = {"metric": "clip_score"}
    found = compare(*two_sides(tmp_path, (ours.tolist(), theirs.tolist()), clip, clip), load_policy("image"))
    assert word(found) == expected
    assert f"({expected})" not in render_text([found])


def good_and_bad(tmp_path: Path) -> tuple[Path, Path]:
    for task, counts in (("good", (3000, 2000, 0, 0)), ("bad", (3000, 2000, 400, 0))):
        ours, theirs = flipped(*counts)
        write_record(tmp_path / "b" / task, ours, task=task)
        write_record(tmp_path / "c" / task, theirs, task=task, format="NVFP4")
    return tmp_path / "b", tmp_path / "c"


def release(**changes: Any) -> Policy:
    return Policy.model_validate({**load_policy("release").model_dump(), **changes})


def test_a_waiver_takes_a_task_out_of_the_verdict_and_is_printed(tmp_path: Path) -> None:
    folders = good_and_bad(tmp_path)
    assert word(compare(*folders, release())) == "fail"
    found = compare(*folders, release(waivers=[WAIVER]))
    assert word(found) == "pass"
    assert "By waiver bad did not count." in sentence(found)
    for text in (render_text([found]), render_markdown([found])):
        assert "fail, waived" in text
        words = " ".join(text.split())
        for part in ("R. Jansen", "2026-10-01", "2099-01-31", "accepted for the preview", "(applied)"):
            assert part in words.replace("\\", "")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"expires": "2026-10-31"}, "it has expired"),
        ({"granted": "2098-01-01"}, "it was not granted yet"),
        ({"candidate": "0123456789ab"}, "it is for another candidate"),
    ],
)
def test_a_waiver_that_does_not_hold_is_printed_too(tmp_path: Path, changes: dict[str, str], why: str) -> None:
    found = compare(*good_and_bad(tmp_path), release(waivers=[WAIVER | changes]))
    assert word(found) == "fail"
    assert why in found.waivers[0]


def test_a_waiver_holds_on_its_last_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = good_and_bad(tmp_path)
    for time, expected in (("2026-11-30T23:59:59+00:00", "pass"), ("2026-12-01T00:00:00+00:00", "fail")):
        monkeypatch.setattr("halfbyte.reports.compare.now", lambda time=time: time)
        assert word(compare(*folders, release(waivers=[WAIVER | {"expires": "2026-11-30"}]))) == expected


def test_waivers_on_everything_and_on_nothing_that_is_there_are_refused(tmp_path: Path) -> None:
    folders = good_and_bad(tmp_path)
    with pytest.raises(UserError, match="waives baad, which was not evaluated"):
        compare(*folders, release(waivers=[WAIVER | {"task": "baad"}]))
    with pytest.raises(UserError, match="waives every task that decides"):
        compare(*folders, release(primary=["bad"], waivers=[WAIVER]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reason": "ok"}, "reason"),
        ({"by": ""}, "by"),
        ({"expires": "2026-09-01"}, "before it was granted"),
        ({"expires": "soon"}, "expires"),
        ({"until": "2027-01-01"}, "until"),
    ],
)
def test_a_waiver_names_who_why_and_until_when(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        release(waivers=[WAIVER | changes])


def test_an_anomaly_cannot_be_waived(tmp_path: Path) -> None:
    for task, counts in (("good", (3000, 2000, 0, 0)), ("bad", (3000, 2000, 0, 300))):
        ours, theirs = flipped(*counts)
        write_record(tmp_path / "b" / task, ours, task=task)
        write_record(tmp_path / "c" / task, theirs, task=task, format="NVFP4")
    found = compare(tmp_path / "b", tmp_path / "c", release(waivers=[WAIVER]))
    assert word(found) == "anomaly"
    assert "(not needed)" in found.waivers[0]


def test_perplexity_can_be_waived(tmp_path: Path) -> None:
    folders = two_sides(tmp_path, flipped(2376, 1225, 5, 5), {}, {})
    record = fidelity(factor=1.5)
    assert word(compare(*folders, release(perplexity_margin=0.02), record)) == "fail"
    found = compare(*folders, release(perplexity_margin=0.02, waivers=[WAIVER | {"task": "perplexity"}]), record)
    assert word(found) == "pass"
    assert "By waiver perplexity did not count." in sentence(found)


def canary(failure: str | None, candidate: str = "NVFP4") -> CanaryRecord:
    return CanaryRecord(
        created="2026-11-01T00:00:00+00:00",
        key="k",
        baseline_digest=model().digest,
        candidate=model(candidate),
        max_kl=2.0,
        kl=0.1,
        rows=[],
        failure=failure,
    )


def test_a_failed_canary_is_an_anomaly_whatever_the_scores(tmp_path: Path) -> None:
    folders = two_sides(tmp_path, flipped(3000, 2000, 0, 0), {}, {})
    found = compare(*folders, release(), canary=canary("3 of 16 prompts have logits that are no numbers"))
    assert found.verdict is not None
    assert (found.verdict.verdict, found.verdict.exit_code, found.verdict.decided_by) == ("anomaly", 4, "canary")
    assert "3 of 16 prompts" in found.verdict.sentence
    assert word(compare(*folders, release(), canary=canary(None))) == "pass"
    with pytest.raises(UserError, match="canary's record is of other models"):
        compare(*folders, release(), canary=canary(None, "FP8"))


def test_an_advisory_task_needs_no_margin_of_its_own(tmp_path: Path) -> None:
    reward = [0.1, -0.2, 0.3, 0.5] * 10
    for task, metric, values in (("good", "acc", flipped(3000, 2000, 0, 0)), ("image", "reward", (reward, reward))):
        write_record(tmp_path / "b" / task, values[0], task=task, metric=metric)
        write_record(tmp_path / "c" / task, values[1], task=task, metric=metric, format="NVFP4")
    found = compare(tmp_path / "b", tmp_path / "c", release(primary=["good"]))
    assert word(found) == "pass"
    assert found.tasks[1].judgement is None
    with pytest.raises(UserError, match="no margin for reward of image"):
        compare(tmp_path / "b", tmp_path / "c", release())


def test_tasks_that_got_worse_are_named_only_where_chance_among_all_of_them_does_not_explain_it(tmp_path: Path) -> None:
    counts = {"bad": (500, 300, 40, 5), **{f"luck{i}": (500, 300, 14, 5) for i in range(4)}}
    for task, count in counts.items():
        ours, theirs = flipped(*count)
        write_record(tmp_path / "b" / task, ours, task=task)
        write_record(tmp_path / "c" / task, theirs, task=task, format="NVFP4")
    found = compare(tmp_path / "b", tmp_path / "c")
    assert all(row.result.p_worse is not None and row.result.p_worse < 0.05 for row in found.tasks)
    assert found.degraded == ["bad"]
    assert "worse beyond chance" in render_text([found])


def test_samples_of_a_question_are_judged_over_questions_and_more_samples_are_asked_for(tmp_path: Path) -> None:
    sides = [0.25, 0.5, 0.75, 0.5, 0.0, 1.0] * 100, [0.5, 0.25, 0.5, 0.75, 0.0, 1.0] * 100  # noise, and no loss
    repeats = {"subtask": {"repeats": 4}, "metric": "exact_match"}
    found = compare(*two_sides(tmp_path, sides, repeats, repeats), release(margin=0.012))
    row = found.tasks[0]
    assert row.samples == 4
    assert row.result.interval is not None
    assert row.result.interval.method == "score over questions, corrected"
    assert word(found) == "inconclusive"
    assert row.judgement is not None
    assert row.judgement.samples_needed is not None
    assert row.judgement.samples_needed > 4
    assert "samples of each question would settle it" in str(found.verdict and found.verdict.next_step)


def test_a_group_whose_subtasks_differ_has_a_wider_interval_over_subtasks(tmp_path: Path) -> None:
    ours, theirs = {}, {}
    for i in range(20):
        values = flipped(100, 80, 30 if i < 2 else 0, 0)
        ours[f"mmlu_{i:02}"], theirs[f"mmlu_{i:02}"] = values
    found = compare(*two_sides(tmp_path, (ours, theirs), {"task": "mmlu"}, {"task": "mmlu"}), release())
    row = found.tasks[0]
    assert row.clustered is not None
    assert row.result.interval is not None
    assert row.clustered.high - row.clustered.low > 2 * (row.result.interval.high - row.result.interval.low)
