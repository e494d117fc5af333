"""Claims about what lies around a candidate's records, and about reports rebuilt from a run folder alone."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml
from record_factory import fidelity, flipped, model, write_record, write_run

from halfbyte.main import main
from halfbyte.records.canary import CanaryRecord
from halfbyte.records.errors import UserError
from halfbyte.records.manifest import Manifest
from halfbyte.records.run import RunFolder
from halfbyte.reports.comparison import load_comparisons
from halfbyte.reports.evidence import compare_folders, layer_table, run_folders
from halfbyte.reports.policy import load_policy


def write_tensors(path: Path, tensors: dict[str, tuple[str, int]]) -> None:
    """A safetensors file of zeros with these (dtype, bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


@pytest.fixture
def run_folder(tmp_path: Path, cache: Path) -> RunFolder:  # noqa: ARG001
    folder = RunFolder(tmp_path / "mine")
    ours, theirs = flipped(3000, 2000, 5, 5)
    write_record(folder.evaluations(model().digest) / "t", ours)
    write_record(folder.evaluations(model("NVFP4").digest) / "t", theirs, format="NVFP4")
    fidelity().save(folder.fidelity(model("NVFP4").digest))
    recipe = {"name": "mine", "gate": {"policy": "release"}, "published": "trtllm_ci_mmlu"}
    folder.recipe.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    Manifest(
        recipe="mine",
        recipe_digest="r",
        model="models/x",
        model_digest=model().digest,
        checkpoint_digest=model("NVFP4").digest,
        seeds={"calibration": 1234},
    ).save(folder.manifest)
    folder.checkpoint.mkdir()
    algorithm = {"quantization": {"quant_algo": "NVFP4"}}
    (folder.checkpoint / "hf_quant_config.json").write_text(json.dumps(algorithm), encoding="utf-8")
    layers = {f"model.layers.{i}.mlp.up.weight": ("U8", 64) for i in range(3)}
    scales = {f"model.layers.{i}.mlp.up.weight_scale": ("F8_E4M3", 8) for i in range(3)}
    write_tensors(folder.checkpoint / "model.safetensors", {**layers, **scales, "lm_head.weight": ("BF16", 200)})
    return folder


def test_layers_of_one_name_and_format_are_one_line_with_their_scales(run_folder: RunFolder) -> None:
    rows = {layer.name: (layer.format, layer.layers, layer.bytes) for layer in layer_table(run_folder.checkpoint)}
    assert rows == {"model.layers.*.mlp.up": ("NVFP4", 3, 216), "lm_head": ("BF16", 1, 200)}
    assert layer_table(run_folder.root / "none") == []


def test_experts_in_one_tensor_are_a_line_as_linears_are(tmp_path: Path) -> None:
    stacks = [f"model.layers.{i}.feed_forward.experts.gate_up_proj" for i in range(2)]
    scales = {f"{stacks[0]}_{kind}_scale": ("F32", 4) for kind in ("weight", "input")}
    write_tensors(tmp_path / "model.safetensors", {stacks[0]: ("F8_E4M3", 64), **scales, stacks[1]: ("BF16", 128)})
    declared = {"quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(declared), encoding="utf-8")
    rows = {(layer.name, layer.format): layer.bytes for layer in layer_table(tmp_path)}
    name = "model.layers.*.feed_forward.experts.gate_up_proj"
    assert rows == {(name, "FP8"): 64 + 2 * 4, (name, "BF16"): 128}


def test_experts_in_blocks_are_named_by_what_config_json_declares(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts.down_proj"
    tensors = {f"{experts}_blocks": ("U8", 128), f"{experts}_scales": ("U8", 8), f"{experts}_bias": ("BF16", 16)}
    write_tensors(tmp_path / "model.safetensors", tensors)
    declared = {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(declared), encoding="utf-8")
    (row,) = layer_table(tmp_path)
    assert (row.name, row.format, row.bytes) == ("model.layers.*.mlp.experts.down_proj", "MXFP4", 128 + 8)


def test_a_run_folder_brings_fidelity_manifest_layers_and_the_published_table(run_folder: RunFolder) -> None:
    found = compare_folders(*run_folders(run_folder), load_policy("release"), "trtllm_ci_mmlu")
    assert found.fidelity is not None
    assert found.manifest is not None
    assert found.manifest["seeds"] == {"calibration": 1234}
    assert len(found.layers) == 2
    assert [table.id for table in found.published] == ["trtllm_ci_mmlu"]


def test_of_several_fidelity_records_the_newest_is_reported(run_folder: RunFolder) -> None:
    place = run_folder.fidelity(model("NVFP4").digest)
    for name, day, text in (("0", 3, "newest"), ("1", 2, "older"), ("z", 1, "oldest")):
        record = fidelity()
        record.created, record.text = f"2026-11-0{day}T12:00:00+00:00", text
        record.save(place / name)
    found = compare_folders(*run_folders(run_folder), None).fidelity
    assert found is not None
    assert found.text == "newest"


def fail_canary(run: RunFolder) -> None:
    """Leaves the record of a canary that found the run's candidate broken."""
    record = CanaryRecord(
        created="2026-11-01T00:00:00+00:00", key="k", baseline_digest=model().digest, candidate=model("NVFP4"),
        max_kl=2.0, kl=None, rows=[], failure="16 of 16 prompts have logits that are no numbers",
    )  # fmt: skip
    record.save(run.canary(model("NVFP4").digest))


def test_a_failed_canary_in_the_run_folder_makes_the_gate_an_anomaly(run_folder: RunFolder) -> None:
    fail_canary(run_folder)
    ours, theirs = run_folders(run_folder)
    assert main(["gate", str(ours), str(theirs), "--policy", "release"]) == 4


def test_results_of_another_model_under_this_runs_name_are_refused(run_folder: RunFolder) -> None:
    """The folder is the run's, and what lies in it is not of the checkpoint that the run made."""
    ours, theirs = run_folders(run_folder)
    other = theirs.with_name("other")
    write_record(other / "t", flipped(3000, 2000, 5, 5)[1], format="FP8")
    with pytest.raises(UserError, match="records are of another model"):
        compare_folders(ours, other, load_policy("release"))


def test_a_run_without_a_checkpoint_cannot_be_reported(run_folder: RunFolder) -> None:
    content = json.loads(run_folder.manifest.read_text(encoding="utf-8")) | {"checkpoint_digest": None}
    run_folder.manifest.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match="no checkpoint yet"):
        run_folders(run_folder)


def test_a_run_that_was_not_evaluated_says_why(run_folder: RunFolder) -> None:
    _, theirs = run_folders(run_folder)
    shutil.rmtree(theirs)
    with pytest.raises(UserError, match=r"was not evaluated \(run the recipe again"):
        run_folders(run_folder)
    fail_canary(run_folder)
    with pytest.raises(UserError, match=r"was not evaluated: 16 of 16 prompts .* \(leave it out\)"):
        run_folders(run_folder)


def test_the_report_command_rebuilds_everything_from_the_records(
    run_folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run_folder.root)]) == 0
    names = {"comparison.json", "report.html", "report.md", "model-card.md", "eval_results.yaml", "verdict.json"}
    assert names <= {path.name for path in run_folder.root.iterdir()}
    html = (run_folder.root / "report.html").read_text(encoding="utf-8")
    for part in ("Layers of NVFP4", "Manifest", "seeds.calibration", "trtllm_ci_mmlu", "Size and speed"):
        assert part in html
    assert "say nothing about a serving engine" in html
    assert "say nothing about a serving engine" in (run_folder.root / "report.md").read_text(encoding="utf-8")
    (one,) = load_comparisons(run_folder.root)
    assert one.verdict is not None
    assert main(["report", str(run_folder.root), "--policy", "mlperf-99", "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "junit.xml").is_file()
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 2
    assert "is no run" in capsys.readouterr().err


def test_a_run_that_a_limit_cut_is_reported_without_a_verdict(run_folder: RunFolder) -> None:
    for side, format in (("bfloat16", "bfloat16"), ("NVFP4", "NVFP4")):
        values = flipped(100, 60, 1, 1)[format == "NVFP4"]
        write_record(run_folder.evaluations(model(side).digest) / "t", values, format=format, limit=100)
    assert main(["report", str(run_folder.root)]) == 3
    assert not (run_folder.root / "verdict.json").exists()


def test_the_step_summary_is_appended_where_ci_names_a_file(
    run_folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    ours, theirs = run_folders(run_folder)
    assert main(["gate", str(ours), str(theirs), "--policy", "release"]) == 0
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert "**PASS: NVFP4.**" in text


def test_runs_of_several_baselines_are_refused_before_anything_is_written(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    ours, theirs = flipped(3000, 2000, 5, 5)
    first = write_run(tmp_path / "first", theirs, of=model("NVFP4"), baseline_values=ours)
    other = write_run(tmp_path / "other", theirs, of=model("FP8"), baseline=model(name="other"), baseline_values=ours)
    for runs in ([first, other], [first, first]):
        assert main(["report", *(str(run.root) for run in runs)]) == 2
        assert not (first.root / "report.html").exists()


def test_a_step_summary_that_cannot_be_written_is_bad_input(
    run_folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "none" / "summary.md"))
    assert main(["gate", *map(str, run_folders(run_folder)), "--policy", "release"]) == 2
    assert "GITHUB_STEP_SUMMARY names" in capsys.readouterr().err


def test_what_differs_is_shown_above_the_error(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    write_record(tmp_path / "b", [1.0, 0.0], dtype="float32")
    write_record(tmp_path / "c", [1.0, 0.0], dtype="bfloat16", format="FP8")
    assert main(["gate", str(tmp_path / "b"), str(tmp_path / "c"), "--policy", "release"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(line.split() == ["*", "dtype", "'float32'", "'bfloat16'"] for line in lines)
    assert lines[-2].startswith("halfbyte: error: ")
    assert lines[-1].startswith("halfbyte: hint: ")
