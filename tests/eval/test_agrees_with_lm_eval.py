"""On real models and real questions: each task's answers are those of lm-eval's hf backend.

In float32 on a CPU they are the same but for the order of sums. In bfloat16 on a GPU lm-eval's own answers change with
the batch size; ours are no further from them than they are from each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM

from halfbyte.eval.evaluate import evaluate_task
from halfbyte.eval.resolve import find_manager, load_task, quiet_lm_eval
from halfbyte.quant.load import Loaded, load
from halfbyte.recipes.schema import EvaluateSpec, ModelSpec, TaskSpec
from halfbyte.records.record import load_record, read_samples

pytestmark = pytest.mark.real

MODELS = ("smollm2", "inhouse")
"""Fixtures that name the folders of those that are there."""
TASKS = {
    "arc_easy": TaskSpec(task="arc_easy", limit=20),
    "arc_challenge": TaskSpec(task="arc_challenge", limit=12),
    "mmlu, no shots": TaskSpec(task="mmlu_anatomy", num_fewshot=0, limit=12),
    "mmlu, five shots": TaskSpec(task="mmlu_anatomy", num_fewshot=5, limit=5),
    "gsm8k, five shots": TaskSpec(task="gsm8k", num_fewshot=5, limit=2, gen_kwargs={"max_gen_toks": 32}),
}
MANY = [
    TaskSpec(task="arc_easy", limit=100),
    TaskSpec(task="arc_challenge", limit=100),
    *(
        TaskSpec(task=f"mmlu_{subject}", num_fewshot=shots, limit=40)
        for shots in (0, 5)
        for subject in ("anatomy", "marketing", "high_school_european_history")
    ),
]
GENERATED = TaskSpec(task="gsm8k", num_fewshot=5, limit=32, gen_kwargs={"max_gen_toks": 96})
SIZES = (1, 8, 64)
"""Of lm-eval's batches on a GPU: of one question, and so many that matrix products take other kernels."""

Answers = dict[tuple[Any, ...], dict[str, Any]]
"""lm-eval's sample rows, ours in its form, by filter and doc_id."""


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    return load(ModelSpec(id=str(request.getfixturevalue(request.param))), device="cpu")


def _ours(loaded: Loaded, spec: TaskSpec, data_root: Path, folder: Path) -> Answers:
    settings = EvaluateSpec(tasks=[spec], canary=None)
    evaluate_task(loaded.model, loaded.tokenizer, spec, settings, loaded.summary, folder, data_root=data_root)
    return {(one.filter, one.doc_id): one.raw for one in read_samples(folder, load_record(folder))}


def _plain(loaded: Loaded, spec: TaskSpec, data_root: Path, batch_size: int = 4) -> Answers:
    with quiet_lm_eval():
        found = simple_evaluate(
            model=HFLM(
                pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size, softmax_dtype="float32"
            ),
            tasks=load_task(spec.task, data_root),
            num_fewshot=spec.num_fewshot,
            limit=spec.limit,
            gen_kwargs=spec.gen_kwargs,
            task_manager=find_manager(spec.task),
        )
    return {(row["filter"], row["doc_id"]): row for row in found["samples"][spec.task]}


@pytest.mark.parametrize("name", TASKS)
def test_answers_of_the_real_model(name: str, loaded: Loaded, data_root: Path, tmp_path: Path) -> None:
    spec = TASKS[name]
    ours, theirs = _ours(loaded, spec, data_root, tmp_path / "r"), _plain(loaded, spec, data_root)
    assert ours.keys() == theirs.keys()
    assert len(ours) >= (spec.limit or 0)
    for key, row in theirs.items():
        sample = ours[key]
        assert sample["prompt_hash"] == row["prompt_hash"]
        assert {name: sample[name] for name in row["metrics"]} == {name: row[name] for name in row["metrics"]}
        for one, other in zip(sample["resps"], row["resps"], strict=True):
            if spec.task == "gsm8k":
                assert one == other
            else:  # float32 on a CPU: the order of a sum is all that may differ
                assert float(one[0][0]) == pytest.approx(float(other[0][0]), abs=1e-4)
                assert str(one[0][1]) == str(other[0][1])


def _values(answers: Answers) -> list[list[float]]:
    """The log-likelihoods of each question's choices, in nats."""
    return [[float(one[0][0]) for one in answers[key]["resps"]] for key in sorted(answers)]


def _apart(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> tuple[float, float, int]:
    """Root mean square and largest difference of log-likelihoods in nats, and the questions with another choice."""
    squares = [(a - b) ** 2 for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    best = [[row.index(max(row)) for row in side] for side in (one, other)]
    return (
        math.sqrt(math.fsum(squares) / len(squares)),
        math.sqrt(max(squares)),
        sum(a != b for a, b in zip(*best, strict=True)),
    )


def _at_most(ours: float, noise: float) -> bool:
    """Whether a count is no larger than one that chance made, as far as three standard deviations of both tell."""
    return ours <= noise + 3 * math.sqrt(2 * noise + 1)


@dataclass
class Measured:
    """What our scorer and lm-eval's hf backend answered."""

    scores: dict[str, list[list[float]]]
    """By side (ours, hf at N, float32), the log-likelihoods of each question's choices."""
    texts: dict[str, list[Any]]
    """By side (not float32), the generated texts of each question."""

    def noise(self) -> tuple[float, float, int]:
        """As _apart gives it, for the two batch sizes of hf that are furthest from each other."""
        pairs = combinations([name for name in self.scores if name.startswith("hf")], 2)
        return max(_apart(self.scores[one], self.scores[other]) for one, other in pairs)

    def report(self) -> None:
        """Prints all differences."""
        print(f"\n{len(self.scores['ours'])} questions")
        for one, other in combinations(self.scores, 2):
            root, most, choices = _apart(self.scores[one], self.scores[other])
            print(f"{one:>8} - {other:8}: {root:.4f} nats rms, {most:.3f} at most, {choices} other choices")
        for one, other in combinations(self.texts, 2):
            print(f"{one:>8} - {other:8}: {self.texts_apart(one, other)} of {len(self.texts[one])} texts differ")

    def texts_apart(self, one: str, other: str) -> int:
        """Questions with another text."""
        return sum(a != b for a, b in zip(self.texts[one], self.texts[other], strict=True))


def measure_in_bfloat16(
    folder: Path, data_root: Path, scratch: Path, *, device: str, scored: Sequence[TaskSpec], generated: TaskSpec
) -> Measured:
    """Asks our scorer, lm-eval's hf backend at SIZES, and that in float32."""
    loaded = load(ModelSpec(id=str(folder)), dtype="bfloat16", device=device)
    exact = load(ModelSpec(id=str(folder)), dtype="float32", device=device)
    found = Measured({}, {})
    for at, spec in enumerate([*scored, generated]):
        sides = {"ours": _ours(loaded, spec, data_root, scratch / str(at))}
        sides |= {f"hf at {size}": _plain(loaded, spec, data_root, size) for size in SIZES}
        if spec is not generated:
            sides["float32"] = _plain(exact, spec, data_root, 16)
        reference = sides["ours"]
        for name, answers in sides.items():
            assert answers.keys() == reference.keys()
            assert all(row["prompt_hash"] == reference[key]["prompt_hash"] for key, row in answers.items())
            if spec is generated:
                found.texts[name] = [answers[key]["resps"] for key in sorted(answers)]
            else:
                found.scores.setdefault(name, []).extend(_values(answers))
    found.report()
    return found


@pytest.fixture(scope="module", params=MODELS)
def measured(request: pytest.FixtureRequest, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """On a GPU, for each real model that is there."""
    folder: Path = request.getfixturevalue(request.param)
    scratch = tmp_path_factory.mktemp("bfloat16")
    return measure_in_bfloat16(folder, data_root, scratch, device="cuda", scored=MANY, generated=GENERATED)


@pytest.mark.gpu
def test_in_bfloat16_we_are_as_near_to_float32_as_lm_eval_is(measured: Measured) -> None:
    theirs = max(_apart(measured.scores[f"hf at {size}"], measured.scores["float32"])[0] for size in SIZES)
    assert _apart(measured.scores["ours"], measured.scores["float32"])[0] <= 1.1 * theirs


@pytest.mark.gpu
def test_in_bfloat16_scores_differ_no_more_than_two_batch_sizes_of_lm_eval(measured: Measured) -> None:
    root, _, choices = measured.noise()
    for size in SIZES:
        ours, _, other_choices = _apart(measured.scores["ours"], measured.scores[f"hf at {size}"])
        assert ours <= 1.25 * root
        assert _at_most(other_choices, choices)


@pytest.mark.gpu
def test_in_bfloat16_texts_differ_no_more_than_two_batch_sizes_of_lm_eval(measured: Measured) -> None:
    sizes = [f"hf at {size}" for size in SIZES]
    noise = max(measured.texts_apart(one, other) for one, other in combinations(sizes, 2))
    assert _at_most(min(measured.texts_apart("ours", size) for size in sizes), noise)
