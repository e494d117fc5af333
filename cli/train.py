"""halfbyte train: from a recipe with a train block to an exported checkpoint, on one process or several."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from pathlib import Path

from halfbyte.recipes.find import load_recipe
from halfbyte.records.errors import UserError
from halfbyte.records.files import dumps
from halfbyte.records.run import RunFolder


def run(args: Namespace) -> int:
    """Prints the plan, calibrates, trains, exports, and prints what training has changed and where the checkpoint is.

    `accelerate launch -m halfbyte train RECIPE` runs this in each process; the first writes and prints.
    """
    leads = os.environ.get("RANK", "0") == "0"
    if not leads:
        os.environ["TQDM_DISABLE"] = "1"
        logging.getLogger("halfbyte").setLevel(logging.WARNING)
    recipe = load_recipe(args.recipe, args.set)
    if recipe.train is None:
        raise UserError(
            f"recipe '{recipe.name}' has no train block",
            "`halfbyte quantize` makes its checkpoint; `halfbyte recipes smollm2-135m-nvfp4-qad` prints a train block",
        )
    from halfbyte.quant import produce  # torch and ModelOpt take seconds; a typo in the recipe should not
    from halfbyte.stages import make_in_folder, print_plan

    job = produce.prepare(recipe, args.device, read_ahead=not args.dry_run)
    if args.dry_run:
        if leads:
            print_plan(job, as_json=args.json)
        return 0
    if leads and not args.quiet:
        print(f"{recipe.name}: {job.source.name}\n{job.plan}", file=sys.stderr)
    folder = RunFolder(args.output or Path("runs") / recipe.name)
    summary = make_in_folder(job, folder, args.data_root, force=args.force)
    if leads:
        _conclude(folder, summary.model_dump(), as_json=args.json)
    return 0


def _conclude(folder: RunFolder, summary: dict[str, object], *, as_json: bool) -> None:
    from halfbyte.records.training import load_training

    record = load_training(folder.training)
    if as_json:
        print(
            dumps({"checkpoint": str(folder.checkpoint), "training": record.model_dump(mode="json"), **summary}), end=""
        )
        return
    print(f"{record.method}, {record.steps} steps, {record.tokens:,} tokens, stopped by {record.stopped}")
    for name in ("loss", "kl"):
        before, after = getattr(record.start, name), getattr(record.best, name)
        if before is not None and after is not None:
            print(f"validation {name:4} {before:.4f} before training, {after:.4f} at step {record.best_step}")
    print(f"checkpoint: {folder.checkpoint}")
