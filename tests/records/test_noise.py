"""The noise floor counts what differs between two evaluations of one model, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "reports"))

from record_factory import model, write_record

from halfbyte.records.errors import UserError
from halfbyte.records.noise import load_noise, noise_between


def pair(folder: Path, first: Any, second: Any, **options: Any) -> tuple[Path, Path]:
    return write_record(folder / "first", first, **options), write_record(folder / "second", second, **options)


def test_flips_are_counted_both_ways_and_by_subtask(tmp_path: Path) -> None:
    one, other = pair(tmp_path, {"a": [1, 1, 0, 0], "b": [1, 0]}, {"a": [1, 0, 1, 1], "b": [1, 0]}, task="both")
    noise = noise_between(one, other)
    assert [(flips.subtask, flips.questions, flips.lost, flips.gained) for flips in noise.flips] == [
        ("a", 4, 1, 2),
        ("b", 2, 0, 0),
    ]
    assert noise.flips[0].doc_ids == [1, 2, 3]
    assert noise.flips[0].change == 0.25
    assert noise.of("acc", "none") == (6, 1, 2)
    assert noise.texts is None
    assert not noise.drawn


def test_two_equal_evaluations_have_no_noise(tmp_path: Path) -> None:
    one, other = pair(tmp_path, [1, 0, 1], [1, 0, 1])
    assert noise_between(one, other).of("acc", "none") == (3, 0, 0)


def _generate(seed: int, text: str) -> Any:
    def edit(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for line in lines:
            line["resps"] = [[f"{text} {line['doc_id'] if line['doc_id'] else ''}"]]
            line["generated"] = [{"tokens": 3, "stop": "end_token", "seed": seed}]
        return lines

    return edit


def test_other_texts_and_drawn_samples_are_told(tmp_path: Path) -> None:
    one = write_record(tmp_path / "one", [1, 0], edit=_generate(1, "so"))
    other = write_record(tmp_path / "other", [1, 0], edit=_generate(2, "thus"))
    noise = noise_between(one, other)
    assert (noise.texts, noise.drawn, noise.of("acc", "none")) == (2, True, (2, 0, 0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"of": model("FP8")}, "not two evaluations of one model"),
        ({"task": "shapes"}, "not two evaluations of one model"),
        ({"questions": lambda at: f"Another {at}?"}, "do not ask the same"),
    ],
)
def test_what_is_no_repetition_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    one = write_record(tmp_path / "one", [1, 0])
    other = write_record(tmp_path / "other", [1, 0], **options)
    with pytest.raises(UserError, match=message):
        noise_between(one, other)


def test_missing_questions_are_no_noise(tmp_path: Path) -> None:
    one, other = pair(tmp_path, [1, 0, 1], [1, 0])
    with pytest.raises(UserError, match="do not hold the same questions"):
        noise_between(one, other)


def test_it_lies_beside_its_record_and_belongs_to_it(tmp_path: Path) -> None:
    one, other = pair(tmp_path, [1, 0, 1], [1, 1, 1])
    assert load_noise(one) is None
    noise = noise_between(one, other)
    noise.save(one)
    assert load_noise(one) == noise
    noise.model_copy(update={"key": "another"}).save(one)
    with pytest.raises(UserError, match="of another record"):
        load_noise(one)
