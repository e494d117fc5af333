"""The Python API: quantize, load, evaluate, compare and gate, each a few lines over the rooms.

checkpoint = halfbyte.quantize("demo-nvfp4", output="runs/demo-nvfp4")
baseline = halfbyte.evaluate("models/SmolLM2-135M-Instruct", tasks=["smoke"], output="runs/baseline")
candidate = halfbyte.evaluate(checkpoint, tasks=["smoke"], output="runs/candidate")
verdict = halfbyte.gate(baseline, candidate, policy="smoke")
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload
from weakref import WeakKeyDictionary

from halfbyte.records.errors import UserError
from halfbyte.records.record import EvaluationRecord, load_record
from halfbyte.records.run import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from halfbyte.recipes.schema import Recipe, TaskSpec
    from halfbyte.records.record import ModelSummary
    from halfbyte.reports.comparison import Comparison, Verdict
    from halfbyte.sides import Side

Evaluated = EvaluationRecord | str | Path
"""A record that `evaluate` gave in this process, or a folder with records."""

_LOADED: WeakKeyDictionary[PreTrainedModel, tuple[PreTrainedTokenizerBase, ModelSummary, str]] = WeakKeyDictionary()
"""What is known of the models that `load` gave: tokenizer, identity, and what they compute in."""
_FOLDERS: dict[str, Path] = {}
"""Where the records that `evaluate` gave are, by their seals."""


def quantize(
    recipe: str | Path | Recipe,
    output: str | Path,
    *,
    data_root: str | Path | None = None,
    device: str | None = None,
) -> Path:
    """Makes the checkpoint of a recipe, trained where the recipe trains; what is done already is kept.

    Args:
        recipe: A shipped recipe by name, the path of one, or what recipes.find.load_recipe gave.
        output: The run's folder; the checkpoint is in it.
        data_root: Where data sets are looked up first; see recipes.data.data_root.
        device: cpu, cuda, cuda:1, ...; None for CUDA where there is one.

    Returns:
        The exported folder.

    Raises:
        UserError: for whatever a user can mend; see quant.produce.
    """
    from halfbyte.quant import produce
    from halfbyte.recipes.find import load_recipe
    from halfbyte.stages import make_checkpoint

    asked = load_recipe(str(recipe)) if isinstance(recipe, str | Path) else recipe
    job, folder = produce.prepare(asked, device), RunFolder(Path(output))
    produce.require_own_folder(job, folder, force=False)
    with folder.lock():
        make_checkpoint(job, folder, _path(data_root))
    return folder.checkpoint


def load(
    checkpoint: str | Path,
    *,
    weights: Literal["folded", "packed"] = "folded",
    device: str | None = None,
    dtype: str | None = None,
) -> PreTrainedModel:
    """Opens a model, original or exported, from its files as a transformers model in evaluation mode.

    Args:
        checkpoint: Folder, run folder, GGUF file or hub id.
        weights: Whether those of a checkpoint are dequantized once (folded) or stay in 4 or 8 bits (packed).
        device: cpu, cuda, cuda:1, ...; None for CUDA where there is one.
        dtype: bfloat16, float16 or float32; None for the model's own on CUDA and float32 on a CPU.

    Raises:
        UserError: see quant.load.load.
    """
    from halfbyte.quant.load import load_as_it_is

    found = load_as_it_is(str(checkpoint), dtype=dtype or "auto", device=device, weights=weights)
    _LOADED[found.model] = found.tokenizer, found.summary, found.dtype
    return found.model


def evaluate(
    model: str | Path | PreTrainedModel,
    tasks: Sequence[str | TaskSpec],
    output: str | Path,
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    data_root: str | Path | None = None,
    include_path: str | Path | None = None,
    device: str | None = None,
) -> EvaluationRecord:
    """Evaluates a model on lm-eval tasks and returns the record of the first; those of all are in `output`/TASK.

    A record that is there already is kept. Records of originals are kept in the cache too.

    Args:
        model: Folder, run folder, GGUF file, hub id, or what `load` gave.
        tasks: Names, or task blocks of a recipe.
        output: Folder for the records.
        num_fewshot: Of each task that is given by name; None for the task's own.
        limit: First questions of each subtask only, of each task that is given by name.
        data_root: See quantize.
        include_path: A folder of your own tasks; see evaluate.include_path of a recipe.
        device: See load; not for a model that is loaded.

    Raises:
        UserError: see eval.evaluate.evaluate_backend; and for a loaded model that is not from `load`.
    """
    from halfbyte.recipes.find import load_evaluation
    from halfbyte.sides import evaluate_into

    named = {"num_fewshot": num_fewshot, "limit": limit}
    blocks = [{"task": one, **named} if isinstance(one, str) else one.model_dump() for one in tasks]
    settings = load_evaluation({"tasks": blocks, "include_path": None if include_path is None else str(include_path)})
    side, quantized = _side(model, device)
    folders = evaluate_into(Path(output), side, settings, _path(data_root), cached=not quantized)
    records = [load_record(folder) for folder in folders]
    _FOLDERS.update({record.seal: folder for record, folder in zip(records, folders, strict=True)})
    return records[0]


@overload
def compare(baseline: Evaluated, candidates: Evaluated) -> Comparison: ...


@overload
def compare(baseline: Evaluated, candidates: Sequence[Evaluated]) -> list[Comparison]: ...


def compare(baseline: Evaluated, candidates: Evaluated | Sequence[Evaluated]) -> Comparison | list[Comparison]:
    """Compares candidates with their baseline, question by question; nothing is judged.

    Args:
        baseline: A record or a folder with records.
        candidates: One, or a list of them.

    Returns:
        One comparison, or a list of them, for reports.text.render_text and its like.

    Raises:
        UserError: when the sides are not comparable; see reports.compare.compare.
    """
    from halfbyte.reports.evidence import compare_folders

    if isinstance(candidates, EvaluationRecord | str | Path):
        return compare_folders(_folder(baseline), _folder(candidates), None)
    if not candidates:
        raise UserError("no candidate to compare was given", "give a record or a folder with records")
    return [compare_folders(_folder(baseline), _folder(one), None) for one in candidates]


def gate(baseline: Evaluated, candidate: Evaluated, policy: str | Path = "release") -> Verdict:
    """The verdict of a policy on a candidate: pass, fail, inconclusive or anomaly, with the reason and what to do next.

    Args:
        baseline: A record or a folder with records.
        candidate: Another.
        policy: A shipped policy by name, or the path of one.

    Raises:
        UserError: when the sides are not comparable or the policy does not apply; see reports.gate.judge.
    """
    from halfbyte.reports.evidence import compare_folders
    from halfbyte.reports.policy import load_policy

    verdict = compare_folders(_folder(baseline), _folder(candidate), load_policy(str(policy))).verdict
    assert verdict is not None, "a comparison with a policy has a verdict"
    return verdict


def _side(model: str | Path | PreTrainedModel, device: str | None) -> tuple[Side, bool]:
    """The model as the front door knows it, and whether its records stay out of the cache."""
    from halfbyte.quant.load import Loaded, describe_as_it_is, load_as_it_is
    from halfbyte.sides import Side, identify

    if isinstance(model, str | Path):
        name = str(model)
        identity = identify(name, device=device)
        opener, describer = partial(load_as_it_is, name, device=device), partial(describe_as_it_is, name)
        return Side(identity.digest, identity.device, identity.dtype, opener, describer), identity.quantized
    if model not in _LOADED:
        raise UserError(
            "the model is not from halfbyte.load", "save it to a folder and give that: what ships is judged"
        )
    tokenizer, summary, dtype = _LOADED[model]
    loaded = Loaded(model, tokenizer, summary, dtype)
    describer = partial(describe_as_it_is, summary.name)
    return Side(summary.digest, model.device.type, dtype, lambda: loaded, describer), True


def _folder(side: Evaluated) -> Path:
    if not isinstance(side, EvaluationRecord):
        return Path(side)
    if side.seal not in _FOLDERS:
        raise UserError(f"nobody knows where the record of {side.task} is", "give its folder in the record's place")
    return _FOLDERS[side.seal]


def _path(name: str | Path | None) -> Path | None:
    return None if name is None else Path(name)
