"""The tokens of a recipe's benchmarks: counted with its tokenizer where it and the questions are here, else stated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.recipes.benchmarks import benchmarks
from halfbyte.recipes.data import NotAtHand
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec

if TYPE_CHECKING:
    from halfbyte.eval.passes import Shape
    from halfbyte.quant.produce import Job


@dataclass(frozen=True, slots=True)
class TaskTokens:
    """What one task asks of a model; None is what is not known."""

    task: str
    questions: int | None
    samples: int
    prompts: int | None
    """Prompt tokens that are computed: what prompts share once, and the samples of a question once."""
    generated: int | None
    """At most: every text goes on to its limit. 0 where nothing is generated."""
    source: str
    """Where the numbers are from."""
    passes: tuple[Shape, ...] = ()
    """The largest forward passes over prompts; none where the questions are not here."""
    slots: int = 0
    slot_tokens: int = 0
    longest: int | None = None
    """Tokens of the longest prompt."""
    outcomes: bool = True
    """Whether each question is right or wrong."""
    metrics: tuple[str, ...] = ()
    """What the task may be judged by; none where that is not known."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("questions", "samples", "prompts", "generated", "longest", "source")
        return {name: getattr(self, name) for name in names}


def count_tokens(job: Job, data_root: Path | None) -> list[TaskTokens]:
    """Counts the tokens of each task of a recipe.

    Args:
        job: The recipe made ready; its model needs no weights.
        data_root: See recipes.data.data_root.

    Raises:
        UserError: for an unknown task, or settings that the tokenizer, the model or the task refuse.
    """
    from halfbyte.eval.resolve import require_tasks
    from halfbyte.quant.models import empty_model, has_tokenizer, open_tokenizer
    from halfbyte.recipes.data import data_root as find_root

    settings = job.recipe.evaluate
    require_tasks(settings)
    if not has_tokenizer(job.source):
        why = "the model's tokenizer is not here"
        return [stated_tokens(spec, settings, why, job.device.type) for spec in settings.tasks]
    tokenizer, root = open_tokenizer(job.source), find_root(data_root)
    _, model = empty_model(job.source)
    return [_counted(spec, settings, model, tokenizer, root, job.device.type) for spec in settings.tasks]


def _counted(
    spec: TaskSpec, settings: EvaluateSpec, model: Any, tokenizer: Any, root: Path | None, device: str
) -> TaskTokens:
    from halfbyte.eval.plan import plan_task

    try:
        plan = plan_task(model, tokenizer, spec, settings, root, device=device)
    except NotAtHand as error:
        return stated_tokens(spec, settings, error.message, device)
    return TaskTokens(
        task=spec.task,
        questions=plan.questions,
        samples=max(1, round(plan.texts / plan.questions)),
        prompts=plan.distinct_tokens,
        generated=plan.most_generated,
        source="counted with the model's tokenizer",
        passes=plan.passes,
        slots=plan.slots,
        slot_tokens=plan.slot_tokens,
        longest=plan.longest,
        outcomes=plan.outcomes,
        metrics=plan.metrics,
    )


def stated_tokens(spec: TaskSpec, settings: EvaluateSpec, reason: str, device: str) -> TaskTokens:
    """What recipes/benchmarks.yaml says of a task.

    A limit cuts each subtask: tokens are taken to be in proportion to the questions.

    Args:
        spec: The task.
        settings: What all tasks share.
        reason: Why its questions cannot be counted here.
        device: Kind of device: cpu or cuda.
    """
    from halfbyte.eval.generation import SLOTS
    from halfbyte.eval.passes import capacity

    every = benchmarks()
    known = every.tasks.get(spec.task)
    if known is None:
        return TaskTokens(spec.task, None, spec.samples or 1, None, None, f"not known: {reason}")
    questions = min(known.questions, (spec.limit or known.questions) * known.subtasks)
    samples = spec.samples or known.samples
    shots = spec.num_fewshot
    count = next((one for one in known.counts if shots is None or one.num_fewshot == shots), None)
    limit = (spec.gen_kwargs or {}).get("max_gen_toks", known.most_generated)
    prompts = None if count is None else round(count.distinct * questions / known.questions)
    source = "stated: the number of questions alone" if count is None else f"stated: counted with {every.tokenizer}"
    texts = questions * samples if limit else 0
    slots = slot_tokens = 0
    if limit and count is not None:
        slots = min(settings.batch_size or SLOTS[device], texts)
        slot_tokens = capacity(count.longest + int(limit), device)
    return TaskTokens(
        task=spec.task,
        questions=questions,
        samples=samples,
        prompts=prompts,
        generated=None if count is None and not limit else texts * int(limit),
        source=f"{source}; {reason}",
        slots=slots,
        slot_tokens=slot_tokens,
        longest=None if count is None else count.longest,
        outcomes=True,
        metrics=() if spec.metric_name is None else (spec.metric_name,),
    )
