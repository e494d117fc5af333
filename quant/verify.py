"""Verifying: reads an exported checkpoint once and says, one row a check, whether its numbers can be right.

Loaders of serving engines do not complain about most of what is checked here; they answer wrongly. Memory is bounded by
the largest tensor, with the original model or without: its weights are compared in pieces. Time is bounded by the disk
without it, and by a few seconds for each billion weights with it. What is looked at is in the checks_*.py beside this.
"""

from __future__ import annotations

from pathlib import Path

from halfbyte.quant import (
    checks_codes,
    checks_declared,
    checks_experts,
    checks_files,
    checks_model,
    checks_pipeline,
    checks_scales,
    checks_shapes,
    checks_source,
)
from halfbyte.quant.checkpoint import quant_format, read_config
from halfbyte.quant.checks import Check, open_checkpoint
from halfbyte.quant.pipelines import transformer_of
from halfbyte.records.errors import UserError

__all__ = ["PIPELINE_RULES", "RULES", "SOURCE_RULES", "Check", "verify"]

_WITHOUT_SOURCE = (
    checks_files,
    checks_declared,
    checks_shapes,
    checks_model,
    checks_scales,
    checks_experts,
    checks_codes,
)
RULES = tuple(rule for module in _WITHOUT_SOURCE for rule in module.RULES)
SOURCE_RULES = checks_source.RULES
PIPELINE_RULES = checks_pipeline.RULES
"""Of an exported diffusers pipeline."""


def verify(folder: Path, source: Path | None = None) -> list[Check]:
    """Runs every check on the exported checkpoint in `folder`.

    Args:
        folder: The checkpoint; of a pipeline, the transformer is looked at, and whether the other parts are there.
        source: The folder of the original model, as safetensors; without it, errors of weights are not looked at.

    Returns:
        One row a check. Where the declaration itself cannot be understood, that is the only row.

    Raises:
        UserError: when `folder` is no exported checkpoint, or `source` no folder of safetensors.
    """
    folder, source = transformer_of(folder), None if source is None else transformer_of(source)
    read_config(folder)
    try:
        quant_format(folder)
    except UserError as error:
        return [Check("declarations", "the declaration can be understood", [error.message])]
    at = open_checkpoint(folder, source)
    rules = RULES if source is None else (*RULES, *SOURCE_RULES)
    rules = (*rules, *PIPELINE_RULES) if at.is_part else rules
    return [Check(rule.name, rule.asks, list(rule.find(at))) for rule in rules]
