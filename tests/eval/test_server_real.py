"""The same model through transformers and through a real OpenAI-compatible server gives the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_server
import pytest

from halfbyte.eval.backend import Prompt, Sampling
from halfbyte.eval.evaluate import evaluate_backend, evaluate_task
from halfbyte.eval.server import open_server
from halfbyte.quant.load import load_as_it_is
from halfbyte.recipes.schema import EvaluateSpec, ServerSpec, TaskSpec
from halfbyte.records.record import EvaluationRecord, Sample, read_samples

QUESTIONS, TEXTS = 20, 5
CLOSE = 0.05
"""Nats a log-likelihood may differ: float32 on both sides, but other kernels. A BOS token too many makes several."""
TASKS = [
    TaskSpec(task="arc_easy", limit=QUESTIONS),
    TaskSpec(task="gsm8k", limit=TEXTS, num_fewshot=1, gen_kwargs={"max_gen_toks": 32}),
]

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSpec]:
    """llama.cpp's server on SmolLM2, stopped at the end whatever happens."""
    with llama_server.serving(smollm2, tmp_path_factory.mktemp("server")) as url:
        yield ServerSpec(base_url=url, concurrency=2, timeout=300.0)


def _settings(server: ServerSpec | None = None) -> EvaluateSpec:
    return EvaluateSpec(
        backend="hf" if server is None else "server", server=server, max_length=2000, tasks=TASKS, canary=None
    )


def _samples(folder: Path, record: EvaluationRecord) -> dict[tuple[str, str, int], Sample]:
    return {sample.key: sample for sample in read_samples(folder, record)}


def test_the_same_model_gives_the_same_answers_through_hf_and_server(
    server: ServerSpec, smollm2: Path, data_root: Path, tmp_path: Path
) -> None:
    loaded = load_as_it_is(str(smollm2), device="cpu")
    sides: dict[str, list[tuple[Path, EvaluationRecord]]] = {"hf": [], "server": []}
    for spec in TASKS:
        output = tmp_path / "hf" / spec.task
        record = evaluate_task(loaded.model, loaded.tokenizer, spec, _settings(), loaded.summary, output, data_root)
        sides["hf"].append((output, record))
        output = tmp_path / "server" / spec.task
        record = evaluate_backend(
            lambda: open_server(server, loaded.tokenizer, max_length=2000),
            spec,
            _settings(server),
            loaded.summary,
            output,
            data_root,
            device="server",
            dtype="server",
        )
        sides["server"].append((output, record))
    for (folder, ours), (other, theirs) in zip(*sides.values(), strict=True):
        assert theirs.fingerprint.engine is not None
        assert theirs.fingerprint.engine.startswith("llamacpp")
        for name in ("subtasks", "bos_per_prompt", "max_length", "chat_template"):
            assert getattr(ours.fingerprint, name) == getattr(theirs.fingerprint, name)
        one, two = _samples(folder, ours), _samples(other, theirs)
        assert one.keys() == two.keys()
        compare = _compare_scores if ours.task == "arc_easy" else _compare_texts
        compare([(one[key], two[key]) for key in sorted(one)])


def _compare_scores(pairs: list[tuple[Sample, Sample]]) -> None:
    assert len(pairs) == QUESTIONS
    for ours, theirs in pairs:
        left, right = ([float(answer[0][0]) for answer in side.raw["resps"]] for side in (ours, theirs))
        assert left == pytest.approx(right, abs=CLOSE)
        best = sorted(left)[-2:]
        if best[1] - best[0] > 2 * CLOSE:
            assert ours.metrics["acc"] == theirs.metrics["acc"]


def _compare_texts(pairs: list[tuple[Sample, Sample]]) -> None:
    texts = {ours.doc_id: tuple(side.raw["resps"][0][0] for side in (ours, theirs)) for ours, theirs in pairs}
    assert len(texts) == TEXTS
    # Greedy texts part where two tokens are as good as equal, and go on differently from there.
    assert sum(ours == theirs for ours, theirs in texts.values()) >= TEXTS - 1, texts
    for ours, theirs in pairs:
        assert ours.generated is not None
        assert theirs.generated is not None
        assert [one.tokens for one in theirs.generated] == [one.tokens for one in ours.generated] or (
            texts[ours.doc_id][0] != texts[ours.doc_id][1]
        )


def test_the_template_a_real_server_applies_is_recognised_and_its_texts_are_ours(
    server: ServerSpec, smollm2: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    plain = open_server(server, tokenizer)
    chat = open_server(server.model_copy(update={"api": "chat"}), tokenizer)
    assert chat.chat_template(True) == tokenizer.chat_template
    assert chat.bos == [1]
    messages = [{"role": "user", "content": "Name three colors."}]
    sampling = Sampling(max_gen_toks=12)
    text = plain.apply_chat_template(messages)
    (ours,) = plain.generate([Prompt(text, tuple(tokenizer.encode(text)), sampling, None)])
    (theirs,) = chat.generate([Prompt(chat.apply_chat_template(messages), None, sampling, None)])
    assert ours == theirs
    assert ours.text
