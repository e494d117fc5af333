"""The run folder: whose it is, what --force may remove, and that it stands for the checkpoint in it."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from line import write_recipe

from halfbyte.quant import making, models, produce, ptq
from halfbyte.quant.load import load
from halfbyte.recipes.find import load_recipe
from halfbyte.recipes.schema import ModelSpec
from halfbyte.records import digests
from halfbyte.records.errors import UserError
from halfbyte.records.manifest import load_manifest
from halfbyte.records.run import RunFolder


@pytest.fixture
def job(tmp_path: Path, tiny_model_folder: Path, cache: Path) -> Any:  # noqa: ARG001
    return produce.prepare(load_recipe(str(write_recipe(tmp_path / "recipe", tiny_model_folder))), "cpu")


def test_force_sets_aside_what_a_run_wrote_and_nothing_else_until_there_is_a_checkpoint(
    job: Any, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    produce.produce(job, run)
    (run.root / "notes.txt").write_text("mine")
    for _ in range(2):  # the second time as after a kill
        produce.require_own_folder(job, run, force=True)
        assert sorted(path.name for path in run.root.iterdir()) == ["notes.txt", "replaced"]
        assert (run.replaced / "checkpoint" / "config.json").is_file()
        produce.claim(job, run)
    produce.produce(job, run)
    assert not run.replaced.exists()


def test_a_disk_without_place_for_both_has_the_new_one(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    produce.produce(job, run)
    produce.require_own_folder(job, run, force=True)
    monkeypatch.setattr(
        "halfbyte.quant.produce.shutil.disk_usage",
        lambda _: SimpleNamespace(free=0 if run.replaced.exists() else 10**12),
    )
    produce.produce(job, run)
    assert not run.replaced.exists()
    assert run.checkpoint.is_dir()


def test_force_refuses_a_folder_that_no_run_wrote(job: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="no run wrote it"):
        produce.require_own_folder(job, RunFolder(tmp_path / "thesis"), force=True)
    assert (tmp_path / "thesis" / "thesis.txt").is_file()


def test_a_run_folder_stands_for_its_checkpoint(job: Any, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    summary = produce.produce(job, run)
    assert load(ModelSpec(id=str(run.root)), device="cpu").summary.digest == summary.digest


def test_colleagues_can_read_the_checkpoint(job: Any, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    produce.produce(job, run)
    modes = {path.name: path.stat().st_mode & 0o044 for path in run.checkpoint.iterdir()}
    assert set(modes.values()) == {0o044}, modes


def test_a_resumed_manifest_names_the_calibration_data(job: Any, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    produce.produce(job, run)
    first = load_manifest(run.manifest)
    run.manifest.unlink()  # as a kill between export and manifest leaves it
    produce.produce(job, run)
    second = load_manifest(run.manifest)
    assert second.data == first.data != {}
    assert second.seconds["calibrate"] == first.seconds["calibrate"]
    assert second.checkpoint_digest == first.checkpoint_digest


def test_the_original_is_hashed_while_it_is_loaded(
    tmp_path: Path,
    tiny_model_folder: Path,
    cache: Path,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading = threading.Event()
    digest, open_original = models.model_digest, making.open_original

    def hash_once_loading(folder: Path) -> str:
        assert loading.wait(20), "hashed before anything was loaded"
        return digest(folder)

    def opened(*args: Any, **options: Any) -> Any:
        loading.set()
        return open_original(*args, **options)

    monkeypatch.setattr(models, "model_digest", hash_once_loading)
    monkeypatch.setattr(making, "open_original", opened)
    job = produce.prepare(load_recipe(str(write_recipe(tmp_path / "recipe", tiny_model_folder))), "cpu")
    run = RunFolder(tmp_path / "run")
    produce.require_own_folder(job, run, force=False)
    produce.produce(job, run)
    assert load_manifest(run.manifest).model_digest == job.source.digest


@pytest.mark.parametrize("wanted", [True, False])
def test_the_original_is_hashed_while_modelopt_is_imported_and_not_for_a_plan_alone(
    wanted: bool,
    tmp_path: Path,
    tiny_model_folder: Path,
    cache: Path,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Path] = []
    resolve = produce.quant_config

    def config(spec: Any) -> Any:
        begun.extend(digests._ahead)
        return resolve(spec)

    monkeypatch.setattr(digests, "_ahead", {})
    monkeypatch.setattr(produce, "quant_config", config)
    recipe = load_recipe(str(write_recipe(tmp_path / "recipe", tiny_model_folder)))
    produce.prepare(recipe, "cpu", read_ahead=wanted)
    assert sorted(begun) == (digests.model_files(tiny_model_folder) if wanted else [])


def test_each_phase_has_its_own_line_of_seconds(job: Any, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    start = time.monotonic()
    produce.produce(job, run)
    wall = time.monotonic() - start
    seconds = load_manifest(run.manifest).seconds
    phases = {"load", "digest", "texts", "calibrate", "keep calibration", "settle", "export", "publish"}
    assert set(seconds) == phases
    assert min(seconds.values()) >= 0
    assert sum(seconds.values()) < wall


@pytest.fixture
def awq(tmp_path: Path, tiny_model_folder: Path, cache: Path) -> Any:  # noqa: ARG001
    path = write_recipe(tmp_path / "recipe", tiny_model_folder)
    return produce.prepare(load_recipe(str(path), ["quantize.preset=NVFP4_AWQ_LITE_CFG"]), "cpu")


def test_weights_that_calibration_changed_are_kept_until_the_checkpoint_is_there(awq: Any, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    kept = 4 * sum(layer.weights for layer in awq.plan.quantized)
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        drop = ptq.drop_weights
        patch.setattr(
            ptq, "drop_weights", lambda folder: seen.extend(x.stat().st_size for x in folder.glob("weights*"))
        )
        produce.produce(awq, run)  # as a kill after the manifest leaves it
        assert 0 <= sum(seen) - kept < 10_000
        patch.setattr(ptq, "drop_weights", drop)
        produce.produce(awq, run)
    assert not list(run.calibration.glob("weights*"))
    assert (run.calibration / ptq.TENSORS_FILE).is_file()


def test_space_is_asked_for_the_weights_that_are_kept(
    awq: Any, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    kept = 4 * sum(layer.weights for layer in awq.plan.quantized)
    for what, needed in ((job, job.plan.tensor_bytes), (awq, awq.plan.tensor_bytes + kept)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=needed: SimpleNamespace(free=free))
        produce.require_space(what, run)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=needed - 1: SimpleNamespace(free=free))
        with pytest.raises(UserError, match="no space for the checkpoint"):
            produce.require_space(what, run)


def test_space_is_asked_for_until_the_checkpoint_is_there(job: Any, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert not produce.has_checkpoint(job, run)
    assert "key" not in vars(job)  # a question before the first stage must not read the model
    produce.require_space(job, run)
    assert "key" not in vars(job)
    produce.produce(job, run)
    assert produce.has_checkpoint(job, run)
