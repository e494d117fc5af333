"""The record of a set of images: each metric's value of each image, kept one by one, in lm-eval's files."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from PIL import Image

from halfbyte.eval.evaluate import finished_record, resumable_folder
from halfbyte.eval.image_metrics import Metric, open_metric
from halfbyte.eval.shape_prompts import read_prompt
from halfbyte.recipes.images import IMAGES, ImagesSpec
from halfbyte.recipes.prompts import load_prompts
from halfbyte.recipes.schema import EvaluateSpec
from halfbyte.records.digests import text_digest, value_digest
from halfbyte.records.errors import UserError, unknown_name
from halfbyte.records.files import dumps, write_text
from halfbyte.records.image_metrics import IMAGE_METRICS
from halfbyte.records.image_set import ImageEntry, ImageSet, require_paired
from halfbyte.records.journal import Journal
from halfbyte.records.manifest import hardware, now, package_versions
from halfbyte.records.progress import progress_bar
from halfbyte.records.record import (
    SCHEMA_VERSION,
    Asked,
    EvaluationRecord,
    Fingerprint,
    Health,
    MemoryKind,
    ModelSummary,
    SubtaskFingerprint,
)
from halfbyte.records.record import Metric as Figure

logger = logging.getLogger(__name__)

VERSION = "1"
"""Of how images are scored; part of the fingerprint."""
FILTER = "none"


@dataclass
class Scores:
    """What the metrics say of a set."""

    values: dict[str, list[float]] = field(default_factory=dict)
    """One an image, by metric."""
    missing: dict[str, str] = field(default_factory=dict)
    """Metrics whose weights are not at hand, with where they come from."""
    identities: dict[str, str] = field(default_factory=dict)
    """Digest of each metric's weights; "" where nothing is trained."""
    cut: dict[str, int] = field(default_factory=dict)
    """Images whose prompt a metric's text encoder did not see whole."""


def require_metrics(spec: ImagesSpec) -> None:
    """Refuses metrics that do not exist and prompts that one cannot judge, before hours are spent on drawing.

    Raises:
        UserError: naming the first.
    """
    for name in (*spec.metrics, *spec.weights_of):
        if name not in IMAGE_METRICS:
            raise unknown_name("image metric", name, IMAGE_METRICS)
    if "fulfilment" in spec.metrics:
        for prompt in load_prompts(spec.prompts, spec.limit, spec.control_images):
            read_prompt(prompt.text)


def record_key(images: ImageSet, reference: ImageSet | None, spec: ImagesSpec) -> str:
    """What decides a record of images, but for which metrics' weights are at hand."""
    other = None if reference is None else reference.settings.key
    asked = [IMAGES, VERSION, SCHEMA_VERSION, images.settings.key, other, spec.metrics, sorted(spec.weights_of.items())]
    return value_digest([*asked, {name: package_versions()[name] for name in ("halfbyte", "torch", "transformers")}])


def evaluate_images(
    images: ImageSet,
    reference: ImageSet | None,
    settings: EvaluateSpec,
    summary: ModelSummary,
    output: Path,
    *,
    device: str,
    replace: bool = False,
    memory: tuple[int, MemoryKind] | None = None,
) -> EvaluationRecord:
    """Scores a set of images; returns the record `output` holds already where it is of the same images and metrics.

    A metric whose weights are not at hand is left out and named in the record; the others go on. What was cut short
    goes on from its last image.

    Args:
        images: The set.
        reference: The baseline's; None for the baseline itself, of which metrics that compare have no value.
        settings: The evaluate block.
        summary: Which model drew them.
        output: The record's folder.
        device: Where the metrics' networks compute.
        replace: Whether another record there is replaced.
        memory: Peak memory of the drawing, where it was watched.

    Raises:
        UserError: for sets that cannot be paired, an unknown metric, and no metric that can be computed.
    """
    spec = _spec(settings)
    require_metrics(spec)
    if reference is not None:
        require_paired(images, reference)
    key = record_key(images, reference, spec)
    done = finished_record(output, key, settings, None, replace=replace)
    if done is not None and not _at_hand_now(done.missing, spec, device):
        return done
    if done is not None:
        logger.info("%s: a metric's weights are at hand now; scoring again", output)
    with resumable_folder(output) as partial:
        start = time.perf_counter()
        scores = _score(images, reference, spec, partial, key, device)
        record = _record(images, scores, spec, summary, partial, key, memory, time.perf_counter() - start)
        record.save(partial)
    return record


def _spec(settings: EvaluateSpec) -> ImagesSpec:
    if settings.images is None:
        raise UserError("the recipe asks for no images", "give an evaluate.images block")
    return settings.images


def _at_hand_now(missing: dict[str, str], spec: ImagesSpec, device: str) -> bool:
    return any(isinstance(_opened(name, spec, device), Metric) for name in missing)


def _opened(name: str, spec: ImagesSpec, device: str) -> Metric | UserError:
    """The metric, or why its weights are not at hand; weights that the recipe names must be there."""
    try:
        return open_metric(name, spec.weights_of, device)
    except UserError as error:
        if name in spec.weights_of:
            raise
        return error


def _score(
    images: ImageSet, reference: ImageSet | None, spec: ImagesSpec, folder: Path, key: str, device: str
) -> Scores:
    scores = Scores()
    prompts = [entry.prompt for entry in images.entries]
    for name in spec.metrics:
        if IMAGE_METRICS[name].needs_reference and reference is None:
            continue
        metric = _opened(name, spec, device)
        if isinstance(metric, UserError):
            logger.warning("%s: %s", name, metric)
            scores.missing[name] = str(metric)
            continue
        with Journal(folder / f"journal-{name}", value_digest([key, metric.identity])) as journal:
            with progress_bar(total=len(images.entries), initial=len(journal.entries), desc=name, unit="image") as bar:
                for entry in images.entries[len(journal.entries) :]:
                    journal.append({"index": entry.index, "value": _value(metric, images, reference, entry)})
                    bar.update()
            scores.values[name] = [float(one["value"]) for one in journal.entries]
        scores.identities[name] = metric.identity
        cut = sum(tokens > 0 for tokens in metric.cut(prompts))
        if cut:
            scores.cut[name] = cut
    if not scores.values:
        why = next(iter(scores.missing.values()), "none of them looks at a baseline's images alone")
        raise UserError(f"no metric of {', '.join(spec.metrics)} could be computed: {why}")
    return scores


def _value(metric: Metric, images: ImageSet, reference: ImageSet | None, entry: ImageEntry) -> float:
    """The metric of one image: one at a time, so that a kill loses one."""
    others = None
    with Image.open(images.path(entry)) as ours:
        if metric.needs_reference and reference is not None:
            others = [_read(reference.path(reference.entries[entry.index]))]
        return metric.scores([ours.convert("RGB")], [entry.prompt], others)[0]


def _read(path: Path) -> Image.Image:
    with Image.open(path) as file:
        return file.convert("RGB")


def _record(
    images: ImageSet,
    scores: Scores,
    spec: ImagesSpec,
    summary: ModelSummary,
    folder: Path,
    key: str,
    memory: tuple[int, MemoryKind] | None,
    seconds: float,
) -> EvaluationRecord:
    figures = [_figure(name, scores.values[name]) for name in spec.metrics if name in scores.values]
    own = [one.metric for one in figures if not IMAGE_METRICS[one.metric].needs_reference]
    rows = [_row(images, entry, scores) for entry in images.entries]
    date = datetime.now().isoformat().replace(":", "-")
    samples = f"samples_{IMAGES}_{date}.jsonl"
    write_text(folder / samples, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))
    results = f"results_{date}.json"
    write_text(folder / results, dumps(_results(images, figures, scores, summary)))
    return EvaluationRecord(
        created=now(),
        key=key,
        model=summary,
        fingerprint=_fingerprint(images, scores, rows),
        primary=[own[0] if own else figures[0].metric, FILTER],
        metrics=figures,
        health=_health(images, scores),
        results_file=results,
        samples_files={IMAGES: samples},
        packages=package_versions(),
        hardware=hardware(),
        seconds=round(seconds + sum(entry.seconds for entry in images.entries), 3),
        tokens=0,
        memory_bytes=None if memory is None else memory[0],
        memory_kind=None if memory is None else memory[1],
        missing=scores.missing,
    )


def _figure(name: str, values: Sequence[float]) -> Figure:
    return Figure(
        subtask=IMAGES,
        metric=name,
        filter=FILTER,
        value=fmean(values),
        stderr=stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None,
        higher_is_better=IMAGE_METRICS[name].higher_is_better,
        questions=len(values),
    )


def _row(images: ImageSet, entry: ImageEntry, scores: Scores) -> dict[str, Any]:
    """A sample line, in the order that records.samples reads fast: texts first, from the filter on what counts."""
    values = {name: some[entry.index] for name, some in scores.values.items()}
    return {
        "doc_id": entry.index,
        "doc": {"prompt": entry.prompt, "seed": entry.seed, "control": entry.control},
        "target": "",
        "arguments": {"gen_args_0": {"arg_0": entry.prompt, "arg_1": {"seed": entry.seed}}},
        "resps": [[entry.file]],
        "filtered_resps": [entry.file],
        "filter": FILTER,
        "metrics": list(values),
        "doc_hash": value_digest([entry.prompt, entry.seed, entry.control]),
        "prompt_hash": text_digest(entry.prompt),
        "target_hash": text_digest(""),
        **values,
        "asked": Asked(cut=min(entry.clip_cut, entry.t5_cut)).model_dump(mode="json"),
        "image": {"set": set_name(images), "file": entry.file, "sha256": entry.sha256},
        "latent_distances": entry.latent_distances,
        "seconds": entry.seconds,
    }


def set_name(images: ImageSet) -> str:
    """The set's place below an images folder: <model digest>/<settings key>."""
    return f"{images.settings.model_digest[:16]}/{images.settings.key[:16]}"


def _fingerprint(images: ImageSet, scores: Scores, rows: list[dict[str, Any]]) -> Fingerprint:
    settings = images.settings
    known = {name: one for name, one in scores.identities.items() if not IMAGE_METRICS[name].needs_reference}
    return Fingerprint(
        task=IMAGES,
        subtasks={
            IMAGES: SubtaskFingerprint(
                version=VERSION,
                num_fewshot=0,
                questions=len(rows),
                documents=value_digest([row["doc_hash"] for row in rows]),
                prompts=value_digest([row["prompt_hash"] for row in rows]),
                targets=value_digest([row["target_hash"] for row in rows]),
                output_type="text_to_image",
                generation={**settings.asked(), "metric_weights": known},
            )
        },
        limit=settings.limit,
        backend="diffusers",
        engine=f"diffusers {settings.versions['diffusers']}",
        dtype=settings.dtype,
    )


def _health(images: ImageSet, scores: Scores) -> Health:
    entries = images.entries
    cut = {"clip": sum(one.clip_cut > 0 for one in entries), "t5": sum(one.t5_cut > 0 for one in entries)}
    return Health(
        prompts=len(entries),
        truncated=sum(min(one.clip_cut, one.t5_cut) > 0 for one in entries),
        cut={name: count for name, count in cut.items() if count} | scores.cut,
        unknown=sum(one.unknown > 0 for one in entries),
    )


def _results(images: ImageSet, figures: list[Figure], scores: Scores, summary: ModelSummary) -> dict[str, Any]:
    """lm-eval's keys, for tools that read them."""
    values: dict[str, Any] = {"alias": IMAGES}
    for one in figures:
        values[f"{one.metric},{FILTER}"] = one.value
        values[f"{one.metric}_stderr,{FILTER}"] = "N/A" if one.stderr is None else one.stderr
    count = len(images.entries)
    return {
        "results": {IMAGES: values},
        "higher_is_better": {IMAGES: {one.metric: one.higher_is_better for one in figures}},
        "n-samples": {IMAGES: {"original": count, "effective": count}},
        "config": {
            "model": images.settings.pipeline, "model_args": {"pretrained": summary.name}, "model_sha": summary.digest
        },
        "images": images.settings.model_dump(mode="json"),
        "missing": scores.missing,
        "model_name": summary.name,
    }  # fmt: skip
