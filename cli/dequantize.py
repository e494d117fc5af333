"""halfbyte dequantize: an exported checkpoint as a plain one that any tool opens."""

from __future__ import annotations

import dataclasses
from argparse import Namespace

from halfbyte.records.files import dumps


def run(args: Namespace) -> int:
    """Writes the plain checkpoint, prints what it holds and where it is."""
    from halfbyte.quant.checkpoint import torch_dtype  # torch takes seconds
    from halfbyte.quant.dequantize import dequantize_checkpoint
    from halfbyte.quant.models import locate

    written = dequantize_checkpoint(locate(args.checkpoint), args.output, torch_dtype(args.dtype))
    if args.json:
        print(dumps({**dataclasses.asdict(written), "folder": str(written.folder)}), end="")
    else:
        print(f"{written.dtype}, {written.bytes / 1e6:.1f} MB, {written.tensors} tensors, {written.shards} shards")
        print(f"checkpoint: {written.folder}")
    return 0
