"""A record says when it or a file of it has changed since it was written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "reports"))

from record_factory import write_record

from halfbyte.records.errors import UserError
from halfbyte.records.record import RECORD_FILE, load_record, read_samples, verify_content


@pytest.fixture
def record(tmp_path: Path) -> Path:
    folder = write_record(tmp_path / "record", [1.0, 0.0, 1.0])
    (folder / load_record(folder).results_file).write_text("{}\n", encoding="utf-8")
    load_record(folder).save(folder)
    return folder


def test_a_record_as_it_was_written_is_believed(record: Path) -> None:
    assert verify_content(record) == load_record(record)
    assert set(verify_content(record).files) == {path.name for path in record.iterdir()} - {RECORD_FILE}


def _flip_a_score(folder: Path) -> None:
    path = folder / load_record(folder).samples_files["colours"]
    path.write_text(path.read_text(encoding="utf-8").replace('"acc": 0.0', '"acc": 1.0'), encoding="utf-8")


def _raise_a_metric(folder: Path) -> None:
    content = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    content["metrics"][0]["value"] = 1.0
    (folder / RECORD_FILE).write_text(json.dumps(content), encoding="utf-8")


def _remove_the_results(folder: Path) -> None:
    (folder / load_record(folder).results_file).unlink()


def _break_the_seal(folder: Path) -> None:
    content = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    del content["seal"]
    (folder / RECORD_FILE).write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip_a_score, "samples_colours_.*has changed"),
        (_raise_a_metric, "record.json has changed"),
        (_remove_the_results, "results_.*is missing"),
        (_break_the_seal, "wrote no digests"),
    ],
)
def test_a_record_that_has_changed_is_refused(record: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(record)
    with pytest.raises(UserError, match=message):
        verify_content(record)


def test_lines_without_our_keys_are_still_read(record: Path) -> None:
    samples = list(read_samples(record, load_record(record)))
    assert [sample.asked for sample in samples] == [None] * 3
    assert [sample.generated for sample in samples] == [None] * 3


def test_our_keys_in_a_line_are_read(record: Path) -> None:
    path = record / load_record(record).samples_files["colours"]
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["asked"] = {"input": "ab", "tokens": 12, "bos": [1], "doubled": 0, "cut": 3}
        line["generated"] = [{"tokens": 7, "stop": "length", "seed": 5}]
        line["answered"] = [False]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    first = next(iter(read_samples(record, load_record(record))))
    assert first.asked is not None
    assert first.generated is not None
    assert (first.asked.cut, first.generated[0].stop, first.answered) == (3, "length", [False])
