"""The trained small Flux: it draws what is asked for, quantization harms it measurably, and read-back is exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from small_flux.prompts import files, prompts
from small_flux.qad import MODEL, draw, mean, measure, recovered, report
from small_flux.qad import Drawn as Row

from halfbyte.eval.image_metrics import open_metric
from halfbyte.quant import ptq
from halfbyte.quant.load import load_transformer
from halfbyte.quant.pipeline_making import PipelineMaking
from halfbyte.quant.pipelines import locate_pipeline, open_parts
from halfbyte.quant.processes import Processes
from halfbyte.quant.produce import prepare, produce
from halfbyte.quant.verify import verify
from halfbyte.recipes.find import load_recipe, shipped_files
from halfbyte.records.digests import model_files
from halfbyte.records.files import atomic_folder
from halfbyte.records.run import RunFolder

CPU = torch.device("cpu")
RECIPES = [name for name in shipped_files() if name.startswith("demo-image-")]
COUNT = 64
SHORT = {  # what a calibration and a distillation need to do their work at all
    "": ["quantize.calibration.sources.0.samples=2", "quantize.calibration.images.steps=2"],
    "qad": [
        "train.max_steps=2", "train.batch_size=2", "train.drawn.prompts.samples=3", "train.drawn.images.steps=2",
        "train.validation.every=2", "train.warmup=0",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Path:
    if not (MODEL / "model_index.json").is_file():
        pytest.skip(f"{MODEL} is missing: tests/small_flux/train.py trains it on a GPU")
    return MODEL


def recipe(name: str, model: Path, *more: str) -> Any:
    short = [*SHORT[""], *(SHORT["qad"] if name.endswith("qad") else [])]
    return load_recipe(name, [f"model.id={model}", *short, *more])


def latents(model: Path, transformer: Any) -> torch.Tensor:
    """After 8 steps, by diffusers' own pipeline."""
    pipeline: Any = open_parts(locate_pipeline(str(model)), torch.float32)
    pipeline.register_modules(transformer=transformer)
    found: torch.Tensor = pipeline(
        "two small red circles at the top", num_inference_steps=8, height=64, width=64, output_type="latent",
        generator=torch.Generator().manual_seed(3), max_sequence_length=32,
    ).images  # fmt: skip
    return found


def test_the_recipes_prompts_are_those_that_the_script_writes() -> None:
    folder = next(iter(path for name, path in shipped_files().items() if name.startswith("demo-image"))).parent
    texts = files()
    assert all((folder / name).read_text(encoding="utf-8") == text for name, text in texts.items())
    lines = "".join(texts.values()).splitlines()
    assert len(lines) == len(set(lines)) == 32 + 64 + 4096


def test_the_weights_are_at_most_12_mb(model: Path) -> None:
    assert sum(path.stat().st_size for path in model_files(model)) <= 12e6


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_read_back_draws_what_the_model_in_memory_drew(name: str, model: Path, tmp_path: Path) -> None:
    job, run = prepare(recipe(name, model), "cpu"), RunFolder(tmp_path / "run")
    made = PipelineMaking(job, run, None, Processes(CPU))
    transformer = made.ready(None)
    unstable = ptq.settle(transformer, torch.bfloat16, scales_are_shared=job.recipe.train is not None)
    memory = latents(model, transformer)
    with atomic_folder(run.checkpoint) as partial:
        made.export(transformer, partial, unstable)
    for weights in ("folded", "packed"):
        read = load_transformer(run.checkpoint / "transformer", device=CPU, weights=weights)
        assert torch.equal(latents(model, read), memory), weights
    assert not torch.equal(latents(model, load_transformer(model / "transformer", device=CPU)), memory)
    source = None if job.recipe.train is not None else model
    assert [str(check) for check in verify(run.checkpoint, source) if not check.passed] == []


@pytest.fixture(scope="module")
def drawn(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], list[Any]]:
    """Images of a recipe's checkpoint, or of the original; each is drawn once."""
    folder = tmp_path_factory.mktemp("damage")
    spec = load_recipe("demo-image-nvfp4").evaluate.images
    assert spec is not None
    found: dict[str | None, list[Any]] = {}

    def make(name: str | None) -> list[Any]:
        if name not in found:
            transformer = model / "transformer"
            if name is not None:
                run = RunFolder(folder / name)
                more = "quantize.calibration.sources.0.samples=4"
                produce(prepare(recipe(name, model, more, "quantize.calibration.images.steps=8"), "cpu"), run)
                transformer = run.checkpoint / "transformer"
            found[name] = draw(model, load_transformer(transformer, device=CPU), prompts(COUNT), spec)
        return found[name]

    return make


def fulfilled(images: list[Any], asked: list[str]) -> float:
    return fmean(open_metric("fulfilment").scores(images, asked))


@pytest.mark.slow
def test_it_draws_what_is_asked_for_and_not_something_else(drawn: Callable[[str | None], list[Any]]) -> None:
    asked = prompts(COUNT)
    images = drawn(None)
    assert fulfilled(images, asked) > 0.85
    assert fulfilled(images, asked) > fulfilled(images, asked[1:] + asked[:1]) + 0.4


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_quantization_changes_what_is_seen_and_fp4_more_than_fp8(drawn: Callable[[str | None], list[Any]]) -> None:
    """The mean fulfilment of some dozens of images is too uncertain to be compared: small_flux/qad.py takes more."""
    asked, original = prompts(COUNT), drawn(None)
    psnr, other = {}, {}
    for name in ("demo-image-fp8", "demo-image-nvfp4"):
        psnr[name] = fmean(open_metric("psnr").scores(drawn(name), asked, original))
        pairs = zip(*(open_metric("fulfilment").scores(side, asked) for side in (original, drawn(name))), strict=True)
        other[name] = sum(ours != theirs for ours, theirs in pairs)
    assert psnr["demo-image-nvfp4"] + 3 < psnr["demo-image-fp8"] < 60
    assert 0 < other["demo-image-fp8"] < other["demo-image-nvfp4"]
    assert other["demo-image-nvfp4"] > COUNT / 8  # one that is less sure of its shapes changes more of them


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_what_qad_wins_back_is_measured_on_what_is_read_back(model: Path, tmp_path: Path) -> None:
    short = [*SHORT[""], *SHORT["qad"]]
    first, result = measure(tmp_path, model, [1, 2], 4, "cpu", short)
    assert first["rows"] == result["rows"][:-1]
    names = [row["name"] for row in result["rows"]]
    assert names == [
        "BF16", "FP8", "NVFP4 PTQ", "NVFP4 SVDQuant PTQ", "NVFP4 QAD, seed 1", "NVFP4 QAD, seed 2",
    ]  # fmt: skip
    assert all(0 < row["psnr"] < 100 for row in result["rows"][1:])
    assert result["rows"][4]["psnr"] != result["rows"][5]["psnr"]
    assert list(result["recovered"]) == names[3:]
    assert report(result).count("| NVFP4 QAD, seed") == 2
    *_, again = measure(tmp_path, model, [1, 2], 4, "cpu", short)
    assert [{**row, "seconds": 0} for row in again["rows"]] == [{**row, "seconds": 0} for row in result["rows"]]


def test_what_is_won_back_is_a_share_of_what_was_lost() -> None:
    original, ptq = Row("BF16", 0.9, None, 0.5), Row("PTQ", 0.8, 0.01, 0.4, 20.0, 0.8)
    won = recovered(original, ptq, Row("QAD", 0.85, 0.01, 0.4, 23.0103, 0.9))
    assert won.fulfilment == pytest.approx(0.5)
    assert won.psnr == pytest.approx(0.5, abs=1e-4)
    assert recovered(original, ptq, ptq).psnr == 0
    rows = {
        "NVFP4 SVDQuant PTQ": {"fulfilment": 0.0, "psnr": 0.3},
        "NVFP4 QAD, seed 1": {"fulfilment": 0.5, "psnr": 0.4},
        "NVFP4 QAD, seed 2": {"fulfilment": 0.7, "psnr": 0.6},
    }
    assert mean({"recovered": rows}, "fulfilment") == pytest.approx(0.6)
    rows["NVFP4 QAD, seed 2"] = {"fulfilment": None, "psnr": 0.6}
    assert mean({"recovered": rows}, "fulfilment") is None
