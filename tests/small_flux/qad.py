"""Measures what QAD wins back of what NVFP4 took from the small Flux, with several seeds of training.

On a GPU, in some minutes; after each seed the result is in OUT/report.md and OUT/result.json, and the same command
goes on:

    python tests/small_flux/qad.py OUT

On a CPU, to see whether it works:

    python tests/small_flux/qad.py OUT --prompts 16 --seeds 1 --set train.max_steps=20

Each checkpoint is written to disk and read back. Its images are drawn from the same latents as the original's, from
prompts of scenes that neither the model nor the distillation was trained on, many at a time. PSNR is the logarithm of
an error: half of the error less is 3.01 dB more, so that what is won back of it is 1 - 10 ** (-dB / 10). Won back is
told of what NVFP4 with plain calibration loses, also where QAD begins with SVDQuant, which has a row of its own:

    python tests/small_flux/qad.py OUT --recipe demo-image-nvfp4-qad
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_flux.prompts import CALIBRATION, EVALUATION, TRAINING, prompts

from halfbyte.eval.image_metrics import open_metric
from halfbyte.quant.load import load_transformer
from halfbyte.quant.pipelines import locate_pipeline, open_parts, quiet_diffusers
from halfbyte.quant.produce import prepare, produce
from halfbyte.recipes.find import load_recipe
from halfbyte.recipes.images import ImagesSpec
from halfbyte.records.files import write_json, write_text
from halfbyte.records.manifest import hardware, package_versions
from halfbyte.records.run import RunFolder

MODEL = Path(__file__).parent / "model"
FP8, PTQ, SMOOTHED = "demo-image-fp8", "demo-image-nvfp4", "demo-image-nvfp4-svdquant"
RECIPES = (f"{SMOOTHED}-qad", f"{PTQ}-qad")
"""That train; the first unless another is asked for."""
TRAINED = "NVFP4 QAD, seed "
BATCH = 128
"""Images drawn together, and scored by one process."""


@dataclass(frozen=True)
class Drawn:
    """What one model's images are worth."""

    name: str
    fulfilment: float
    """Mean over the prompts."""
    change: float | None
    """Standard error of its difference from the original's, prompt by prompt; None for the original."""
    exact: float
    """Part of the images that show all that was asked for."""
    psnr: float | None = None
    """dB to the original's image, the mean over the prompts; None for the original."""
    ssim: float | None = None
    seconds: float = 0.0
    """To make the checkpoint."""


@dataclass(frozen=True)
class Recovered:
    """What one training won back of what PTQ lost, as a share."""

    fulfilment: float | None
    """None where PTQ lost none."""
    psnr: float


def main() -> None:
    """Measures, prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--device", default=None)
    parser.add_argument("--recipe", default=RECIPES[0], choices=RECIPES)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the recipes")
    args = parser.parse_args()
    for result in measure(args.out, args.model, args.seeds, args.prompts, args.device, args.set, args.recipe):
        write_json(args.out / "result.json", result)
        write_text(args.out / "report.md", report(result))
        print(report(result), flush=True)


def measure(
    out: Path,
    model: Path,
    seeds: list[int],
    count: int,
    device: str | None = None,
    overrides: list[str] | None = None,
    recipe: str = RECIPES[0],
) -> Iterator[dict[str, Any]]:
    """Makes the checkpoints below `out` and measures them.

    Args:
        out: For runs; what is there already is not made again.
        model: The trained small Flux.
        seeds: Of the trainings.
        count: Prompts.
        device: None for a GPU where there is one.
        overrides: Of the recipes, as for --set; those of train are for QAD alone.
        recipe: One of RECIPES.

    Yields:
        What result.json holds, after each seed.
    """
    began = time.monotonic()
    changes = [f"model.id={model}", *(overrides or [])]
    plain = [one for one in changes if not one.startswith("train.")]
    names = {f"{TRAINED}{seed}": f"train.seed={seed}" for seed in seeds}
    starts = {"FP8": FP8, "NVFP4 PTQ": PTQ} | ({"NVFP4 SVDQuant PTQ": SMOOTHED} if recipe.startswith(SMOOTHED) else {})
    jobs = {
        **{name: prepare(load_recipe(start, plain), device) for name, start in starts.items()},
        **{name: prepare(load_recipe(recipe, [*changes, seed]), device) for name, seed in names.items()},
    }
    job = jobs["NVFP4 PTQ"]
    spec = job.recipe.evaluate.images
    assert spec is not None
    asked = prompts(CALIBRATION + EVALUATION + TRAINING + count)[CALIBRATION + EVALUATION + TRAINING :]
    original = load_transformer(model / "transformer", dtype="float32", device=job.device)
    baseline = draw(model, original, asked, spec)
    del original
    first: RunFolder | None = None
    with _pool(count) as pool:
        others = _scores(pool, asked, baseline)["fulfilment"]
        rows = [Drawn("BF16", statistics.fmean(others), None, _all_shown(others))]
        for name, one in jobs.items():
            run = RunFolder(out / "runs" / name.lower().replace(",", "").replace(" ", "-"))
            if one.recipe.train is not None:
                if first is not None and not run.training.exists():  # the teacher draws the same for all seeds
                    shutil.copytree(first.training / "teacher", run.training / "teacher")
                first = first or run
            start = time.monotonic()
            produce(one, run)
            made = time.monotonic() - start
            transformer = load_transformer(run.checkpoint / "transformer", dtype="float32", device=job.device)
            images = draw(model, transformer, asked, spec)
            rows.append(_row(name, _scores(pool, asked, images, baseline), others, made))
            del transformer
            gc.collect()
            print(f"{time.monotonic() - began:.0f} s: {rows[-1]}", flush=True)
            if one.recipe.train is not None:
                yield {
                    "rows": [asdict(row) for row in rows],
                    "recovered": {row.name: asdict(recovered(rows[0], rows[2], row)) for row in rows[3:]},
                    "recipe": recipe,
                    "prompts": count,
                    "steps": spec.steps,
                    "train": one.recipe.train.model_dump(mode="json", exclude={"seed"}),
                    "seconds": round(time.monotonic() - began),
                    "packages": package_versions(),
                    "hardware": hardware(),
                }


@torch.no_grad()
def draw(folder: Path, transformer: Any, asked: list[str], spec: ImagesSpec) -> list[Any]:
    """One image a prompt; the n-th from the noise of seed n.

    Args:
        folder: The pipeline with all other parts.
        transformer: Where it computes.
        asked: The prompts.
        spec: How to draw.
    """
    device = next(transformer.parameters()).device
    pipeline: Any = open_parts(locate_pipeline(str(folder)), torch.float32).to(device)
    pipeline.register_modules(transformer=transformer)
    images: list[Any] = []
    with quiet_diffusers():
        for start in range(0, len(asked), BATCH):
            some = asked[start : start + BATCH]
            images += pipeline(
                some, height=spec.size[0], width=spec.size[1], num_inference_steps=spec.steps,
                guidance_scale=spec.guidance, max_sequence_length=spec.max_sequence_length,
                generator=[torch.Generator().manual_seed(start + at) for at in range(len(some))],
            ).images  # fmt: skip
    return images


def _pool(count: int) -> ProcessPoolExecutor:
    """As many processes as can be of use: the metrics take longer over an image than a GPU does."""
    several = min(-(-count // BATCH), os.cpu_count() or 1)
    return ProcessPoolExecutor(several, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))


def _scores(
    pool: ProcessPoolExecutor, asked: list[str], images: list[Any], baseline: list[Any] | None = None
) -> dict[str, list[float]]:
    """Of each image: its fulfilment, and beside a baseline its PSNR and SSIM."""
    parts = [slice(start, start + BATCH) for start in range(0, len(asked), BATCH)]
    begun = [pool.submit(_part, asked[at], images[at], baseline and baseline[at]) for at in parts]
    found = [future.result() for future in begun]
    return {metric: [value for part in found for value in part[metric]] for metric in found[0]}


def _part(asked: list[str], images: list[Any], baseline: list[Any] | None) -> dict[str, list[float]]:
    metrics = ["fulfilment", *(["psnr", "ssim"] if baseline else [])]
    return {metric: open_metric(metric).scores(images, asked, baseline) for metric in metrics}


def _row(name: str, scores: dict[str, list[float]], others: list[float], seconds: float) -> Drawn:
    """A quantized model's, beside the original's fulfilment."""
    fulfilled = scores["fulfilment"]
    return Drawn(
        name,
        statistics.fmean(fulfilled),
        statistics.stdev(map(float.__sub__, fulfilled, others)) / len(others) ** 0.5,
        _all_shown(fulfilled),
        statistics.fmean(scores["psnr"]),
        statistics.fmean(scores["ssim"]),
        round(seconds, 1),
    )


def _all_shown(fulfilled: list[float]) -> float:
    return statistics.fmean(value == 1.0 for value in fulfilled)


def recovered(original: Drawn, ptq: Drawn, trained: Drawn) -> Recovered:
    """What a training won back of what PTQ lost."""
    lost = original.fulfilment - ptq.fulfilment
    assert trained.psnr is not None
    assert ptq.psnr is not None
    return Recovered(
        (trained.fulfilment - ptq.fulfilment) / lost if lost > 0 else None,
        1 - 10 ** ((ptq.psnr - trained.psnr) / 10),
    )


def report(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f"{result['recipe']}: {result['prompts']} prompts, one image each of {result['steps']} steps, "
        f"{result['seconds']} s in all on {result['hardware']['cuda'] or 'a CPU'}.",
        "",
        "| model | fulfilment | ± of the loss | all shown | PSNR | SSIM | fulfilment won back | error won back |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for row in result["rows"]:
        share = result["recovered"].get(row["name"])
        cells = [row["name"], f"{row['fulfilment']:.4f}", _apart(row["change"]), f"{row['exact']:.1%}"]
        cells += ["–", "–"] if row["psnr"] is None else [f"{row['psnr']:.2f} dB", f"{row['ssim']:.4f}"]
        cells += ["–", "–"] if share is None else [_share(share["fulfilment"]), _share(share["psnr"])]
        lines.append(f"| {' | '.join(cells)} |")
    means = [_share(mean(result, name)) for name in ("fulfilment", "psnr")]
    lines += ["", f"Mean of the seeds: {means[0]} of fulfilment and {means[1]} of the error."]
    return "\n".join(lines) + "\n"


def mean(result: dict[str, Any], name: str) -> float | None:
    """What the seeds won back on average; None where PTQ lost nothing."""
    found = [one[name] for row, one in result["recovered"].items() if row.startswith(TRAINED)]
    return None if None in found else statistics.fmean(found)


def _apart(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "nothing lost" if value is None else f"{value:.0%}"


if __name__ == "__main__":
    main()
