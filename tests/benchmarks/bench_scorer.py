"""How much faster MMLU is scored than by lm-eval's hf backend, with the same answers: what sharing prompts is worth."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.eval.lm import Generator
from halfbyte.eval.prompts import encode_pairs
from halfbyte.eval.resolve import load_task, quiet_lm_eval
from halfbyte.eval.scorer import PrefixScorer
from halfbyte.quant.load import load
from halfbyte.recipes.schema import ModelSpec

pytestmark = [pytest.mark.bench, pytest.mark.real]
SUBJECTS = 20
QUESTIONS = 10


def _requests(data_root: Path, lm: Any) -> list[Any]:
    """The requests of five-shot MMLU: all four letters of QUESTIONS questions of each of SUBJECTS subjects."""
    (group,) = load_task("mmlu", data_root, 1234)
    found = []
    for task in sorted(group.get_all_tasks(), key=lambda task: task.task_name)[:SUBJECTS]:
        task.set_config(key="num_fewshot", value=5)
        task.set_fewshot_seed(seed=1234)
        with quiet_lm_eval():
            task.build_all_requests(limit=QUESTIONS, rank=0, world_size=1, tokenizer_name=lm.tokenizer_name)
        found += task.instances
    return found


@pytest.mark.parametrize("batch_size", [1, 8])
def test_mmlu_five_shot_on_a_cpu(batch_size: int, smollm2: Path, data_root: Path) -> None:
    loaded = load(ModelSpec(id=str(smollm2)), device="cpu")
    with quiet_lm_eval():
        plain = Generator(loaded.model, loaded.tokenizer, batch_size=batch_size)
    requests = _requests(data_root, plain)
    encoded = encode_pairs(plain, [request.args for request in requests])
    texts = [((), list(request.context), list(request.continuation)) for request in encoded]
    start = time.perf_counter()
    with quiet_lm_eval():
        theirs = plain._loglikelihood_tokens(texts, disable_tqdm=True)
    middle = time.perf_counter()
    scorer = PrefixScorer(loaded.model)
    batches = scorer.plan(encoded)
    ours: dict[int, tuple[float, bool]] = {}
    for batch in batches:
        ours |= dict(zip(batch.members, scorer.score(encoded, batch), strict=True))
    end = time.perf_counter()
    ratio = (middle - start) / (end - middle)
    padded = sum(len(batch.rows) * batch.width for batch in batches)
    tokens = sum(row.length - batch.prefix for batch in batches for row in batch.rows)
    print(
        f"\n{len(requests)} requests: hf backend at batch size {batch_size} {middle - start:.1f} s, "
        f"ours {end - middle:.1f} s, {ratio:.1f} x; {len(batches)} batches, {1 - tokens / padded:.1%} padding, "
        f"{torch.get_num_threads()} threads"
    )
    for at, (value, greedy) in enumerate(theirs):
        assert ours[at][0] == pytest.approx(value, abs=1e-4)
        assert ours[at][1] == greedy
    assert ratio >= 4
