"""How much faster MMLU is scored than by lm-eval's hf backend, with the same answers: what sharing prompts is worth."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_quantize import SHAPES
from lm_eval.models.huggingface import HFLM

from halfbyte.eval.prompts import Encoder
from halfbyte.eval.resolve import load_task, quiet_lm_eval
from halfbyte.eval.scorer import PrefixScorer
from halfbyte.eval.sharing import Request
from halfbyte.quant.load import load
from halfbyte.recipes.schema import ModelSpec

pytestmark = [pytest.mark.bench, pytest.mark.real]
SUBJECTS = 20
QUESTIONS = int(os.environ.get("HALFBYTE_QUESTIONS", "10"))
"""Of each subject; a whole subject has 246 on average, and shares more."""


def _requests(data_root: Path, lm: Any, *, subjects: int | None, questions: int | None) -> list[Any]:
    """The requests of five-shot MMLU: all four letters of the first questions of the first subjects; None: of all."""
    (group,) = load_task("mmlu", data_root, 1234)
    found = []
    for task in sorted(group.get_all_tasks(), key=lambda task: task.task_name)[:subjects]:
        task.set_config(key="num_fewshot", value=5)
        task.set_fewshot_seed(seed=1234)
        with quiet_lm_eval():
            task.build_all_requests(limit=questions, rank=0, world_size=1, tokenizer_name=lm.tokenizer_name)
        found += task.instances
    return found


def _as_texts(encoded: list[Request]) -> list[Any]:
    """What lm-eval's hf backend scores."""
    return [((), list(request.context), list(request.continuation)) for request in encoded]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_mmlu_five_shot_on_a_cpu(batch_size: int, smollm2: Path, data_root: Path) -> None:
    loaded = load(ModelSpec(id=str(smollm2)), device="cpu")
    with quiet_lm_eval():
        plain = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size)
    requests = _requests(data_root, plain, subjects=SUBJECTS, questions=QUESTIONS)
    encoded = Encoder(plain.tokenizer, plain.max_length).pairs([request.args for request in requests])
    start = time.perf_counter()
    with quiet_lm_eval():
        theirs = plain._loglikelihood_tokens(_as_texts(encoded), disable_tqdm=True)
    middle = time.perf_counter()
    scorer = PrefixScorer(loaded.model)
    batches = scorer.plan(encoded)
    ours: dict[int, tuple[float, bool]] = {}
    for batch in batches:
        ours |= dict(zip(batch.members, scorer.score(encoded, batch), strict=True))
    end = time.perf_counter()
    ratio = (middle - start) / (end - middle)
    padded = sum(batch.computed for batch in batches)
    tokens = sum(batch.tokens for batch in batches)
    print(
        f"\n{len(requests)} requests: hf backend at batch size {batch_size} {middle - start:.1f} s, "
        f"ours {end - middle:.1f} s, {ratio:.1f} x; {len(batches)} batches, {1 - tokens / padded:.1%} padding, "
        f"{torch.get_num_threads()} threads"
    )
    for at, (value, greedy) in enumerate(theirs):
        assert ours[at][0] == pytest.approx(value, abs=1e-4)
        assert ours[at][1] == greedy
    assert 1 - tokens / padded < 0.05
    assert ratio >= 4


def _random_model() -> Any:
    """A random model of the shape of Llama 3.1 8B with a vocabulary of 152,064, on CUDA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        config = LlamaConfig(**SHAPES["cuda"], vocab_size=152064, tie_word_embeddings=False, dtype="bfloat16")
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
