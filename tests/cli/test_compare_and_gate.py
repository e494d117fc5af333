"""`halfbyte compare` shows, `halfbyte gate` decides, and neither decides on nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "reports"))

from record_factory import fidelity, flipped, model, write_record

from halfbyte.main import main
from halfbyte.records.run import RunFolder

QUESTIONS, RIGHT = 2000, 1400


@pytest.fixture
def sides(tmp_path: Path) -> dict[str, Path]:
    """Evaluation folders: a baseline, one that loses little, one that loses much, and one that is too small to tell."""
    folders = {}
    for name, lost, gained in (("good", 10, 10), ("bad", 300, 20), ("unsure", 30, 20)):
        questions, right = (QUESTIONS, RIGHT) if name != "unsure" else (200, 140)
        baseline, candidate = flipped(questions, right, lost, gained)
        own = tmp_path / f"{name}-baseline"
        write_record(own / "colours", baseline)
        folders[name] = write_record(tmp_path / name / "colours", candidate, of=model("NVFP4", name)).parent
        folders[f"{name}-baseline"] = own
    return folders


@pytest.mark.parametrize(("name", "code"), [("good", 0), ("bad", 1), ("unsure", 3)])
def test_the_gates_exit_code_is_its_verdict(
    sides: dict[str, Path], name: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gate", str(sides[f"{name}-baseline"]), str(sides[name]), "--policy", "release"]) == code
    assert {0: "PASS", 1: "FAIL", 3: "INCONCLUSIVE"}[code] in capsys.readouterr().out


def test_the_gate_writes_junit_and_json(
    sides: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junit = tmp_path / "out" / "junit.xml"
    sides_of = [str(sides["bad-baseline"]), str(sides["bad"])]
    assert main(["gate", *sides_of, "--policy", "release", "--junit", str(junit), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (comparison,) = found["comparisons"]
    assert comparison["verdict"]["verdict"] == "fail"
    assert (found["verdict"], found["exit_code"]) == ("fail", 1)
    assert found["sentence"] == comparison["verdict"]["sentence"]
    assert len(ElementTree.parse(junit).findall(".//failure")) == 1


def test_compare_never_fails_on_a_loss(sides: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", str(sides["bad-baseline"]), str(sides["bad"])]
    assert main(arguments) == 0
    assert "not judged" in capsys.readouterr().out
    assert main([*arguments, "--policy", "release"]) == 0
    assert "FAIL" in capsys.readouterr().out


def test_compare_takes_several_candidates_and_writes_every_report(
    sides: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report"
    candidates = [str(sides["good"]), str(sides["bad"])]
    assert main(["compare", str(sides["good-baseline"]), *candidates, "--output", str(output)]) == 0
    shown = capsys.readouterr()
    assert sorted(path.name for path in output.iterdir()) == [
        "comparison.json",
        "model-card.md",
        "report.html",
        "report.md",
    ]
    assert str(output / "report.html") in shown.err
    assert str(output) not in shown.out


@pytest.mark.parametrize(
    ("style", "sign"), [("text", "model "), ("markdown", "# "), ("json", "{"), ("html", "<!doctype html>")]
)
def test_compare_prints_the_format_asked_for(
    sides: dict[str, Path], style: str, sign: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(sides["good-baseline"]), str(sides["good"]), "--format", style]) == 0
    assert capsys.readouterr().out.lower().startswith(sign)


def test_the_fidelity_of_a_run_is_found_from_its_evaluation_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    first, second = model(), model("NVFP4")
    baseline, candidate = flipped(QUESTIONS, RIGHT, 10, 10)
    ours, theirs = run.evaluations(first.digest), run.evaluations(second.digest)
    write_record(ours / "colours", baseline, of=first)
    write_record(theirs / "colours", candidate, of=second)
    fidelity(baseline=first, candidate=second).save(
        run.fidelity(second.digest) / "0123456789abcdef"
    )  # a folder for each text and setting
    assert main(["compare", str(ours), str(theirs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["fidelity"]["windows"] == 40


def test_a_fidelity_record_of_another_baseline_is_left_out_with_a_warning(
    sides: dict[str, Path], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    other = model("bfloat16", "another")
    fidelity(baseline=other, candidate=model("NVFP4", "good")).save(sides["good"])
    assert main(["compare", str(sides["good-baseline"]), str(sides["good"]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["fidelity"] is None
    assert "is left out" in caplog.text


def test_the_gate_on_two_empty_folders_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert main(["gate", str(tmp_path / "one"), str(tmp_path / "two"), "--policy", "release"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "no evaluation record in" in shown.err


def test_an_unknown_policy_is_bad_input_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gate", str(tmp_path / "none"), str(tmp_path / "none"), "--policy", "relase"]) == 2
    assert "did you mean 'release'" in capsys.readouterr().err
