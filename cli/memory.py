"""halfbyte memory: the peak memory of pipelines, unquantized and exported, with all parts loaded and one at a time."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from halfbyte.image_sides import ImageSide, baseline_of, candidate_of, images_of
from halfbyte.recipes.find import load_recipe
from halfbyte.recipes.prompts import load_prompts
from halfbyte.records.errors import UserError
from halfbyte.records.files import dumps
from halfbyte.records.memory import MEMORY_FILE, MemoryRecord, MemoryRow
from halfbyte.records.run import RunFolder

if TYPE_CHECKING:
    from halfbyte.quant.produce import Job
    from halfbyte.recipes.schema import Recipe


def run(args: Namespace) -> int:
    """Draws one image in each way, prints the table, and writes memory.json into the first recipe's run folder."""
    recipes = [_packed(load_recipe(name, args.set)) for name in args.recipe]
    for recipe in recipes:
        images_of(recipe.evaluate)
    from halfbyte.quant import produce  # torch and ModelOpt take seconds

    jobs = [produce.prepare(recipe, args.device) for recipe in recipes]
    if len({job.source.digest for job in jobs}) > 1:
        raise UserError("these recipes start from different models", "one table has one baseline: give them one by one")
    folders = [RunFolder(args.output / recipe.name) for recipe in recipes]
    for job, folder in zip(jobs, folders, strict=True):
        if not produce.has_checkpoint(job, folder):
            raise UserError(
                f"{folder.root} holds no checkpoint of this recipe",
                f"make it first: halfbyte quantize {job.recipe.name} --output {folder.root}",
            )
    rows = _rows(jobs[0], baseline_of(jobs[0]), "original")
    for job, folder in zip(jobs, folders, strict=True):
        rows += _rows(job, candidate_of(job, folder), "packed")
    size = images_of(jobs[0].recipe.evaluate).size
    kind = "cuda" if jobs[0].device.type == "cuda" else "process"
    record = MemoryRecord.model_validate({"height": size[0], "width": size[1], "kind": kind, "rows": rows})
    record.save(folders[0].root / MEMORY_FILE)
    if args.json:
        print(dumps(record.model_dump(mode="json")), end="")
        return 0
    for line in _lines(record):
        print(line)
    print(f"record: {folders[0].root / MEMORY_FILE}")
    return 0


def _packed(recipe: Recipe) -> Recipe:
    """The recipe with its checkpoint's weights as they are stored: folded ones take what the original's take."""
    return recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"weights": "packed"})})


def _rows(job: Job, side: ImageSide, weights: str) -> list[MemoryRow]:
    """One pipeline with all parts loaded, and with one at a time."""
    from PIL import Image

    from halfbyte.eval.peaks import STEPS, peaks_of
    from halfbyte.eval.pipelines import Pipeline, Request

    spec = images_of(job.recipe.evaluate)
    prompt = load_prompts(spec.prompts, 1, spec.control_images)[0]
    found = []
    for low_vram in (False, True):
        pipeline = Pipeline(side.opener().parts, job.device, low_vram)
        control = None
        if prompt.control is not None:
            with Image.open(prompt.control) as file:
                control = file.convert("RGB")
        request = Request(
            prompt=prompt.text,
            seed=spec.seeds[0],
            steps=min(STEPS, spec.steps),
            guidance=spec.guidance,
            height=spec.size[0],
            width=spec.size[1],
            max_sequence_length=spec.max_sequence_length,
            control=control,
        )
        found.append(
            MemoryRow(
                model=side.summary.name,
                format=side.summary.format,
                weights=weights,
                low_vram=low_vram,
                stages=peaks_of(pipeline, request),
                transformer_bytes=pipeline.parts.bytes["transformer"],
            )
        )
    return found


def _lines(record: MemoryRecord) -> list[str]:
    from halfbyte.eval.peaks import memory_table

    rows = memory_table(record.rows)
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(pairs))
        for pairs in (zip(row, widths, strict=True) for row in rows)
    ]
    where = "what CUDA's allocator gave out" if record.kind == "cuda" else "the resident size of this process"
    lines.append(f"{record.height} x {record.width} pixels; peaks are {where}; the stages are those of low VRAM")
    return lines
