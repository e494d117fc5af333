"""Sets of images on disk: read whole or not at all, and paired only where prompts, seeds and settings agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.records.digests import file_digest
from halfbyte.records.errors import UserError
from halfbyte.records.image_set import ENTRIES_FILE, SETTINGS_FILE, ImageEntry, ImageSet, ImageSettings, require_paired


def _saved(folder: Path, prompts: tuple[str, ...] = ("a cat", "a dog"), **settings: Any) -> ImageSet:
    folder.mkdir(parents=True)
    entries = []
    for index, prompt in enumerate(prompts):
        path = folder / f"{index:04d}-0.png"
        path.write_bytes(prompt.encode())
        entry = {"index": index, "prompt": prompt, "seed": 0, "file": path.name, "sha256": file_digest(path)}
        entries.append(ImageEntry.model_validate({**entry, "seconds": 1.0}))
    content = {
        "model": "m", "model_digest": "a" * 64, "pipeline": "FluxPipeline", "scheduler": "Euler",
        "scheduler_digest": "s", "steps": 2, "guidance": 3.5, "height": 32, "width": 32, "dtype": "float32",
        "device": "cpu", "prompts_digest": "p", "seeds": [0], "versions": {"torch": "2"}, **settings,
    }  # fmt: skip
    found = ImageSet(folder, ImageSettings.model_validate(content), entries)
    found.save()
    return found


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    saved = _saved(tmp_path / "set")
    found = ImageSet.load(tmp_path / "set")
    assert (found.settings, found.entries) == (saved.settings, saved.entries)
    assert found.path(found.entries[1]).read_bytes() == b"a dog"
    found.verify()


def test_the_key_changes_with_all_but_the_models_name(tmp_path: Path) -> None:
    key = _saved(tmp_path / "set").settings.key
    assert _saved(tmp_path / "name", model="other").settings.key == key
    others: dict[str, Any] = {"steps": 3, "model_digest": "b", "versions": {"torch": "3"}, "dtype": "bfloat16"}
    keys = {_saved(tmp_path / name, **{name: value}).settings.key for name, value in others.items()}
    assert len(keys - {key}) == 4


def test_a_set_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    _saved(folder)
    line = (folder / ENTRIES_FILE).read_text().splitlines()[0]
    for content, says in ((None, "no whole set"), ("", "holds no image"), ("{}\n", ":1 is not an image's line")):
        if content is None:
            (folder / ENTRIES_FILE).unlink()
        else:
            (folder / ENTRIES_FILE).write_text(content)
        with pytest.raises(UserError, match=says):
            ImageSet.load(folder)
    (folder / ENTRIES_FILE).write_text(line + "\n")
    (folder / SETTINGS_FILE).write_text("{}")
    with pytest.raises(UserError, match="is not the settings of a set of images"):
        ImageSet.load(folder)


def test_a_changed_or_missing_image_is_named(tmp_path: Path) -> None:
    found = _saved(tmp_path / "set")
    (found.folder / "0001-0.png").write_bytes(b"other")
    with pytest.raises(UserError, match=r"0001-0.png has changed"):
        found.verify()
    (found.folder / "0001-0.png").unlink()
    with pytest.raises(UserError, match=r"0001-0.png is missing"):
        found.verify()


def test_sets_of_unequal_prompts_are_not_paired(tmp_path: Path) -> None:
    baseline = _saved(tmp_path / "baseline")
    require_paired(_saved(tmp_path / "same"), baseline)
    with pytest.raises(UserError, match="image 1 is of prompt 'a cow'"):
        require_paired(_saved(tmp_path / "other", ("a cat", "a cow")), baseline)
    with pytest.raises(UserError, match=r"holds 1 images and .* 2"):
        require_paired(_saved(tmp_path / "fewer", ("a cat",)), baseline)


@pytest.mark.parametrize("field", ["scheduler_digest", "steps", "guidance", "height", "pipeline", "prompts_digest"])
def test_sets_of_other_settings_are_not_paired(tmp_path: Path, field: str) -> None:
    value = {"steps": 3, "guidance": 1.0, "height": 48}.get(field, "other")
    with pytest.raises(UserError, match=f"other settings: {field} is"):
        require_paired(_saved(tmp_path / "candidate", **{field: value}), _saved(tmp_path / "baseline"))


def test_the_lines_are_json_in_the_order_of_their_index(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (_saved(tmp_path / "set").folder / ENTRIES_FILE).read_text().splitlines()]
    assert [(line["index"], line["prompt"]) for line in lines] == [(0, "a cat"), (1, "a dog")]
