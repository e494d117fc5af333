"""What answers requests: the protocol that the hf, vllm and server backends follow, and the samples they give."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from halfbyte.eval.sharing import Request

Stop = Literal["stop_string", "end_token", "stopped", "length"]
"""stopped: by a stop string or the end token, and the server does not say by which."""
MAX_GEN_TOKS = 256
"""Most tokens generated where neither the task nor its settings say: lm-eval's number."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one text is generated. What a task does not name is off, whatever defaults the model brings for sampling."""

    until: tuple[str, ...] = ()
    """Stop sequences in the task's order; the end token is none of them, and always ends a text."""
    max_gen_toks: int = MAX_GEN_TOKS
    """Most tokens, the end token included."""
    temperature: float = 0.0
    """0: greedy, and nothing is drawn."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    other: tuple[tuple[str, Any], ...] = ()
    """Further settings of the task (repetition_penalty, min_p, ...), sorted; a backend takes them or refuses them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One sample to be generated; the k samples of a question are k prompts with seeds of their own."""

    text: str
    tokens: tuple[int, ...] | None
    """As the model is fed with them, special tokens and cutting done; None where the backend has no tokenizer."""
    sampling: Sampling
    seed: int | None
    """Of this sample, below 2^31; None where nothing is drawn."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One sample."""

    text: str
    """Cut at the first stop sequence, as lm-eval hands it to its filters; special tokens left out."""
    tokens: int
    """Generated, the end token included."""
    stop: Stop | None
    """None: the backend does not say."""
    seed: int | None
    """None where nothing was drawn."""


class Members(Protocol):
    """A planned batch of requests to be scored."""

    @property
    def members(self) -> list[int]:
        """The requests answered, in the order in which they are."""


class Backend(Protocol):
    """A model that scores and generates. Tokens and texts in, answers out; it keeps no journal and counts nothing.

    Batches are planned from the requests alone, never from what was answered before, so that a killed run that goes
    on gives the same bits; one batch is one journal entry.
    """

    name: str
    """hf, vllm or server: what the record says."""
    max_length: int
    """Longest input in tokens, what is generated included."""
    tokenizer: Any | None
    """A tokenizer of transformers. With none, texts are sent as they are, nothing is scored, and BOS is unknown."""
    told: Callable[[], None] | None
    """Set by who asks, and called for each sample that ends before its batch does; what cannot tell never calls it."""

    @property
    def engine(self) -> str | None:
        """What computes, for the fingerprint: "vllm 0.33.0"; None where it is transformers in this process."""

    @property
    def dtype(self) -> str:
        """Type it computes in: bfloat16, float16, float32; "server" where a server does not say."""

    @property
    def bos(self) -> Sequence[int]:
        """The numbers of BOS tokens at the head of prompts that are not encoded here, sorted; empty where unknown."""

    def score_batches(self, requests: list[Request]) -> Sequence[Members]:
        """Fixed batches of requests, each one call of `score`."""

    def score(self, requests: list[Request], batch: Any) -> list[tuple[float, bool]]:
        """For each member of a planned batch: log-likelihood in nats, and whether greedy decoding would give it."""

    def generation_batches(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Positions of prompts in fixed batches, each one call of `generate`; equal prompts stay in one batch."""

    def generate(self, prompts: Sequence[Prompt]) -> list[Generated]:
        """One sample for each prompt of a planned batch, in order."""

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The chat template that would be applied (lm-eval's argument); None where none is or it is unknown."""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as the text of a prompt."""

    def model_info(self) -> dict[str, Any]:
        """What lm-eval writes about a model: model_num_parameters, model_dtype, model_sha; empty where unknown."""


def sampling_of(gen_kwargs: dict[str, Any]) -> Sampling:
    """A task's generation settings, as it and its user give them, normalized by lm-eval."""
    from lm_eval.models.utils import normalize_gen_kwargs

    found: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, MAX_GEN_TOKS))
    draws = bool(found.pop("do_sample", False))
    temperature = float(found.pop("temperature", None) or 0.0)
    if draws and temperature == 0.0 and "temperature" not in gen_kwargs:
        temperature = 1.0
    return Sampling(
        until=tuple(str(text) for text in found.pop("until", []) if text),
        max_gen_toks=int(found.pop("max_gen_toks")),
        temperature=temperature if draws else 0.0,
        top_p=float(found.pop("top_p", 1.0) or 1.0),
        top_k=int(found.pop("top_k", 0) or 0),
        other=tuple(sorted(found.items())),
    )


def sample_seed(seed: int, task: str, doc_id: int, repeat: int) -> int:
    """The seed of one sample, below 2^31; depends on nothing but its arguments, and differs among repeats.

    >>> sample_seed(1234, "aime24", 0, 1) - sample_seed(1234, "aime24", 0, 0)
    1
    """
    first = int.from_bytes(hashlib.sha256(f"{seed}\n{task}\n{doc_id}".encode()).digest()[:4], "big")
    return (first + repeat) % 2**31
