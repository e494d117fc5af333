"""The whole of MMLU, five-shot, beside lm-eval on one GPU in one run: wall time, scoring time, and the matrix peak."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from bench_scorer import _random_model
from lm_eval.models.huggingface import HFLM

from halfbyte.eval.evaluate import evaluate_task
from halfbyte.eval.resolve import quiet_lm_eval
from halfbyte.eval.scorer import PrefixScorer
from halfbyte.quant.models import locate, open_tokenizer
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.record import ModelSummary, read_samples

pytestmark = [pytest.mark.bench, pytest.mark.real, pytest.mark.gpu]
TASK = "mmlu"
SUMMARY = ModelSummary(name="random", digest="0" * 64, format="bfloat16", bytes_on_disk=1, bits_per_weight=16.0)


class _Timed:
    """Seconds within a function, and what it returned."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds, self.returned = function, 0.0, list[Any]()

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            torch.cuda.synchronize()
            start = time.perf_counter()
            found = self.function(instance, *arguments, **options)
            torch.cuda.synchronize()
            self.seconds += time.perf_counter() - start
            self.returned.append(found)
            return found

        return call


@contextmanager
def _timed(owner: type, name: str) -> Iterator[_Timed]:
    real = getattr(owner, name)
    timed = _Timed(real)
    setattr(owner, name, timed)
    try:
        yield timed
    finally:
        setattr(owner, name, real)


def _matmul_peak() -> float:
    """FLOP/s of a large bfloat16 matrix product, the best of ten."""
    size, best = 8192, 0.0
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def _theirs(plain: Any, size: int, limit: int | None) -> tuple[float, float, dict[tuple[str, int], int]] | None:
    """Wall seconds, those of scoring, and the letter chosen for each (task, doc_id); None where memory is short."""
    plain.batch_size_per_gpu = size
    torch.cuda.empty_cache()
    start = time.perf_counter()
    try:
        with _timed(HFLM, "_loglikelihood_tokens") as scoring, quiet_lm_eval():
            found: Any = lm_eval.simple_evaluate(
                model=plain, tasks=[TASK], num_fewshot=5, limit=limit, log_samples=True, random_seed=1234,
                numpy_random_seed=1234, torch_random_seed=1234, fewshot_random_seed=1234,
            )  # fmt: skip
    except torch.OutOfMemoryError:  # its log-probabilities of the whole vocabulary at each position
        print(f"\nhf backend, batch size {size}, {limit or 'all'} a subject: out of memory")
        return None
    wall = time.perf_counter() - start
    chosen = {
        (task, int(sample["doc_id"])): _largest([float(answer[0]) for answer in sample["filtered_resps"]])
        for task, samples in found["samples"].items()
        for sample in samples
    }
    return wall, scoring.seconds, chosen


def _largest(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _differing(one: dict[Any, int], other: dict[Any, int]) -> float:
    assert one.keys() == other.keys()
    return sum(one[key] != other[key] for key in one) / len(one)


def test_mmlu_five_shot(smollm2: Path, data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random 8B model; $HALFBYTE_QUESTIONS a subject, or all. lm-eval's best batch size is looked for on a part."""
    monkeypatch.chdir(data_root)  # where lm-eval finds cais/mmlu
    wanted = os.environ.get("HALFBYTE_QUESTIONS")
    limit = int(wanted) if wanted else None
    model = _random_model()
    tokenizer = open_tokenizer(locate(str(smollm2)))
    with quiet_lm_eval():
        plain = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=32, softmax_dtype="float32")
    few = min(limit or 10, 10)
    tried = {}
    for size in (8, 16, 32):
        found = _theirs(plain, size, few)
        if found is not None:
            tried[size] = found
            print(f"\nhf backend, batch size {size}, {few} a subject: {found[1]:.1f} s of scoring")
    for best in sorted(tried, key=lambda size: tried[size][1]):
        found = _theirs(plain, best, limit)
        if found is not None:
            break
    assert found is not None
    wall, scoring, letters = found
    print(f"hf backend, batch size {best}: wall {wall:.1f} s, scoring {scoring:.1f} s, {len(letters)} questions")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with _timed(PrefixScorer, "plan") as planning, _timed(PrefixScorer, "score") as scored:
        record = evaluate_task(
            model, tokenizer, TaskSpec(task=TASK, num_fewshot=5, limit=limit),
            EvaluateSpec(tasks=[TaskSpec(task=TASK)]), SUMMARY,
            tmp_path / "mmlu", data_root,
        )  # fmt: skip
    ours_wall, ours = time.perf_counter() - start, planning.seconds + scored.seconds
    batches = [batch for found in planning.returned for batch in found]
    padded, behind = sum(batch.computed for batch in batches), sum(batch.tokens for batch in batches)
    distinct = behind + sum(map(len, {batch.rows[0].context[: batch.prefix] for batch in batches}))
    weights = sum(p.numel() for p in model.parameters()) - 2 * model.get_input_embeddings().weight.numel()
    used, peak = 2 * weights * distinct / scored.seconds, _matmul_peak()
    chosen = {
        (sample.subtask, sample.doc_id): _largest([float(answer[0]) for answer in sample.raw["filtered_resps"]])
        for sample in read_samples(tmp_path / "mmlu", record)
    }
    print(
        f"ours: wall {ours_wall:.1f} s, planning {planning.seconds:.1f} s, scoring {scored.seconds:.1f} s: "
        f"{scoring / ours:.2f} x in scoring, {wall / ours_wall:.2f} x in wall time\n"
        f"{len(batches)} batches, {distinct} tokens computed, {1 - behind / padded:.1%} padding; matrix products of "
        f"the layers alone {used / 1e12:.0f} TFLOP/s, {used / peak:.1%} of {peak / 1e12:.0f}; at most "
        f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB\n"
        f"letters that differ: {_differing(letters, chosen):.2%} ours from hf at {best}"
        + "".join(
            f", {_differing(tried[best][2], tried[size][2]):.2%} hf at {size} from hf at {best}, {few} a subject"
            for size in tried.keys() - {best}
        )
    )
    assert used >= 0.55 * peak
    assert 1 - behind / padded < 0.05
    assert scoring / ours >= 4.5
    assert wall / ours_wall >= 3
