"""Prompt files: read in order, and each mistake in one is one line that names its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.recipes.images import ImagesSpec
from halfbyte.recipes.prompts import load_prompts, prompts_digest
from halfbyte.records.errors import UserError


def _file(folder: Path, content: str | bytes, name: str = "prompts.txt") -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_prompts_are_read_in_order_without_empty_lines(tmp_path: Path) -> None:
    found = load_prompts(_file(tmp_path, "\ufeffa cat \n\n  a dog\r\n一只猫\n"))
    assert [(one.text, one.line) for one in found] == [("a cat", 1), ("a dog", 3), ("一只猫", 4)]
    assert [one.text for one in load_prompts(_file(tmp_path, "a\nb\nc\n"), 2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "name", "says"),
    [
        ("", "prompts.txt", "holds no prompt"),
        (" \n\n", "prompts.txt", "holds no prompt"),
        ("a cat\na dog\n\na cat\n", "prompts.txt", ":4 repeats line 1: 'a cat'"),
        (b"\xff\xfe\x00", "prompts.txt", "is not UTF-8"),
        ("a cat\n", "prompts.jsonl", ":1 is not JSON"),
        ('{"text": "a cat"}\n', "prompts.jsonl", ":1 has no prompt"),
        ('{"prompt": " "}\n', "prompts.jsonl", ":1 has no prompt"),
        ('{"prompt": "a", "control_image": "no.png"}\n', "prompts.jsonl", "no.png, which does not exist"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, content: str | bytes, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_prompts(_file(tmp_path, content, name))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing.txt does not exist"):
        load_prompts(str(tmp_path / "nothing.txt"))
    with pytest.raises(UserError, match="is a folder"):
        load_prompts(str(tmp_path))


def test_one_prompt_may_have_several_control_images(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(name.encode())
    lines = [f'{{"prompt": "a cat", "control_image": "{name}"}}\n' for name in ("a.png", "b.png")]
    found = load_prompts(_file(tmp_path, "".join(lines), "prompts.jsonl"))
    assert [one.control for one in found] == [tmp_path / "a.png", tmp_path / "b.png"]
    with pytest.raises(UserError, match=":2 repeats line 1"):
        load_prompts(_file(tmp_path, lines[0] * 2, "prompts.jsonl"))


def test_the_digest_is_of_texts_their_order_and_the_control_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    line = '{"prompt": "x", "control_image": "a.png"}\n'
    digests = [prompts_digest(load_prompts(_file(tmp_path, text))) for text in ("x\ny\n", "y\nx\n", "x\n")]
    digests.append(prompts_digest(load_prompts(_file(tmp_path, line, "prompts.jsonl"))))
    (tmp_path / "a.png").write_bytes(b"bb")
    digests.append(prompts_digest(load_prompts(_file(tmp_path, line, "prompts.jsonl"))))
    assert len(set(digests)) == 5
    assert prompts_digest(load_prompts(_file(tmp_path, "\nx\n\ny\n"))) == digests[0]


def test_a_number_of_seeds_and_a_square_are_short_for_lists() -> None:
    spec = ImagesSpec.model_validate({"prompts": "p.txt", "seeds": 3, "size": 512})
    assert (spec.seeds, spec.size) == ([0, 1, 2], [512, 512])


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"seeds": [1, 1]}, "named twice"),
        ({"seeds": []}, "at least 1"),
        ({"seeds": [-1]}, "at least 0"),
        ({"size": 1000}, "multiples of 16"),
        ({"metrics": ["psnr", "psnr"]}, "named twice"),
        ({"steps": 0}, "greater than or equal to 1"),
    ],
)
def test_a_block_that_would_draw_nothing_of_use_is_refused(block: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ImagesSpec.model_validate({"prompts": "p.txt", **block})
