"""Encoding texts by what they share gives the tokens that encoding each text alone gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from halfbyte.eval import encoding
from halfbyte.eval.encoding import cuts_safely, encode_texts

# Patterns in the form that widespread tokenizers have them: words with the space or sign before them, digits in
# groups, line ends with the spaces before them, and a run of spaces without its last one where a word follows.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
FROM_THE_RIGHT = r"\d{1,3}(?=(?:\d{3})*\b)|[^\d]+"

WORDS = [
    *("the", " cat", "  ", "\n", "\n\n", " \n ", "\t", "12345", "1", "don't", "é", "e\u0301", "猫", "<eos>", "<bos>"),
    *("A.", "?", "...", " (", "\r\n", "Answer:", " A", "'", "s"),
]


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def make(pre: Any, *, normalizer: Any = None, bos: bool = False, trim: bool = True, eos: bool = False) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["".join(WORDS) * 3, "".join(reversed(WORDS)) * 3, " the cat sat" * 9], trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    if bos or eos:
        single = " ".join(part for part, wanted in (("<bos>", bos), ("$A", True), ("<eos>", eos)) if wanted)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} $B", special_tokens=[("<bos>", 0), ("<eos>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


SAFE: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: make(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt-2 with whole offsets": lambda: make(pre_tokenizers.ByteLevel(add_prefix_space=False), trim=False),
    "llama 3": lambda: make(split(LLAMA_3), bos=True),
    "qwen": lambda: make(split(LLAMA_3.replace("{1,3}", "")), normalizer=normalizers.NFC()),
    "smollm": lambda: make(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
}
UNSAFE: dict[str, Callable[[], Any]] = {
    "a space before the text": lambda: make(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits from the right": lambda: make(split(FROM_THE_RIGHT)),
    "another normalizer": lambda: make(split(LLAMA_3), normalizer=normalizers.Prepend("_")),
    "no pre-tokens": lambda: make(pre_tokenizers.Metaspace()),
}


@pytest.fixture(scope="module", params=sorted(SAFE))
def safe(request: pytest.FixtureRequest) -> Any:
    return SAFE[request.param]()


texts = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


@given(
    beginnings=st.lists(st.lists(st.sampled_from(WORDS), min_size=8, max_size=30).map("".join), min_size=1, max_size=3),
    questions=st.lists(texts, min_size=1, max_size=5),
    answers=st.lists(texts, min_size=1, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_tokens_are_those_of_each_text_alone(
    safe: Any, beginnings: list[str], questions: list[str], answers: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encoding, "MIN_SHARED", 8)
        contexts = [first + question for first in beginnings for question in questions]
        asked = [*contexts, *(context + answer for context in contexts for answer in answers), "", "the"]
        for special in (True, False):
            alone = [safe([text], add_special_tokens=special)["input_ids"][0] for text in asked]
            assert encode_texts(safe, asked, special=special) == alone


def test_tokenizers_that_may_be_given_parts_are_told_from_others() -> None:
    assert [name for name, tokenizer in SAFE.items() if not cuts_safely(tokenizer())] == []
    assert [name for name, tokenizer in UNSAFE.items() if cuts_safely(tokenizer())] == []


@pytest.mark.parametrize("name", [*UNSAFE, "a token behind the text"])
def test_other_tokenizers_are_given_whole_texts(name: str) -> None:
    tokenizer = UNSAFE[name]() if name in UNSAFE else make(split(LLAMA_3), eos=True)
    asked = ["the cat 1234 " * 40 + end for end in ("", "A", " 5", "567")]
    assert encode_texts(tokenizer, asked, special=True) == [tokenizer(text)["input_ids"] for text in asked]


def test_what_is_shared_is_encoded_once(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    call = type(tiny_tokenizer).__call__

    def counted(self: Any, texts: Any, **options: Any) -> Any:
        given.extend(texts)
        return call(self, texts, **options)

    monkeypatch.setattr(type(tiny_tokenizer), "__call__", counted)
    shots = "the cat sees the dog.\n" * 50
    asked = [f"{shots}question {number}?\nanswer" for number in range(20)]
    encode_texts(tiny_tokenizer, [*asked, *(text + end for text in asked for end in (" A", " B"))], special=True)
    assert sum(map(len, given)) < 4 * len(shots)


@pytest.mark.real
def test_smollm2_tokens_of_mmlu_like_prompts_are_those_of_whole_texts(smollm2: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert cuts_safely(tokenizer)
    shots = "Which number is 12 + 30?\nA. 42\nB. 43\nAnswer: A\n\n" * 20
    asked = [f"{shots}  Is {a}{b} even?\n\nAnswer:" for a in range(10) for b in ("", "\n", " .", "é", "  x")]
    asked += [text + end for text in asked for end in (" A", " B", "\n", "  ")]
    assert encode_texts(tokenizer, asked, special=True) == [tokenizer(text)["input_ids"] for text in asked]
