"""halfbyte verify: checks the numbers of an exported checkpoint, one row a check."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from halfbyte.records.errors import UserError
from halfbyte.records.files import dumps
from halfbyte.records.run import RunFolder


def run(args: Namespace) -> int:
    """Prints each check; exit code 1 when one failed."""
    from halfbyte.quant.verify import verify  # torch takes seconds

    folder = Path(args.checkpoint)
    if RunFolder(folder).recipe.is_file() and RunFolder(folder).checkpoint.is_dir():
        folder = RunFolder(folder).checkpoint  # a run folder stands for the checkpoint in it
    checks = verify(folder, None if args.source is None else _source(args.source))
    if args.json:
        print(dumps([check.as_dict() for check in checks]), end="")
    else:
        print("\n".join(map(str, checks)))
    return 0 if all(check.passed for check in checks) else 1


def _source(name: str) -> Path:
    """The folder of the original model.

    Raises:
        UserError: when it cannot be found, is quantized itself, or is one GGUF file.
    """
    from halfbyte.quant.checkpoint import quant_format
    from halfbyte.quant.models import locate
    from halfbyte.quant.pipelines import is_pipeline, locate_pipeline

    if is_pipeline(Path(name).expanduser()):
        pipeline = locate_pipeline(name)
        if quant_format(pipeline.transformer) is not None:
            raise UserError(f"{name} is quantized itself", "give the original pipeline")
        return pipeline.folder
    found = locate(name)
    if found.gguf_file is not None:
        raise UserError(f"{name} is a GGUF file, whose tensors have other names", "give a folder with *.safetensors")
    if quant_format(found.folder) is not None:
        raise UserError(f"{name} is quantized itself", "give the original model")
    return found.folder
