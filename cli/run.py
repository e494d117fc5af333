"""halfbyte run: the whole line from a recipe to a verdict; a stage that is done is skipped, one cut short goes on."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.compare_command import can_judge, exit_code, rendered
from halfbyte.recipes.find import load_recipe, require_supported, with_limit
from halfbyte.recipes.images import IMAGES
from halfbyte.records.errors import UserError
from halfbyte.records.files import dumps
from halfbyte.records.run import RunFolder

if TYPE_CHECKING:
    from halfbyte.quant.produce import Job
    from halfbyte.recipes.schema import Recipe
    from halfbyte.reports.comparison import Comparison
    from halfbyte.reports.policy import Policy
    from halfbyte.sides import Side

STAGES = ("plan", "baseline", "quantize", "verify", "canary", "candidate", "fidelity", "report")


def run(args: Namespace) -> int:
    """Runs each recipe and prints one table of all; the exit code is that of the worst verdict."""
    recipes = [with_limit(load_recipe(name, args.set), args.limit) for name in args.recipe]
    twice = {recipe.name for recipe in recipes if [other.name for other in recipes].count(recipe.name) > 1}
    if twice:
        raise UserError(f"recipe '{min(twice)}' is given twice")
    for recipe in recipes:
        require_supported(recipe)  # all of them, before a model is fetched for the first
    from halfbyte.eval.image_scores import require_metrics
    from halfbyte.eval.opening import require_two_endpoints
    from halfbyte.eval.resolve import require_tasks
    from halfbyte.quant import produce  # torch and ModelOpt take seconds; a typo in a recipe should not
    from halfbyte.reports.published import published_table

    for recipe in recipes:
        require_two_endpoints(recipe.evaluate)
    for recipe in recipes:
        if recipe.published is not None:
            published_table(recipe.published)  # a misspelling is found before hours of work
    policies = {recipe.name: _policy_that_applies(recipe) for recipe in recipes}
    jobs = [produce.prepare(recipe, args.device, read_ahead=not args.dry_run) for recipe in recipes]
    if len(jobs) > 1 and len({job.source.digest for job in jobs}) > 1:
        raise UserError("these recipes start from different models", "one table has one baseline: run them one by one")
    if args.dry_run:
        return _print_plans(jobs, as_json=args.json)
    for job in jobs:
        if not args.force:
            produce.require_own_folder(job, RunFolder(args.output / job.recipe.name), force=False)
        if job.recipe.evaluate.images is not None:
            require_metrics(job.recipe.evaluate.images)
        else:
            require_tasks(job.recipe.evaluate)
    comparisons = [
        _run_one(job, RunFolder(args.output / job.recipe.name), policies[job.recipe.name], args) for job in jobs
    ]
    return _conclude(comparisons, args)


def _print_plans(jobs: list[Job], *, as_json: bool) -> int:
    from halfbyte.stages import plan_dict, plan_text

    if as_json:
        print(dumps([plan_dict(job) for job in jobs]), end="")
        return 0
    for job in jobs:
        if job.recipe.evaluate.images is not None:
            from halfbyte.run_images import plan_text as images_text

            print(f"{plan_text(job)}\n{images_text(job)}\n")
            continue
        tasks = ", ".join(spec.task for spec in job.recipe.evaluate.tasks)
        print(f"{plan_text(job)}\ntasks        {tasks}\n")
    return 0


def _policy_that_applies(recipe: Recipe) -> Policy | None:
    """The recipe's policy; None, with a warning, where it cannot judge tasks that are cut by a limit."""
    from halfbyte.reports.applies import require_tasks_of
    from halfbyte.reports.policy import load_policy

    policy = load_policy(recipe.gate.policy)
    limits = {spec.task: spec.limit for spec in recipe.evaluate.tasks}
    if recipe.evaluate.images is not None:
        limits = {f"{IMAGES}/{name}": recipe.evaluate.images.limit for name in recipe.evaluate.images.metrics}
    if not can_judge(policy, limits):
        return None
    require_tasks_of(policy, recipe.evaluate)
    return policy


def _run_one(job: Job, folder: RunFolder, policy: Policy | None, args: Namespace) -> Comparison:
    from halfbyte.quant import produce
    from halfbyte.reports.compare import compare
    from halfbyte.reports.evidence import with_evidence
    from halfbyte.reports.write import write_reports
    from halfbyte.sides import Side, own_records
    from halfbyte.stages import (
        keep_baseline,
        make_checkpoint,
        measure,
        observe_baseline,
        release_canary,
        require_verified,
    )

    recipe = job.recipe
    settings = recipe.evaluate
    with folder.lock(), folder.restoring() if args.force else nullcontext():
        if args.force:
            produce.require_own_folder(job, folder, force=True)
        produce.claim(job, folder)
        if not produce.has_checkpoint(job, folder):
            produce.require_space(job, folder)  # before hours of baseline, and not after them
        if settings.images is not None:
            from halfbyte.run_images import run_images

            return run_images(job, folder, policy, args.data_root, partial(_say, args, recipe))
        _say(args, recipe, "plan", f"{job.source.name} on {job.device}\n{job.plan}")
        baseline = Side(job.source.digest, job.device.type, job.dtype, job.open_baseline, job.describe_baseline)
        _say(args, recipe, "baseline", job.source.name)
        ours = _evaluated(baseline, job, folder, policy, args)
        reference = observe_baseline(baseline, settings.canary) if settings.canary else None
        if settings.fidelity is not None:
            keep_baseline(baseline, settings.fidelity, args.data_root)
        baseline.free()
        _say(args, recipe, "quantize", str(folder.checkpoint))
        summary = make_checkpoint(job, folder, args.data_root)
        _say(args, recipe, "verify", str(folder.checkpoint))
        require_verified(folder, summary.digest, job)
        candidate = Side(
            summary.digest,
            job.device.type,
            job.dtype,
            lambda: job.open_candidate(folder),
            lambda: job.describe_candidate(folder),
            candidate=True,
        )
        if settings.canary and reference:
            _say(args, recipe, "canary", "a few prompts, beside the baseline")
            where = folder.canary(candidate.digest)
            release_canary(reference, baseline.digest, candidate, settings.canary, where)
        _say(args, recipe, "candidate", f"read back from {folder.checkpoint}")
        theirs = own_records(candidate, settings, folder.evaluations(candidate.digest), args.data_root)
        fidelity = None
        if settings.fidelity is not None:
            _say(args, recipe, "fidelity", settings.fidelity.source.dataset)
            where = folder.fidelity(candidate.digest)
            fidelity = measure(baseline, candidate, settings.fidelity, where, args.data_root)
        baseline.free()
        candidate.free()
        _say(args, recipe, "report", str(folder.root))
        comparison = compare(ours, theirs, policy=policy, fidelity=fidelity)
        comparison = with_evidence(comparison, folder, recipe.published)
        write_reports([comparison], folder.root)
    return comparison


def _evaluated(baseline: Side, job: Job, folder: RunFolder, policy: Policy | None, args: Namespace) -> list[Path]:
    """The baseline's records in the run folder, one a task; refuses a policy that cannot judge them."""
    from halfbyte.reports.applies import require_margins
    from halfbyte.sides import cached_records, keep_copy, measure_noise

    settings = job.recipe.evaluate
    cached = cached_records(baseline, settings, args.data_root)
    ours = [keep_copy(record, folder.evaluations(baseline.digest)) for record in cached]
    if args.repeat_baseline:
        _say(args, job.recipe, "baseline", "once more, in other batches")
        measure_noise(baseline, settings, ours, args.data_root)
    if policy is not None:
        require_margins(policy, ours)
    return ours


def _say(args: Namespace, recipe: Recipe, stage: str, what: str) -> None:
    if not args.quiet:
        print(f"[{recipe.name} {STAGES.index(stage) + 1}/{len(STAGES)}] {stage}: {what}", file=sys.stderr, flush=True)


def _conclude(comparisons: list[Comparison], args: Namespace) -> int:
    from halfbyte.reports.methods import with_gains
    from halfbyte.reports.write import write_reports

    folders = [RunFolder(args.output / one.candidate.name).evaluations(one.candidate.digest) for one in comparisons]
    comparisons = with_gains(comparisons, folders)
    report: Path = args.output / comparisons[0].candidate.name / "report.html"
    if len(comparisons) > 1:
        write_reports(comparisons, args.output / "report")
        report = args.output / "report" / "report.html"
    if args.json:
        print(rendered(comparisons, "json"), end="")
    else:
        print(rendered(comparisons, "text"))
        print(f"report: {report}")
    return exit_code(comparisons)
