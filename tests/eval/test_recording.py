"""A record says what each question was asked with, how each text ended, and what would make a score wrong unnoticed."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.eval.evaluate import evaluate_task
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.errors import UserError
from halfbyte.records.record import EvaluationRecord, ModelSummary, Sample, read_samples, verify_content

CHOICE = TaskSpec(task="tiny_choice", num_fewshot=2)
GENERATE = TaskSpec(task="tiny_generate", limit=6)
DRAWN = TaskSpec(task="tiny_generate", limit=3, samples=4, gen_kwargs={"temperature": 1.0, "do_sample": True})

Evaluate = Callable[..., tuple[EvaluationRecord, list[Sample]]]


@pytest.fixture
def evaluate(
    tiny_llama: Any, tiny_tokenizer: Any, summary: ModelSummary, tiny_tasks: Path, tmp_path: Path, cache: Path
) -> Evaluate:
    assert tiny_tasks.is_dir()
    assert not cache.exists()
    numbers = iter(range(100))

    def run(
        spec: TaskSpec, *, model: Any = tiny_llama, tokenizer: Any = tiny_tokenizer, repeat: int = 0, **options: Any
    ) -> tuple[EvaluationRecord, list[Sample]]:
        settings = EvaluateSpec(tasks=[spec], **{"batch_tokens": 256, **options})
        folder = tmp_path / f"record-{next(numbers)}"
        record = evaluate_task(model, tokenizer, spec, settings, summary, folder, repeat=repeat)
        assert verify_content(folder) == record
        return record, list(read_samples(folder, record))

    return run


class Seen:
    """Keeps each row of tokens a model is given in a forward pass without a cache."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: set[tuple[int, ...]] = set()
        forward = type(model).forward

        def watched(module: Any, input_ids: Any = None, **options: Any) -> Any:
            self.rows |= {tuple(row) for row in input_ids.tolist()}
            return forward(module, input_ids, **options)

        monkeypatch.setattr(type(model), "forward", watched)


def digest(*sequences: list[int]) -> str:
    """Of the tokens of a question's requests, as documented in records.record.Asked."""
    whole = hashlib.sha256()
    for tokens in sequences:
        whole.update(array("q", tokens).tobytes() + b"\n")
    return whole.hexdigest()


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("add_bos", [False, True])
def test_what_is_recorded_is_what_the_model_was_fed(
    evaluate: Evaluate,
    tokenizer_factory: Any,
    tiny_llama: Any,
    monkeypatch: pytest.MonkeyPatch,
    chat: bool,
    add_bos: bool,
) -> None:
    tokenizer = tokenizer_factory(add_bos=add_bos)
    seen = Seen(tiny_llama, monkeypatch)
    monkeypatch.setattr("halfbyte.eval.scorer.shares_exactly", lambda _model: False)  # whole rows are seen
    record, samples = evaluate(
        CHOICE, tokenizer=tokenizer, apply_chat_template=chat, system_prompt="Be brief." if chat else None
    )
    for sample in samples:
        requests = sample.raw["arguments"].values()
        prompt = sample.raw["arguments"]["gen_args_0"]["arg_0"]
        assert sample.prompt_hash == hashlib.sha256(prompt.encode()).hexdigest()
        assert ("<|system|>Be brief." in prompt) == chat
        fed = [tokenizer(one["arg_0"] + one["arg_1"])["input_ids"] for one in requests]
        assert sample.asked is not None
        assert sample.asked.input == digest(*fed)
        assert sample.asked.bos == [int(add_bos)]
        for tokens in fed:
            assert any(row[: len(tokens) - 1] == tuple(tokens[:-1]) for row in seen.rows)
    assert record.fingerprint.bos_per_prompt == [int(add_bos)]
    assert record.health.prompts == 24
    assert record.health.truncated == record.health.doubled == 0


def test_a_template_that_adds_bos_where_the_tokenizer_adds_it_too_gives_one(
    evaluate: Evaluate, tokenizer_factory: Any
) -> None:
    tokenizer = tokenizer_factory(add_bos=True)
    tokenizer.chat_template = "<bos>" + tokenizer.chat_template
    record, _ = evaluate(CHOICE, tokenizer=tokenizer, apply_chat_template=True)
    assert record.fingerprint.bos_per_prompt == [1]
    assert record.health.doubled == 0


@pytest.mark.parametrize("spec", [CHOICE, GENERATE])
def test_a_template_that_doubles_bos_is_seen(evaluate: Evaluate, tokenizer_factory: Any, spec: TaskSpec) -> None:
    tokenizer = tokenizer_factory()
    tokenizer.chat_template = "<bos><bos>" + tokenizer.chat_template
    record, samples = evaluate(spec, tokenizer=tokenizer, apply_chat_template=True)
    assert record.fingerprint.bos_per_prompt == [2]
    assert record.health.doubled == record.health.prompts
    assert {sample.asked.doubled for sample in samples if sample.asked} == {1}


def test_a_doubled_special_token_inside_a_prompt_is_seen(evaluate: Evaluate, tokenizer_factory: Any) -> None:
    tokenizer = tokenizer_factory()
    tokenizer.chat_template = tokenizer.chat_template.replace("<eos>", "<eos><eos>")
    record, _ = evaluate(CHOICE, tokenizer=tokenizer, apply_chat_template=True)
    assert record.fingerprint.bos_per_prompt == [0]
    assert record.health.doubled == record.health.prompts


@pytest.mark.parametrize("spec", [CHOICE, GENERATE])
def test_a_prompt_longer_than_the_window_is_an_error_that_names_the_question(
    evaluate: Evaluate, spec: TaskSpec
) -> None:
    with pytest.raises(UserError, match=rf"that of question \d+ of {spec.task} is \d+ tokens too long"):
        evaluate(spec, max_length=12)


@pytest.mark.parametrize("spec", [CHOICE, GENERATE])
def test_where_prompts_may_be_cut_the_record_says_which(evaluate: Evaluate, spec: TaskSpec) -> None:
    record, samples = evaluate(spec, max_length=12, allow_truncated=True)
    cut = {sample.doc_id for sample in samples if sample.asked and sample.asked.cut > 0}
    assert record.health.truncated == len(cut) > 0
    whole, _ = evaluate(spec)
    assert whole.health.truncated == 0


def test_how_each_text_ended_is_recorded(evaluate: Evaluate) -> None:
    record, samples = evaluate(GENERATE)
    rows = [sample for sample in samples if sample.filter == "number"]
    texts = [one for sample in rows for one in sample.generated or ()]
    assert len(texts) == record.health.samples == 6
    assert record.health.hit_cap == sum(one.stop == "length" for one in texts)
    assert record.health.unexpected_stops == 0
    assert all(one.tokens is not None and 1 <= one.tokens <= 6 for one in texts)
    assert record.health.unanswered == sum(sample.answered == [False] for sample in rows)
    assert all(sample.answered is None for sample in samples if sample.filter == "whole")
    assert record.speed is not None
    assert record.speed.generated_per_sample == sum(one.tokens or 0 for one in texts) / 6


class _Forced:
    """A model that says one token only."""

    def __init__(self, model: Any, token: int) -> None:
        def forced(_module: Any, _inputs: Any, output: Any) -> Any:
            output[..., token] += 1e4
            return output

        self._handle = model.get_output_embeddings().register_forward_hook(forced)

    def remove(self) -> None:
        self._handle.remove()


@pytest.mark.parametrize(("text", "stop", "capped"), [(" cat", "length", 6), ("<eos>", "end_token", 0)])
def test_a_text_cut_by_the_cap_and_an_empty_one_are_counted(
    evaluate: Evaluate, llama_factory: Any, tiny_tokenizer: Any, text: str, stop: str, capped: int
) -> None:
    model = llama_factory()
    _Forced(model, tiny_tokenizer.encode(text)[0])
    record, samples = evaluate(GENERATE, model=model)
    assert {one.stop for sample in samples for one in sample.generated or ()} == {stop}
    assert (record.health.hit_cap, record.health.empty) == (capped, 6 - capped)
    assert record.health.unanswered == 6


def test_k_samples_have_k_seeds_and_are_no_duplicates(evaluate: Evaluate) -> None:
    record, samples = evaluate(DRAWN)
    rows = [sample for sample in samples if sample.filter == "whole"]
    seeds = [one.seed for sample in rows for one in sample.generated or ()]
    assert len(seeds) == len(set(seeds)) == 12 == record.health.samples
    assert None not in seeds
    assert record.fingerprint.subtasks["tiny_generate"].repeats == 4
    assert all(len(set(sample.raw["resps"][0])) > 1 for sample in rows)


def test_a_sample_depends_on_its_own_seed_alone(evaluate: Evaluate) -> None:
    def texts(spec: TaskSpec, **options: Any) -> dict[int, list[str]]:
        return {sample.doc_id: sample.raw["resps"][0] for sample in evaluate(spec, **options)[1]}

    every = texts(DRAWN)
    assert texts(DRAWN, batch_size=1) == every
    fewer = texts(DRAWN.model_copy(update={"samples": 2, "limit": 2}))
    assert fewer == {doc_id: some[:2] for doc_id, some in every.items() if doc_id < 2}


def test_a_repetition_asks_the_same_and_draws_anew(evaluate: Evaluate) -> None:
    first, before = evaluate(DRAWN)
    second, after = evaluate(DRAWN, repeat=1)
    assert second.key != first.key
    assert second.repeat == 1
    assert second.fingerprint == first.fingerprint
    assert [sample.asked for sample in after] == [sample.asked for sample in before]
    assert [sample.raw["resps"] for sample in after] != [sample.raw["resps"] for sample in before]
    assert not {one.seed for s in before for one in s.generated or ()} & {
        one.seed for s in after for one in s.generated or ()
    }


def test_a_repetition_scores_in_other_batches(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[list[int]] = []
    from halfbyte.eval.scorer import PrefixScorer

    plan = PrefixScorer.plan

    def watched(self: Any, requests: Any) -> Any:
        batches = plan(self, requests)
        sizes.append([len(batch.members) for batch in batches])
        return batches

    monkeypatch.setattr(PrefixScorer, "plan", watched)
    first, before = evaluate(CHOICE)
    second, after = evaluate(CHOICE, repeat=1)
    assert sizes[0] != sizes[1]
    assert second.fingerprint == first.fingerprint
    assert [sample.metrics for sample in after] == [sample.metrics for sample in before]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TaskSpec(task="tiny_choice", samples=2), "draws nothing; samples would have no effect"),
        (TaskSpec(task="tiny_generate", samples=2), "would be one text 2 times: it generates greedily"),
    ],
)
def test_samples_without_effect_are_errors(evaluate: Evaluate, spec: TaskSpec, message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(spec)


@pytest.mark.parametrize("spec", [CHOICE, GENERATE])
def test_a_tokenizer_without_a_padding_token_changes_nothing(
    evaluate: Evaluate, tokenizer_factory: Any, spec: TaskSpec
) -> None:
    tokenizer = tokenizer_factory()
    tokenizer.pad_token = None
    assert tokenizer.pad_token_id is None
    _, bare = evaluate(spec, tokenizer=tokenizer)
    _, padded = evaluate(spec)
    assert [(sample.raw["resps"], sample.asked) for sample in bare] == [(s.raw["resps"], s.asked) for s in padded]


@pytest.mark.parametrize("spec", [CHOICE, GENERATE])
def test_an_output_wider_than_the_vocabulary_changes_nothing(
    evaluate: Evaluate, llama_factory: Any, tiny_llama: Any, spec: TaskSpec
) -> None:
    """Embeddings are padded to a multiple of 64 or 128 in many models; no token of the padding may be chosen."""
    wide = llama_factory(vocab_size=512)
    with torch.no_grad():
        for own, given in zip(wide.parameters(), tiny_llama.parameters(), strict=True):
            if own.shape == given.shape:
                own.copy_(given)
            else:
                own.fill_(0)[: given.shape[0]] = given
    _, narrow = evaluate(spec)
    _, padded = evaluate(spec, model=wide)
    if spec is GENERATE:  # scores differ: the padding has a share of the probability
        assert [sample.raw["resps"] for sample in padded] == [sample.raw["resps"] for sample in narrow]
    assert [sample.asked for sample in padded] == [sample.asked for sample in narrow]


@pytest.mark.parametrize("spec", [CHOICE, GENERATE])
def test_one_question_and_batches_of_one_give_what_many_give(evaluate: Evaluate, spec: TaskSpec) -> None:
    _, many = evaluate(spec.model_copy(update={"limit": 6}))
    _, single = evaluate(spec.model_copy(update={"limit": 6}), batch_size=1, batch_tokens=1)
    _, one = evaluate(spec.model_copy(update={"limit": 1}))
    assert [sample.metrics for sample in single] == [sample.metrics for sample in many]
    assert [sample.metrics for sample in one] == [sample.metrics for sample in many if sample.doc_id == 0]
    assert [sample.asked for sample in one] == [sample.asked for sample in many if sample.doc_id == 0]


def test_no_question_is_an_error(evaluate: Evaluate, tiny_tasks: Path) -> None:
    (tiny_tasks / "tiny_choice.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"holds no data|has no question"):
        evaluate(GENERATE)


def test_data_that_has_changed_is_evaluated_again(
    tiny_llama: Any, tiny_tokenizer: Any, summary: ModelSummary, tiny_tasks: Path, tmp_path: Path, cache: Path
) -> None:
    settings = EvaluateSpec(tasks=[GENERATE])
    asked = (tiny_llama, tiny_tokenizer, GENERATE, settings, summary, tmp_path / "record")
    first = evaluate_task(*asked)
    assert evaluate_task(*asked) == first
    questions = tiny_tasks / "tiny_choice.jsonl"
    questions.write_text(questions.read_text(encoding="utf-8").replace("cat", "dog"), encoding="utf-8")
    with pytest.raises(UserError, match="made with other settings, packages, data"):
        evaluate_task(*asked)
    again = evaluate_task(*asked, replace=True)
    assert again.key == first.key
    assert again.fingerprint.subtasks != first.fingerprint.subtasks
    assert not (cache / "evaluations").exists()
