"""Where the weights of image metrics are looked for, and what is said where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.eval import metric_weights
from halfbyte.eval.metric_weights import find_weights, weights_identity
from halfbyte.records.errors import UserError
from halfbyte.records.image_metrics import CLIP

FILES = ["config.json", "model.safetensors", "tokenizer.json|vocab.json"]


def copy(folder: Path, *names: str, content: str = "x") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ("config.json", "model.safetensors", "vocab.json"):
        (folder / name).write_text(content)
    return folder


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALFBYTE_WEIGHTS", raising=False)
    monkeypatch.setattr(metric_weights, "hub_is_reachable", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_the_recipes_path_is_taken_before_the_folder_of_weights_and_that_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = copy(tmp_path / "mine")
    below = copy(tmp_path / "root" / CLIP.id)
    monkeypatch.setenv("HALFBYTE_WEIGHTS", str(tmp_path / "root"))
    assert find_weights("clip_score", CLIP, FILES, str(named)) == named
    assert find_weights("clip_score", CLIP, FILES, str(named / "model.safetensors")) == named
    assert find_weights("clip_score", CLIP, FILES) == below
    other = copy(tmp_path / "root" / "laion" / "clip")
    assert find_weights("clip_score", CLIP, FILES, "laion/clip") == other


def test_what_is_not_at_hand_says_where_it_comes_from_and_how_to_point_to_a_copy(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        find_weights("clip_score", CLIP, FILES)
    assert str(caught.value) == (
        "clip_score needs openai/clip-vit-large-patch14, which comes from "
        "https://huggingface.co/openai/clip-vit-large-patch14: the hub cannot be reached, and its cache has no copy "
        "(put a copy into $HALFBYTE_WEIGHTS/openai/clip-vit-large-patch14, or name it in the recipe: "
        "evaluate.images.weights_of: {clip_score: PATH})"
    )
    with pytest.raises(UserError, match="there is no such folder"):
        find_weights("clip_score", CLIP, FILES, str(tmp_path / "nowhere"))


def test_a_copy_that_is_not_whole_says_what_it_lacks_and_is_not_completed_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy(tmp_path / CLIP.id, "config.json")
    monkeypatch.setenv("HALFBYTE_WEIGHTS", str(tmp_path))
    with pytest.raises(UserError, match=r"lacks model\.safetensors, tokenizer\.json or vocab\.json"):
        find_weights("clip_score", CLIP, FILES)


def test_a_folder_of_weights_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HALFBYTE_WEIGHTS", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"HALFBYTE_WEIGHTS is not a folder"):
        find_weights("clip_score", CLIP, FILES)


@pytest.mark.usefixtures("cache")
def test_the_identity_is_of_the_content_wherever_it_lies(tmp_path: Path) -> None:
    one, two, other = copy(tmp_path / "a"), copy(tmp_path / "b"), copy(tmp_path / "c", content="y")
    assert weights_identity(one, FILES) == weights_identity(two, FILES) != weights_identity(other, FILES)
