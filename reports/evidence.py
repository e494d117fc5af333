"""What else there is on a candidate beside its evaluations: the run that made it, its canary, fidelity and layers."""

from __future__ import annotations

import json
import logging
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from halfbyte.records.canary import CANARY_FILE, CanaryRecord, load_canary
from halfbyte.records.digests import value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.fidelity import FIDELITY_FILE, FidelityRecord, load_fidelity
from halfbyte.records.files import read_json
from halfbyte.records.manifest import Manifest, load_manifest
from halfbyte.records.record import ModelSummary, find_records, load_record
from halfbyte.records.run import RunFolder
from halfbyte.reports.compare import compare
from halfbyte.reports.comparison import Comparison, Layer
from halfbyte.reports.gate import judge
from halfbyte.reports.memory import memory_tables, read_memory
from halfbyte.reports.policy import Policy
from halfbyte.reports.published import beside, published_table
from halfbyte.reports.training import read_training

logger = logging.getLogger(__name__)
T = TypeVar("T", FidelityRecord, CanaryRecord)
_HEADER_LENGTH = 8  # bytes of a safetensors file that say how long its header is
_LONGEST_HEADER = 100_000_000  # the format's own limit
_WEIGHTS = (".weight", "_proj_blocks", "_proj")
"""How the names of weights end: of linears, and of experts that are in one tensor."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What lies around a candidate's records."""

    fidelity: FidelityRecord | None
    canary: CanaryRecord | None
    run: RunFolder | None
    """The run that the candidate's folder belongs to."""


def compare_folders(
    baseline: Path, candidate: Path, policy: Policy | None, published: str | None = None, *, few_flips: bool = False
) -> Comparison:
    """Compares the records below two folders, with all that the candidate's run folder holds of it.

    Args:
        baseline: A folder with records.
        candidate: Another one; below a run folder, what the run left there is part of the comparison.
        policy: See compare.
        published: The id of a published table to lay beside.
        few_flips: See compare.

    Raises:
        UserError: see compare; and when the run folder is of another model than the records in it.
    """
    found = find_evidence(baseline, candidate)
    comparison = compare(
        baseline, candidate, policy=policy, fidelity=found.fidelity, canary=found.canary, few_flips=few_flips
    )
    return with_evidence(comparison, found.run, published)


def with_evidence(comparison: Comparison, run: RunFolder | None, published: str | None = None) -> Comparison:
    """The comparison with what its run left beside its records, and a published table, where there are any.

    Raises:
        UserError: when what the run left is damaged, or there is no such table.
    """
    manifest = None if run is None or not run.manifest.is_file() else load_manifest(run.manifest)
    # A run also holds records of the original model, of which nothing here speaks.
    if run is not None and manifest is not None and manifest.checkpoint_digest == comparison.candidate.digest:
        recipe = read_recipe(run)
        training = read_training(run.training, manifest.keys.get("checkpoint", ""), _settings(recipe))
        lost = training is None and recipe.get("train") is not None
        note = f"its recipe trains, and {run.training} does not say how, so that it is called PTQ here"
        comparison = comparison.model_copy(
            update={
                "manifest": manifest.model_dump(mode="json"),
                "layers": layer_table(run.checkpoint),
                "training": training,
                "quantized_by": _quantized_by(recipe),
                "notes": comparison.notes + [note] * lost,
            }
        )
    if comparison.training is not None and comparison.policy is not None:
        # Once more: a trained candidate may be better than its baseline, and its name is another.
        comparison = judge(comparison, comparison.policy)
    tables = [] if published is None else [beside(published_table(published), comparison)]
    tables += memory_tables(None if run is None else read_memory(run.root), comparison.baseline.name)
    return comparison.model_copy(update={"published": tables})


def read_recipe(run: RunFolder) -> dict[str, Any]:
    """The recipe that a run was made from; empty where it is not at hand.

    Raises:
        UserError: when the file is no recipe.
    """
    if not run.recipe.is_file():
        return {}
    try:
        found: Any = yaml.safe_load(run.recipe.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, or a date that is none
        raise UserError(f"{run.recipe} is no recipe: {error}", "run the recipe again") from None
    if not isinstance(found, dict):
        raise UserError(f"{run.recipe} is no recipe", "run the recipe again")
    return found


def _settings(recipe: dict[str, Any]) -> str:
    """See comparison.Training."""
    blocks = {name: recipe.get(name) for name in ("model", "quantize", "train")}
    train = blocks["train"]
    if isinstance(train, dict):
        blocks["train"] = {name: value for name, value in train.items() if name != "seed"}
    return value_digest(blocks)


def _quantized_by(recipe: dict[str, Any]) -> str | None:
    """What a recipe names: ModelOpt's recipe, a preset, or the algorithm beside an inline configuration."""
    block = recipe.get("quantize")
    if not isinstance(block, dict):
        return None
    named = next((block[key] for key in ("recipe", "preset", "algorithm") if block.get(key)), None)
    if isinstance(named, dict):
        named = named.get("method")
    return None if named is None else str(named)


def run_folders(folder: RunFolder) -> tuple[Path, Path]:
    """The records of the baseline and of the candidate in a run folder.

    Raises:
        UserError: when the run has not come so far.
    """
    manifest = load_manifest(folder.manifest)
    if manifest.checkpoint_digest is None:
        raise UserError(f"{folder.root} has no checkpoint yet", "run the recipe again; it goes on where it stopped")
    found = folder.evaluations(manifest.model_digest), folder.evaluations(manifest.checkpoint_digest)
    if not found[1].is_dir():
        broken = [load_canary(path.parent) for path in folder.canary(manifest.checkpoint_digest).rglob(CANARY_FILE)]
        failure = next((f": {one.failure}" for one in broken if one.failure), "")
        raise UserError(
            f"{folder.root} was not evaluated{failure}",
            "leave it out" if failure else "run the recipe again; it goes on where it stopped",
        )
    return found


def find_evidence(baseline: Path, candidate: Path) -> Evidence:
    """What lies below a candidate's folder, or in the run folder that it belongs to.

    Raises:
        UserError: when the run's checkpoint is another model than the records are of.
    """
    ours, theirs = _models(baseline), _models(candidate)
    run = RunFolder(candidate.resolve().parent.parent)
    manifest = load_manifest(run.manifest) if run.manifest.is_file() else None
    if manifest is not None:
        _refuse_other_model(manifest, run, theirs)
    places = [candidate]
    for digest in sorted(theirs):
        places += [run.fidelity(digest), run.canary(digest)]
    fidelity: list[FidelityRecord] = []
    canary: list[CanaryRecord] = []
    for place in places:
        for path in sorted(place.rglob(FIDELITY_FILE)):
            record = load_fidelity(path.parent)
            if record.baseline.digest in ours and record.candidate.digest in theirs:
                fidelity.append(record)
            else:
                logger.warning("%s is of other models than those compared and is left out", path)
        for path in sorted(place.rglob(CANARY_FILE)):
            seen = load_canary(path.parent)
            if seen.baseline_digest in ours and seen.candidate.digest in theirs:
                canary.append(seen)
    return Evidence(_newest(fidelity), _newest(canary), run if manifest is not None else None)


def _newest(records: list[T]) -> T | None:
    """Of several, such as of an earlier text, the one that was made last."""
    return max(records, key=lambda one: one.created, default=None)


def _models(folder: Path) -> dict[str, ModelSummary]:
    models = [load_record(path).model for path in find_records(folder).values()]
    return {model.digest: model for model in models}


def _refuse_other_model(manifest: Manifest, run: RunFolder, models: dict[str, ModelSummary]) -> None:
    known = {manifest.checkpoint_digest, manifest.model_digest}
    for digest, model in models.items():
        if digest not in known:
            raise UserError(
                f"the records are of another model ({model.name}, {digest[:12]}) than the run in {run.root} made "
                f"({(manifest.checkpoint_digest or 'nothing yet')[:12]})",
                "evaluate the checkpoint that is there, or name the folder of its records",
            )


def layer_table(checkpoint: Path) -> list[Layer]:
    """The weights of a checkpoint by the name of their layers without numbers, with the format they are stored in.

    Reads the headers of its safetensors files alone; empty where there are none.
    """
    tensors: dict[str, tuple[str, int]] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, entry in _header(path).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                tensors[name] = (str(entry["dtype"]), int(end) - int(start))
    algorithm = _algorithm(checkpoint)
    groups: dict[tuple[str, str], list[int]] = {}
    for name, (dtype, size) in sorted(tensors.items()):
        if not name.endswith(_WEIGHTS):
            continue
        stem = name.removesuffix(".weight").removesuffix("_blocks")
        scales = _scales(name, stem)
        found = sum(tensors[other][1] for other in scales if other in tensors)
        label = algorithm if scales[0] in tensors and algorithm else dtype
        groups.setdefault((re.sub(r"\.\d+(?=\.|$)", ".*", stem), label), []).append(size + found)
    return [
        Layer(name=name, format=label, layers=len(sizes), bytes=sum(sizes)) for (name, label), sizes in groups.items()
    ]


def _scales(name: str, stem: str) -> list[str]:
    """What may lie beside a weight: of experts in one tensor with its name in front, in gpt-oss's layout one tensor."""
    if name.endswith("_blocks"):
        return [f"{stem}_scales"]
    front = f"{stem}." if name.endswith(".weight") else f"{name}_"
    return [f"{front}{suffix}" for suffix in ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")]


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(_HEADER_LENGTH))
            found: Any = json.loads(file.read(length)) if length <= _LONGEST_HEADER else None
    except (struct.error, ValueError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path} is no safetensors file", "export the checkpoint again")
    return found


def _algorithm(checkpoint: Path) -> str | None:
    """As hf_quant_config.json names it, or config.json for a layout that has no such file."""
    path = checkpoint / "hf_quant_config.json"
    if path.is_file():
        found = read_json(path).get("quantization", {}).get("quant_algo")
    elif (checkpoint / "config.json").is_file():
        found = (read_json(checkpoint / "config.json").get("quantization_config") or {}).get("quant_method")
    else:
        found = None
    return None if found is None else str(found).upper()
