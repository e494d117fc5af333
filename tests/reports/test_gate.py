"""Claims about the gate: every hole found in other gates is a test here, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_factory import fidelity, flipped, model, write_record

from halfbyte.records.errors import UserError
from halfbyte.reports.compare import compare
from halfbyte.reports.comparison import Comparison, Verdict
from halfbyte.reports.gate import judge, worst
from halfbyte.reports.policy import Policy, load_policy

RELEASE = load_policy("release")


def decide(comparison: Comparison, policy: Policy) -> Verdict:
    found = judge(comparison, policy).verdict
    assert found is not None
    return found


def gated(
    tmp_path: Path, counts: tuple[int, int, int, int], policy: Policy | None = RELEASE, **record: Any
) -> Comparison:
    """Compares records with (questions, right in the baseline, lost, gained)."""
    ours, theirs = flipped(*counts)
    write_record(tmp_path / "baseline", ours, task="arc_easy", **record)
    write_record(tmp_path / "candidate", theirs, task="arc_easy", format="NVFP4", **record)
    return compare(tmp_path / "baseline", tmp_path / "candidate", policy)


def policy(**changes: Any) -> Policy:
    return RELEASE.model_copy(update=changes)


def verdict(comparison: Comparison) -> tuple[str, int]:
    assert comparison.verdict is not None
    return comparison.verdict.verdict, comparison.verdict.exit_code


def test_the_nvfp4_of_smollm2_on_arc_easy_fails(tmp_path: Path) -> None:
    found = gated(tmp_path, (2376, 1225, 273, 143))
    assert verdict(found) == ("fail", 1)
    assert round(found.tasks[0].result.baseline, 4) == 0.5156
    assert round(found.tasks[0].result.candidate, 4) == 0.4609
    assert found.verdict is not None
    assert "0.5156 to 0.4609; of 2,376 questions 273 lost, 143 gained" in found.verdict.sentence
    assert "Do not release" in found.verdict.next_step


def test_the_fp8_of_smollm2_on_arc_easy_is_no_failure_and_says_how_many_questions_would_settle_it(
    tmp_path: Path,
) -> None:
    found = gated(tmp_path, (2376, 1225, 69, 55))
    assert verdict(found) == ("inconclusive", 3)
    assert found.verdict is not None
    assert "About 20,000 questions" in found.verdict.next_step


def test_few_flips_on_many_questions_pass(tmp_path: Path) -> None:
    found = gated(tmp_path, (2376, 1225, 10, 12))
    assert verdict(found) == ("pass", 0)
    assert found.verdict is not None
    assert "gained 0.0008 acc" in found.verdict.sentence
    assert "released under policy 'release'" in found.verdict.next_step


def test_too_few_questions_are_inconclusive_even_without_a_single_flip(tmp_path: Path) -> None:
    assert verdict(gated(tmp_path, (100, 60, 0, 0))) == ("inconclusive", 3)


def test_a_task_that_the_baseline_cannot_do_is_no_evidence_however_many_questions_it_has(tmp_path: Path) -> None:
    found = gated(tmp_path, (5000, 5, 0, 0))
    assert verdict(found) == ("inconclusive", 3)
    assert found.verdict is not None
    assert "cannot show a loss" in found.verdict.sentence
    assert found.verdict.next_step == "Evaluate a task that the baseline can do."


def test_a_candidate_that_left_out_a_task_is_refused(tmp_path: Path) -> None:
    for task in ("arc_easy", "mmlu"):
        write_record(tmp_path / "baseline" / task, [1.0, 0.0], task=task)
    write_record(tmp_path / "candidate" / "mmlu", [1.0, 0.0], task="mmlu", format="FP8")
    with pytest.raises(UserError, match="the candidate has no record of arc_easy"):
        compare(tmp_path / "baseline", tmp_path / "candidate", RELEASE)
    with pytest.raises(UserError, match="the baseline has no record of arc_easy"):
        compare(tmp_path / "candidate", tmp_path / "baseline", RELEASE)
    assert [row.task for row in compare(tmp_path / "baseline", tmp_path / "candidate", tasks=["mmlu"]).tasks] == [
        "mmlu"
    ]
    with pytest.raises(UserError, match="did you mean 'mmlu'"):
        compare(tmp_path / "baseline", tmp_path / "candidate", tasks=["mmul"])


def test_a_limited_record_is_refused_unless_the_policy_allows_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'arc_easy' was cut to 200 questions"):
        gated(tmp_path, (200, 100, 5, 5), limit=200)
    assert verdict(gated(tmp_path, (200, 100, 5, 5), load_policy("smoke"), limit=200)) == ("pass", 0)


def test_a_limit_is_said_and_removing_it_is_the_next_step(tmp_path: Path) -> None:
    found = gated(tmp_path, (200, 100, 14, 5), load_policy("smoke"), limit=200)
    assert verdict(found) == ("inconclusive", 3)
    assert found.verdict is not None
    assert "evaluate without the limit of 200" in found.verdict.next_step
    assert "cut to the first 200 questions of each subtask" in found.tasks[0].notes


def test_a_loss_on_the_margin_asks_for_another_task_or_the_whole_one(tmp_path: Path) -> None:
    for limit, step in ((None, "evaluate another task"), (200, "evaluate without the limit of 200")):
        found = gated(tmp_path, (200, 100, 14, 4), load_policy("smoke"), limit=limit)
        assert found.verdict is not None
        assert "lies on the margin" in found.verdict.next_step
        assert step in found.verdict.next_step


def test_passing_the_smoke_policy_is_said_to_be_no_evidence(tmp_path: Path) -> None:
    found = gated(tmp_path, (200, 100, 0, 0), load_policy("smoke"))
    assert verdict(found) == ("pass", 0)
    assert found.verdict is not None
    assert not found.verdict.release_evidence
    assert "no evidence for a release" in found.verdict.next_step


def test_nothing_is_rounded_before_it_is_compared(tmp_path: Path) -> None:
    comparison = gated(tmp_path, (2376, 1225, 30, 25), None)
    interval = comparison.tasks[0].result.interval
    assert interval is not None
    assert verdict_at(comparison, interval.high + 1e-9) == "pass"
    assert verdict_at(comparison, interval.high) == "inconclusive"
    assert verdict_at(comparison, interval.high - 1e-9) == "inconclusive"
    just = decide(comparison, policy(margin=interval.high + 1e-6)).sentence
    at_most, tolerated = (just.split(words)[1].split(" ")[0] for words in ("at most ", "where "))
    assert at_most != tolerated


def verdict_at(comparison: Comparison, margin: float) -> str:
    return decide(comparison, policy(margin=margin)).verdict


def test_one_failing_task_fails_all_and_one_open_task_leaves_all_open(tmp_path: Path) -> None:
    counts = {"good": (2376, 1225, 5, 5), "open": (2376, 1225, 69, 55), "bad": (2376, 1225, 273, 143)}
    for task, count in counts.items():
        ours, theirs = flipped(*count)
        write_record(tmp_path / "b" / task, ours, task=task)
        write_record(tmp_path / "c" / task, theirs, task=task, format="NVFP4")
    found = compare(tmp_path / "b", tmp_path / "c")
    for primary, expected, decided_by in (
        ("all", "fail", "bad"),
        (["good", "open"], "inconclusive", "open"),
        (["good"], "pass", "good"),
    ):
        result = decide(found, policy(primary=primary))
        assert (result.verdict, result.decided_by) == (expected, decided_by)


def test_a_policy_whose_tasks_were_not_evaluated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="decides on arc_easy, gsm8k, and gsm8k was not evaluated"):
        gated(tmp_path, (100, 50, 0, 0), policy(primary=["arc_easy", "gsm8k"]))
    with pytest.raises(UserError, match="decides on no task"):
        gated(tmp_path, (100, 50, 0, 0), policy(primary=[]))


def test_margins_differ_by_task(tmp_path: Path) -> None:
    assert verdict(gated(tmp_path, (2376, 1225, 69, 55), policy(margins={"arc_easy": 0.02}))) == ("pass", 0)


def test_values_without_spread_are_inconclusive_and_say_why(tmp_path: Path) -> None:
    write_record(tmp_path / "b", [0.25, 0.5, 0.75] * 10, metric="reward")
    write_record(tmp_path / "c", [0.25, 0.5, 0.75] * 10, metric="reward", format="NVFP4")
    found = compare(tmp_path / "b", tmp_path / "c", policy(margins={"reward": 0.1}))
    assert verdict(found) == ("inconclusive", 3)
    assert found.verdict is not None
    assert "no spread" in found.verdict.sentence
    assert "say so in the policy, as `bounds: {reward: [0, 1]}`" in found.verdict.next_step


def test_a_model_is_compared_with_itself_for_the_noise_floor_and_not_judged(tmp_path: Path) -> None:
    """Naming the baseline's folder twice would pass any gate."""
    write_record(tmp_path / "b", [1.0, 0.0] * 400)
    found = compare(tmp_path / "b", tmp_path / "b")
    assert found.same_model
    assert "noise floor" in found.notes[0]
    with pytest.raises(UserError, match="both sides are one model"):
        compare(tmp_path / "b", tmp_path / "b", RELEASE)


def test_a_policy_of_another_alpha_needs_another_comparison(tmp_path: Path) -> None:
    found = gated(tmp_path, (100, 50, 0, 0), None)
    with pytest.raises(UserError, match=r"made for an alpha of 0\.05"):
        decide(found, policy(alpha=0.01))


@pytest.mark.parametrize(
    ("factor", "margin", "expected"),
    [(1.5, 0.02, "fail"), (1.005, 0.02, "pass"), (0.9, 0.02, "pass"), (1.02, 0.02, "inconclusive")],
)
def test_perplexity_is_gated_where_the_policy_says_so_and_lower_is_better(
    tmp_path: Path, factor: float, margin: float, expected: str
) -> None:
    ours, theirs = flipped(2376, 1225, 5, 5)
    write_record(tmp_path / "b", ours)
    write_record(tmp_path / "c", theirs, format="NVFP4")
    record = fidelity(factor=factor)
    found = compare(tmp_path / "b", tmp_path / "c", policy(perplexity_margin=margin), record)
    assert found.verdict is not None
    assert found.verdict.verdict == expected
    if expected != "pass":
        assert found.verdict.decided_by == "perplexity"
    assert verdict(compare(tmp_path / "b", tmp_path / "c", RELEASE, record)) == ("pass", 0)  # advisory there


def test_a_perplexity_is_called_too_high_at_the_error_of_a_fail(tmp_path: Path) -> None:
    """The margin lies between the lower ends of both intervals: chance explains it as far as a fail is concerned."""
    ours, theirs = flipped(2376, 1225, 5, 5)
    folders = write_record(tmp_path / "b", ours), write_record(tmp_path / "c", theirs, format="NVFP4")
    found = compare(*folders, RELEASE, fidelity(factor=1.05)).fidelity
    assert found is not None
    assert found.ratio_interval is not None
    assert found.ratio_wide is not None
    assert (found.ratio_interval.level, found.ratio_wide.level) == (pytest.approx(0.9), pytest.approx(0.98))
    assert found.ratio_wide.low < found.ratio_interval.low < found.ratio
    for low, expected in ((found.ratio_wide.low, "inconclusive"), (found.ratio_interval.low, "inconclusive")):
        strict = policy(perplexity_margin=low - 1 + 1e-9)
        assert verdict(compare(*folders, strict, fidelity(factor=1.05))) == (expected, 3)
    strict = policy(perplexity_margin=found.ratio_wide.low - 1 - 1e-9)
    failed = compare(*folders, strict, fidelity(factor=1.05))
    assert verdict(failed) == ("fail", 1)
    assert failed.verdict is not None
    assert f"98% interval {found.ratio_wide.low:.4f} to {found.ratio_wide.high:.4f}" in failed.verdict.sentence


def test_a_perplexity_gate_without_a_record_is_refused_and_with_few_windows_is_open(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no fidelity record"):
        gated(tmp_path, (2376, 1225, 5, 5), policy(perplexity_margin=0.02))
    found = compare(
        tmp_path / "baseline", tmp_path / "candidate", policy(perplexity_margin=0.02), fidelity(windows=5, factor=1.0)
    )
    assert verdict(found) == ("inconclusive", 3)
    assert found.verdict is not None
    assert "5 windows are too few" in found.verdict.sentence


def test_a_fidelity_record_of_another_model_or_with_another_sum_is_refused(tmp_path: Path) -> None:
    gated(tmp_path, (100, 50, 0, 0))
    folders = tmp_path / "baseline", tmp_path / "candidate"
    with pytest.raises(UserError, match="fidelity record is of another candidate"):
        compare(*folders, fidelity=fidelity(candidate=model("FP8")))
    with pytest.raises(UserError, match=r"claims 0\.5 where its windows sum to"):
        compare(*folders, fidelity=fidelity().model_copy(update={"kl": 0.5}))
    with pytest.raises(UserError, match="no windows"):
        compare(*folders, fidelity=fidelity(windows=0))
    assert compare(*folders, fidelity=fidelity()).fidelity is not None


def test_a_group_is_judged_once_over_the_questions_of_all_its_subtasks(tmp_path: Path) -> None:
    ours, theirs = flipped(300, 200, 12, 2)
    split = {"mmlu_law": slice(0, 250), "mmlu_anatomy": slice(250, 300)}
    write_record(tmp_path / "b", {name: ours[part] for name, part in split.items()}, task="mmlu")
    write_record(tmp_path / "c", {name: theirs[part] for name, part in split.items()}, task="mmlu", format="FP8")
    (row,) = compare(tmp_path / "b", tmp_path / "c", RELEASE).tasks
    assert row.result.baseline == pytest.approx(200 / 300)  # the micro-average, not the mean of the subtasks' means
    assert (row.result.lost, row.result.gained) == (12, 2)
    assert [(one.subtask, one.questions) for one in row.subtasks] == [("mmlu_anatomy", 50), ("mmlu_law", 250)]
    assert sum(one.lost for one in row.subtasks) == 12


def test_the_worst_verdict_speaks_for_several_candidates() -> None:
    assert worst(["pass", "inconclusive", "fail"]) == "fail"
    assert worst(["pass", "inconclusive"]) == "inconclusive"
    assert worst(["pass"]) == "pass"
    with pytest.raises(ValueError, match="no verdicts"):
        worst([])


def test_a_baseline_at_chance_cannot_show_a_loss(tmp_path: Path) -> None:
    """One of four answers is right by luck: what answers at random loses nothing when it is damaged further."""
    random = np.random.default_rng(0)
    ours, theirs = (random.random(14042) < 0.25 for _ in range(2))
    for side, values, of in (("b", ours, model()), ("c", theirs, model("NVFP4"))):
        write_record(tmp_path / side, values.astype(float).tolist(), of=of, subtask={"chance": 0.25})
    (row,) = compare(tmp_path / "b", tmp_path / "c", RELEASE).tasks
    assert row.judgement is not None
    assert row.judgement.verdict == "inconclusive"
    assert "near to chance" in str(row.judgement.reason)
