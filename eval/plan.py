"""What an evaluation will take, from tokenizer and data alone: questions, tokens, and how long it may run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance

from halfbyte.eval.backend import Generated, Prompt
from halfbyte.eval.generation import SLOTS
from halfbyte.eval.hf import HFDescription, plan_batches
from halfbyte.eval.lm import JournaledLM
from halfbyte.eval.passes import Shape, capacity, largest, shape_of
from halfbyte.eval.questions import Questions
from halfbyte.eval.resolve import quiet_lm_eval
from halfbyte.eval.scorer import BUDGETS, PACKED
from halfbyte.eval.sharing import Batch, Request, plan
from halfbyte.eval.trial import depends_on_length
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.errors import UserError
from halfbyte.records.record import RECORD_FILE, EvaluationRecord, load_record


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """What one task asks of a model."""

    task: str
    questions: int
    prompt_tokens: int
    """Of all prompts as the model is fed with them, continuations that are scored included; the prompt of k samples
    counts once a sample."""
    distinct_tokens: int
    """Those of them that are computed: shared beginnings once."""
    longest: int
    """Tokens of the longest prompt."""
    truncated: int
    """Questions whose prompt does not fit and would be cut."""
    texts: int
    """Texts to be generated."""
    most_generated: int
    """Tokens generated when every text goes on to its limit."""
    expected_generated: int | None
    """Tokens generated when texts are as long as in an earlier record of the model; None where there is none, and
    where nothing is generated."""
    seconds: float | None
    """Expected, at the speeds of earlier records of the model on this hardware, the largest of its kind; None where
    there is none of some size."""
    passes: tuple[Shape, ...] = ()
    """The largest forward passes over prompts."""
    outcomes: bool = True
    """Whether a question is right or wrong, or has several samples that are; not a perplexity."""
    metrics: tuple[str, ...] = ()
    """What the task may be judged by: the metric that is named, else all it has."""
    slots: int = 0
    """Texts generated at once."""
    slot_tokens: int = 0
    """Tokens of keys and values that each of them has room for when the longest goes on to its limit."""

    @property
    def generated(self) -> int:
        """Expected where that is known, else the most."""
        return self.most_generated if self.expected_generated is None else self.expected_generated


def plan_task(
    model: Any,
    tokenizer: Any,
    spec: TaskSpec,
    settings: EvaluateSpec,
    root: Path | None,
    *,
    device: str,
    known: Sequence[EvaluationRecord] = (),
) -> TaskPlan:
    """Builds all prompts of a task and counts; nothing is computed and no weights are needed.

    Args:
        model: The model without weights, on the meta device: its configuration is looked at.
        tokenizer: Its tokenizer.
        spec: The task.
        settings: What all tasks share.
        root: The data root.
        device: Where the model would be: cpu or cuda.
        known: Earlier records of the model on this hardware.

    Raises:
        UserError: see eval.evaluate.evaluate_backend; prompts that do not fit are counted instead.
    """
    backend = _Tokenizing(model, tokenizer, settings, device)
    if settings.apply_chat_template and not backend.chat_template(True):
        raise UserError("apply_chat_template is set, but the tokenizer has no chat template", "evaluate without it")
    lm = _Counting(backend, settings.seed)
    questions = Questions(spec, settings, root)
    questions.warn_of_a_missing_template(tokenizer)
    for method, group in groupby(questions.requests(lm), key=lambda request: str(request.request_type)):
        requests = [request for one in group for request in [one] * int(one.repeats or 1)]
        getattr(lm, method)(requests)
    known = [record for record in known if record.fingerprint.backend == settings.backend]
    same = [record for record in known if record.fingerprint.task == spec.task]
    lengths = [record.speed.generated_per_sample for record in same if record.speed]
    length = next((value for value in reversed(lengths) if value is not None), None)
    expected = None if length is None or not lm.texts else min(round(length * lm.texts), lm.most_generated)
    return TaskPlan(
        task=spec.task,
        questions=len(lm.book.asked),
        prompt_tokens=lm.book.tokens,
        distinct_tokens=lm.distinct_tokens,
        longest=max(one.tokens or 0 for one in lm.book.asked.values()),
        truncated=sum(one.cut > 0 for one in lm.book.asked.values()),
        texts=lm.texts,
        most_generated=lm.most_generated,
        expected_generated=expected,
        seconds=_seconds(lm, expected, known),
        passes=tuple(largest(backend.shapes)),
        outcomes=not any(task.OUTPUT_TYPE == "loglikelihood_rolling" for task in questions.tasks.values()),
        metrics=questions.metrics(),
        slots=lm.slots,
        slot_tokens=lm.slot_tokens,
    )


def earlier_records(folders: Iterable[Path], digest: str, hardware: dict[str, Any]) -> list[EvaluationRecord]:
    """The records of a model that were computed on this hardware, oldest first.

    Args:
        folders: Where records may be, each a folder or none.
        digest: The model's.
        hardware: records.manifest.hardware().
    """
    same = ("processor", "cuda")
    found = [load_record(path.parent) for folder in folders for path in folder.glob(f"*/{RECORD_FILE}")]
    return sorted(
        (
            record
            for record in found
            if record.model.digest == digest and all(record.hardware.get(name) == hardware.get(name) for name in same)
        ),
        key=lambda record: record.created,
    )


ENOUGH = 5000
"""Tokens: a speed over fewer of them is mostly that of the first batch."""


def _seconds(lm: _Counting, expected: int | None, known: Sequence[EvaluationRecord]) -> float | None:
    """Scored tokens at their rate, and generated ones at theirs, which has the prompts of those in it."""
    speeds = [(record.health.samples or 0, record.speed) for record in known if record.speed is not None]
    scored = [(speed.distinct_tokens, speed.scored_per_second) for _, speed in speeds]
    generated = [(count * (speed.generated_per_sample or 0.0), speed.generated_per_second) for count, speed in speeds]
    total = 0.0
    for tokens, rates in ((lm.scored_tokens, scored), (lm.most_generated if expected is None else expected, generated)):
        if tokens:
            size, rate = max(((size, rate) for size, rate in rates if rate), default=(0, None))
            if rate is None or size < ENOUGH:
                return None
            total += tokens / rate
    return total


class _Tokenizing(HFDescription):
    """A backend that plans as the hf backend does, and answers nothing."""

    def __init__(self, model: Any, tokenizer: Any, settings: EvaluateSpec, device: str) -> None:
        with quiet_lm_eval():
            super().__init__(model, tokenizer, max_length=settings.max_length)
        self._budget = settings.batch_tokens or BUDGETS[device]
        self._share = depends_on_length(model.config) is None
        self.device = device
        self.most = settings.batch_size or SLOTS[device]
        self.shapes: list[Shape] = []
        """Of the largest passes of each call."""

    def score_batches(self, requests: list[Request]) -> list[Batch]:
        batches = plan(requests, self._budget, share=self._share, pack=PACKED[self.device] if self._share else None)
        self.shapes += largest(shape_of(batch, requests) for batch in batches)
        return batches

    def note_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Looks at the beginnings of the longest prompts, which are computed together first."""
        first = [prompts[at].tokens or () for at in plan_batches(prompts, self.most)[0]]
        several = [Request(tokens[:-1], tokens[-1:]) for tokens in first if len(tokens) > 1]
        batches = plan(several, self._budget)
        self.shapes += largest(Shape(len(one.rows), one.width, one.prefix) for one in batches if one.rows)

    def score(self, requests: list[Request], batch: Any) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def generation_batches(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return [list(range(len(prompts)))]

    def generate(self, prompts: Sequence[Prompt]) -> list[Generated]:
        raise NotImplementedError


class _Counting(JournaledLM):
    """Counts what would be computed, in the place of computing it."""

    def __init__(self, backend: _Tokenizing, seed: int) -> None:
        super().__init__(backend, Path(), "", seed=seed, allow_truncated=True)
        self._planner = backend
        self.texts = 0
        self.most_generated = 0
        self.scored_tokens = 0
        self.slots = self.slot_tokens = 0

    def _run(
        self,
        _method: str,
        requests: list[Instance],
        batches: list[list[int]],
        _answer: Any,
        _owners: Any,
        work: Sequence[int] | None = None,
    ) -> list[Any]:
        if work is not None:
            self.scored_tokens += sum(work)
            return [[0.0, False]] * sum(map(len, batches))
        return [["", 0, None, None]] * len(requests)

    def _prompts(self, requests: list[Instance]) -> list[Prompt]:
        prompts = super()._prompts(requests)
        self.texts += len(prompts)
        self.most_generated += sum(prompt.sampling.max_gen_toks for prompt in prompts)
        if prompts:
            self._planner.note_prompts(prompts)
            self.slots = min(self._planner.most, max(self.slots, len(prompts)))
            longest = max(len(prompt.tokens or ()) + prompt.sampling.max_gen_toks for prompt in prompts)
            self.slot_tokens = max(self.slot_tokens, capacity(longest, self._planner.device))
        return prompts
