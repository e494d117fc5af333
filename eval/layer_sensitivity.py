"""Layer sensitivity: how far the baseline goes from itself with some of a checkpoint's layers in the place of its own.

The layers are those that were read back from the checkpoint, with their stored weights and input scales: what is
measured is what ships. Everything around them is the baseline's.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.eval.fidelity import check_window, compare_window, describe_text, fidelity_key, read_text, windows_of
from halfbyte.quant.load import Loaded
from halfbyte.recipes.schema import FidelitySpec
from halfbyte.records.digests import text_digest, value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.fidelity import Window
from halfbyte.records.journal import Journal
from halfbyte.records.layer_sensitivity import (
    By,
    LayerSensitivity,
    SensitivityRecord,
    load_sensitivity,
    sensitivity_file,
)
from halfbyte.records.manifest import hardware, now, package_versions
from halfbyte.records.progress import progress_bar

logger = logging.getLogger(__name__)

WHOLE = "all"
"""The group of all layers."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def layer_sensitivity(
    baseline: Loaded,
    candidate: Loaded,
    spec: FidelitySpec,
    output: Path,
    *,
    by: By = "block",
    data_root: Path | None = None,
    replace: bool = False,
) -> SensitivityRecord:
    """Measures each group of quantized layers alone, and writes a record; goes on where an earlier run was cut short.

    It takes one forward pass of the text for each group. Both models are in memory, and the baseline's logits on one
    window. An FP8 or FP4 KV cache counts in blocks alone, since it belongs to no linear.

    Args:
        baseline: The original model, as quant.load.load_as_it_is opens it; it is as it was afterwards.
        candidate: An exported checkpoint of it, on the same device and in the same dtype.
        spec: Text, window, and how many tokens: a few hundred tell the worst from the best.
        output: Folder for layer-sensitivity-BY.json.
        by: What is quantized at a time.
        data_root: See recipes.data.data_root.
        replace: Measure again where `output` holds a measurement of something else, and replace it.

    Raises:
        UserError: when the candidate is no quantized version of the baseline, its smoothing is folded into layers
            outside of a group, the text is too short, or `output` holds another measurement.
    """
    start = time.perf_counter()
    groups = quantized_groups(baseline.model, candidate.model, by)
    check_window(baseline.model, spec.window)
    text = read_text(spec, data_root)
    windows = windows_of(baseline.tokenizer, text, spec)
    digests = baseline.summary.digest, candidate.summary.digest
    where = {"device": baseline.model.device.type, "dtype": baseline.dtype}
    key = value_digest([fidelity_key(text, spec, *digests, **where), by])
    done = _done(output, by, key, replace=replace)
    if done is not None:
        return done
    with Journal(output / f"journal-layer-sensitivity-{by}.jsonl", key) as journal:
        _measure(baseline.model, candidate.model, windows, groups, journal)
        rows = [Window.model_validate(entry) for entry in journal.entries]
    per_group = {name: rows[at :: len(groups) + 1] for at, name in enumerate([WHOLE, *groups])}
    tokens = sum(row.tokens for row in per_group[WHOLE])
    layers = [name for names in groups.values() for name in names]
    record = SensitivityRecord(
        created=now(),
        key=key,
        by=by,
        baseline=baseline.summary,
        candidate=candidate.summary,
        text=describe_text(spec.source),
        text_digest=text_digest(text),
        window=spec.window,
        tokens=tokens,
        dtype=baseline.dtype,
        baseline_perplexity=math.exp(math.fsum(row.baseline_nll for row in per_group[WHOLE]) / tokens),
        whole=_mean(WHOLE, layers, per_group[WHOLE]),
        groups=[_mean(name, names, per_group[name]) for name, names in groups.items()],
        packages=package_versions(),
        hardware=hardware(),
        seconds=time.perf_counter() - start,
    )
    record.save(output)
    journal.path.unlink()
    return record


def quantized_groups(baseline: nn.Module, candidate: nn.Module, by: By) -> dict[str, list[str]]:
    """The quantized layers of each group, by the group's name, in the order of the model.

    Args:
        baseline: The original model.
        candidate: Its quantized version.
        by: What a group is.

    Raises:
        UserError: when nothing is quantized, or the two differ outside of the groups.
    """
    ours = dict(baseline.named_modules())
    layers = _quantized_layers(ours, candidate)
    if not layers:
        raise UserError(
            "no layer of the candidate is quantized, or it is no version of the baseline",
            "give the original model and a checkpoint that was exported from it",
        )
    groups: dict[str, list[str]] = {}
    for name in layers:
        group = {"layer": name, "kind": _NUMBER.sub("*", name), "block": _block(ours, name)}[by]
        groups.setdefault(group, []).append(name)
    _require_same_elsewhere(baseline, candidate, list(groups) if by == "block" else layers, by)
    return groups


def _quantized_layers(ours: dict[str, nn.Module], candidate: nn.Module) -> list[str]:
    """Linears that are none any more, and modules in which a stack of experts has become a module of its own."""
    found: list[str] = []
    for name, module in candidate.named_modules():
        if found and name.startswith(f"{found[-1]}."):
            continue
        parent = name.rpartition(".")[0]
        if name not in ours:  # where the parent's class differs it is an attention with a quantized KV cache
            if parent in ours and type(ours[parent]) is type(candidate.get_submodule(parent)):
                found.append(parent)
        elif isinstance(ours[name], nn.Linear) and not isinstance(module, nn.Linear):
            found.append(name)
    return found


def _block(modules: dict[str, nn.Module], name: str) -> str:
    """The element of the outermost list of blocks that a layer lies in; the layer itself where it lies in none."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        if isinstance(modules[".".join(parts[:end])], nn.ModuleList):
            return ".".join(parts[: end + 1])
    return name


def _require_same_elsewhere(baseline: nn.Module, candidate: nn.Module, swapped: list[str], by: By) -> None:
    """Refuses a candidate whose other parameters are not the baseline's: AWQ folds its scales into norms."""
    inside = tuple(f"{name}." for name in swapped)
    theirs = dict(candidate.named_parameters())
    for name, parameter in baseline.named_parameters():
        if name.startswith(inside):
            continue
        other = theirs.get(name)
        if other is None or other.shape != parameter.shape or not torch.equal(other, parameter):
            hint = "give its own original, opened by quant.load.load(recipe.model) in the recipe's dtype"
            if by != "block":
                hint = "its smoothing is folded into the layer before; measure by='block', or another checkpoint"
            raise UserError(f"{name} of the candidate differs from the baseline's, and is not quantized", hint)


@contextmanager
def _in_place_of(baseline: nn.Module, candidate: nn.Module, names: list[str]) -> Iterator[None]:
    """The baseline with some of its modules replaced by the candidate's."""
    own = {name: baseline.get_submodule(name) for name in names}
    try:
        for name in names:
            baseline.set_submodule(name, candidate.get_submodule(name))
        yield
    finally:
        for name, module in own.items():
            baseline.set_submodule(name, module)


class _Said:
    """Stands for the baseline on one window, whose logits are known."""

    def __init__(self, model: Any, ids: list[int]) -> None:
        self.device = model.device
        with torch.inference_mode():
            self._logits: Tensor = model(torch.tensor([ids], device=model.device)).logits

    def __call__(self, _: Tensor) -> Any:
        return SimpleNamespace(logits=self._logits)


def _measure(
    baseline: Any, candidate: Any, windows: list[list[int]], groups: dict[str, list[str]], journal: Journal
) -> None:
    """One entry for each window and group, the whole first; those that are there are not computed again."""
    # A group that is itself a module, a block, is exchanged whole: smoothing may be folded into its norms.
    modules = {name for name, _ in baseline.named_modules()}
    swaps = {name: [name] if name in modules else layers for name, layers in groups.items()}
    names = [WHOLE, *groups]
    total = len(windows) * len(names)
    done = len(journal.entries)
    with progress_bar(total=total, desc="layer sensitivity", unit="pass", initial=done) as bar:
        for number, ids in enumerate(windows):
            waiting = names[max(0, done - number * len(names)) :]
            said = _Said(baseline, ids) if waiting else None
            for name in waiting:
                if name == WHOLE:
                    row = compare_window(said, candidate, ids)
                else:
                    with _in_place_of(baseline, candidate, swaps[name]):
                        row = compare_window(said, baseline, ids)
                journal.append(row.model_dump())
                bar.update()


def _mean(name: str, layers: list[str], rows: list[Window]) -> LayerSensitivity:
    tokens = sum(row.tokens for row in rows)
    return LayerSensitivity(
        group=name,
        layers=layers,
        kl=math.fsum(row.kl for row in rows) / tokens,
        top1_agreement=sum(row.agree for row in rows) / tokens,
        perplexity=math.exp(math.fsum(row.candidate_nll for row in rows) / tokens),
    )


def _done(output: Path, by: By, key: str, *, replace: bool) -> SensitivityRecord | None:
    """The record that is there where it is the one wanted.

    Raises:
        UserError: when there is another one, which is not to be replaced.
    """
    path = output / sensitivity_file(by)
    if not path.exists():
        return None
    found = load_sensitivity(output, by)
    if found.key == key:
        logger.info("layer sensitivity: done already")
        return found
    if not replace:
        raise UserError(
            f"{path} is of other models, another text or other packages", "give another output, or delete that file"
        )
    return None
