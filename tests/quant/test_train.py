"""Training: what is exported is what was validated, and whatever goes wrong is told and costs no good checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training import write_training

from halfbyte.quant import produce, ptq, train
from halfbyte.quant.batches import Held, collate
from halfbyte.quant.curves import Curves, Diverged
from halfbyte.quant.load import load
from halfbyte.quant.models import open_tokenizer
from halfbyte.quant.trainer import divergence
from halfbyte.quant.training_rows import IGNORED
from halfbyte.quant.training_texts import training_examples
from halfbyte.quant.verify import verify
from halfbyte.recipes.find import load_recipe
from halfbyte.recipes.schema import ModelSpec
from halfbyte.records.errors import UserError
from halfbyte.records.manifest import load_manifest
from halfbyte.records.run import RunFolder
from halfbyte.records.training import load_training, read_curves

INPUTS = torch.randint(0, 384, (3, 40), generator=torch.Generator().manual_seed(2))
STATIC = "quantize.preset=NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG"


@pytest.fixture
def folder(tmp_path: Path, tiny_model_folder: Path, cache: Path) -> Path:  # noqa: ARG001
    torch.set_num_threads(1)
    write_training(tmp_path / "recipe", tiny_model_folder)
    return tmp_path


def job_of(folder: Path, *changes: str) -> Any:
    return produce.prepare(load_recipe(str(folder / "recipe" / "tiny.yaml"), list(changes)), "cpu")


@pytest.mark.parametrize(
    "changes",
    [
        ["train.method=qat"],
        ["train.method=qad"],
        ["train.method=qad", "quantize.preset=NVFP4_AWQ_LITE_CFG"],
        ["train.method=qad", "quantize.preset=NVFP4_SVDQUANT_DEFAULT_CFG"],
        ["train.method=qad", "quantize.kv_cache=fp8", "train.gradient_checkpointing=true"],
        ["train.lora={rank: 4}", "train.learning_rate=5e-3"],
        ["train.learned_scales=true", STATIC],
    ],
    ids=["qat", "qad", "awq", "svdquant", "kv", "lora", "learned"],
)
def test_the_checkpoint_answers_as_memory_did_and_as_it_was_validated(
    folder: Path, changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and but for the rounding of what is kept to bfloat16, which a random model makes much of."""
    seen: list[torch.Tensor] = []
    unsettled: list[float] = []
    export, settle = ptq.export, ptq.settle
    job, run = job_of(folder, *changes), RunFolder(folder / "run")

    @torch.no_grad()
    def watched(model: Any, *arguments: Any) -> None:
        seen.append(model(INPUTS, use_cache=False).logits)
        export(model, *arguments)

    def settled(model: Any, *arguments: Any, **options: Any) -> Any:
        unsettled.append(validation_kl(job, model))
        return settle(model, *arguments, **options)

    monkeypatch.setattr(ptq, "export", watched)
    monkeypatch.setattr(ptq, "settle", settled)
    produce.produce(job, run)
    read = load(ModelSpec(id=str(run.checkpoint)), device="cpu", dtype="float32").model
    with torch.no_grad():
        assert torch.equal(read(INPUTS, use_cache=False).logits, seen[0])
    assert [check.name for check in verify(run.checkpoint) if not check.passed] == []
    record = load_training(run.training)
    kl = validation_kl(job, read)
    assert unsettled == [pytest.approx(record.best.kl, rel=1e-4)]
    assert kl == pytest.approx(record.best.kl, rel=0.1)
    assert record.start.kl is not None
    if record.method == "qad":
        assert kl < 0.9 * record.start.kl
    else:
        assert record.best.loss < record.start.loss - 0.1


@torch.no_grad()
def validation_kl(job: Any, model: Any) -> float:
    """KL divergence of a model from the original on the texts held out."""
    tokenizer = open_tokenizer(job.source)
    examples = training_examples(job.recipe.train, tokenizer, 512)
    original = job.open_baseline().model
    held = Held(examples.validation, per_batch=1, first=0)
    total, tokens = 0.0, 0
    for place in range(len(held)):
        batch = collate([held[place]])
        counted = batch["labels"][:, 1:] != IGNORED
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        ours, theirs = (one(**inputs, use_cache=False).logits[:, :-1][counted] for one in (model, original))
        total += float(divergence(ours.log_softmax(-1), theirs))
        tokens += int(counted.sum())
    return total / tokens


def test_space_for_the_checkpoints_of_a_training_is_asked_for_before_it_begins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, run = job_of(folder, "train.validation.keep=2"), RunFolder(folder / "run")
    weights = sum(one.numel() for one in job.open_baseline().model.parameters())
    needed = job.plan.exported_bytes + 4 * 3 * 4 * weights  # four of float32 weights and AdamW's two moments
    free = [needed]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0]))
    produce.require_space(job, run)
    free[0] -= 1
    with pytest.raises(UserError, match=r"GB needed .* of them for checkpoints of the training"):
        produce.produce(job, run)
    assert not run.calibration.exists()
    free[0] += 1
    produce.produce(job, run)
    sizes = [sum(one.stat().st_size for one in path.iterdir()) for path in run.training.glob("checkpoints/step-*")]
    assert sizes == [pytest.approx(3 * 4 * weights, rel=0.1)] * 2  # with headers and the states of random generators
    cut_short(run)
    free[0] = needed - sum(sizes)  # they are there already
    produce.require_space(job, run)


def test_a_warmup_never_takes_all_steps(folder: Path) -> None:
    """A single step would be at learning rate 0."""
    run = RunFolder(folder / "run")
    produce.produce(job_of(folder, "train.max_steps=1", "train.warmup=0.05"), run)
    assert [one.learning_rate for one in read_curves(run.training).steps] == [1e-3]
    spec = job_of(folder, "train.warmup=0.95").recipe.train
    assert [train.warmup_of(spec, steps) for steps in (1, 2, 10, 100)] == [0, 1, 9, 95]


def test_questions_that_are_all_too_short_to_be_looked_for_are_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    questions = {"sums": {"0": "two plus two?"}, "stories": {"0": "a long story of " + "many different words " * 5}}
    produce.produce(job_of(folder), RunFolder(folder / "run"), questions=questions)
    warned = [one.message for one in caplog.records if one.levelname == "WARNING" and "looked for" in one.message]
    assert len(warned) == 1
    assert "no question of 'sums'" in warned[0]


def test_without_a_train_block_key_and_stages_are_as_they_were(folder: Path) -> None:
    plain, trained = job_of(folder, "train=null"), job_of(folder)
    assert plain.key != trained.key
    run = RunFolder(folder / "plain")
    produce.produce(plain, run)
    assert not run.training.exists()
    assert "train" not in load_manifest(run.manifest).seconds


def test_the_manifest_names_texts_seed_and_time_of_the_training(folder: Path) -> None:
    run = RunFolder(folder / "run")
    produce.produce(job_of(folder), run)
    made = load_manifest(run.manifest)
    assert made.seeds == {"calibration": 1234, "training": 1234}
    assert any(name.startswith("training: ") for name in made.data)
    assert made.seconds["train"] > 0


def test_steps_of_accumulated_passes_are_those_of_one_batch(folder: Path) -> None:
    """ModelOpt's distillation loss would be twice as large with two passes a step."""
    runs = {name: RunFolder(folder / name) for name in ("whole", "parts")}
    produce.produce(job_of(folder, "train.batch_size=4"), runs["whole"])
    produce.produce(job_of(folder, "train.batch_size=2", "train.gradient_accumulation=2"), runs["parts"])
    whole, parts = (read_curves(run.training) for run in runs.values())
    assert [one.loss for one in parts.steps] == pytest.approx([one.loss for one in whole.steps], rel=1e-4)
    assert [one.grad_norm for one in parts.steps] == pytest.approx([one.grad_norm for one in whole.steps], rel=1e-3)
    assert [one.tokens for one in parts.steps] == [one.tokens for one in whole.steps]


def test_a_finished_training_is_not_done_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(folder / "run")
    first = produce.produce(job_of(folder), run)
    run.manifest.unlink()  # as a kill between training and manifest leaves it
    shutil.rmtree(run.checkpoint)
    monkeypatch.setattr("halfbyte.quant.making.train", None)
    assert produce.produce(job_of(folder), run).digest == first.digest


def test_patience_stops_and_the_best_is_exported(folder: Path) -> None:
    """With a tiny learning rate nothing gets better after a while by more than chance."""
    run = RunFolder(folder / "run")
    changes = ["train.max_steps=60", "train.learning_rate=3e-2", "train.schedule=constant", "train.warmup=0.0"]
    produce.produce(job_of(folder, *changes, "train.validation={share: 0.2, every: 2, patience: 2, keep: 1}"), run)
    record = load_training(run.training)
    assert record.stopped == "patience"
    assert record.steps == record.best_step + 4
    validated = {one.step: one.validation_kl for one in read_curves(run.training).validations if one.step}
    assert record.best.kl == min(value for value in validated.values() if value is not None)
    kept = sorted(path.name for path in (run.training / "checkpoints").glob("step-*"))
    assert kept == sorted({f"step-{record.best_step}", f"step-{record.steps}"})


@pytest.mark.parametrize("method", ["qat", "qad"])
def test_a_learning_rate_that_diverges_stops_and_keeps_the_last_good_checkpoint(folder: Path, method: str) -> None:
    run = RunFolder(folder / "run")
    changes = [f"train.method={method}", "train.max_steps=60", "train.warmup=0.5", "train.learning_rate=3.0"]
    job = job_of(folder, *changes, "train.validation={share: 0.2, every: 1}")
    for again in (False, True):
        with pytest.raises(UserError, match=r"training has diverged: .* at step") as raised:
            produce.produce(job, run)
        assert "learning_rate" in str(raised.value.hint)
        assert again or not run.checkpoint.exists()
    record = load_training(run.training)
    assert record.stopped.startswith("diverged: ")
    assert record.steps < 60
    assert not run.checkpoint.exists()
    assert (run.training / "checkpoints" / f"step-{record.best_step}" / "trained.safetensors").is_file()


def test_a_gradient_that_is_no_number_stops_before_the_weights_have_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halfbyte.quant.trainer import DistilledTrainer

    real, calls = DistilledTrainer.compute_loss, []

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        loss = real(self, *args, **kwargs)
        return loss * float("nan") if len(calls) == 6 else loss

    monkeypatch.setattr(DistilledTrainer, "compute_loss", broken)
    run = RunFolder(folder / "run")
    with pytest.raises(UserError, match="the gradient is nan at step 6; the checkpoint of step 4 is kept"):
        produce.produce(job_of(folder), run)
    assert [one.step for one in read_curves(run.training).steps] == [1, 2, 3, 4, 5]


def test_what_a_kill_left_incomplete_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(folder / "run")
    monkeypatch.setattr(train, "_record", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        produce.produce(job_of(folder), run)
    monkeypatch.undo()
    whole = run.training / "checkpoints" / "step-4"
    for name in ("step-5", "step-6", "step-7.old"):
        shutil.copytree(whole, whole.with_name(name))
    (whole.with_name("step-5") / "whole.json").unlink()
    facts = json.loads((whole.with_name("step-6") / "whole.json").read_text())
    (whole.with_name("step-6") / "whole.json").write_text(json.dumps(facts | {"step": 6}))
    (whole.with_name("step-6") / "optimizer.pt").write_bytes(b"half")
    monkeypatch.setenv("HALFBYTE_CACHE", str(folder / "cache"))
    produce.produce(job_of(folder), run)
    assert sorted(path.name for path in whole.parent.glob("step-*")) == ["step-4", "step-8"]


@pytest.mark.parametrize("change", ["train.learning_rate=2e-3", "train.seed=7", "train.method=qat"])
def test_a_changed_recipe_does_not_go_on_with_the_training_of_another(folder: Path, change: str) -> None:
    run = RunFolder(folder / "run")
    produce.produce(job_of(folder), run)
    with pytest.raises(UserError, match="another model, quantize or train block"):
        produce.require_own_folder(job_of(folder, change), run, force=False)


def test_changed_texts_do_not_go_on_with_the_training_of_others(folder: Path) -> None:
    run = RunFolder(folder / "run")
    produce.produce(job_of(folder), run)
    run.manifest.unlink()
    shutil.rmtree(run.checkpoint)
    texts = folder / "recipe" / "training.txt"
    texts.write_text(texts.read_text() + "one more line of text\n")
    with pytest.raises(UserError, match="is of a training with another recipe, texts, model"):
        produce.produce(job_of(folder), run)
    (run.training / "training.json").unlink()  # as a kill in the middle of it leaves it
    with pytest.raises(UserError, match="is of a training with another recipe, texts, model"):
        produce.produce(job_of(folder), run)


def cut_short(run: RunFolder) -> None:
    """As a kill between the last checkpoint and the record leaves it."""
    run.manifest.unlink()
    shutil.rmtree(run.checkpoint)
    (run.training / "training.json").unlink()


def test_changed_texts_cost_neither_the_calibration_nor_the_logits_of_the_training_begun(folder: Path) -> None:
    run = RunFolder(folder / "run")
    produce.produce(job_of(folder, "train.teacher.offline_top_k=8"), run)
    cut_short(run)
    kept = [*run.calibration.iterdir(), *(run.training / "teacher").iterdir()]
    before = [path.stat().st_mtime_ns for path in kept]
    texts = folder / "recipe" / "training.txt"
    texts.write_text(texts.read_text() + "one more line of text\n")
    with pytest.raises(UserError, match="is of a training with another recipe, texts, model"):
        produce.produce(job_of(folder, "train.teacher.offline_top_k=8"), run)
    assert [path.stat().st_mtime_ns for path in kept] == before


@pytest.mark.parametrize("stopped", ["max_steps", "patience"])
def test_a_training_that_was_over_is_not_gone_on_with(folder: Path, stopped: str) -> None:
    patient = ["train.validation={share: 0.2, every: 2, patience: 1}", "train.learning_rate=1e-6", "train.max_steps=40"]
    changes = patient if stopped == "patience" else []
    run = RunFolder(folder / "run")
    produce.produce(job_of(folder, *changes), run)
    first = load_training(run.training)
    assert first.stopped == stopped
    cut_short(run)
    produce.produce(job_of(folder, *changes), run)
    again = load_training(run.training)
    assert (again.steps, again.stopped, again.best) == (first.steps, first.stopped, first.best)


def test_a_checkpoint_before_the_first_validation_is_gone_on_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ["train.validation={share: 0.2, every: 4, patience: 2}", "train.save_every=2"]
    run = RunFolder(folder / "run")
    monkeypatch.setattr(train.Checkpoints, "thin", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        produce.produce(job_of(folder, *changes), run)
    monkeypatch.undo()
    monkeypatch.setenv("HALFBYTE_CACHE", str(folder / "cache"))
    assert [path.name for path in run.training.glob("checkpoints/step-*")] == ["step-2"]
    produce.produce(job_of(folder, *changes), run)
    assert load_training(run.training).steps == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "curves.jsonl is missing"),
        ("{}\n", "curves.jsonl:1 is no line of a training curve"),
        ("", "lacks the vali"),
    ],
)
def test_curves_that_are_lost_are_one_line(folder: Path, content: str | None, message: str) -> None:
    run = RunFolder(folder / "run")
    produce.produce(job_of(folder), run)
    cut_short(run)
    path = run.training / "curves.jsonl"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UserError, match=message):
        produce.produce(job_of(folder), run)


@pytest.mark.parametrize("name", ["texts", "processes"])
def test_a_training_goes_on_only_with_the_rows_and_processes_it_began_with(folder: Path, name: str) -> None:
    """Rows of a hub data set may change under a recipe that does not."""
    run = RunFolder(folder / "run")
    produce.produce(job_of(folder), run)
    cut_short(run)
    for path in run.training.glob("checkpoints/*/whole.json"):
        facts = json.loads(path.read_text())
        path.write_text(json.dumps(facts | {"began": facts["began"] | {name: 2}}))
    with pytest.raises(UserError, match=f"is of a training with other {name}: 2, and now"):
        produce.produce(job_of(folder), run)


def test_a_damaged_checkpoint_of_a_training_is_named_and_those_that_are_left_go_on(folder: Path) -> None:
    run, job = RunFolder(folder / "run"), job_of(folder, "train.validation={share: 0.2, every: 2, keep: 9}")
    produce.produce(job, run)
    best = run.training / "checkpoints" / f"step-{load_training(run.training).best_step}"
    shutil.rmtree(run.checkpoint)
    weights = best / "trained.safetensors"
    weights.write_bytes(b"\0" * 64 + weights.read_bytes()[64:])
    with pytest.raises(UserError, match=r"trained.safetensors is damaged: .*delete .*step-"):
        produce.produce(job, run)
    shutil.rmtree(best)
    (run.training / "training.json").unlink()
    produce.produce(job, run)
    assert run.checkpoint.is_dir()


def test_a_qat_that_leaves_the_original_has_not_diverged(tmp_path: Path) -> None:
    def watched(metric: str) -> Curves:
        curves = Curves(tmp_path, SimpleNamespace(tokens=lambda step: step), 4, resumed=0, metric=metric)  # type: ignore[arg-type]
        curves.validated(0, 6.3, 0.05)
        return curves

    watched("loss").validated(2, 1.6, 3.5)
    with pytest.raises(Diverged, match=r"the validation loss is 8.40 at step 2, after 6.30"):
        watched("loss").validated(2, 8.4, 0.1)
    with pytest.raises(Diverged, match=r"the validation KL divergence is 3.50 at step 2, after 0.05"):
        watched("kl").validated(2, 6.3, 3.5)
    with pytest.raises(Diverged, match="the validation KL divergence is nan at step 2"):
        watched("loss").validated(2, 6.3, float("nan"))


@pytest.fixture
def broken(folder: Path, llama_factory: Any, tiny_model_folder: Path) -> Path:
    """A model with one weight that is no number."""
    model = llama_factory()
    with torch.no_grad():
        model.lm_head.weight[5, 3] = float("nan")
    found = shutil.copytree(tiny_model_folder, folder / "broken")
    model.save_pretrained(found)
    return found


def test_a_teacher_whose_weights_are_no_numbers_is_told_so(folder: Path, broken: Path) -> None:
    job = job_of(folder, f"train.teacher={{model: {{id: {broken}}}}}")
    with pytest.raises(UserError, match="the teacher is broken: the validation KL divergence is nan at step 0"):
        produce.produce(job, RunFolder(folder / "run"))


def test_a_model_that_is_broken_before_training_is_told_so(folder: Path, broken: Path) -> None:
    with pytest.raises(UserError, match="the model is broken before training: the validation loss is nan at step 0"):
        produce.produce(job_of(folder, f"model.id={broken}"), RunFolder(folder / "run"))


@pytest.mark.parametrize(
    ("shape", "message"), [({"vocab_size": 380}, "has embeddings of 380 tokens"), ({"max_length": 16}, "takes 16")]
)
def test_a_teacher_that_is_too_narrow_or_takes_shorter_texts_is_refused(
    folder: Path, shape: dict[str, int], message: str, llama_factory: Any, tiny_tokenizer: Any
) -> None:
    llama_factory(**shape).save_pretrained(folder / "other")
    tiny_tokenizer.save_pretrained(folder / "other")
    with pytest.raises(UserError, match=message):
        job_of(folder, f"train.teacher.model={{id: {folder / 'other'}}}")


def test_a_teacher_with_another_vocabulary_is_refused(folder: Path, llama_factory: Any, tokenizer_factory: Any) -> None:
    other = folder / "other"
    tokenizer = tokenizer_factory()
    tokenizer.add_tokens(["unheard"])
    llama_factory(vocab_size=385).save_pretrained(other)
    tokenizer.save_pretrained(other)
    with pytest.raises(UserError, match=r"has another vocabulary than .*: 385 and 384 tokens"):
        job_of(folder, f"train.teacher.model={{id: {other}}}")


def test_another_teacher_of_the_same_vocabulary_is_learned_from(folder: Path, llama_factory: Any) -> None:
    other = folder / "other"
    llama_factory(seed=5).save_pretrained(other)
    open_tokenizer(job_of(folder).source).save_pretrained(other)
    job = job_of(folder, f"train.teacher.model={{id: {other}}}")
    assert job.key != job_of(folder).key
    run = RunFolder(folder / "run")
    produce.produce(job, run)
    record = load_training(run.training)
    assert record.teacher == str(other)
    assert record.start.kl is not None
    assert record.start.kl > 2  # random models of two seeds have nothing in common


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.length=513", "train.length is 513 tokens and the model takes 512"),
        ("train.sources=[{dataset: missing.txt}]", "missing.txt does not exist"),
        ("train.teacher.device=gpu", "unknown device 'gpu'"),
        ("train.lora={targets: [nothing]}", "lora.targets nothing match no linear"),
        ("train.learned_scales=true", "learned_scales needs weights with static block scales"),
        ("quantize.keep=['*']", "matches no layer of the model"),
    ],
)
def test_a_mistake_in_the_train_block_is_one_line(folder: Path, change: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("*", r"\*").replace("[", r"\[")):
        produce.produce(job_of(folder, change), RunFolder(folder / "run"))
