"""How much faster GSM8K (5-shot) is generated than by lm-eval's hf backend at its best batch size, in one run.

On a GPU the model is a random one of the shape of Llama 3.1 8B. Its texts hardly ever end by themselves, so that one
case has them all run to the cap of 256 tokens, and another ends them at different lengths by a stop sequence that
comes up in random text.
"""

from __future__ import annotations

import os
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_scorer import _random_model
from lm_eval.models.huggingface import HFLM

from halfbyte.eval.hf import HFBackend
from halfbyte.eval.lm import JournaledLM
from halfbyte.eval.resolve import load_task, quiet_lm_eval
from halfbyte.quant.load import load
from halfbyte.quant.models import locate, open_tokenizer
from halfbyte.recipes.schema import ModelSpec

pytestmark = [pytest.mark.bench, pytest.mark.real]


def _requests(data_root: Path, questions: int, settings: dict[str, Any]) -> list[Any]:
    """The prompts of the first GSM8K questions, each after five examples."""
    (task,) = load_task("gsm8k", data_root, 1234)
    task.set_config(key="num_fewshot", value=5)
    task.set_fewshot_seed(seed=1234)
    with quiet_lm_eval():
        task.build_all_requests(limit=questions, rank=0, world_size=1, tokenizer_name="")
    for request in task.instances:
        request.arguments = (request.args[0], {**request.args[1], **settings})
    found: list[Any] = task.instances
    return found


def _theirs(model: Any, tokenizer: Any, requests: list[Any], size: int) -> tuple[float, list[str]]:
    with quiet_lm_eval():
        plain = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size)
        start = time.perf_counter()
        texts = plain.generate_until(requests, disable_tqdm=True)
    return time.perf_counter() - start, texts


def _ours(model: Any, tokenizer: Any, requests: list[Any], folder: Path) -> tuple[float, list[str], JournaledLM]:
    with quiet_lm_eval():
        lm = JournaledLM(HFBackend(model, tokenizer), folder, "bench", label="gsm8k")
    start = time.perf_counter()
    texts = lm.generate_until(requests)
    return time.perf_counter() - start, texts, lm


def _equal(one: list[str], other: list[str]) -> str:
    """How many texts are equal, and how much of each is before the first difference."""
    same = sum(left == right for left, right in zip(one, other, strict=True)) / len(one)
    common = [
        len(list(takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))) / max(1, len(left))
        for left, right in zip(one, other, strict=True)
    ]
    return f"{same:.1%} equal, {sum(common) / len(common):.1%} of the characters before a first difference"


def test_gsm8k_on_a_cpu(smollm2: Path, data_root: Path, tmp_path: Path) -> None:
    loaded = load(ModelSpec(id=str(smollm2)), device="cpu")
    requests = _requests(data_root, int(os.environ.get("HALFBYTE_QUESTIONS", "16")), {})
    tried = {size: _theirs(loaded.model, loaded.tokenizer, requests, size) for size in (1, 4)}
    seconds, texts, lm = _ours(loaded.model, loaded.tokenizer, requests, tmp_path)
    print()
    for size, (theirs, _) in tried.items():
        print(f"hf backend at batch size {size}: {theirs:.1f} s")
    best = min(theirs for theirs, _ in tried.values())
    print(f"ours {seconds:.1f} s, {lm.tokens} tokens, {best / seconds:.2f} x; {torch.get_num_threads()} threads")
    assert texts == tried[1][1]
    assert seconds < best


@pytest.mark.gpu
@pytest.mark.parametrize("until", [None, "q"], ids=["all to the cap", "of different lengths"])
def test_gsm8k_on_a_gpu(until: str | None, smollm2: Path, data_root: Path, tmp_path: Path) -> None:
    """$HALFBYTE_QUESTIONS questions; lm-eval's best batch size is looked for on a third of them."""
    model = _random_model()
    tokenizer = open_tokenizer(locate(str(smollm2)))
    with torch.no_grad():
        model.lm_head.weight[len(tokenizer) :] = 0  # tokens without a text are never the likeliest
    questions = int(os.environ.get("HALFBYTE_QUESTIONS", "384"))
    requests = _requests(data_root, questions, {} if until is None else {"until": ["Question:", "</s>", until]})
    few = requests[: max(1, questions // 3)]
    _theirs(model, tokenizer, few[:8], 8)  # the first pass chooses kernels
    tried = {}
    print()
    for size in (32, 64, 128):
        tried[size] = _theirs(model, tokenizer, few, size)
        print(f"hf backend at batch size {size}: {len(few) / tried[size][0]:.2f} questions/s")
    best, second = sorted(tried, key=lambda size: tried[size][0])[:2]
    seconds, theirs = _theirs(model, tokenizer, requests, best)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    took, texts, lm = _ours(model, tokenizer, requests, tmp_path)
    generated = [one for samples in lm.generated.values() for one in samples]
    tokens = sum(one.tokens for one in generated)
    stops = {stop: sum(one.stop == stop for one in generated) for stop in ("stop_string", "end_token", "length")}
    print(
        f"hf backend at batch size {best}: {seconds:.1f} s; ours {took:.1f} s: {seconds / took:.2f} x\n"
        f"{questions} questions, {lm.book.tokens} prompt tokens, {tokens} generated, {stops}, refusal "
        f"{lm.backend.generator.refusal}, graphs {lm.backend.generator.decoder.graphs}, at most "
        f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB\n"
        f"ours and hf at {best}: {_equal(theirs, texts)}\n"
        f"hf at {second} and at {best}: {_equal(*(tried[size][1] for size in (second, best)))}"
    )
    assert lm.backend.generator.refusal is None
    assert seconds / took >= 5
