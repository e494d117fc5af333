"""Reads the images of two records: pairs them, finds their files, and orders them with the worst pairs first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte.records.digests import cache_folder, file_digest
from halfbyte.records.errors import UserError
from halfbyte.records.image_metrics import IMAGE_METRICS
from halfbyte.records.record import EvaluationRecord, Sample, is_of_images, load_record, read_samples
from halfbyte.reports.metrics import definition, judged_metrics
from halfbyte.reports.pictures import Picture, Pictures, Reference

IMAGES_FOLDER = "images"
TOKENS = {"clip": 77, "clip_score": 77, "image_reward": 35}
"""Longest prompt of each reader, in tokens, where it is always the same; clip and t5 read while an image is drawn."""
_UP = 4  # folders above a record in which the images of its run may lie
_APART = ("lpips", "ssim", "psnr")
"""Metrics that tell how far two images are apart, the one that people agree with most first."""


def read_pictures(baseline: Path, candidate: Path, *, files: bool = True) -> Pictures | None:
    """The images of two record folders of one task that have been paired; None where the task draws none.

    Args:
        baseline: A record's folder.
        candidate: Another one's.
        files: Whether to look for the images themselves, each of which is compared with its digest.

    Raises:
        UserError: when a sample line does not say which image it is of, or a value is no number.
    """
    first, second = load_record(baseline), load_record(candidate)
    if not is_of_images(first):
        return None
    primary = next((name for name in judged_metrics(first) if name in judged_metrics(second)), first.primary[0])
    ours = {sample.doc_id: sample for sample in read_samples(baseline, first)}
    pairs, apart, distances = [], {}, []
    for sample in read_samples(candidate, second):
        pair, steps = _pair(ours[sample.doc_id], sample, baseline, candidate, files=files)
        pairs.append(pair)
        distances.append(steps)
        apart[pair.index] = _badness(pair, primary)
    pairs.sort(key=lambda pair: apart[pair.index], reverse=True)
    return Pictures(
        task=first.task,
        primary=primary,
        pairs=pairs,
        references=_references(second, pairs),
        latent_distances=_means(distances),
        equal=sum(pair.equal for pair in pairs),
    )


def missing_metrics(first: EvaluationRecord, second: EvaluationRecord) -> dict[str, str]:
    """Metrics that should be judged and are of one side alone or of none, by the name of their row, with the reason."""
    if not is_of_images(first):
        return {}
    found: dict[str, str] = {}
    sides = (("baseline", first, second), ("candidate", second, first))
    for side, record, other in sides:
        for name, reason in record.missing.items():
            if name not in IMAGE_METRICS or not IMAGE_METRICS[name].needs_reference:
                found[f"{first.task}/{name}"] = reason
        for name in judged_metrics(other):
            if name not in judged_metrics(record) and name not in record.missing:
                found[f"{first.task}/{name}"] = f"the {side} was not evaluated by it"
    return found


def image_notes(second: EvaluationRecord) -> list[str]:
    """What a reader must know of a record of images: reference metrics that are missing, and prompts read in part."""
    notes = [
        f"{name} was asked for and is missing: {reason}"
        for name, reason in second.missing.items()
        if name in IMAGE_METRICS and IMAGE_METRICS[name].needs_reference
    ]
    health = second.health
    for reader, count in sorted(health.cut.items()):
        limit = TOKENS.get(reader)
        notes.append(
            f"{count} of {health.prompts} prompts were cut before {reader} read them"
            + (f", which takes {limit} tokens" if limit else "")
        )
    if health.unknown:
        notes.append(f"{health.unknown} of {health.prompts} prompts hold characters that a text encoder does not know")
    return notes


def _pair(
    ours: Sample, theirs: Sample, baseline: Path, candidate: Path, *, files: bool
) -> tuple[Picture, Sequence[float]]:
    one, other = (_image(sample, folder) for sample, folder in ((ours, baseline), (theirs, candidate)))
    doc = theirs.raw.get("doc") or {}
    pair = Picture(
        index=theirs.doc_id,
        prompt=str(doc.get("prompt", "")),
        seed=int(doc.get("seed", 0)),
        baseline=ours.metrics,
        candidate=theirs.metrics,
        baseline_file=_file(one, baseline) if files else None,
        candidate_file=_file(other, candidate) if files else None,
        equal=one["sha256"] == other["sha256"],
    )
    return pair, theirs.raw.get("latent_distances") or []


def _image(sample: Sample, folder: Path) -> Mapping[str, str]:
    found: Any = sample.raw.get("image")
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in ("set", "file", "sha256")):
        raise UserError(f"the record in {folder} does not say where image {sample.doc_id} is", "evaluate again")
    return found


def _file(image: Mapping[str, str], record: Path) -> Path | None:
    """The image's file in its run or in the cache, if it is still the one that was scored."""
    name = Path(image["set"]) / image["file"]
    if name.is_absolute() or ".." in name.parts:
        return None
    above = record.resolve()
    places = [above, *list(above.parents)[:_UP], cache_folder()]
    for place in places:
        path = place / IMAGES_FOLDER / name
        if path.is_file():
            return path if file_digest(path) == image["sha256"] else None
    return None


def _badness(pair: Picture, primary: str) -> tuple[float, float]:
    """What the worst pairs have most of: the loss of the primary metric, then the distance of the images."""
    loss = 0.0
    if primary in pair.baseline and primary in pair.candidate:
        loss = pair.baseline[primary] - pair.candidate[primary]
        loss = loss if definition(primary, IMAGE_METRICS[primary].higher_is_better).higher_is_better else -loss
    name = next((name for name in _APART if name in pair.candidate), None)
    if name is None:
        return loss, 0.0
    value = pair.candidate[name]
    return loss, -value if IMAGE_METRICS[name].higher_is_better else value


def _references(record: EvaluationRecord, pairs: Sequence[Picture]) -> list[Reference]:
    found = []
    for name in dict.fromkeys(figure.metric for figure in record.metrics):
        if name not in IMAGE_METRICS or not IMAGE_METRICS[name].needs_reference:
            continue
        values = [pair.candidate[name] for pair in pairs if name in pair.candidate]
        if len(values) < len(pairs):
            raise UserError(f"{len(pairs) - len(values)} images have no number for {name}", "evaluate again")
        known = definition(name, IMAGE_METRICS[name].higher_is_better)
        higher = known.higher_is_better
        for value in (min(values), max(values)):
            if not math.isfinite(value) or (limits := known.refuse(value)) is not None:
                what = "which is no number" if not math.isfinite(value) else f"and by its definition it is {limits}"
                raise UserError(f"{name} of an image of {record.model.name} is {value:g}, {what}", "evaluate again")
        found.append(
            Reference(
                metric=name,
                higher_is_better=higher,
                images=len(values),
                mean=statistics.fmean(values),
                median=statistics.median(values),
                worst=min(values) if higher else max(values),
            )
        )
    return found


def _means(distances: Sequence[Sequence[float]]) -> list[float]:
    """Of each step; empty unless all images have the same steps."""
    if len({len(steps) for steps in distances}) != 1:
        return []
    return [statistics.fmean(step) for step in zip(*distances, strict=True)]
