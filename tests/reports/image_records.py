"""Writes records of images as an evaluation of a diffusion model would, with the images themselves where asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from record_factory import digest, model

from halfbyte.records.image_metrics import IMAGE_METRICS
from halfbyte.records.record import EvaluationRecord, Fingerprint, Health, Metric, ModelSummary, SubtaskFingerprint

SETTINGS = {"pipeline": "FluxPipeline", "scheduler": "Euler", "steps": 8, "guidance": 3.5, "height": 64, "width": 64}
PROMPTS = (
    "a large red circle at the top left", "two small blue squares", "a green triangle on a white background",
    "une étoile jaune", "一个红色的圆", "a <b>bold</b> & \"quoted\" 'prompt'",
)  # fmt: skip


def noise(index: int, seed: int, size: int = 64, amount: float = 0.0) -> Image.Image:
    """A smooth image of that number, and with an amount one that differs from it the more."""
    random = np.random.default_rng(index)
    base = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((size, size), 3)
    if not amount:
        return base
    other = np.random.default_rng([index, seed, 7]).normal(0, 255 * amount, (size, size, 3))
    return Image.fromarray(np.clip(np.asarray(base) + other, 0, 255).astype(np.uint8))


def write_images(
    root: Path,
    values: Mapping[str, Sequence[float]],
    *,
    format: str = "bfloat16",
    of: ModelSummary | None = None,
    files: Callable[[int], Image.Image] | None = None,
    prompts: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    missing: dict[str, str] | None = None,
    primary: str | None = None,
    latents: Sequence[float] | None = None,
    generation: dict[str, Any] | None = None,
    limit: int | None = None,
    health: Health | None = None,
    edit: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None,
) -> Path:
    """Writes a record below root/evaluations, and its images below root/images.

    Args:
        root: A run's folder.
        values: One an image, by metric.
        files: Draws an image by its number; None leaves them away.
        latents: Distance of the latents after each step.
        edit: Changes the sample lines, as damage would.

    Returns:
        The folder of the model's records.
    """
    summary = of or model(format)
    count = len(next(iter(values.values())))
    asked = list(prompts or [f"{PROMPTS[i % len(PROMPTS)]} {i}" for i in range(count)])
    drawn = list(seeds or [0] * count)
    place = f"{summary.digest[:16]}/{digest('settings')[:16]}"
    lines = []
    for i in range(count):
        name, sha = f"{i:04d}-{drawn[i]}.png", digest(f"{summary.digest} {i}")
        if files is not None:
            path = root / "images" / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            files(i).save(path)
            sha = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(
            {
                "doc_id": i,
                "doc": {"prompt": asked[i], "seed": drawn[i], "control": None},
                "target": "",
                "arguments": {"gen_args_0": {"arg_0": asked[i], "arg_1": {"seed": drawn[i]}}},
                "resps": [[name]],
                "filtered_resps": [name],
                "filter": "none",
                "metrics": list(values),
                "doc_hash": digest(f"{asked[i]} {drawn[i]}"),
                "prompt_hash": digest(asked[i]),
                "target_hash": digest(""),
                **{metric: row[i] for metric, row in values.items()},
                "image": {"set": place, "file": name, "sha256": sha},
                "latent_distances": None if latents is None else list(latents),
            }
        )
    folder = root / "evaluations" / summary.digest[:16]
    record = folder / "images"
    record.mkdir(parents=True, exist_ok=True)
    written = edit(lines) if edit else lines
    samples = "samples_images_2026-11-01T00-00-00.jsonl"
    (record / samples).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in written))
    own = [name for name in values if not IMAGE_METRICS[name].needs_reference]
    part = SubtaskFingerprint(
        version="1",
        num_fewshot=0,
        questions=count,
        documents=digest("".join(line["doc_hash"] for line in lines)),
        prompts=digest("".join(line["prompt_hash"] for line in lines)),
        targets=digest("".join(line["target_hash"] for line in lines)),
        output_type="text_to_image",
        generation={**SETTINGS, **(generation or {})},
    )
    EvaluationRecord(
        created="2026-11-01T00:00:00+00:00",
        model=summary,
        fingerprint=Fingerprint(
            task="images", subtasks={"images": part}, backend="diffusers", dtype="bfloat16", limit=limit
        ),
        primary=[primary or own[0], "none"],
        metrics=[
            Metric(
                subtask="images",
                metric=name,
                filter="none",
                value=sum(row) / count,
                higher_is_better=IMAGE_METRICS[name].higher_is_better,
                questions=count,
            )
            for name, row in values.items()
        ],
        results_file="results_2026-11-01T00-00-00.json",
        samples_files={"images": samples},
        packages={"torch": "2.13.0", "diffusers": "0.42.1"},
        hardware={"machine": "x86_64"},
        seconds=10.0,
        tokens=0,
        missing=missing or {},
        health=health or Health(prompts=count),
    ).save(record)
    return folder


def scores(count: int, shift: float = 0.0, seed: int = 0) -> dict[str, list[float]]:
    """CLIPScore, CLIP-IQA and ImageReward as FLUX.1-dev has them, the candidate's near the baseline's of each image.

    Args:
        count: Images.
        shift: What the candidate loses, in units of each metric's margin under the policy `image`.
        seed: 0 for the baseline, another for a candidate.
    """
    base = np.random.default_rng(1)
    own = np.random.default_rng([2, seed])
    found = {}
    for name, mean, spread, margin, ends in (
        ("clip_score", 30.15, 3.0, 0.06, (0, 100)), ("clip_iqa", 0.9, 0.02, 0.01, (0, 1)),
        ("image_reward", 1.118, 0.8, 0.05, (-9, 9)),
    ):  # fmt: skip
        row = base.normal(mean, spread, count)
        if seed:
            row = row - shift * margin + own.normal(0, 3 * margin, count)
        found[name] = np.clip(row, *ends).tolist()
    return found
