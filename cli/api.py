"""The Python API: quantize, load, evaluate, compare and gate, each a few lines over what the commands do.

checkpoint = halfbyte.quantize("demo-nvfp4", output="runs/demo-nvfp4")
baseline = halfbyte.evaluate("models/SmolLM2-135M-Instruct", tasks=["smoke"], output="out/bf16")
candidate = halfbyte.evaluate(checkpoint, tasks=["smoke"], output="out/nvfp4")
verdict = halfbyte.gate(baseline, candidate, policy="smoke")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from pydantic import PrivateAttr

from halfbyte.records.errors import UserError, unknown_name
from halfbyte.records.record import EvaluationRecord, load_record
from halfbyte.records.run import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from halfbyte.recipes.schema import Recipe, TaskSpec
    from halfbyte.reports.comparison import Comparison, Verdict
    from halfbyte.sides import Side

_LOADED: WeakKeyDictionary[PreTrainedModel, tuple[str, dict[str, Any], list[Any]]] = WeakKeyDictionary()
"""Of each model that `load` gave: its name, the fields of quant.load.Loaded beside the model, and its state then."""


class Evaluation(EvaluationRecord):
    """What `evaluate` gives: the record of its first task, which knows the records of all of them."""

    _folders: list[Path] = PrivateAttr(default_factory=list)

    @property
    def folders(self) -> list[Path]:
        """The folder of each task's record, in the order of the tasks."""
        return self._folders

    @property
    def records(self) -> dict[str, EvaluationRecord]:
        """The record of each task, read from its folder."""
        return {record.task: record for record in map(load_record, self._folders)}


Weights = Literal["folded", "packed"]
"""As quant.build has it, which imports torch."""
Records = Evaluation | str | Path
"""One side of a comparison: what `evaluate` gave, or a folder with records."""


def quantize(
    recipe: str | Path | Recipe,
    output: str | Path,
    *,
    data_root: str | Path | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    force: bool = False,
) -> Path:
    """Makes the checkpoint of a recipe, trained where the recipe trains; what is done already is kept.

        checkpoint = halfbyte.quantize("demo-nvfp4", output="runs/x", overrides=["model.id=path/to/model"])

    Args:
        recipe: A shipped recipe by name, the path of a .yaml file, or what recipes.find.load_recipe gave.
        output: The run's folder; the checkpoint is in it.
        data_root: Where data sets are looked up first; None for $HALFBYTE_DATA.
        overrides: As --set: `field=value` each. Only for a name or a path.
        device: cpu, cuda, cuda:1, ...; None for CUDA where there is one.
        force: Replace what another run wrote into `output`.

    Returns:
        The exported folder.

    Raises:
        UserError: for an unknown recipe, a model that cannot be quantized that way, an `output` of another recipe; see
            quant.produce.produce.
    """
    from halfbyte.quant import produce
    from halfbyte.recipes.find import load_recipe
    from halfbyte.recipes.schema import Recipe
    from halfbyte.stages import make_in_folder

    if not isinstance(recipe, str | Path | Recipe):
        raise UserError(f"{recipe!r} is no recipe", "give a name, the path of a .yaml file, or what load_recipe gave")
    if isinstance(overrides, str):
        raise UserError(f"overrides is the text {overrides!r}", f"give a list: overrides=[{overrides!r}]")
    if isinstance(recipe, str | Path):
        recipe = load_recipe(str(recipe), overrides)
    elif overrides:
        raise UserError("overrides belong to a recipe's name or path", "give them to load_recipe")
    folder = RunFolder(Path(output))
    make_in_folder(produce.prepare(recipe, device), folder, _path(data_root), force=force)
    return folder.checkpoint


def load(
    checkpoint: str | Path,
    *,
    weights: Weights = "folded",
    device: str | None = None,
    dtype: str | None = None,
) -> PreTrainedModel:
    """Opens a model, exported or original, from its files as a transformers model in evaluation mode.

        model = halfbyte.load("runs/demo-nvfp4/checkpoint", device="cuda")

    Args:
        checkpoint: Checkpoint, run folder, model folder, GGUF file or hub id.
        weights: Whether those of a checkpoint are dequantized once (folded) or stay in 4 or 8 bits (packed).
        device: See quantize.
        dtype: To compute in: bfloat16, float16, float32; None for the model's own on CUDA and float32 on a CPU.

    Raises:
        UserError: when there is no such model, or it is damaged, or is in a format that cannot be read back.
    """
    from halfbyte.quant.load import load_as_it_is

    if weights not in ("folded", "packed"):
        raise unknown_name("way to hold weights", weights, ["folded", "packed"])
    name = str(checkpoint)
    found = load_as_it_is(name, dtype=dtype or "auto", device=device, weights=weights)
    rest = {"tokenizer": found.tokenizer, "summary": found.summary, "dtype": found.dtype}
    _LOADED[found.model] = name, rest, _state(found.model)
    return found.model


def evaluate(
    model: str | Path | PreTrainedModel,
    tasks: str | TaskSpec | Sequence[str | TaskSpec],
    output: str | Path,
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    data_root: str | Path | None = None,
    include_path: str | Path | None = None,
    device: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Evaluates a model on lm-eval tasks; each task's record is `output`/TASK, and what is there already is kept.

        record = halfbyte.evaluate("runs/x/checkpoint", tasks=["arc_easy", "gsm8k"], output="runs/y", limit=100)
        print(record.metrics[0].value, record.records["gsm8k"].metrics[0].value)

    Args:
        model: What `load` takes, or what it gave.
        tasks: Tasks or groups by name, or task blocks of a recipe.
        output: Folder for the records.
        num_fewshot: Examples in the prompt of each task named; None for the task's own number.
        limit: First questions of each subtask of each task named; None for all.
        data_root: See quantize.
        include_path: A folder of your own tasks; see recipes.schema.EvaluateSpec.
        device: See quantize; None for a model from `load`, which is where it is.
        settings: More fields of a recipe's evaluate block: {"apply_chat_template": True}.

    Returns:
        The record of the first task; `records` has those of all, and `compare` and `gate` look at all of them.

    Raises:
        UserError: for an unknown task, data that is not to be had, prompts that do not fit, a loaded model that was
            changed or is not from `load`, and an `output` that holds other records.
    """
    from halfbyte.recipes.find import load_evaluation
    from halfbyte.recipes.schema import TaskSpec
    from halfbyte.sides import evaluate_into

    several = [tasks] if not isinstance(tasks, Sequence) or isinstance(tasks, str) else tasks
    strange = [one for one in several if not isinstance(one, str | TaskSpec)]
    if strange:
        raise UserError(f"{strange[0]!r} is no task", "give names, or task blocks: recipes.schema.TaskSpec")
    taken = sorted({"tasks", "include_path"} & (settings or {}).keys())
    if taken:
        raise UserError(f"settings has {taken[0]}, which is an argument of its own", f"give {taken[0]}=...")
    if not several:
        raise UserError("no task to evaluate was named", "give lm-eval tasks, or halfbyte's: smoke, math_500, ...")
    named = {"num_fewshot": num_fewshot, "limit": limit}
    block = {"tasks": [{"task": one, **named} if isinstance(one, str) else one.model_dump() for one in several]}
    own = {} if include_path is None else {"include_path": str(include_path)}
    spec = load_evaluation({**(settings or {}), **own, **block})
    side, cached = _side(model, spec.dtype, spec.weights, device)
    folders = evaluate_into(Path(output), side, spec, _path(data_root), cached=cached)
    record = Evaluation.model_validate(load_record(folders[0]).model_dump())
    record._folders = folders
    return record


def compare(
    baseline: Records | Sequence[Records],
    candidate: Records | Sequence[Records],
    *,
    policy: str | Path | None = None,
) -> Comparison:
    """Compares a candidate with its baseline, question by question; a loss is shown and is no error.

        comparison = halfbyte.compare("out/bf16", "out/nvfp4")
        print(comparison.tasks[0].result.loss, comparison.tasks[0].result.interval)

    Args:
        baseline: What `evaluate` gave, a folder with records, or several of them that are of one model.
        candidate: The same of the other model. For several candidates call it once for each; reports.text.render_text
            and its like make one table of all.
        policy: Also judge by this policy; see gate.

    Raises:
        UserError: when the two are not comparable, a side mixes models, or a record is missing or damaged.
    """
    from halfbyte.reports.compare import compare as compare_records
    from halfbyte.reports.evidence import compare_folders
    from halfbyte.reports.policy import load_policy

    judge = None if policy is None else load_policy(str(policy))
    ours, theirs = _folders(baseline), _folders(candidate)
    if len(ours) == len(theirs) == 1:
        return compare_folders(ours[0], theirs[0], judge)
    return compare_records(ours, theirs, policy=judge)


def gate(
    baseline: Records | Sequence[Records],
    candidate: Records | Sequence[Records],
    policy: str | Path = "release",
) -> Verdict:
    """Decides on a candidate: pass, fail, inconclusive or anomaly, with the reason and what to do next.

        verdict = halfbyte.gate("out/bf16", "out/nvfp4", policy="release")
        sys.exit(verdict.exit_code)

    Args:
        baseline: See compare.
        candidate: See compare.
        policy: A shipped policy by name, or the path of one.

    Raises:
        UserError: when the two are not comparable, or the policy is unknown or does not apply to what was evaluated.
    """
    if policy is None:
        raise UserError("a verdict needs a policy", "`halfbyte policies` lists them; compare gives figures without one")
    verdict = compare(baseline, candidate, policy=policy).verdict
    assert verdict is not None, "a comparison with a policy has a verdict"
    return verdict


def _side(model: str | Path | PreTrainedModel, dtype: str, weights: Weights, device: str | None) -> tuple[Side, bool]:
    """The model for the code that evaluates, and whether its records are kept in the shared cache."""
    from halfbyte.quant.load import Loaded, describe_as_it_is, load_as_it_is
    from halfbyte.sides import Side, identify

    loaded = None
    if not isinstance(model, str | Path):
        if not hasattr(model, "named_parameters") or model not in _LOADED:
            raise UserError("the model is not from halfbyte.load", "save it and give its folder: what ships is judged")
        name, rest, state = _LOADED[model]
        if state != _state(model):
            raise UserError(
                f"the model was changed since it was loaded from {name}",
                "save it and give its folder: what ships is judged",
            )
        if device is not None or dtype != "auto":
            raise UserError("a loaded model has its device and dtype already", "give them to halfbyte.load")
        loaded = Loaded(model, **rest)
        dtype, device = loaded.dtype, str(model.device)
    else:
        name = str(model)
    identity = identify(name, dtype=dtype, device=device)
    opener = partial(load_as_it_is, name, dtype=dtype, device=device, weights=weights)
    describer = partial(describe_as_it_is, name)
    if loaded is not None:
        opener = partial(_given, loaded)
    return Side(identity.digest, identity.device, identity.dtype, opener, describer), not identity.quantized


def _given(loaded: Any) -> Any:
    return loaded


def _state(model: Any) -> list[Any]:
    """What changes when a model's weights do, or the type they compute in; not when it moves to another device."""
    # What is loaded under torch.inference_mode has no version.
    parts = model.named_parameters()
    return [(name, str(one.dtype), None if one.is_inference() else one._version) for name, one in parts]


def _folders(side: Records | Sequence[Records]) -> list[Path]:
    several = [side] if isinstance(side, Evaluation | EvaluationRecord | str | Path) else side
    found: list[Path] = []
    for one in several:
        if isinstance(one, Evaluation):
            found += one.folders
        elif isinstance(one, EvaluationRecord):
            raise UserError(f"a record of {one.task} does not know its folder", "give the folder in its place")
        else:
            found.append(Path(one).expanduser())
    return found


def _path(name: str | Path | None) -> Path | None:
    return None if name is None else Path(name)
