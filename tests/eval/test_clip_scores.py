"""CLIPScore and CLIP-IQA against torchmetrics on one random CLIP, and what is done about prompts that are too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics.functional.multimodal.clip_iqa as torch_clip_iqa
from image_networks import images, save_clip
from torchmetrics.functional.multimodal import clip_image_quality_assessment, clip_score

from halfbyte.eval.clip_scores import open_clip
from halfbyte.eval.image_metrics import open_metric
from halfbyte.records.errors import UserError

PROMPTS = ["a red cube", "two green balls on a table", "ein blaues Dreieck, 红色", "x"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


class Reference:
    """The same weights as torchmetrics takes them, which expects tensors of CLIP and not transformers' objects."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, CLIPModel
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        self.model = CLIPModel.from_pretrained(folder)
        self.config = self.model.config
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = CLIPImageProcessorPil.from_pretrained(folder)

    def __call__(self, text: Any = None, images: Any = None, **options: Any) -> Any:
        if text is not None:
            return self.tokenizer(text, **options)
        options.pop("padding", None)
        return self.images(images=images, **options)

    def to(self, _: Any) -> Reference:
        return self

    def get_image_features(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.model.get_image_features(pixels).pooler_output

    def get_text_features(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model.get_text_features(tokens, mask).pooler_output


def stacked(given: list[Any]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in given])


def test_clip_score_equals_torchmetrics(clip: Path) -> None:
    given, reference = images(4), Reference(clip)
    metric = open_metric("clip_score", {"clip_score": str(clip)})
    with torch.no_grad():
        for image, prompt in zip(given, PROMPTS, strict=True):
            theirs = clip_score(stacked([image])[0], prompt, lambda: (reference, reference))
            assert metric.scores([image], [prompt]) == pytest.approx([float(theirs)], abs=1e-5)
        mean = clip_score(stacked(given), PROMPTS, lambda: (reference, reference))
    ours = metric.scores(given, PROMPTS)
    assert sum(ours) / 4 == pytest.approx(float(mean), abs=1e-5)
    assert len({round(value, 3) for value in ours}) == 4
    assert min(ours) > 0  # torchmetrics rounds a negative mean up to 0


def test_clip_iqa_equals_torchmetrics_given_pixels_of_0_to_255(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torchmetrics' processor divides by 255 itself, so that a data range of 255 would make every image black
    reference = Reference(clip)
    monkeypatch.setattr(torch_clip_iqa, "_get_clip_model_and_processor", lambda _: (reference, reference))
    given = images(4)
    ours = open_metric("clip_iqa", {"clip_iqa": str(clip)}).scores(given, [""] * 4)
    theirs = clip_image_quality_assessment(stacked(given), "openai/clip-vit-large-patch14", data_range=1.0)
    assert ours == pytest.approx(theirs.tolist(), abs=1e-5)
    assert len({round(value, 4) for value in ours}) == 4


def test_values_do_not_depend_on_which_images_are_looked_at_together(clip: Path) -> None:
    metric = open_metric("clip_score", {"clip_score": str(clip)})
    given, prompts = images(11), [*PROMPTS, *PROMPTS, *PROMPTS[:3]]
    together = metric.scores(given, prompts)
    alone = [metric.scores([image], [prompt])[0] for image, prompt in zip(given, prompts, strict=True)]
    assert together == pytest.approx(alone, abs=1e-4)


def test_a_prompt_beyond_77_tokens_is_cut_before_its_end_token_and_counted(clip: Path) -> None:
    metric = open_metric("clip_score", {"clip_score": str(clip)})
    letters = "abcdefghij" * 10
    assert metric.cut([letters, letters[:75], "a cat"]) == [25, 0, 0]
    whole, longer = "a " * 75, "a " * 90
    assert metric.cut([whole, longer]) == [0, 15]
    image = images(1)
    assert metric.scores(image, [longer]) == metric.scores(image, [whole])


def test_both_metrics_look_through_one_network_and_say_which(clip: Path, tmp_path: Path) -> None:
    score, iqa = (open_metric(name, {name: str(clip)}) for name in ("clip_score", "clip_iqa"))
    assert score.clip is iqa.clip  # type: ignore[attr-defined]
    assert score.identity == iqa.identity != ""
    other = open_metric("clip_score", {"clip_score": str(save_clip(tmp_path, seed=1))})
    assert other.identity != score.identity


def test_a_copy_that_lacks_a_tensor_is_refused_rather_than_filled_with_random_numbers(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_clip(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    open_clip.cache_clear()
    with pytest.raises(UserError, match=r"lacks 1 of them \(visual_projection\.weight\)"):
        open_metric("clip_score", {"clip_score": str(folder)})


def test_a_network_of_nan_is_an_error_and_no_score(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_clip(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["visual_projection.weight"][:] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="clip_iqa of image 0 is nan"):
        open_metric("clip_iqa", {"clip_iqa": str(folder)}).scores(images(2), ["", ""])
