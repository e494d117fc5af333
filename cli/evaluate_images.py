"""halfbyte eval --prompts: the images of one pipeline, original or exported, and what the metrics say of them."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path

from halfbyte.image_sides import images_of, open_side
from halfbyte.recipes.find import load_evaluation
from halfbyte.recipes.images import IMAGES
from halfbyte.recipes.schema import EvaluateSpec
from halfbyte.records.errors import UserError
from halfbyte.records.files import dumps
from halfbyte.records.image_metrics import IMAGE_METRICS
from halfbyte.records.image_set import ENTRIES_FILE, ImageSet
from halfbyte.records.record import EvaluationRecord, load_record

logger = logging.getLogger(__name__)

_OF_TASKS = ("limit", "dtype", "weights", "allow_truncated")


def run(args: Namespace) -> int:
    """Draws, scores, and prints each metric and where images and record are; below --output: images/, evaluations/."""
    if args.output is None:
        raise UserError("--output is missing", "name the folder for images and records")
    for name in ("show", "num_fewshot", "samples", "max_length", "batch_size"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} belongs to --tasks", "leave it out")
    if args.dry_run or args.apply_chat_template or args.repeat_baseline:
        raise UserError("--dry-run, --apply-chat-template and --repeat-baseline belong to --tasks", "leave them out")
    settings = _settings(args)
    reference = None if args.reference is None else find_set(args.reference)
    record, folder, images = _evaluated(args, settings, reference)
    if args.json:
        print(dumps(record.model_dump(mode="json")), end="")
        return 0
    model = record.model
    print(f"{args.model}: {model.format}, {model.bits_per_weight:.2f} bits per weight")
    for metric in record.metrics:
        spread = "" if metric.stderr is None else f" +- {metric.stderr:.4f}"
        print(f"{record.task:24} {metric.metric:16} {metric.value:.4f}{spread}  n={metric.questions}")
    for name, reason in record.missing.items():
        print(f"{record.task:24} {name:16} missing: {reason}")
    print(f"images: {images.folder}")
    print(f"record: {folder}")
    return 0


def _settings(args: Namespace) -> EvaluateSpec:
    block = {name: getattr(args, name) for name in _OF_TASKS if name != "limit"}
    return load_evaluation({**block, "images": {"prompts": args.prompts, "limit": args.limit}}, args.set)


def _evaluated(
    args: Namespace, settings: EvaluateSpec, reference: ImageSet | None
) -> tuple[EvaluationRecord, Path, ImageSet]:
    from halfbyte.eval.image_scores import require_metrics
    from halfbyte.quant.checkpoint import plain_dtype, torch_dtype  # torch takes seconds
    from halfbyte.quant.models import compute_dtype, device_of
    from halfbyte.quant.pipelines import denoiser_of, locate_pipeline, summarize_pipeline

    spec = images_of(settings)
    require_metrics(spec)
    lonely = [name for name in spec.metrics if IMAGE_METRICS[name].needs_reference and reference is None]
    if lonely:
        logger.info("%s compare with a baseline's images and are left out: give --reference", ", ".join(lonely))
    source = locate_pipeline(args.model)
    device = device_of(args.device)
    own = plain_dtype(denoiser_of(source.folder))
    dtype = str(compute_dtype(settings.dtype, device, torch_dtype(own))).removeprefix("torch.")
    summary = summarize_pipeline(source.folder, source.name)
    side = open_side(source, summary, settings, dtype=dtype, device=str(device), own=None)
    images = side.drawing(settings, reference).draw(args.output / IMAGES)
    side.free()
    folder = args.output / "evaluations" / IMAGES
    side.record(images, reference, settings, folder, replace=False)
    return load_record(folder), folder, images


def find_set(folder: Path) -> ImageSet:
    """The one set of images at or below a folder.

    Raises:
        UserError: when there is none, or several.
    """
    found = sorted(path.parent for path in folder.rglob(ENTRIES_FILE)) if folder.is_dir() else []
    if not found:
        raise UserError(f"{folder} holds no set of images", "draw the baseline's with `halfbyte eval --prompts`")
    if len(found) > 1:
        raise UserError(f"{folder} holds {len(found)} sets of images", f"name one of them, such as {found[0]}")
    return ImageSet.load(found[0])
