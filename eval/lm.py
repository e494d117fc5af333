"""How a model becomes an lm-eval LM: our scorer for continuations, lm-eval's hf backend for generated texts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs

from halfbyte.eval.prompts import bos_count, encode_contexts, encode_documents, encode_pairs, plan_generation
from halfbyte.eval.scorer import PrefixScorer
from halfbyte.eval.sharing import Request
from halfbyte.records.errors import UserError
from halfbyte.records.journal import Journal
from halfbyte.records.progress import progress_bar


class Generator(HFLM):
    """lm-eval's hf backend around a loaded model, for what it generates; counts that.

    Args:
        model: A causal LM of transformers, on its device, in the type to compute in.
        tokenizer: Its tokenizer.
        batch_size: Sequences generated at once.
        max_length: Longest input in tokens; None for the model's own.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch_size: int = 16, max_length: int | None = None) -> None:
        super().__init__(
            pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size, max_length=max_length
        )
        self.generated = 0
        """Tokens generated so far, the end token included."""
        self.hit_cap = 0
        """Generations so far that ended at the token limit."""

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any) -> Any:
        output = super()._model_generate(context, max_length, stop, **generation_kwargs)
        ends = self.model.generation_config.eos_token_id
        end_ids = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        for row in output[:, context.shape[1] :].tolist():
            length = next((at + 1 for at, token in enumerate(row) if token in end_ids), None)
            self.generated += len(row) if length is None else length
            full = length is None and len(row) >= max_length - context.shape[1]
            if full and not any(text in self.tok_decode(row) for text in stop if text):
                self.hit_cap += 1
        return output


@dataclass
class Counts:
    """What was seen on the way; see records.Health."""

    tokens: int = 0
    truncated: int = 0
    bos: set[int] = field(default_factory=set)
    hit_cap: int | None = None
    empty: int | None = None


class JournaledLM(LM):
    """An lm-eval LM that answers in fixed batches and appends each whole batch to a journal.

    The batches depend on the requests alone and not on what was answered before, so that the answers of a run that
    was killed and went on are those of an undisturbed one, bit for bit.

    Args:
        inner: The loaded model, its tokenizer, and what generates.
        folder: Where the journals are.
        key: Digest of all settings that decide the answers, the model included.
        seed: Sampled generations of batch i are drawn with seed + i.
        label: Name on the progress bar.
        batch_tokens: Tokens a forward pass when scoring; None for the device's own.
    """

    def __init__(
        self,
        inner: Generator,
        folder: Path,
        key: str,
        *,
        seed: int = 1234,
        label: str = "",
        batch_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.inner = inner
        self.folder = folder
        self.key = key
        self.seed = seed
        self.label = label
        self.counts = Counts()
        self.scorer = PrefixScorer(inner.model, budget=batch_tokens)
        self._device = inner.device
        self._rank = inner.rank
        self._world_size = inner.world_size

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Log-likelihood (nats) of each continuation, and whether greedy decoding would give it."""
        encoded = encode_pairs(self.inner, [request.args for request in requests])
        self._refuse_cut_answers(encoded)
        cut = [_cut(request, self.max_length) for request in encoded]
        self._count(self._seen(encoded, self.max_length + 1))
        answers = self._score("loglikelihood", requests, cut)
        self._refuse_nonsense([value for value, _ in answers])
        return answers

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Log-likelihood (nats) of each whole document, in windows of max_length."""
        documents = encode_documents(self.inner, [request.args[0] for request in requests])
        windows = [window for document in documents for window in document]
        self._count(self._seen(windows, None))
        scores = iter(self._score("loglikelihood_rolling", requests, windows))
        answers = [math.fsum(next(scores)[0] for _ in document) for document in documents]
        self._refuse_nonsense(answers)
        return answers

    def _score(self, method: str, requests: list[Instance], encoded: list[Request]) -> list[tuple[float, bool]]:
        scorer = self.scorer
        batches = scorer.plan(encoded)

        def answer(index: int) -> list[Any]:
            return [[value, greedy] for value, greedy in scorer.score(encoded, batches[index])]

        answers = self._run(method, requests, [batch.members for batch in batches], answer)
        return [(value, greedy) for value, greedy in answers]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The text generated after each prompt, cut at the first stop sequence.

        Raises:
            UserError: when max_gen_toks leaves no room for a prompt.
        """
        settings = [json.dumps(request.args[1], sort_keys=True, default=str) for request in requests]
        room = {text: self._room(request.args[1]) for text, request in zip(settings, requests, strict=True)}
        prompts = encode_contexts(self.inner, [request.args[0] for request in requests], settings)
        self._count((prompt.length, prompt.bos, room[prompt.group]) for prompt in prompts)
        batches = plan_generation(prompts, self.inner.batch_size)

        def answer(index: int) -> list[Any]:
            torch.manual_seed(self.seed + index)
            batch = [requests[at] for at in batches[index]]
            return [str(text) for text in self.inner.generate_until(batch, disable_tqdm=True)]

        answers: list[str] = self._run("generate_until", requests, batches, answer)
        self.counts.empty = (self.counts.empty or 0) + sum(not text.strip() for text in answers)
        return answers

    def _room(self, gen_kwargs: dict[str, Any]) -> int:
        """Longest prompt in tokens beside `max_gen_toks`."""
        most = int(normalize_gen_kwargs(gen_kwargs, self.inner.max_gen_toks)["max_gen_toks"])
        if most >= self.inner.max_length:
            raise UserError(
                f"max_gen_toks {most} leaves no room for a prompt in {self.inner.max_length} tokens",
                "lower gen_kwargs.max_gen_toks of the task or raise max_length",
            )
        return int(self.inner.max_length) - most

    def _seen(self, encoded: Sequence[Request], room: int | None) -> Iterator[tuple[int, int, int | None]]:
        for request in encoded:
            length = len(request.context) + len(request.continuation)
            yield length, bos_count(request.context, self.tokenizer.bos_token_id), room

    def _count(self, seen: Iterable[tuple[int, int, int | None]]) -> None:
        """Of each prompt: its tokens, the BOS tokens at its head, and the most tokens it may have."""
        for length, bos, room in seen:
            self.counts.tokens += length
            self.counts.bos.add(bos)
            self.counts.truncated += room is not None and length > room

    def _refuse_cut_answers(self, encoded: Sequence[Request]) -> None:
        """A prompt may be cut from the left, the continuation that is scored may not."""
        most = max(len(request.continuation) for request in encoded)
        if most > self.max_length:
            raise UserError(
                f"{self.label}: an answer of {most} tokens does not fit into a max_length of {self.max_length}",
                "raise max_length",
            )

    def _refuse_nonsense(self, values: Sequence[float]) -> None:
        bad = sum(not math.isfinite(value) for value in values)
        if bad:
            raise UserError(
                f"{self.label}: the model gives {bad} of {len(values)} log-likelihoods that are no numbers",
                "its logits hold NaN or infinity: look at the checkpoint's scales, or compute in another dtype",
            )

    def _run(
        self,
        method: str,
        requests: list[Instance],
        batches: list[list[int]],
        answer: Callable[[int], list[Any]],
    ) -> list[Any]:
        """All answers, batch by batch, those in the journal from there; `batches` say where each belongs."""
        generates = method == "generate_until"
        answers: list[Any] = [None] * sum(map(len, batches))
        key = _requests_digest(self.key, method, requests, batches)
        with (
            Journal(self.folder / f"journal-{method}.jsonl", key) as journal,
            progress_bar(total=sum(map(len, batches)), desc=self.label, unit="request") as bar,
        ):
            bar.update(sum(len(batch) for batch in batches[: len(journal.entries)]))
            bar.initial = bar.n  # the ETA is of what is left, not of what an earlier process did
            for index, batch in enumerate(batches):
                if index == len(journal.entries):
                    generated, capped = self.inner.generated, self.inner.hit_cap
                    entry: dict[str, Any] = {"answers": answer(index)}
                    if generates:
                        entry["tokens"] = self.inner.generated - generated
                        entry["hit_cap"] = self.inner.hit_cap - capped
                    journal.append(entry)
                    bar.update(len(batch))
                entry = journal.entries[index]
                for at, value in zip(batch, entry["answers"], strict=True):
                    answers[at] = value
                if generates:
                    self.counts.tokens += entry["tokens"]
                    self.counts.hit_cap = (self.counts.hit_cap or 0) + entry["hit_cap"]
        return answers

    @property
    def max_length(self) -> int:
        """Longest input in tokens."""
        return int(self.inner.max_length)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.inner.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """lm-eval's name for the tokenizer in its cache of requests."""
        return str(self.inner.tokenizer_name)

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        found: int | None = self.inner.eot_token_id
        return found

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The chat template lm-eval would apply; None where none is."""
        found: str | None = self.inner.chat_template(chat_template)
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat rendered by the model's template."""
        return str(self.inner.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt))

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes about a model; its own version asks the hub, which a folder on disk has no entry in."""
        model = self.inner.model
        return {"model_num_parameters": model.num_parameters(), "model_dtype": str(model.dtype), "model_sha": ""}


def _cut(request: Request, max_length: int) -> Request:
    """A request whose context is cut from the left so that all but the last token fit into the model."""
    room = max(1, max_length + 1 - len(request.continuation))
    return request if len(request.context) <= room else Request(request.context[-room:], request.continuation)


def _requests_digest(key: str, method: str, requests: list[Instance], batches: list[list[int]]) -> str:
    digest = hashlib.sha256(json.dumps([key, method, batches]).encode("ascii"))
    for request in requests:
        digest.update(json.dumps(request.args, sort_keys=True, default=str).encode("ascii"))
    return digest.hexdigest()
