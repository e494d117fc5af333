"""Fixtures all rooms share: the real data and model where they are, and tiny ones made on the spot."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORDS = """the a cat dog sun moon is was in on and or not red blue green one two three four five big small hot cold
day night eats sees likes runs question answer yes no true false water fire tree bird fish book"""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _named_folder(variable: str) -> Path:
    named = os.environ.get(variable)
    if not named:
        pytest.skip(f"${variable} is not set")
    folder = Path(named).resolve()
    if not folder.is_dir():
        pytest.skip(f"${variable} names {folder}, which is no folder")
    return folder


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The real benchmark data ($HALFBYTE_DATA)."""
    return _named_folder("HALFBYTE_DATA")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct as safetensors ($HALFBYTE_SMOLLM2)."""
    return _named_folder("HALFBYTE_SMOLLM2")


@pytest.fixture(scope="session")
def inhouse() -> Path:
    """The folder of the in-house model that tests/make_inhouse.py makes ($HALFBYTE_INHOUSE)."""
    return _named_folder("HALFBYTE_INHOUSE")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for halfbyte."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HALFBYTE_CACHE", str(folder))
    return folder


def make_tokenizer(*, add_bos: bool = False) -> Any:
    """A byte-level BPE tokenizer trained on a few words: any text is encodable, <bos>, <eos> and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = WORDS.split()
    tokenizer.train_from_iterator(
        [f"{a} {b} {c}" for a, b, c in zip(words, words[1:], words[2:], strict=False)], trainer
    )
    if add_bos:
        bos = tokenizer.token_to_id("<bos>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", bos)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def make_llama(*, seed: int = 0, vocab_size: int = 384, layers: int = 2, max_length: int = 512) -> Any:
    """A random Llama of 2 layers and 64 dimensions in float32, in evaluation mode."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        initializer_range=0.3,  # so that a random model has opinions: the default gives almost uniform logits
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float().eval()


@pytest.fixture(scope="session")
def tokenizer_factory() -> Callable[..., Any]:
    """`make_tokenizer`, for a test that needs another one than `tiny_tokenizer`."""
    return make_tokenizer


@pytest.fixture(scope="session")
def llama_factory() -> Callable[..., Any]:
    """`make_llama`, for a test that needs another one than `tiny_llama`."""
    return make_llama


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A tokenizer of 384 tokens that adds no BOS."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_llama() -> Any:
    """A random Llama for `tiny_tokenizer`; do not change it in a test, make another with `llama_factory`."""
    return make_llama()


@pytest.fixture
def tiny_model_folder(tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any) -> Path:
    """The tiny Llama and its tokenizer, saved as a model folder."""
    folder = tmp_path / "tiny-llama"
    tiny_llama.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder
