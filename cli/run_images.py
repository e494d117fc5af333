"""The stages of `halfbyte run` for a model that draws: both sides' images, their records, and the comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.image_sides import baseline_of, candidate_of, images_of, keep_baseline, own_record
from halfbyte.recipes.prompts import load_prompts

if TYPE_CHECKING:
    from halfbyte.quant.produce import Job
    from halfbyte.records.run import RunFolder
    from halfbyte.reports.comparison import Comparison
    from halfbyte.reports.policy import Policy


def run_images(
    job: Job, folder: RunFolder, policy: Policy | None, data_root: Path | None, say: Callable[[str, str], None]
) -> Comparison:
    """From the plan to the reports; the caller holds the folder and has claimed it.

    Args:
        job: What to do.
        folder: Where.
        policy: What judges; None for none.
        data_root: Where data sets are looked up first.
        say: Called with the name of each stage and what it works on.

    Raises:
        UserError: for whatever a user can mend; prompts and settings are looked at before anything is computed.
        Anomaly: when a side draws what is no image.
    """
    from halfbyte.reports.compare import compare
    from halfbyte.reports.evidence import with_evidence
    from halfbyte.reports.write import write_reports
    from halfbyte.stages import make_checkpoint, require_verified

    recipe = job.recipe
    settings = recipe.evaluate
    say("plan", f"{job.source.name} on {job.device}\n{job.plan}")
    baseline = baseline_of(job)
    say("baseline", job.source.name)
    images, ours = keep_baseline(baseline, settings, folder)
    baseline.free()
    say("quantize", str(folder.checkpoint))
    summary = make_checkpoint(job, folder, data_root)
    say("verify", str(folder.checkpoint))
    require_verified(folder, summary.digest, job)
    say("candidate", f"read back from {folder.checkpoint}")
    candidate = candidate_of(job, folder)
    theirs = own_record(candidate, images, settings, folder)
    candidate.free()
    say("report", str(folder.root))
    comparison = compare([ours], [theirs], policy=policy)
    comparison = with_evidence(comparison, folder, recipe.published)
    write_reports([comparison], folder.root)
    return comparison


def plan_text(job: Job) -> str:
    """What would be drawn and what it takes of a GPU's memory, for a dry run."""
    from halfbyte.eval.vram import modes

    spec = images_of(job.recipe.evaluate)
    prompts = load_prompts(spec.prompts, spec.limit, spec.control_images)
    count = len(prompts) * len(spec.seeds)
    stages = baseline_of(job).pipeline.stage_bytes()
    lines = [
        f"images       {count} on each side: {len(prompts)} prompts x {len(spec.seeds)} seeds, {spec.size[0]} x "
        f"{spec.size[1]} pixels, {spec.steps} steps",
        f"metrics      {', '.join(spec.metrics)}",
        "memory       of the weights; what is computed comes on top",
        *(f"             baseline  {mode}" for mode in modes(stages)),
        *(f"             candidate {mode}" for mode in modes(stages, job.plan.tensor_bytes) if mode.packed),
    ]
    return "\n".join(lines)
