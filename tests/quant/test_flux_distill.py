"""QAD of a tiny random Flux: what is recorded and learned, what a kill costs, and what is in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

pytest.importorskip("diffusers")

from tiny_flux import save_tiny_flux

from halfbyte.quant import flux_distill, ptq, trajectories
from halfbyte.quant.flux_distill import FluxTraining, Steps, attention_with_gradients, distill
from halfbyte.quant.load_transformer import load_transformer
from halfbyte.quant.pipeline_making import PipelineMaking
from halfbyte.quant.processes import Processes
from halfbyte.quant.produce import prepare, produce
from halfbyte.quant.train import put_trained
from halfbyte.quant.trajectories import VELOCITY, Trajectories, collate, draw_trajectories
from halfbyte.recipes.find import load_recipe
from halfbyte.recipes.schema import Recipe
from halfbyte.records.errors import UserError
from halfbyte.records.run import RunFolder
from halfbyte.records.training import TrainingRecord, load_training, read_curves

CPU = torch.device("cpu")
PROMPTS = [f"a {colour} {shape}" for colour in ("red", "green", "blue") for shape in ("circle", "square")]
IMAGES = {"steps": 3, "size": [32, 32], "max_sequence_length": 16}
KEY = "0" * 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline in source/ and its prompts."""
    folder = tmp_path_factory.mktemp("flux")
    save_tiny_flux(folder / "source")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    return folder


def recipe(folder: Path, **train: Any) -> Recipe:
    """NVFP4 with a short distillation."""
    prompts = str(folder / "prompts.txt")
    block = {
        "method": "qad", "drawn": {"prompts": {"dataset": prompts}, "images": IMAGES}, "max_steps": 8, "batch_size": 4,
        "learning_rate": 3e-3, "validation": {"share": 0.3, "every": 4},
    }  # fmt: skip
    return Recipe.model_validate(
        {
            "name": "tiny", "description": "A test.", "model": {"id": str(folder / "source"), "kind": "flux"},
            "quantize": {
                "preset": "nvfp4_default", "calibration": {"sources": [{"dataset": prompts}], "images": IMAGES},
            },
            "train": {**block, **train},
            "evaluate": {"images": {"prompts": prompts, "metrics": ["psnr"], **IMAGES}},
        }
    )  # fmt: skip


def making(folder: Path, run: Path, **train: Any) -> PipelineMaking:
    """A job at its beginning."""
    return PipelineMaking(prepare(recipe(folder, **train), "cpu"), RunFolder(run), None, Processes(CPU))


@pytest.fixture(scope="module")
def drawn(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trajectories:
    return draw(folder, tmp_path_factory.mktemp("teacher"))


def draw(folder: Path, out: Path, batch_size: int = 1) -> Trajectories:
    made = making(folder, out / "run")
    spec = made.job.recipe.train
    assert spec is not None
    assert spec.drawn is not None
    together = spec.drawn.model_copy(update={"batch_size": batch_size})
    return draw_trajectories(
        made.source, together, out, weights=torch.bfloat16, compute=torch.float32, device=CPU
    )[0]  # fmt: skip


def training(made: PipelineMaking, drawn: Trajectories) -> FluxTraining:
    spec = made.job.recipe.train
    assert spec is not None
    return FluxTraining(spec, KEY, CPU, made.calibrated(), drawn, "tiny")


def answers(model: nn.Module, drawn: Trajectories, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Velocities of a model and of the teacher."""
    batch = collate([drawn[row] for row in rows])
    wanted = batch.pop(VELOCITY)
    with torch.no_grad():
        return model(**batch, return_dict=False)[0], wanted


def test_a_recorded_step_is_what_the_teacher_was_asked_and_answered(folder: Path, drawn: Trajectories) -> None:
    teacher = load_transformer(folder / "source" / "transformer", device=CPU)
    assert len(drawn) == len(PROMPTS) * 3
    assert drawn.tokens == 16 * 16 / 4 * 4  # a VAE without downsampling here: 16 x 16 patches of 2 x 2
    for row in range(len(drawn)):
        found, wanted = answers(teacher, drawn, [row])
        assert torch.equal(found, wanted)
    assert not torch.equal(drawn[0]["hidden_states"], drawn[3]["hidden_states"])  # another prompt, another noise
    assert float(drawn[0]["timestep"]) == 1.0
    assert float(drawn[0]["timestep"]) > float(drawn[1]["timestep"]) > float(drawn[2]["timestep"])


def killed_at(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """The files that are kept from now on; a kill comes before the one of this number, counted from 1, is written."""
    keep, kept = trajectories._keep, []

    def killed(asked: Any, path: Path, key: str) -> None:
        kept.append(path.name)
        if len(kept) == at:
            raise KeyboardInterrupt
        keep(asked, path, key)

    monkeypatch.setattr(trajectories, "_keep", killed)
    return kept


def test_a_kill_while_the_teacher_draws_costs_one_prompt(
    folder: Path, drawn: Trajectories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = killed_at(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        draw(folder, tmp_path)
    found = draw(folder, tmp_path)
    assert kept == [f"{number:06d}.safetensors" for number in (0, 1, 2, 2, 3, 4, 5)]
    for row in range(len(drawn)):
        assert all(torch.equal(value, found[row][name]) for name, value in drawn[row].items())
    draw(folder, tmp_path)
    assert len(kept) == 7  # nothing is drawn again


def test_prompts_that_are_drawn_together_are_kept_one_by_one(
    folder: Path, drawn: Trajectories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = draw(folder, tmp_path / "whole", batch_size=4)
    kept = killed_at(monkeypatch, 6)
    with pytest.raises(KeyboardInterrupt):
        draw(folder, tmp_path / "killed", batch_size=4)
    found = draw(folder, tmp_path / "killed", batch_size=4)
    assert kept == [f"{number:06d}.safetensors" for number in (0, 1, 2, 3, 4, 5, 4, 5)]
    assert len(found) == len(whole) == len(drawn)
    for row in range(len(drawn)):
        assert all(torch.equal(value, found[row][name]) for name, value in whole[row].items())
        for name, value in drawn[row].items():
            torch.testing.assert_close(found[row][name], value, rtol=1e-3, atol=1e-4)


def test_a_damaged_trajectory_is_named(folder: Path, tmp_path: Path) -> None:
    draw(folder, tmp_path)
    (tmp_path / "000002.safetensors").write_bytes(b"nothing of that kind")
    with pytest.raises(UserError, match="000002"):
        draw(folder, tmp_path)


def test_whole_prompts_are_held_out_and_the_order_is_decided_by_the_seed(folder: Path, drawn: Trajectories) -> None:
    spec = recipe(folder).train
    assert spec is not None
    first, again = Steps(drawn, spec), Steps(drawn, spec)
    other = Steps(drawn, spec.model_copy(update={"seed": 7}))
    rows = [first.of(step) for step in range(8)]
    assert rows == [again.of(step) for step in range(8)]
    assert rows != [other.of(step) for step in range(8)]
    held = {row // 3 for row in first.held}
    seen = {row // 3 for step in rows for row in step}
    assert len(first.held) == len(held) * 3 == 6
    assert held | seen == set(range(len(PROMPTS)))
    assert not held & seen
    with pytest.raises(UserError, match="held out"):
        Steps(Trajectories(drawn.folder, 1, 3), spec)


def test_the_attention_has_a_gradient_and_the_values_it_had(folder: Path, tmp_path: Path, drawn: Trajectories) -> None:
    model = making(folder, tmp_path).calibrated()
    before, _ = answers(model, drawn, [0, 4])
    with attention_with_gradients():
        within, _ = answers(model, drawn, [0, 4])
        batch = collate([drawn[0]])
        del batch[VELOCITY]
        model.requires_grad_(True)
        model(**batch, return_dict=False)[0].sum().backward()
    assert torch.equal(before, within)
    assert float(model.transformer_blocks[0].attn.to_q.weight.grad.abs().sum()) > 0
    with pytest.raises(NotImplementedError):
        model(**batch, return_dict=False)[0].sum().backward()


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}])
def test_what_is_learned_brings_the_checkpoint_closer_to_the_teacher(
    folder: Path, tmp_path: Path, drawn: Trajectories, lora: dict[str, Any] | None
) -> None:
    made = making(folder, tmp_path / "run", lora=lora, max_steps=48, learning_rate=3e-3 if lora else 1e-3)
    given = training(made, drawn)
    record = distill(given, made.run)
    assert record.best.loss < 0.9 * record.start.loss
    assert (record.method, record.steps, record.stopped) == ("qad", 48, "max_steps")
    assert record.tokens == 48 * 4 * drawn.tokens
    curves = read_curves(made.run.training)
    assert [one.step for one in curves.validations] == list(range(0, 49, 4))
    assert len(curves.steps) == 48
    model = made.open()
    ptq.load_calibration(model, made.run.calibration)
    ptq.share_scales(model)
    put_trained(model, given.spec, made.run, KEY)
    held = Steps(drawn, given.spec).held
    found, wanted = answers(model, drawn, held)
    assert float(nn.functional.mse_loss(found, wanted)) == pytest.approx(record.best.loss, rel=1e-3)


def learned(made: PipelineMaking, drawn: Trajectories) -> tuple[TrainingRecord, dict[str, Tensor]]:
    given = training(made, drawn)
    return distill(given, made.run), {name: value.detach() for name, value in given.model.named_parameters()}


def test_an_interrupted_training_ends_as_one_that_was_not(
    folder: Path, tmp_path: Path, drawn: Trajectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, whole = learned(making(folder, tmp_path / "whole"), drawn)
    step = flux_distill._Loop._step

    def killed(loop: Any) -> None:
        if loop.done == 6:
            raise KeyboardInterrupt
        step(loop)

    monkeypatch.setattr(flux_distill._Loop, "_step", killed)
    with pytest.raises(KeyboardInterrupt):
        learned(making(folder, tmp_path / "resumed"), drawn)
    monkeypatch.setattr(flux_distill._Loop, "_step", step)
    resumed, weights = learned(making(folder, tmp_path / "resumed"), drawn)
    assert (resumed.start, resumed.best, resumed.best_step) == (record.start, record.best, record.best_step)
    assert all(torch.equal(value, weights[name]) for name, value in whole.items())
    of_whole, of_resumed = (read_curves(tmp_path / name / "training") for name in ("whole", "resumed"))
    assert [(one.step, one.loss) for one in of_whole.steps] == [(one.step, one.loss) for one in of_resumed.steps]


def test_a_training_that_diverges_exports_nothing_and_says_so(folder: Path, tmp_path: Path) -> None:
    made = prepare(recipe(folder, learning_rate=1e6, warmup=0.0), "cpu")
    for _ in range(2):  # the second call does not train again
        with pytest.raises(UserError, match="diverged"):
            produce(made, RunFolder(tmp_path))
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("smoothed", [False, True], ids=["max", "svdquant"])
def test_the_exported_checkpoint_is_the_trained_one(folder: Path, tmp_path: Path, smoothed: bool) -> None:
    given = recipe(folder, max_steps=16, learning_rate=1e-4 if smoothed else 3e-3)
    if smoothed:
        svdquant = {"algorithm": {"method": "svdquant", "lowrank": 4}, "calibration": given.quantize.calibration}
        block = load_recipe("demo-image-nvfp4-svdquant").quantize.model_copy(update=svdquant)
        given = given.model_copy(update={"quantize": block})
    job, run = prepare(given, "cpu"), RunFolder(tmp_path)
    produce(job, run)
    record = load_training(run.training)
    drawn = Trajectories(run.training / "teacher", len(PROMPTS), 3)
    spec = job.recipe.train
    assert spec is not None
    found, wanted = answers(
        load_transformer(run.checkpoint / "transformer", device=CPU), drawn, Steps(drawn, spec).held
    )
    loss = float(nn.functional.mse_loss(found, wanted))
    # What stays unquantized is rounded to bfloat16, and with it what smoothing multiplies every input by.
    assert loss == pytest.approx(record.best.loss, rel=0.15 if smoothed else 0.03)
    assert loss < record.start.loss
    assert record.learned == "velocities"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "qat"}, "method must be qad"),
        ({"validation": {"metric": "kl"}}, "validation by kl"),
        ({"teacher": {"temperature": 2.0}}, "unquantized self"),
        ({"drawn": None}, "give exactly one of"),
        ({"drawn": None, "sources": [{"dataset": "texts.txt"}]}, "needs train.drawn"),
    ],
)
def test_what_a_model_that_draws_cannot_be_trained_by_is_refused(
    folder: Path, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe(folder, **wrong)
