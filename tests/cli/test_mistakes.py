"""Each mistake gives one clear line and exit 2, and leaves earlier results whole."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from line import fill, fill_at_export, run_child, write_recipe

sys.path.insert(0, str(Path(__file__).parent.parent / "reports"))

from record_factory import flipped, write_record

from halfbyte.main import main

Mistake = Callable[..., str]


def contents(folder: Path) -> dict[str, str]:
    """The digest of each file below a folder; the lock's file, which holds nothing, is left out."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }


class Line:
    """A whole run that was done before the mistakes are made, its model and its recipe."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.recipe = write_recipe(folder, model)
        self.cache = folder / "cache"
        self.runs = folder / "runs"
        self.run = self.runs / "tiny-nvfp4"
        assert run_child(["run", str(self.recipe)], folder, self.cache) in (0, 1, 3)

    def another(self, folder: Path, **changes: Any) -> Path:
        """A recipe that differs from the first in the fields given."""
        return write_recipe(folder, self.model, **changes)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Any, tiny_tokenizer: Any) -> Line:
    folder = tmp_path_factory.mktemp("line")
    tiny_llama.save_pretrained(folder / "model")
    tiny_tokenizer.save_pretrained(folder / "model")
    return Line(folder, folder / "model")


@pytest.fixture
def mistake(line: Line, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Mistake]:
    """Runs a command that must be refused; returns its error and hint. The earlier run must be whole afterwards."""
    monkeypatch.chdir(line.folder)
    monkeypatch.setenv("HALFBYTE_CACHE", str(line.cache))
    monkeypatch.delenv("HALFBYTE_DATA", raising=False)
    before = contents(line.runs)

    def refused(*arguments: object) -> str:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        shown = capfd.readouterr()
        assert code == 2, shown.err
        assert shown.out == ""
        return said(shown.err)

    yield refused
    assert contents(line.runs) == before


def said(stderr: str) -> str:
    """The error and the hint on stderr, which holds one of each at most, and else progress alone."""
    assert "Traceback" not in stderr
    lines = [part for line in stderr.splitlines() for part in line.split("\r") if part.strip()]
    ours = [line for line in lines if line.startswith("halfbyte: ")]
    assert [line.split(": ")[1] for line in ours] in (["error"], ["error", "hint"]), stderr
    assert ours == lines[-len(ours) :], stderr
    return " | ".join(ours)


def test_an_unknown_recipe_is_named_with_the_nearest(mistake: Mistake) -> None:
    assert "unknown recipe 'demo-fp9' | halfbyte: hint: did you mean 'demo-fp8'?" in mistake("run", "demo-fp9")
    assert "recipe file absent.yaml does not exist" in mistake("quantize", "absent.yaml", "--output", "runs/tiny-nvfp4")


def test_an_unknown_field_is_named_with_the_nearest(line: Line, mistake: Mistake, tmp_path: Path) -> None:
    recipe = line.another(tmp_path, evaluat={"tasks": []})
    assert "unknown field 'evaluat' | halfbyte: hint: did you mean 'evaluate'?" in mistake("run", recipe)
    assert "--set: unknown field 'model.idd'" in mistake("run", line.recipe, "--set", "model.idd=x")


def test_an_unknown_task_is_named_with_the_nearest(line: Line, mistake: Mistake, tmp_path: Path) -> None:
    expected = "unknown task 'smok' | halfbyte: hint: did you mean 'smoke'?"
    other = ("--output", tmp_path / "runs", "--set", "evaluate.tasks.0.task=smok")
    assert expected in mistake("run", line.recipe, "--quiet", *other)
    assert expected in mistake("eval", line.model, "--tasks", "smok", "--output", line.folder / "evaluation")


def test_an_option_for_a_recipes_field_is_answered_with_the_way_to_set_it(
    line: Line, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["eval", str(line.model), "--tasks", "smoke", "--include-path", "tasks"])
    assert refused.value.code == 2
    shown = said(capfd.readouterr().err.partition("\n")[2])
    assert "unrecognized arguments: --include-path tasks | halfbyte: hint: halfbyte eval --help" in shown
    assert "--set evaluate.include_path=FOLDER" in shown


def test_a_policy_that_cannot_judge_what_is_evaluated_is_refused_before_the_checkpoint_is_made(
    line: Line, mistake: Mistake, tmp_path: Path
) -> None:
    fields = {"name": "ours", "description": "Ours.", "release_evidence": False, "allow_limit": True}
    other = ("--output", tmp_path / "runs", "--set", f"gate.policy={tmp_path / 'ours.yaml'}")
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump({**fields, "margin": 0.02, "primary": ["smok"]}))
    expected = "policy 'ours' decides on smok, which the recipe does not evaluate"
    assert expected in mistake("run", line.recipe, *other, "--dry-run")
    assert expected in mistake("plan", line.recipe, *other[2:])
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump({**fields, "margins": {"elsewhere": 0.02}}))
    assert "policy 'ours' has no margin for " in mistake("run", line.recipe, *other)
    assert not list((tmp_path / "runs").rglob("*.safetensors"))


@pytest.mark.parametrize("name", ["../smoke", "/smoke", ".smoke", "a b"])
def test_a_task_that_would_name_another_folder_is_refused(line: Line, mistake: Mistake, name: str) -> None:
    assert f"task '{name}'" in mistake("eval", line.model, "--tasks", name, "--output", "runs/tiny-nvfp4")
    assert not (line.folder / "smoke.partial").exists()


def test_an_unknown_preset_is_named_with_the_known_ones(line: Line, mistake: Mistake) -> None:
    shown = mistake("run", line.recipe, "--set", "quantize.preset=nvfp5")
    assert "unknown preset 'nvfp5' | halfbyte: hint: did you mean 'nvfp4'? known: " in shown


def test_an_unknown_modelopt_recipe_is_named(line: Line, mistake: Mistake) -> None:
    both = ("--set", "quantize.preset=null", "--set", "quantize.recipe=general/ptq/nvfp5")
    assert "unknown ModelOpt recipe 'general/ptq/nvfp5'" in mistake("run", line.recipe, *both)


@pytest.mark.parametrize(
    ("device", "expected"),
    [("tpu", "unknown device 'tpu'"), ("meta", "not supported"), ("cuda:99", "not on this machine")],
)
def test_an_unknown_device_is_named(line: Line, mistake: Mistake, device: str, expected: str) -> None:
    assert expected in mistake("run", line.recipe, "--device", device)
    assert expected in mistake("eval", line.model, "--tasks", "smoke", "--device", device, "--output", "evaluation")


def test_a_recipe_that_matches_no_layer_is_refused_before_calibration(
    line: Line, mistake: Mistake, tmp_path: Path
) -> None:
    block = yaml.safe_load(line.recipe.read_text(encoding="utf-8"))["quantize"]
    block.pop("preset")
    nothing = {"quantizer_name": "*", "enable": False}
    block["quant_cfg"] = [nothing, {"quantizer_name": "*no_such_layer*", "cfg": {"num_bits": [4, 3]}}]
    shown = mistake("run", line.another(tmp_path, quantize=block))
    assert "the recipe matches no layer" in shown
    assert "its layers are named like model.layers.0" in shown


def _missing(folder: Path) -> None:
    shutil.rmtree(folder)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _no_safetensors_inside(folder: Path) -> None:
    (folder / "model.safetensors").write_text("<html>not found</html>", encoding="utf-8")


def _fewer_weights(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}), encoding="utf-8")


def _of_another_library(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _code_of_its_own(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _nonsense_in_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}), encoding="utf-8")


def _empty_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]", encoding="utf-8")


def _no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


MODELS = [
    (_missing, "does not exist"),
    (_empty, "it has no config.json"),
    (_without_config, "it has no config.json"),
    (_truncated, "model.safetensors is damaged"),
    (_pickled, "holds no safetensors weights | halfbyte: hint: convert pytorch_model.bin"),
    (_no_safetensors_inside, "model.safetensors is damaged"),
    (_fewer_weights, "9 missing_keys, first model.layers.2."),
    (_of_another_library, "is quantized already, by gptq"),
    (_code_of_its_own, "custom code"),
    (_nonsense_in_config, "'hidden_size' expected int, got str"),
    (_empty_index, "names no weights"),
    (_no_tokenizer, "has no usable tokenizer"),
]


@pytest.mark.parametrize(("damage", "expected"), MODELS, ids=[damage.__name__ for damage, _ in MODELS])
def test_a_model_folder_that_cannot_be_used_is_named(
    damage: Callable[[Path], None], expected: str, line: Line, mistake: Mistake, tmp_path: Path
) -> None:
    model = shutil.copytree(line.model, tmp_path / "model")
    damage(model)
    other = write_recipe(tmp_path, model)
    assert expected in mistake("run", other, "--quiet", "--output", tmp_path / "runs")
    assert expected in mistake("eval", model, "--tasks", "smoke", "--limit", 4, "--output", tmp_path / "evaluation")


def test_a_checkpoint_with_a_missing_shard_is_refused(line: Line, mistake: Mistake, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    checkpoint = shutil.copytree(line.run / "checkpoint", tmp_path / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, checkpoint / file, {"format": "pt"})
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}), encoding="utf-8")
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    arguments = ("eval", checkpoint, "--tasks", "smoke", "--output", tmp_path / "evaluation")
    assert "lacks 1 of 2 shards: model-00002-of-00002.safetensors" in mistake(*arguments)
    index.unlink()
    assert "the checkpoint is incomplete" in mistake(*arguments)


def test_a_checkpoint_that_declares_what_it_does_not_hold_is_refused(
    line: Line, mistake: Mistake, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(line.run / "checkpoint", tmp_path / "checkpoint")
    shutil.copy(line.model / "model.safetensors", checkpoint / "model.safetensors")
    shown = mistake("eval", checkpoint, "--tasks", "smoke", "--output", tmp_path / "evaluation")
    assert "declares NVFP4, but no weight in it is quantized" in shown


def test_an_exported_checkpoint_is_no_original(line: Line, mistake: Mistake) -> None:
    shown = mistake("run", line.recipe, "--set", f"model.id={line.run / 'checkpoint'}")
    assert "is an exported checkpoint already | halfbyte: hint: give the original model" in shown


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "is empty"), (b" \n\n", "is empty"), (b"caf\xe9 and more\n", "is not UTF-8: byte 3 is 0xe9")],
)
def test_calibration_text_that_cannot_be_used_is_named(
    content: bytes, expected: str, line: Line, mistake: Mistake, tmp_path: Path
) -> None:
    recipe = line.another(tmp_path)
    (tmp_path / "texts.txt").write_bytes(content)
    assert expected in mistake("quantize", recipe, "--quiet", "--output", tmp_path / "checkpoint")
    assert "texts.txt" in mistake("run", recipe, "--quiet", "--output", tmp_path / "runs")
    assert expected in mistake("run", recipe, "--quiet")
    assert expected in mistake("run", recipe, "--quiet", "--force")


def test_an_output_folder_of_another_recipe_is_refused(line: Line, mistake: Mistake, tmp_path: Path) -> None:
    assert "belongs to recipe 'tiny-nvfp4', not to 'other'" in mistake(
        "quantize", line.another(tmp_path, name="other"), "--output", line.run
    )
    changed = mistake("run", line.recipe, "--set", "quantize.preset=fp8")
    assert "was made from another model, quantize or train block" in changed
    assert "is not empty and no run wrote it" in mistake("quantize", line.recipe, "--output", line.model)
    assert "is a file" in mistake("quantize", line.recipe, "--output", line.recipe)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"questions": lambda i: f"another {i}?"}, "question"),
        ({"limit": 20}, "limit is None in the baseline and 20 in the candidate"),
        ({"chat_template": "0" * 64}, "chat_template"),
        ({"subtask": {"num_fewshot": 5}}, "num_fewshot of colours is 0 in the baseline and 5 in the candidate"),
    ],
    ids=["questions", "limits", "templates", "shots"],
)
def test_evaluations_that_are_not_comparable_are_refused(
    changes: dict[str, Any], expected: str, mistake: Mistake, tmp_path: Path
) -> None:
    baseline, candidate = flipped(40, 30, 2, 1)
    write_record(tmp_path / "ours" / "colours", baseline)
    write_record(tmp_path / "theirs" / "colours", candidate, format="NVFP4", **changes)
    assert expected in mistake("compare", tmp_path / "ours", tmp_path / "theirs")
    assert expected in mistake("gate", tmp_path / "ours", tmp_path / "theirs", "--policy", "release")


def test_an_unreachable_data_set_says_where_to_put_it(
    line: Line, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halfbyte.recipes import data

    monkeypatch.setattr(data, "hub_is_reachable", lambda: False)
    (tmp_path / "root").mkdir()
    block = yaml.safe_load(line.recipe.read_text(encoding="utf-8"))["quantize"]
    block["calibration"]["sources"] = [{"dataset": "owner/poems"}]
    recipe = line.another(tmp_path, quantize=block)
    root = ("--data-root", tmp_path / "root")
    shown = mistake("quantize", recipe, "--quiet", *root, "--output", tmp_path / "checkpoint")
    assert "data set 'owner/poems' is not below the data root, and not to be had from the hub" in shown
    assert f"put its files into {tmp_path / 'root' / 'owner/poems'}" in shown


def test_a_gated_data_set_says_how_to_get_access(
    line: Line, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    from halfbyte.recipes import data

    def gated(*_arguments: Any, **_options: Any) -> None:
        raise DatasetNotFoundError("Dataset 'owner/poems' is a gated dataset on the Hub.")

    monkeypatch.setattr(data, "hub_is_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", gated)
    block = yaml.safe_load(line.recipe.read_text(encoding="utf-8"))["quantize"]
    block["calibration"]["sources"] = [{"dataset": "owner/poems"}]
    recipe = line.another(tmp_path, quantize=block)
    shown = mistake("quantize", recipe, "--quiet", "--output", tmp_path / "checkpoint")
    assert "owners grant access on https://huggingface.co/datasets/owner/poems" in shown
    assert "log in with `hf auth login`" in shown


def test_the_gate_on_two_empty_folders_is_refused(mistake: Mistake, tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    shown = mistake("gate", tmp_path / "ours", tmp_path / "theirs", "--policy", "release")
    assert f"no evaluation record in {tmp_path / 'ours'}" in shown


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
        )
    except OSError as error:
        pytest.skip(f"no mount command: {error}")
    if done.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_fills_up_during_export_is_one_line_and_the_same_command_finishes_later(
    line: Line, disk: Path, tmp_path: Path
) -> None:
    before = contents(line.runs)
    stderr = tmp_path / "stderr"
    command = ["quantize", str(line.recipe), "--quiet", "--output", str(disk / "out")]
    assert run_child(command, tmp_path, line.cache, partial(fill_at_export, disk, stderr)) == 2
    assert f"no space left on the disk while writing {disk / 'out' / 'checkpoint'}" in said(stderr.read_text())
    assert not (disk / "out" / "checkpoint").exists()
    assert not (disk / "out" / "checkpoint.partial").exists()
    assert (disk / "out" / "calibration" / "tensors.safetensors").is_file()
    (disk / "filler").unlink()
    assert run_child(command, tmp_path, line.cache) == 0
    checkpoint = contents(disk / "out" / "checkpoint")
    assert checkpoint == contents(line.run / "checkpoint")
    assert contents(line.runs) == before


def test_a_disk_too_small_for_the_checkpoint_is_refused_before_anything_is_computed(
    line: Line, mistake: Mistake, disk: Path
) -> None:
    fill(disk, 100 * 1024)
    shown = mistake("quantize", line.recipe, "--quiet", "--output", disk / "out")
    assert f"no space for the checkpoint at {disk / 'out'}" in shown
    assert not (disk / "out" / "calibration").exists()
    (disk / "filler").unlink()
    assert main(["quantize", str(line.recipe), "--quiet", "--output", str(disk / "out")]) == 0


def test_an_output_that_cannot_be_written_is_named(line: Line, mistake: Mistake, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    shown = "Read-only file system"
    assert shown in mistake("quantize", line.recipe, "--quiet", "--output", disk / "out")
    assert shown in mistake("eval", line.model, "--tasks", "smoke", "--limit", 4, "--output", disk / "evaluation")
    ours = line.run / "evaluations"
    baseline, candidate = sorted(path for path in ours.iterdir() if path.is_dir())
    assert shown in mistake("compare", baseline, candidate, "--output", disk / "report")
    assert "is a file" in mistake("eval", line.model, "--tasks", "smoke", "--output", line.recipe)
