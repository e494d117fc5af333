"""halfbyte quantize: from a recipe to an exported checkpoint."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

from halfbyte.recipes.find import load_recipe
from halfbyte.records.files import dumps
from halfbyte.records.run import RunFolder


def run(args: Namespace) -> int:
    """Prints the plan, makes the checkpoint, prints where it is."""
    overrides = list(args.set)
    if args.model is not None:
        overrides.append(f"model.id={json.dumps(args.model, ensure_ascii=False)}")  # quoted: 123 is a name too
    recipe = load_recipe(args.recipe, overrides)
    from halfbyte.quant import produce  # torch and ModelOpt take seconds; a typo in the recipe should not
    from halfbyte.stages import make_in_folder, print_plan

    job = produce.prepare(recipe, args.device, read_ahead=not args.dry_run)
    if args.dry_run:
        print_plan(job, as_json=args.json)
        return 0
    if not args.quiet:
        print(f"{recipe.name}: {job.source.name}\n{job.plan}", file=sys.stderr)
    folder = RunFolder(args.output)
    summary = make_in_folder(job, folder, args.data_root, force=args.force)
    if args.json:
        print(dumps({"checkpoint": str(folder.checkpoint), **summary.model_dump()}), end="")
    else:
        print(f"{summary.format}, {summary.bytes_on_disk / 1e6:.1f} MB, {summary.bits_per_weight:.2f} bits per weight")
        print(f"checkpoint: {folder.checkpoint}")
    return 0
