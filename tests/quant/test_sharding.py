"""Two processes that divide a model train it as one does, and its checkpoint is gathered by one of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from training import write_training

from halfbyte.quant.sharding import CONFIGURATION, is_sharded, sharded_tensors
from halfbyte.quant.verify import verify
from halfbyte.records.run import RunFolder
from halfbyte.records.training import load_training, read_curves

LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def train(folder: Path, processes: int, device: str, *changes: str) -> RunFolder:
    """`halfbyte train` by so many processes, with the same rows in each optimizer step."""
    run = RunFolder(folder / f"by-{processes}")
    command = [sys.executable, *(LAUNCH if processes > 1 else []), "-m", "halfbyte", "train"]
    command += [str(folder / "tiny.yaml"), "--output", str(run.root), "--device", device]
    command += [part for change in (*changes, f"train.batch_size={4 // processes}") for part in ("--set", change)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "log.txt").write_text(done.stderr, encoding="utf-8")
    return run


def shapes(run: RunFolder) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The tensors of an exported checkpoint."""
    found = {name: tensor for path in run.checkpoint.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("method", ["qat", "qad"])
def test_two_processes_train_as_one_does(method: str, device: str, tmp_path: Path, tiny_model_folder: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    write_training(tmp_path, tiny_model_folder)
    changes = (f"train.method={method}", "train.dtype=float32", "train.gradient_accumulation=2")
    one, two = (train(tmp_path, processes, device, *changes) for processes in (1, 2))
    curves = [read_curves(run.training) for run in (one, two)]
    steps, validations = (list(zip(*parts, strict=True)) for parts in zip(
        *((curve.steps, curve.validations) for curve in curves), strict=True
    ))  # fmt: skip
    assert len(steps) >= 4
    for ours, theirs in steps:
        assert (theirs.step, theirs.tokens) == (ours.step, ours.tokens)
        assert theirs.loss == pytest.approx(ours.loss, abs=1e-4)
        assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=1e-3)
    for ours, theirs in validations:
        assert theirs.validation_loss == pytest.approx(ours.validation_loss, abs=1e-4)
        assert theirs.validation_kl == pytest.approx(ours.validation_kl, abs=1e-4)
    assert {path.name for path in two.checkpoint.iterdir()} == {path.name for path in one.checkpoint.iterdir()}
    assert shapes(two) == shapes(one)
    assert all(check.passed for check in verify(two.checkpoint))
    best = two.training / "checkpoints" / f"step-{load_training(two.training).best_step}"
    assert is_sharded(best)
    assert len(list((best / "pytorch_model_fsdp_0").glob("*.distcp"))) == 2
    names = {name for found in sharded_tensors(best) for name in found}
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not any("quantizer" in name for name in names)


def test_a_divided_training_goes_on_from_its_checkpoint(tmp_path: Path, tiny_model_folder: Path) -> None:
    write_training(tmp_path, tiny_model_folder)
    run = train(tmp_path, 2, "cpu")
    whole, best = read_curves(run.training), load_training(run.training)
    shutil.rmtree(run.training / "checkpoints" / "step-8")
    shutil.rmtree(run.checkpoint)
    (run.training / "training.json").unlink()
    again = train(tmp_path, 2, "cpu")
    assert [(one.step, one.loss) for one in read_curves(again.training).steps] == [
        (one.step, one.loss) for one in whole.steps
    ]
    assert load_training(again.training).best == best.best
    assert "goes on from step 4 of 8" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_the_shipped_configuration_is_one_of_accelerate() -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import FullyShardedDataParallelPlugin

    read = load_config_from_file(str(CONFIGURATION))
    assert str(read.distributed_type) == "DistributedType.FSDP"
    keys = {name.removeprefix("fsdp_") for name in yaml.safe_load(CONFIGURATION.read_text())["fsdp_config"]}
    known = set(FullyShardedDataParallelPlugin.__dataclass_fields__)
    assert keys - known <= {"version", "offload_params"} | {"auto_wrap_policy"}
