"""Claims about records of images: every metric judged on both sides, missing ones never passed, worst pairs first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from image_records import noise, scores, write_images

from halfbyte.records.errors import UserError
from halfbyte.records.record import Health
from halfbyte.reports.compare import compare
from halfbyte.reports.comparison import Comparison
from halfbyte.reports.junit import junit
from halfbyte.reports.policy import Policy, load_policy
from halfbyte.reports.published import beside, overlay_rows, published_table
from halfbyte.reports.text import render_markdown, render_text

COUNT = 300


@pytest.fixture(autouse=True)
def own_cache(cache: Path) -> None:
    """No clock of another test."""


def gated(tmp_path: Path, shift: float, policy: Policy | None = None, **more: Any) -> Comparison:
    weights = {"metric_weights": {"clip_score": "one"}}
    ours = write_images(tmp_path, scores(COUNT), generation=weights)
    theirs = write_images(
        tmp_path,
        scores(COUNT, shift, seed=1),
        format="NVFP4",
        **{**more, "generation": weights | more.get("generation", {})},
    )
    return compare(ours, theirs, policy=policy or load_policy("image"))


def words(comparison: Comparison) -> dict[str, str]:
    return {row.task: row.judgement.verdict for row in comparison.tasks if row.judgement}


def test_every_metric_of_an_image_record_is_a_row_that_is_judged_in_its_own_units(tmp_path: Path) -> None:
    found = gated(tmp_path, 0.0)
    assert words(found) == {"images/clip_score": "pass", "images/clip_iqa": "pass", "images/image_reward": "pass"}
    assert [row.judgement.margin for row in found.tasks if row.judgement] == [0.06, 0.01, 0.05]
    assert found.verdict is not None
    assert (found.verdict.verdict, found.verdict.exit_code) == ("pass", 0)
    assert "on images (" in found.verdict.sentence
    assert "of 300 images" in found.verdict.sentence


@pytest.mark.parametrize(("shift", "word"), [(3.0, "fail"), (-3.0, "anomaly"), (1.0, "inconclusive")])
def test_the_bounds_of_the_image_policy_work_on_both_sides(tmp_path: Path, shift: float, word: str) -> None:
    found = gated(tmp_path, shift)
    assert word in words(found).values()
    assert found.verdict is not None
    assert found.verdict.verdict == word
    if word == "fail":
        assert "Look at the worst pairs of images" in found.verdict.next_step


def test_costs_are_counted_once_and_not_once_a_metric(tmp_path: Path) -> None:
    assert gated(tmp_path, 0.0).costs["candidate"].seconds == 10


@pytest.mark.parametrize("sides", ["both", "candidate"])
def test_the_gate_does_not_pass_on_a_metric_that_is_missing(tmp_path: Path, sides: str) -> None:
    ours, theirs = scores(COUNT), scores(COUNT, 0.0, seed=1)
    missing = {"image_reward": "image_reward needs THUDM/ImageReward: the hub cannot be reached"}
    del theirs["image_reward"]
    if sides == "both":
        del ours["image_reward"]
    weights = [{"metric_weights": dict.fromkeys(side, "digest")} for side in (ours, theirs)]
    one = write_images(tmp_path, ours, missing=missing if sides == "both" else {}, generation=weights[0])
    two = write_images(tmp_path, theirs, format="NVFP4", missing=missing, generation=weights[1])
    found = compare(one, two, policy=load_policy("image"))
    assert found.verdict is not None
    assert (found.verdict.verdict, found.verdict.exit_code) == ("inconclusive", 3)
    assert found.verdict.decided_by == "images/image_reward"
    assert "image_reward needs THUDM/ImageReward" in found.verdict.sentence
    assert set(words(found).values()) == {"pass"}
    assert '<testcase classname="NVFP4" name="images/image_reward">' in junit([found])
    assert "images/image_reward could not be measured" in render_text([compare(one, two)])
    others = load_policy("image").model_copy(update={"primary": ["images/clip_score", "clip_iqa", "images/clip_iqa"]})
    with pytest.raises(UserError, match=r"decides on .* and clip_iqa was not evaluated"):
        compare(one, two, policy=others)
    named = others.model_copy(update={"primary": ["images/clip_score"]})
    verdict = compare(one, two, policy=named).verdict
    assert verdict is not None
    assert verdict.verdict == "pass"
    whole = others.model_copy(update={"primary": ["images"]})
    assert compare(one, two, policy=whole).verdict.verdict == "inconclusive"  # type: ignore[union-attr]


def test_a_failure_is_a_failure_although_another_metric_is_missing(tmp_path: Path) -> None:
    ours, theirs = scores(COUNT), scores(COUNT, 4.0, seed=1)
    del theirs["clip_iqa"]
    one = write_images(tmp_path, ours)
    two = write_images(tmp_path, theirs, format="NVFP4")
    found = compare(one, two, policy=load_policy("image"))
    assert found.verdict is not None
    assert found.verdict.verdict == "fail"
    assert "images/clip_iqa could not be measured" in found.verdict.sentence
    assert found.missing == {"images/clip_iqa": "the candidate was not evaluated by it"}


def test_a_policy_without_a_margin_for_a_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no margin for clip_score of images/clip_score"):
        gated(tmp_path, 0.0, load_policy("release"))


def test_metrics_that_compare_with_the_baseline_are_shown_and_do_not_decide(tmp_path: Path) -> None:
    ours, theirs = scores(60), scores(60, 0.0, seed=1)
    theirs |= {"psnr": [20.0 + i for i in range(60)], "ssim": [0.9] * 59 + [0.1], "lpips": [0.2] * 60}
    one = write_images(tmp_path, ours)
    two = write_images(tmp_path, theirs, format="NVFP4", latents=[0.0, 0.25, 0.5])
    found = compare(one, two)
    assert [row.metric for row in found.tasks] == ["clip_score", "clip_iqa", "image_reward"]
    (pictures,) = found.pictures
    assert [(row.metric, round(row.mean, 4), row.median, row.worst) for row in pictures.references] == [
        ("psnr", 49.5, 49.5, 20.0), ("ssim", 0.8867, 0.9, 0.1), ("lpips", 0.2, 0.2, 0.2)
    ]  # fmt: skip
    assert pictures.latent_distances == [0.0, 0.25, 0.5]
    for text in (render_text([found]), render_markdown([found])):
        assert "Distance from the baseline's images" in text
        assert "49.5000" in text


def test_a_reference_metric_that_is_missing_is_a_note(tmp_path: Path) -> None:
    found = gated(tmp_path, 0.0, missing={"lpips": "lpips needs alexnet"})
    assert found.verdict is not None
    assert found.verdict.verdict == "pass"
    assert "lpips was asked for and is missing: lpips needs alexnet" in found.notes


def test_prompts_that_were_cut_are_counted_once_in_the_notes(tmp_path: Path) -> None:
    health = Health(prompts=COUNT, truncated=2, cut={"clip": 4, "image_reward": 7}, unknown=1)
    found = gated(tmp_path, 0.0, health=health)
    text = render_text([found])
    for sentence in (
        "4 of 300 prompts were cut before clip read them, which takes 77 tokens",
        "7 of 300 prompts were cut before image_reward read them, which takes 35 tokens",
        "1 of 300 prompts hold characters that a text encoder does not know",
    ):
        assert " ".join(text.split()).count(sentence) == 1
    assert "margins for" not in text


def test_too_few_images_are_said_to_be_too_few(tmp_path: Path) -> None:
    one = write_images(tmp_path, scores(6))
    two = write_images(tmp_path, scores(6, seed=1), format="NVFP4")
    verdict = compare(one, two, policy=load_policy("image")).verdict
    assert verdict is not None
    assert (verdict.verdict, verdict.next_step) == ("inconclusive", "Draw more prompts or seeds.")


def test_the_worst_pairs_come_first_by_the_primary_metric_and_then_by_distance(tmp_path: Path) -> None:
    ours = {"fulfilment": [1.0, 1.0, 0.5, 1.0]}
    theirs = {"fulfilment": [1.0, 0.5, 0.5, 1.0], "psnr": [30.0, 35.0, 20.0, 25.0]}
    one = write_images(tmp_path, ours)
    two = write_images(tmp_path, theirs, format="NVFP4")
    pairs = compare(one, two).pictures[0].pairs
    assert [pair.index for pair in pairs] == [1, 2, 3, 0]
    assert (pairs[0].baseline, pairs[0].candidate) == ({"fulfilment": 1.0}, {"fulfilment": 0.5, "psnr": 35.0})


def test_images_are_found_beside_the_records_and_only_if_they_are_still_the_same(tmp_path: Path) -> None:
    values = {"fulfilment": [1.0] * 3}
    one = write_images(tmp_path, values, files=lambda i: noise(i, 0))
    two = write_images(tmp_path, values, format="NVFP4", files=lambda i: noise(i, 0, amount=0.1 * i))
    pairs = {pair.index: pair for pair in compare(one, two).pictures[0].pairs}
    assert all(pair.baseline_file and pair.candidate_file for pair in pairs.values())
    assert [pairs[i].equal for i in range(3)] == [True, False, False]
    assert pairs[1].candidate_file is not None
    pairs[1].candidate_file.write_bytes(b"other")
    assert {pair.index: pair.candidate_file is None for pair in compare(one, two).pictures[0].pairs} == {
        0: False, 1: True, 2: False
    }  # fmt: skip
    assert "png" not in compare(one, two).model_dump_json()


Edit = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: [{**line, "clip_score": float("nan")} for line in lines], "clip_score .* is nan"),
        (lambda lines: [{**line, "clip_score": "NaN"} for line in lines], "clip_score .* is NaN"),
        (lambda lines: lines[:-1], "299 of the 300 questions of images"),
        (lambda lines: [{**line, "image": None} for line in lines], "does not say where image 0 is"),
    ],
)
def test_damaged_sample_lines_are_refused_in_one_line(tmp_path: Path, edit: Edit, message: str) -> None:
    with pytest.raises(UserError, match=message):
        gated(tmp_path, 0.0, edit=edit)


def test_a_value_outside_of_its_range_is_refused(tmp_path: Path) -> None:
    ours, theirs = scores(20), scores(20, 0.0, seed=1)
    theirs["clip_iqa"] = [255 * value for value in theirs["clip_iqa"]]
    with pytest.raises(UserError, match=r"clip_iqa .* by its definition it is between 0 and 1"):
        compare(write_images(tmp_path, ours), write_images(tmp_path, theirs, format="NVFP4"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompts": [f"other {i}" for i in range(COUNT)]}, r"(?s)prompt|question"),
        ({"seeds": [1] * COUNT}, "question"),
        ({"generation": {"steps": 30}}, "steps|generation"),
        ({"generation": {"scheduler": "Heun"}}, "scheduler|generation"),
        ({"generation": {"metric_weights": {"clip_score": "other"}}}, "metric_weights|generation"),
        ({"limit": 5}, "limit"),
    ],
)
def test_images_of_other_prompts_seeds_and_settings_are_not_compared(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        gated(tmp_path, 0.0, **more)


def test_table_5_has_our_scores_below_the_published_ones(tmp_path: Path) -> None:
    found = gated(tmp_path, 1.0)
    table = overlay_rows(beside(published_table("blog1_table5_flux_quality"), found), "NVFP4")
    assert table.headers == ["", "ImageReward", "CLIP_IQA", "CLIPScore"]
    rows = {row[0]: row[1:] for row in table.rows}
    scores_by_metric = {row.metric: row.result for row in found.tasks}
    names = ("image_reward", "clip_iqa", "clip_score")
    assert rows["BF16"] == ["1.118", "0.927", "30.15"]
    assert rows["ours, as BF16"] == [f"{scores_by_metric[name].baseline:.3f}" for name in names]
    assert rows["ours, as FP4_PTQ"] == [f"{scores_by_metric[name].candidate:.3f}" for name in names]
    assert "ours, as FP4_QAT" not in rows
