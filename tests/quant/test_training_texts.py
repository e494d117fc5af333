"""Training data: what is learned, what is left out, and what is held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from halfbyte.quant.training_rows import IGNORED, Row
from halfbyte.quant.training_texts import Examples, Sampled, training_examples
from halfbyte.recipes.training import TrainSpec
from halfbyte.records.errors import UserError

THINKING = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Puts a thought before the last answer and none before earlier ones, as templates of reasoning models do."""


def spec(*sources: dict[str, Any], **more: Any) -> TrainSpec:
    content = {"method": "qat", "sources": list(sources), "max_steps": 1, "length": 64, **more}
    return TrainSpec.model_validate(content)


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def learned(tokenizer: Any, row: Row) -> str:
    return str(tokenizer.decode([label for label in row.labels if label != IGNORED]))


def every(examples: Examples) -> list[Row]:
    return [*examples.train, *examples.validation]


@pytest.fixture
def texts(tmp_path: Path) -> str:
    return jsonl(
        tmp_path / "texts.jsonl", [{"text": f"the dog sees {i} birds and likes {i * i} fish"} for i in range(40)]
    )


def test_a_plain_text_is_learned_but_for_its_first_token_and_ends(tmp_path: Path, tokenizer_factory: Any) -> None:
    path = jsonl(tmp_path / "two.jsonl", [{"text": "the cat runs"}, {"text": "a dog sees"}])
    for add_bos in (False, True):
        tokenizer = tokenizer_factory(add_bos=add_bos)
        found = training_examples(spec({"dataset": path}, packing=False), tokenizer, 64)
        for row in every(found):
            assert row.input_ids[-1] == tokenizer.eos_token_id
            assert row.labels == [IGNORED, *row.input_ids[1:]]
            assert (row.input_ids[0] == tokenizer.bos_token_id) is add_bos
            assert row.position_ids is None


def test_a_text_that_brings_its_special_tokens_gets_no_second_ones(tmp_path: Path, tokenizer_factory: Any) -> None:
    tokenizer = tokenizer_factory(add_bos=True)
    path = jsonl(tmp_path / "two.jsonl", [{"text": "<bos>the cat runs<eos>"}, {"text": "<bos>a dog<eos>"}])
    for row in every(training_examples(spec({"dataset": path}, packing=False), tokenizer, 64)):
        assert row.input_ids.count(tokenizer.bos_token_id) == row.input_ids.count(tokenizer.eos_token_id) == 1


PAIRS = [{"q": "how many birds", "a": "four birds"}, {"q": "is the sun hot", "a": "yes"}]
PAIR = {"prompt_field": "q", "response_field": "a"}


def test_of_a_pair_the_response_and_its_end_are_learned(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = jsonl(tmp_path / "pairs.jsonl", PAIRS)
    source = {"dataset": path, **PAIR, "layout": "question {prompt} answer {response}"}
    found = training_examples(spec(source, packing=False), tiny_tokenizer, 64)
    assert sorted(learned(tiny_tokenizer, row) for row in every(found)) == [" four birds<eos>", " yes<eos>"]
    whole = sorted(tiny_tokenizer.decode(row.input_ids) for row in every(found))
    assert whole[0] == "question how many birds answer four birds<eos>"
    everything = training_examples(spec(source, packing=False, mask_prompts=False), tiny_tokenizer, 64)
    assert all(row.labels[1:] == row.input_ids[1:] for row in every(everything))


def test_a_layout_is_checked() -> None:
    for layout in ("{prompt}", "{response}{prompt}", "{prompt}{response}{response}"):
        with pytest.raises(ValidationError, match="once each"):
            spec({"dataset": "x.jsonl", **PAIR, "layout": layout})
    with pytest.raises(ValidationError, match="layout belongs to"):
        spec({"dataset": "x.jsonl", "layout": "{prompt} {response}"})
    plain = spec({"dataset": "x.jsonl"})
    assert TrainSpec.model_validate(plain.model_dump()) == plain


CHAT = [
    {"role": "system", "content": "be small"},
    {"role": "user", "content": "is the moon cold"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "is fire cold"},
    {"role": "assistant", "content": "no"},
]


def test_of_a_chat_the_assistants_turns_and_their_ends_are_learned(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = jsonl(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": CHAT[1:3]}])
    found = training_examples(spec({"dataset": path, "messages_field": "messages"}, packing=False), tiny_tokenizer, 64)
    assert sorted(learned(tiny_tokenizer, row) for row in every(found)) == ["yes<eos>", "yes<eos>no<eos>"]
    assert {tiny_tokenizer.decode(row.input_ids) for row in every(found)} == {
        "<|system|>be small<eos><|user|>is the moon cold<eos><|assistant|>yes<eos><|user|>is fire cold<eos>"
        "<|assistant|>no<eos>",
        "<|user|>is the moon cold<eos><|assistant|>yes<eos>",
    }


def test_a_template_that_changes_earlier_turns_is_followed(tmp_path: Path, tokenizer_factory: Any) -> None:
    tokenizer = tokenizer_factory()
    tokenizer.chat_template = THINKING
    path = jsonl(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": CHAT[1:3]}])
    found = training_examples(spec({"dataset": path, "messages_field": "messages"}, packing=False), tokenizer, 64)
    answers = {learned(tokenizer, row) for row in every(found)}
    assert answers == {"yes<eos><think></think>no<eos>", "<think></think>yes<eos>"}


def test_a_chat_that_cannot_be_written_is_named(tmp_path: Path, tokenizer_factory: Any) -> None:
    tokenizer = tokenizer_factory()
    train = {"messages_field": "messages"}
    path = jsonl(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": "hello"}])
    with pytest.raises(UserError, match=r"chat 2 of '.*chats.jsonl' is no list of messages"):
        training_examples(spec({"dataset": path, **train}), tokenizer, 64)
    jsonl(Path(path), [{"messages": [{"from": "human", "value": "hello"}]}])
    with pytest.raises(UserError, match="no role and content that are texts, but from: str, value: str"):
        training_examples(spec({"dataset": path, **train}), tokenizer, 64)
    jsonl(Path(path), [{"messages": CHAT}])
    tokenizer.chat_template = "{{ raise_exception('system is not supported') }}"
    with pytest.raises(UserError, match=r"refuses chat 1 of .*: system is not supported"):
        training_examples(spec({"dataset": path, **train}), tokenizer, 64)
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(UserError, match="rewrites the turns of chat 1"):
        training_examples(spec({"dataset": path, **train}), tokenizer, 64)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"holds chats, and the model has no chat template.*instruction-tuned"):
        training_examples(spec({"dataset": path, **train}), tokenizer, 64)


def test_packed_rows_hold_the_texts_one_after_another(texts: str, tiny_tokenizer: Any) -> None:
    alone = training_examples(spec({"dataset": texts}, packing=False), tiny_tokenizer, 64)
    packed = training_examples(spec({"dataset": texts}), tiny_tokenizer, 64)
    assert len(packed.train) < len(alone.train) == packed.train.texts
    cut: list[list[int]] = []
    for row in packed.train:
        assert len(row.input_ids) == len(row.labels) == len(row.position_ids or []) <= 64
        for token, label, place in zip(row.input_ids, row.labels, row.position_ids or [], strict=True):
            if place == 0:
                cut.append([])
            assert place == len(cut[-1])
            assert label == (IGNORED if place == 0 else token)
            cut[-1].append(token)
    assert sorted(cut) == sorted(row.input_ids for row in alone.train)
    assert packed.train.tokens == sum(map(len, cut))
    assert packed.train.learned == packed.train.tokens - len(cut)
    assert packed.digest != alone.digest
    assert packed.data == alone.data
    one_by_one = training_examples(spec({"dataset": texts}), tiny_tokenizer, 64, packs=False)
    assert one_by_one.digest == alone.digest


def test_the_split_is_decided_by_the_seed_and_nothing_is_on_both_sides(texts: str, tiny_tokenizer: Any) -> None:
    block = {"packing": False, "validation": {"share": 0.25}}
    one, again, other = (
        training_examples(spec({"dataset": texts}, **block, seed=seed), tiny_tokenizer, 64) for seed in (1, 1, 2)
    )
    assert one.digest == again.digest != other.digest
    assert (len(one.train), len(one.validation)) == (30, 10)
    held = {tuple(row.input_ids) for row in one.validation}
    assert not held & {tuple(row.input_ids) for row in one.train}
    few = training_examples(
        spec({"dataset": texts}, packing=False, validation={"samples": 3, "share": 0.5}), tiny_tokenizer, 64
    )
    assert len(few.validation) == 3


def test_what_is_the_same_as_a_text_held_out_is_not_trained_on(tmp_path: Path, tiny_tokenizer: Any) -> None:
    rows = [f"the dog sees {i % 10} birds" for i in range(40)] + [f"The dog  sees {i} BIRDS\n" for i in range(10)]
    path = jsonl(tmp_path / "twice.jsonl", [{"text": row} for row in rows])
    found = training_examples(spec({"dataset": path}, packing=False, validation={"share": 0.1}), tiny_tokenizer, 64)

    def norm(row: Row) -> str:
        return " ".join(str(tiny_tokenizer.decode(row.input_ids)).replace("<eos>", "").casefold().split())

    held = [norm(row) for row in found.validation]
    assert len(set(held)) == len(held)
    assert not set(held) & {norm(row) for row in found.train}
    (count,) = found.counts.values()
    assert count.repeated == 50 - count.train - count.validation == 5 * len(held) - len(held)


def test_what_is_left_out_is_counted_by_its_reason(tmp_path: Path, tiny_tokenizer: Any) -> None:
    rows = [
        {"q": "how many", "a": " "},
        {"q": "how many", "a": None},
        {"q": "one two three four five six seven eight nine " * 9, "a": "never reached"},
        {"q": "the cat", "a": "runs " * 60},
        *({"q": f"is it {i}", "a": "yes"} for i in range(10)),
    ]
    path = jsonl(tmp_path / "pairs.jsonl", rows)
    found = training_examples(spec({"dataset": path, **PAIR}, length=32), tiny_tokenizer, 64)
    (count,) = found.counts.values()
    assert (count.texts, count.empty, count.masked, count.truncated) == (14, 2, 1, 1)
    assert count.train + count.validation == 11
    assert "2 empty, 1 nothing to learn; 1 cut to train.length" in str(count)
    short = jsonl(tmp_path / "short.jsonl", [{"text": "a"}, {"text": "the cat"}, {"text": "a dog"}])
    tiny_tokenizer_without_end = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    (count,) = training_examples(spec({"dataset": short}), tiny_tokenizer_without_end, 64).counts.values()
    assert (count.short, count.train + count.validation) == (1, 2)


def test_a_source_of_which_nothing_is_left_is_refused(tmp_path: Path, texts: str, tiny_tokenizer: Any) -> None:
    path = jsonl(tmp_path / "blank.jsonl", [{"q": "one", "a": ""}, {"q": "two two " * 40, "a": "x"}])
    with pytest.raises(
        UserError, match=r"nothing of '.*blank.jsonl' is left.*of 2 texts 1 are empty, 0 too short, and 1"
    ):
        training_examples(spec({"dataset": texts}, {"dataset": path, **PAIR}, length=16), tiny_tokenizer, 64)
    one = jsonl(tmp_path / "one.jsonl", [{"text": "the cat"}])
    with pytest.raises(UserError, match="there is one text"):
        training_examples(spec({"dataset": one}), tiny_tokenizer, 64)
    same = jsonl(tmp_path / "same.jsonl", [{"text": "the cat"}] * 5)
    with pytest.raises(UserError, match="all texts are the same"):
        training_examples(spec({"dataset": same}), tiny_tokenizer, 64)


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = jsonl(tmp_path / "pairs.jsonl", PAIRS)
    with pytest.raises(UserError, match=r"no column 'answer' \(set response_field to one of its columns: q, a\)"):
        training_examples(spec({"dataset": path, "prompt_field": "q", "response_field": "answer"}), tiny_tokenizer, 64)
    with pytest.raises(UserError, match=r"no column 'messages' \(set messages_field to one of its columns: q, a\)"):
        training_examples(spec({"dataset": path, "messages_field": "messages"}), tiny_tokenizer, 64)
    with pytest.raises(UserError, match=r"no column 'body' \(set field to one of its columns: q, a\)"):
        training_examples(spec({"dataset": path, "field": "body"}), tiny_tokenizer, 64)
    plain = tmp_path / "plain.txt"
    plain.write_text("one\ntwo\n")
    with pytest.raises(UserError, match="plain text; prompt_field 'q' would have no effect"):
        training_examples(spec({"dataset": str(plain), **PAIR}), tiny_tokenizer, 64)
    with pytest.raises(UserError, match="name of ModelOpt's, which gives plain texts"):
        training_examples(spec({"dataset": "cnn_dailymail", **PAIR}), tiny_tokenizer, 64)
    numbers = jsonl(tmp_path / "numbers.jsonl", [{"q": "one", "a": 4}])
    with pytest.raises(UserError, match=r"column 'a' of .* holds int, not text"):
        training_examples(spec({"dataset": numbers, **PAIR}), tiny_tokenizer, 64)


def test_a_row_longer_than_the_model_is_refused(texts: str, tiny_tokenizer: Any) -> None:
    with pytest.raises(
        UserError, match=r"train.length is 64, and the model takes at most 32 tokens \(set train.length"
    ):
        training_examples(spec({"dataset": texts}), tiny_tokenizer, 32)
    assert training_examples(spec({"dataset": texts}), tiny_tokenizer, None).train


def test_samples_are_drawn_from_each_source_by_the_seed(texts: str, tiny_tokenizer: Any) -> None:
    sources = {"dataset": texts, "samples": 10}, {"dataset": texts, "samples": 1000}
    found = training_examples(spec(*sources, packing=False, validation={"samples": 1}), tiny_tokenizer, 64)
    assert [count.texts for count in found.counts.values()] == [10, 40]
    assert list(found.counts) == [f"{texts} train", f"{texts} train (2)"]
    assert [len(texts) for texts in found.texts.values()] == [10, 40]


def test_what_the_teacher_wrote_is_learned_from_its_prompt_on(tiny_tokenizer: Any) -> None:
    sampled = [Sampled([0, 20 + i, 30, 31, 1], 2, f"text {i}") for i in range(8)]
    block = TrainSpec.model_validate(
        {"method": "qad", "sampled": {"samples": 8}, "max_steps": 1, "length": 16, "packing": False}
    )
    found = training_examples(block, tiny_tokenizer, 64, sampled=sampled)
    assert all(row.labels == [IGNORED, IGNORED, 30, 31, 1] for row in every(found))
    other = training_examples(block, tiny_tokenizer, 64, sampled=[*sampled[1:], Sampled([0, 9, 9, 9], 2, "")])
    assert other.data != found.data


@pytest.mark.real
def test_gsm8k_pairs_of_a_real_tokenizer_mask_the_question(smollm2: Path, data_root: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    source = {"dataset": "openai/gsm8k", "name": "main", "prompt_field": "question", "response_field": "answer"}
    block = spec({**source, "layout": "Question: {prompt}\nAnswer: {response}"}, length=512, packing=False)
    found = training_examples(block, tokenizer, 2048, data_root)
    (count,) = found.counts.values()
    assert (count.texts, count.train + count.validation + count.repeated) == (7473, 7473)
    row = found.train[0]
    asked = [token for token, label in zip(row.input_ids, row.labels, strict=True) if label == IGNORED]
    assert tokenizer.decode(asked).endswith("\nAnswer:")
    assert "####" in learned(tokenizer, row)
    assert learned(tokenizer, row).endswith(tokenizer.eos_token)
    packed = training_examples(block.model_copy(update={"packing": True}), tokenizer, 2048, data_root)
    assert packed.train.tokens / (512 * len(packed.train)) > 0.97
    chat = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello! How can I help?"}]
    from halfbyte.quant.turns import write_chat

    written = write_chat(chat, tokenizer, "chat 1", spans=True)
    assert [written.text[a:b] for a, b in written.learned or ()] == ["Hello! How can I help?<|im_end|>"]
