"""On a GPU: the checkpoint read back scores where ModelOpt's fake quantization in memory does, as far as noise allows.

What the batch size alone changes, and what our scorer does, is measured beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from halfbyte.eval.prompts import Encoder
from halfbyte.eval.resolve import load_task, quiet_lm_eval
from halfbyte.eval.scorer import PrefixScorer
from halfbyte.quant import calibration, configs, ptq
from halfbyte.quant.checkpoint import quant_format
from halfbyte.quant.load import open_exported
from halfbyte.quant.models import locate, open_original, open_tokenizer
from halfbyte.recipes.schema import QuantizeSpec
from halfbyte.recipes.texts import load_texts

pytestmark = [pytest.mark.gpu, pytest.mark.real]
CUDA = torch.device("cuda")


def _spec(seed: int) -> QuantizeSpec:
    """The calibration of recipes/llm/smollm2-135m-fp8.yaml under another seed."""
    return QuantizeSpec.model_validate(
        {
            "preset": "FP8_DEFAULT_CFG",
            "calibration": {
                "sources": [
                    {"dataset": "openai/gsm8k", "name": "main", "field": "question", "samples": 64},
                    {
                        "dataset": "Salesforce/wikitext",
                        "name": "wikitext-2-v1",
                        "split": "validation",
                        "field": "text",
                        "samples": 64,
                    },
                ],
                "length": 512,
                "seed": seed,
            },
        }
    )


class _Questions:
    """ARC-Easy, and which of its questions a model answers rightly."""

    def __init__(self, data_root: Path, tokenizer: Any) -> None:
        (self.task,) = load_task("arc_easy", data_root, 1234)
        self.tokenizer = tokenizer
        with quiet_lm_eval():
            self.task.build_all_requests(limit=None, rank=0, world_size=1, tokenizer_name="")

    def right(self, model: Any, batch_size: int | None) -> list[bool]:
        """By lm-eval's hf backend at a batch size, or by our scorer for None."""
        with quiet_lm_eval():
            backend = HFLM(pretrained=model, tokenizer=self.tokenizer, batch_size=batch_size or 1)
            pairs = [request.args for request in self.task.instances]
            if batch_size is None:
                encoded, scorer = Encoder(backend.tokenizer, backend.max_length).pairs(pairs), PrefixScorer(model)
                values = [0.0] * len(encoded)
                for batch in scorer.plan(encoded):
                    for at, (value, _) in zip(batch.members, scorer.score(encoded, batch), strict=True):
                        values[at] = value
            else:
                values = [value for value, _ in backend.loglikelihood(self.task.instances, disable_tqdm=True)]
        best: dict[int, tuple[float, int]] = {}
        for request, value in zip(self.task.instances, values, strict=True):
            best[request.doc_id] = max(best.get(request.doc_id, (-float("inf"), 0)), (value, request.idx))
        documents = list(self.task.eval_docs)
        return [best[at][1] == self.task.doc_to_target(document) for at, document in enumerate(documents)]


def _apart(one: list[bool], other: list[bool]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("seed", [1234, 1])
def test_fp8_read_back_answers_as_in_memory(seed: int, smollm2: Path, data_root: Path, tmp_path: Path) -> None:
    """The checkpoint beside the model in memory as ModelOpt's own flow evaluates it, before anything is settled."""
    source = locate(str(smollm2))
    tokenizer = open_tokenizer(source)
    questions = _Questions(data_root, tokenizer)
    right: dict[str, list[bool]] = {}

    def ask(name: str, model: Any, batch_size: int | None) -> None:
        found = right[name] = questions.right(model, batch_size)
        print(f"\nseed {seed}, {name}: {sum(found) / len(found):.4f} ({sum(found)} of {len(found)})", flush=True)
        for other in right:
            print(f"{_apart(found, right[other])} answers differ from: {other}", flush=True)

    spec = _spec(seed)
    model = open_original(source, weights=torch.bfloat16, compute=torch.bfloat16, device=CUDA)
    texts = [text for one in spec.calibration.sources for text in load_texts(one, seed, data_root).texts]
    rows = calibration.tokenize(texts, tokenizer, 512)
    # One text a batch, as ModelOpt's own loop over texts of unequal length has it.
    loop = calibration.forward_loop(rows, tokens_per_row=1, pack=False)
    ptq.calibrate(model, configs.quant_config(spec), loop)
    ask("in memory, batch size 64", model, 64)
    unstable = ptq.settle(model)
    ptq.export(model, tokenizer, tmp_path / "checkpoint", torch.bfloat16, unstable)
    declared = quant_format(tmp_path / "checkpoint")
    assert declared is not None
    del model
    read_back = open_exported(locate(str(tmp_path / "checkpoint")), declared, dtype=torch.bfloat16, device=CUDA)
    ask("read back, batch size 64", read_back, 64)
    ask("read back, batch size 16", read_back, 16)
    ask("read back, our scorer", read_back, None)
    memory, shipped = right["in memory, batch size 64"], right["read back, batch size 64"]
    assert _apart(memory, shipped) <= _apart(shipped, right["read back, batch size 16"])
