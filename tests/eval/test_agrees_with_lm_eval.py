"""On the real model and real questions: each task's answers are those of lm-eval's hf backend."""

from __future__ import annotations

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

TASKS = {
    "arc_easy": TaskSpec(task="arc_easy", limit=20),
    "arc_challenge": TaskSpec(task="arc_challenge", limit=12),
    "mmlu, no shots": TaskSpec(task="mmlu_anatomy", num_fewshot=0, limit=12),
    "mmlu, five shots": TaskSpec(task="mmlu_anatomy", num_fewshot=5, limit=5),
    "gsm8k, five shots": TaskSpec(task="gsm8k", num_fewshot=5, limit=2, gen_kwargs={"max_gen_toks": 32}),
}


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> Loaded:
    return load(ModelSpec(id=str(smollm2)), device="cpu")


def _plain(loaded: Loaded, spec: TaskSpec, data_root: Path) -> list[dict[str, Any]]:
    with quiet_lm_eval():
        found = simple_evaluate(
            model=HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=4),
            tasks=load_task(spec.task, data_root),
            num_fewshot=spec.num_fewshot,
            limit=spec.limit,
            gen_kwargs=spec.gen_kwargs,
            task_manager=find_manager(spec.task),
        )
    rows: list[dict[str, Any]] = found["samples"][spec.task]
    return rows


@pytest.mark.parametrize("name", TASKS)
def test_answers_of_the_real_model(name: str, loaded: Loaded, data_root: Path, tmp_path: Path) -> None:
    spec = TASKS[name]
    settings = EvaluateSpec(tasks=[spec], canary=None)
    evaluate_task(loaded.model, loaded.tokenizer, spec, settings, loaded.summary, tmp_path / "r", data_root=data_root)
    ours = {(one.filter, one.doc_id): one for one in read_samples(tmp_path / "r", load_record(tmp_path / "r"))}
    theirs = _plain(loaded, spec, data_root)
    assert len(theirs) == len(ours) >= (spec.limit or 0)
    for row in theirs:
        sample = ours[row["filter"], row["doc_id"]]
        assert sample.prompt_hash == row["prompt_hash"]
        assert {key: sample.metrics[key] for key in row["metrics"]} == {key: row[key] for key in row["metrics"]}
        for one, other in zip(sample.raw["resps"], row["resps"], strict=True):
            if spec.task == "gsm8k":
                assert one == other
            else:  # float32 on a CPU: the order of a sum is all that may differ
                assert float(one[0][0]) == pytest.approx(float(other[0][0]), abs=1e-4)
                assert str(one[0][1]) == str(other[0][1])
