"""Claims about training in reports: curves, what stopped it, rows PTQ, QAT and QAD, and where it won or harmed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from page_reader import page, written
from record_factory import fidelity, flipped, model, write_run, write_training

from halfbyte.main import main
from halfbyte.records.errors import UserError
from halfbyte.records.manifest import load_manifest
from halfbyte.records.record import ModelSummary
from halfbyte.records.training import CURVES_FILE, OverlapFound
from halfbyte.reports import figures
from halfbyte.reports.comparison import Comparison, load_comparisons
from halfbyte.reports.curves import training_plots
from halfbyte.reports.evidence import compare_folders, run_folders
from halfbyte.reports.html import render_html
from halfbyte.reports.methods import comparison_file, with_gains
from halfbyte.reports.policy import load_policy
from halfbyte.reports.text import render_markdown, render_text
from halfbyte.reports.training import read_training, training_line

BASELINE = flipped(2000, 1200, 0, 0)[0]


def summary(name: str) -> ModelSummary:
    return model("NVFP4", name)


def scores(lost: int, gained: int = 0) -> list[float]:
    return flipped(2000, 1200, lost, gained)[1]


@pytest.fixture
def runs(tmp_path: Path, cache: Path) -> list[Path]:  # noqa: ARG001
    """PTQ, QAT and three seeds of QAD: QAT harms, QAD wins most of the loss back."""
    made = {"ptq": scores(200), "qat": scores(320), "qad-1": scores(60), "qad-2": scores(70), "qad-3": scores(80)}
    for name, values in made.items():
        run = write_run(tmp_path / name, values, of=summary(name), baseline_values=BASELINE, task="mmlu")
        if name == "qat":
            write_training(run.training, "qat", stopped="patience", overlap=OverlapFound(questions=2000, found=3))
        elif name != "ptq":
            write_training(run.training, "qad", seed=int(name[-1]), overlap=OverlapFound(questions=2000, found=0))
    return [tmp_path / name for name in made]


def reported(runs: list[Path], policy: str | None = None) -> list[Comparison]:
    from halfbyte.records.run import RunFolder

    sides = [run_folders(RunFolder(run)) for run in runs]
    rules = None if policy is None else load_policy(policy)
    return with_gains([compare_folders(*side, rules) for side in sides], [after for _, after in sides])


def test_the_table_has_a_row_a_method_with_the_mean_and_spread_of_its_seeds(runs: list[Path]) -> None:
    found = reported([runs[4], runs[1], runs[0], runs[3], runs[2]])
    lines = render_text(found).split("\n\n")[0].splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "BF16 (baseline)", "NVFP4 PTQ", "NVFP4 QAT", "NVFP4 QAD, 3 seeds",
    ]  # fmt: skip
    values = [1140 / 2000, 1130 / 2000, 1120 / 2000]
    assert f"{fmean(values):.4f} ± {stdev(values):.4f}" in lines[-1]
    behind = render_text(found).split("\n\n")[1].splitlines()
    assert [line.split("  ")[0] for line in behind[3:]] == [f"NVFP4 QAD, seed {i}" for i in (1, 2, 3)]
    summaries = comparison_file(found).methods
    assert [(one.method, one.seeds) for one in summaries] == [("ptq", []), ("qat", [1]), ("qad", [1, 2, 3])]
    assert summaries[2].scores[0].values == pytest.approx(values)
    assert summaries[2].scores[0].deviation == pytest.approx(stdev(values))
    assert summaries[1].scores[0].deviation is None


def test_json_markdown_and_html_agree_on_training(runs: list[Path], tmp_path: Path) -> None:
    folders = [str(runs[i]) for i in range(5)]
    code = main(["report", *folders, "--output", str(tmp_path / "out")])
    assert code == 1
    out = tmp_path / "out"
    content = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    html, markdown = ((out / name).read_text(encoding="utf-8") for name in ("report.html", "report.md"))
    qad = content["comparisons"][2]
    assert qad["training"]["record"]["best_step"] == 30
    assert [len(qad["training"][curve]) for curve in ("steps", "validations")] == [40, 5]
    score = content["methods"][2]["scores"][0]
    cell = f"{score['mean']:.4f} ± {score['deviation']:.4f}"
    line = "validation loss 3.5000 (PTQ) to 3.2000, KL divergence 0.4000 to 0.2500 nats a token"
    gain = qad["gains"][0]
    assert (gain["says"], gain["gain"]) == ("better", pytest.approx(0.07))
    for text in (html, markdown):
        assert cell in text
        assert line in text
        assert "3 of 2,000 evaluation questions overlap with its texts" in text
        assert f"{gain['interval']['low']:.4f} to {gain['interval']['high']:.4f}" in text
    assert load_comparisons(out) == load_comparisons(out)
    assert content["verdict"] == "fail"
    assert content["sentence"].startswith("NVFP4 lost")
    assert [one["verdict"]["candidate"] for one in content["comparisons"]][:3] == ["NVFP4", "NVFP4 QAT", "NVFP4 QAD"]


def test_every_number_in_the_tables_of_a_page_with_trainings_is_one_of_the_json(runs: list[Path]) -> None:
    found = reported(runs, "release")
    known = written(comparison_file(found).model_dump(mode="json")) | {figures.NONE}
    numbers = page(render_html(found)).numbers
    assert len(numbers) > 100
    assert [number for number in numbers if number not in known] == []


def test_the_curves_are_drawn_with_what_they_are_of(runs: list[Path]) -> None:
    html = render_html(reported(runs[:3]))
    figures = re.findall(r'<figure aria-label="(Training of [^"]*)">(.*?)</figure>', html, flags=re.DOTALL)
    assert [label for label, _ in figures] == ["Training of NVFP4 QAT", "Training of NVFP4 QAD"]
    words = [set(re.findall(r"<text[^>]*>([^<]*)</text>", drawing)) for _, drawing in figures]
    assert {"loss, nats a token", "training", "validation", "PTQ", "exported", "step"} <= words[0]
    assert "KL divergence from the teacher, nats a token" not in words[0]
    assert "KL divergence from the teacher, nats a token" in words[1]
    assert "nan" not in html.lower().split("<figure")[1]


def test_what_a_model_that_draws_has_learned_is_no_nats_of_tokens(runs: list[Path]) -> None:
    found = reported(runs[:3])
    training = found[-1].training
    assert training is not None
    record = training.record.model_copy(
        update={
            "learned": "velocities",
            "start": training.record.start.model_copy(update={"kl": None}),
            "best": training.record.best.model_copy(update={"kl": None}),
            "overlap": None,
        }
    )
    validations = [row.model_copy(update={"validation_kl": None}) for row in training.validations]
    drawn = training.model_copy(update={"record": record, "validations": validations})
    line = training_line(drawn, "Flux")
    assert "40,000 patches" in line
    assert "mean squared error of the velocity 3.5000 (PTQ) to 3.2000, on prompts that were held out." in line
    (_, svg), *_ = training_plots([found[-1].model_copy(update={"training": drawn})])
    assert "mean squared error of the velocity" in svg
    assert "nats" not in line + svg


def test_where_training_won_or_harmed_is_said_with_intervals(runs: list[Path]) -> None:
    text = " ".join(render_text(reported(runs[:3])).split())
    assert "NVFP4 QAT: training made it worse than PTQ beyond chance" in text
    assert "NVFP4 QAD: training made it better than PTQ beyond chance" in text
    assert "mmlu (-0.0600 acc, interval -0.0" in text
    assert "NVFP4 QAT: 3 of 2,000 evaluation questions share a run of words with the training texts" in text


def test_fidelity_is_compared_with_ptqs_window_by_window(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    for name, factor in (("ptq", 1.3), ("qad", 1.1)):
        of = summary(name)
        run = write_run(tmp_path / name, scores(200), of=of, baseline_values=BASELINE, task="mmlu")
        record = fidelity(factor=factor, candidate=of)
        if name == "qad":
            record.windows = [
                window.model_copy(update={"kl": window.kl * (0.3 + i % 2 / 10)})
                for i, window in enumerate(record.windows)
            ]
            record.kl = sum(window.kl for window in record.windows) / record.tokens
        record.save(run.fidelity(of.digest) / "key")
    write_training(run.training)
    found = reported([tmp_path / "ptq", tmp_path / "qad"])
    assert found[0].fidelity_gain is None
    gain = found[1].fidelity_gain
    assert gain is not None
    assert gain.kl_interval is not None
    assert gain.perplexity_interval is not None
    assert gain.kl_share == pytest.approx(0.35, abs=0.02)
    assert gain.kl_interval.low < gain.kl_change < gain.kl_interval.high < 0
    assert gain.perplexity_ratio == pytest.approx(1.1 / 1.3)
    assert (gain.perplexity_interval.low, gain.perplexity_interval.high) == pytest.approx((1.1 / 1.3, 1.1 / 1.3))
    line = f"a change of {gain.kl_change:.4f} (90% interval {gain.kl_interval.low:.4f} to {gain.kl_interval.high:.4f})"
    for text in (render_text(found), render_markdown(found), render_html(found)):
        assert line in " ".join(text.split())


def test_training_that_changes_nothing_beyond_chance_claims_nothing(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    for name, values in (("ptq", scores(200)), ("qad", scores(196))):
        run = write_run(tmp_path / name, values, of=summary(name), baseline_values=BASELINE, task="mmlu")
    write_training(run.training)
    found = reported([tmp_path / "ptq", tmp_path / "qad"])
    assert [gain.says for gain in found[1].gains] == ["no difference shown"]
    assert found[0].gains == []
    assert "beyond chance, at 5%" not in render_text(found)


def test_training_that_made_nothing_better_exports_ptq_and_is_no_second_candidate(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    for name in ("ptq", "qat"):
        run = write_run(tmp_path / name, scores(200), of=summary("same"), baseline_values=BASELINE, task="mmlu")
    write_training(run.training, "qat", best_step=0, stopped="diverged: the loss was no number at step 12")
    found = reported([tmp_path / "ptq", tmp_path / "qat"])
    text = " ".join(render_text(found).split())
    assert "training made nothing better by its validation, so that what is exported is PTQ" in text
    assert "training diverged: the loss was no number at step 12" in text
    assert [one.says for one in found[1].gains] == ["no difference shown"]


@pytest.mark.parametrize(("method", "name"), [("qad", "KL divergence"), ("qat", "loss")])
def test_training_that_made_its_validation_worse_says_so(tmp_path: Path, cache: Path, method: Any, name: str) -> None:  # noqa: ARG001
    run = write_run(tmp_path / "run", scores(200), of=summary("same"), baseline_values=BASELINE, task="mmlu")
    record = write_training(run.training, method)
    assert "has made its validation" not in render_text(reported([run.root]))
    worse = record.start.model_dump(exclude={"step"})
    record.model_copy(update={"best": record.best.model_copy(update=worse)}).save(run.training)
    text = " ".join(render_text(reported([run.root])).split())
    assert f"training has made its validation {name} worse: " in text


def test_ptq_of_another_calibration_is_not_where_training_began(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    for name, values in (("ptq", scores(200)), ("qad", scores(60))):
        run = write_run(tmp_path / name, values, of=summary(name), baseline_values=BASELINE, task="mmlu")
        manifest = load_manifest(run.manifest)
        manifest.data = {"calibration: texts.txt": "one", **({"training: more.txt": "two"} if name == "qad" else {})}
        manifest.save(run.manifest)
    write_training(run.training)
    runs = [tmp_path / "ptq", tmp_path / "qad"]
    assert reported(runs)[1].gains
    manifest.data = {"calibration: texts.txt": "other"}
    manifest.save(run.manifest)
    found = reported(runs)
    assert found[1].gains == []
    assert "was calibrated on other texts than PTQ, and is not shown beside it" in " ".join(render_text(found).split())


def test_records_of_the_baseline_in_a_run_are_of_no_training(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    run = write_run(tmp_path / "qad", scores(10), of=summary("qad"), baseline_values=BASELINE, task="mmlu")
    write_training(run.training)
    before = run.evaluations(model().digest)
    assert compare_folders(before, run.evaluations(summary("qad").digest), None).training is not None
    assert compare_folders(before, before, None).training is None


def test_a_long_curve_is_thinned_and_keeps_its_ends(tmp_path: Path) -> None:
    write_training(tmp_path, steps=5000, best_step=4000)
    found = read_training(tmp_path, "")
    assert found is not None
    steps = [row.step for row in found.steps]
    assert (steps[0], steps[-1]) == (1, 5000)
    assert len(steps) <= 401
    assert len(found.validations) == 501


def test_training_without_its_curves_is_refused_and_none_is_none(tmp_path: Path) -> None:
    assert read_training(tmp_path, "") is None
    write_training(tmp_path)
    (tmp_path / CURVES_FILE).unlink()
    with pytest.raises(UserError, match=r"curves\.jsonl is missing"):
        read_training(tmp_path, "")


def test_training_of_another_run_is_refused(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    """A copied training.json would make a PTQ candidate a trained one, which may be better than its baseline."""
    run = write_run(tmp_path / "ptq", scores(2, 90), of=summary("ptq"), baseline_values=BASELINE, task="mmlu")
    write_training(run.training, key="that of another run")
    with pytest.raises(UserError, match=r"training\.json is of another training than the one that made the checkpoint"):
        compare_folders(*run_folders(run), None)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda line: '"step": 30, "tokens": 30000, "validation_loss"' not in line, "lacks the validation at step 30"),
        (lambda line: '"step": 0,' not in line, "lacks the validation at step 0"),
    ],
)
def test_curves_and_record_of_a_training_must_belong_together(
    tmp_path: Path, keep: Callable[[str], bool], message: str
) -> None:
    write_training(tmp_path)
    path = tmp_path / CURVES_FILE
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if keep(line)), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_training(tmp_path, "")


def test_a_curve_longer_than_its_training_is_refused(tmp_path: Path) -> None:
    write_training(tmp_path, steps=50)
    kept = (tmp_path / CURVES_FILE).read_bytes()
    write_training(tmp_path, steps=40)
    (tmp_path / CURVES_FILE).write_bytes(kept)
    with pytest.raises(UserError, match=r"goes to step 50, and training\.json ends at 40"):
        read_training(tmp_path, "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"step": 1, "tokens": 1, "loss": NaN, "learning_rate": 0.1, "seconds": 1}\n', "41 is no line of a training"),
        (b'{"step": 1, "tok', "41 is no line of a training"),
        (b"7\n", "41 is no line of a training"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_a_damaged_curve_is_refused_in_one_line(tmp_path: Path, line: bytes, message: str) -> None:
    write_training(tmp_path, steps=36, best_step=30)
    with (tmp_path / CURVES_FILE).open("ab") as file:
        file.write(line)
    with pytest.raises(UserError, match=message):
        read_training(tmp_path, "")


def test_what_made_a_checkpoint_is_not_said_of_the_original_model_beside_it(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    run = write_run(tmp_path / "ptq", scores(10), of=summary("ptq"), baseline_values=BASELINE, task="mmlu")
    before, after = run_folders(run)
    assert compare_folders(before, after, None).manifest is not None
    assert compare_folders(after, before, None).manifest is None


def test_the_compare_command_finds_the_trainings_of_its_candidates(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("ptq", "qat", "qad-1")
    folders = [str(run / "evaluations" / summary(name).digest[:16]) for run, name in zip(runs[:3], names, strict=True)]
    assert main(["compare", str(runs[0] / "evaluations" / model().digest[:16]), *folders, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [one["method"] for one in found["methods"]] == ["ptq", "qat", "qad"]
    assert [len(one["gains"]) for one in found["comparisons"]] == [0, 1, 1]
    assert found["verdict"] is None


def test_a_trained_candidate_that_beats_its_baseline_is_no_anomaly_and_an_untrained_one_is(
    tmp_path: Path,
    cache: Path,  # noqa: ARG001
) -> None:
    for name in ("ptq", "qad"):
        run = write_run(tmp_path / name, scores(2, 90), of=summary(name), baseline_values=BASELINE, task="mmlu")
    write_training(run.training)
    plain, trained = reported([tmp_path / "ptq", tmp_path / "qad"], "release")
    assert plain.verdict is not None
    assert trained.verdict is not None
    assert (plain.verdict.verdict, trained.verdict.verdict) == ("anomaly", "pass")
    assert trained.verdict.candidate == "NVFP4 QAD"
    text = " ".join(render_text([plain, trained]).split())
    assert "NVFP4 QAD: better than its baseline beyond chance" in text
    assert "NVFP4 PTQ: better than its baseline beyond chance" not in text


def test_trainings_of_other_settings_are_no_seeds_of_one(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    for number, (seed, rate) in enumerate([(1, "1e-5"), (2, "1e-5"), (1, "1e-4"), (2, "1e-4"), (2, "1e-4")]):
        of = summary(f"qad-{number}")
        train = f"{{method: qad, learning_rate: {rate}, seed: {seed}}}"
        values = scores(60 + number)
        run = write_run(tmp_path / of.name, values, of=of, baseline_values=BASELINE, task="mmlu", train=train)
        write_training(run.training, seed=seed)
    found = reported([tmp_path / f"qad-{number}" for number in range(5)])
    assert [one.seeds for one in comparison_file(found).methods] == [[1, 2], [1, 2], [2]]
    names = [line.split("  ")[0] for line in render_text(found).split("\n\n")[0].splitlines()[3:]]
    assert len(set(names)) == 3
    assert [name[:19] for name in names] == [
        "NVFP4 QAD, 2 seeds ",
        "NVFP4 QAD, 2 seeds ",
        f"NVFP4 QAD, seed 2 {summary('qad-4').digest[0]}",
    ]


def test_seeds_on_other_tasks_are_rows_of_their_own(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    for seed, task in ((1, "mmlu"), (2, "gsm8k"), (3, "mmlu")):
        of = summary(f"qad-{seed}")
        run = write_run(tmp_path / of.name, scores(60), of=of, baseline_values=BASELINE, task=task)
        write_training(run.training, seed=seed)
    found = reported([tmp_path / f"qad-{seed}" for seed in (1, 2, 3)])
    assert [one.seeds for one in comparison_file(found).methods] == [[1, 3], [2]]
    lines = render_text(found).split("\n\n")[0].splitlines()[3:]
    assert [line.split("  ")[0] for line in lines] == ["NVFP4 QAD, 2 seeds", "NVFP4 QAD, seed 2"]


def test_a_trained_checkpoint_whose_training_is_not_at_hand_says_so(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    of = summary("qad")
    train = "{method: qad, seed: 1}"
    run = write_run(tmp_path / "qad", scores(60), of=of, baseline_values=BASELINE, task="mmlu", train=train)
    text = " ".join(render_text(reported([run.root])).split())
    assert "its recipe trains, and" in text
    write_training(run.training)
    assert "its recipe trains, and" not in " ".join(render_text(reported([run.root])).split())


@pytest.mark.parametrize("content", ["[1]", "gate: [", "quantize: {preset: fp8}", "date: 2026-13-01"])
def test_the_recipe_of_a_run_that_is_none_is_one_line(tmp_path: Path, cache: Path, content: str) -> None:  # noqa: ARG001
    run = write_run(tmp_path / "ptq", scores(60), of=summary("ptq"), baseline_values=BASELINE, task="mmlu")
    run.recipe.write_text(content, encoding="utf-8")
    assert main(["report", str(run.root)]) == 2
