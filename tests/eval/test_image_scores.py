"""Records of images: each metric's value of each image, resumable by image, comparable by the fingerprint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drawing import PROMPTS, asked, opened, summary, write_prompts
from tiny_flux import save_tiny_flux

from halfbyte.eval import image_scores
from halfbyte.eval.image_metrics import Metric, Psnr
from halfbyte.eval.image_scores import evaluate_images, require_metrics
from halfbyte.eval.images import Drawing
from halfbyte.recipes.schema import EvaluateSpec
from halfbyte.records.errors import UserError
from halfbyte.records.image_set import ImageSet
from halfbyte.records.record import read_samples, verify_content
from halfbyte.records.samples import scan_lines

METRICS = ["fulfilment", "psnr", "ssim"]


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageSet, ImageSet, Path]:
    """A baseline's images, another pipeline's, and the prompt file."""
    folder = tmp_path_factory.mktemp("sets")
    prompts = write_prompts(folder)
    found: list[ImageSet] = []
    for seed, digest in ((0, "a"), (1, "b")):
        pipeline = opened(save_tiny_flux(folder / digest, seed=seed))
        found.append(Drawing(pipeline, asked(prompts), summary(digest), dtype="float32").draw(folder / "images"))
    return found[0], found[1], prompts


def _settings(prompts: Path, *metrics: str, **more: Any) -> EvaluateSpec:
    block = {"prompts": str(prompts), "metrics": list(metrics or METRICS), **more}
    return EvaluateSpec.model_validate({"images": block})


def test_a_line_holds_all_metrics_of_an_image(sets: tuple[ImageSet, ImageSet, Path], tmp_path: Path) -> None:
    ours, theirs, prompts = sets
    record = evaluate_images(theirs, ours, _settings(prompts), summary("b"), tmp_path / "record", device="cpu")
    assert verify_content(tmp_path / "record") == record
    samples = list(read_samples(tmp_path / "record", record))
    assert [sample.doc_id for sample in samples] == [0, 1, 2]
    assert [sample.raw["doc"]["prompt"] for sample in samples] == list(PROMPTS)
    assert all(list(sample.metrics) == METRICS for sample in samples)
    for figure in record.metrics:
        values = [sample.metrics[figure.metric] for sample in samples]
        assert figure.value == pytest.approx(sum(values) / 3)
    assert record.primary == ["fulfilment", "none"]
    assert samples[0].raw["image"] == {
        "set": f"{'b' * 16}/{theirs.folder.name}", "file": theirs.entries[0].file, "sha256": theirs.entries[0].sha256,
    }  # fmt: skip
    fast = list(scan_lines(tmp_path / "record", record, "psnr"))
    assert [line.value for line in fast] == [sample.metrics["psnr"] for sample in samples]


def test_a_baseline_has_no_value_of_what_compares(sets: tuple[ImageSet, ImageSet, Path], tmp_path: Path) -> None:
    record = evaluate_images(sets[0], None, _settings(sets[2]), summary(), tmp_path / "record", device="cpu")
    assert [figure.metric for figure in record.metrics] == ["fulfilment"]
    assert record.missing == {}


def test_both_sides_have_one_fingerprint(sets: tuple[ImageSet, ImageSet, Path], tmp_path: Path) -> None:
    ours, theirs, prompts = sets
    settings = _settings(prompts)
    first = evaluate_images(ours, None, settings, summary(), tmp_path / "first", device="cpu")
    second = evaluate_images(theirs, ours, settings, summary("b"), tmp_path / "second", device="cpu")
    assert first.fingerprint == second.fingerprint
    generation = first.fingerprint.subtasks["images"].generation or {}
    assert generation["pipeline"] == "FluxPipeline"
    assert {"scheduler_digest", "steps", "guidance", "height", "width", "seeds", "prompts_digest"} <= set(generation)


def test_missing_weights_are_named_and_the_other_metrics_go_on(
    sets: tuple[ImageSet, ImageSet, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFBYTE_WEIGHTS", str(tmp_path))
    monkeypatch.setattr("halfbyte.eval.metric_weights.hub_is_reachable", lambda *_: False)
    settings = _settings(sets[2], "clip_score", "fulfilment")
    record = evaluate_images(sets[0], None, settings, summary(), tmp_path / "record", device="cpu")
    assert [figure.metric for figure in record.metrics] == ["fulfilment"]
    assert "openai/clip-vit-large-patch14" in record.missing["clip_score"]
    assert record.primary == ["fulfilment", "none"]
    with pytest.raises(UserError, match="no metric of clip_score could be computed"):
        evaluate_images(sets[0], None, _settings(sets[2], "clip_score"), summary(), tmp_path / "none", device="cpu")
    named = _settings(sets[2], "clip_score", "fulfilment", weights_of={"clip_score": str(tmp_path / "nowhere")})
    with pytest.raises(UserError, match="nowhere"):  # what the recipe names must be there
        evaluate_images(sets[0], None, named, summary(), tmp_path / "named", device="cpu")


def test_weights_that_have_come_are_used_in_the_place_of_a_record_without_them(
    sets: tuple[ImageSet, ImageSet, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(sets[2], "ssim", "fulfilment")
    there = image_scores.open_metric

    def absent(name: str, *arguments: Any) -> Metric:
        if name == "ssim":
            raise UserError("ssim needs weights")
        return there(name, *arguments)

    monkeypatch.setattr(image_scores, "open_metric", absent)
    arguments: Any = (sets[1], sets[0], settings, summary("b"), tmp_path / "record")
    assert set(evaluate_images(*arguments, device="cpu").missing) == {"ssim"}
    monkeypatch.setattr(image_scores, "open_metric", there)
    record = evaluate_images(*arguments, device="cpu")
    assert record.missing == {}
    assert [figure.metric for figure in record.metrics] == ["ssim", "fulfilment"]


def test_a_kill_loses_at_most_one_image(
    sets: tuple[ImageSet, ImageSet, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: Any = (sets[1], sets[0], _settings(sets[2]), summary("b"))
    whole = evaluate_images(*arguments, tmp_path / "whole", device="cpu")
    scored: list[int] = []
    real = Psnr._batch

    def deadly(self: Psnr, *batch: Any) -> list[float]:
        scored.append(len(batch[0]))
        if len(scored) == 2:
            raise Killed
        return real(self, *batch)

    monkeypatch.setattr(Psnr, "_batch", deadly)
    with pytest.raises(Killed):
        evaluate_images(*arguments, tmp_path / "killed", device="cpu")
    again = evaluate_images(*arguments, tmp_path / "killed", device="cpu")
    assert scored == [1, 1, 1, 1]  # the first, the one that was lost, and the other two
    assert [(one.metric, one.value) for one in again.metrics] == [(one.metric, one.value) for one in whole.metrics]


def test_what_is_scored_is_not_scored_again(
    sets: tuple[ImageSet, ImageSet, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: Any = (sets[1], sets[0], _settings(sets[2]), summary("b"), tmp_path / "record")
    first = evaluate_images(*arguments, device="cpu")
    monkeypatch.setattr(image_scores, "open_metric", lambda *_: pytest.fail("scored again"))
    assert evaluate_images(*arguments, device="cpu") == first


def test_sets_that_cannot_be_paired_are_refused(sets: tuple[ImageSet, ImageSet, Path], tmp_path: Path) -> None:
    pipeline = opened(tmp_path / "c" if (tmp_path / "c").exists() else save_tiny_flux(tmp_path / "c"))
    prompts = write_prompts(tmp_path, "a red circle", "a green square", "two small green circles")
    other = Drawing(pipeline, asked(prompts), summary("c"), dtype="float32").draw(tmp_path / "images")
    with pytest.raises(UserError, match="image 1 is of prompt 'a green square'"):
        evaluate_images(other, sets[0], _settings(prompts), summary("c"), tmp_path / "record", device="cpu")


def test_an_unknown_metric_and_a_prompt_it_cannot_judge_are_refused_early(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, "a photo of a cat")
    with pytest.raises(UserError, match="unknown image metric 'clip_scor'"):
        require_metrics(asked(prompts, metrics=["clip_scor"]))
    with pytest.raises(UserError, match="fulfilment cannot be judged"):
        require_metrics(asked(prompts))
    require_metrics(asked(prompts, metrics=["clip_score"]))
