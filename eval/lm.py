"""How a backend becomes an lm-eval LM: batch by batch into a journal, with what was asked and how each text ended."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from halfbyte.eval.asked import Book, Question
from halfbyte.eval.backend import Backend, Generated, Prompt, Sampling, sample_seed, sampling_of
from halfbyte.eval.bar import Bar, work_of
from halfbyte.eval.prompts import Encoder
from halfbyte.eval.sharing import Request
from halfbyte.records.errors import UserError
from halfbyte.records.journal import Journal
from halfbyte.records.record import Asked


class JournaledLM(LM):
    """An lm-eval LM that answers in fixed batches and appends each whole batch to a journal.

    The batches depend on the requests alone and not on what was answered before, so that the answers of a run that
    was killed and went on are those of an undisturbed one, bit for bit.

    Args:
        backend: What answers.
        folder: Where the journals are.
        key: Digest of all settings that decide the answers, the model included.
        seed: What the seeds of drawn samples are derived from.
        label: Name on the progress bar.
        allow_truncated: Whether prompts that are longer than the model's window are cut instead of refused.
    """

    def __init__(
        self,
        backend: Backend,
        folder: Path,
        key: str,
        *,
        seed: int = 1234,
        label: str = "",
        allow_truncated: bool = True,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.folder = folder
        self.key = key
        self.seed = seed
        self.label = label
        self.allow_truncated = allow_truncated
        tokenizer = backend.tokenizer
        self.book = Book(tokenizer.bos_token_id, tokenizer.all_special_ids) if tokenizer is not None else Book(None, ())
        """What the model was given for each question."""
        self.generated: dict[Question, list[Generated]] = {}
        """The samples of each question, in the order of lm-eval's resps."""
        self.spent: dict[str, tuple[int, float]] = {}
        """By method, tokens (scored: shared ones once; generated: without prompts) and seconds of what this process
        computed, without what was in a journal."""
        self.distinct_tokens = 0
        """Prompt tokens that are computed, shared beginnings counted once."""
        self._encoder = Encoder(tokenizer, backend.max_length) if tokenizer is not None else None

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Log-likelihood (nats) of each continuation, and whether greedy decoding would give it."""
        encoded = self._require_encoder().pairs([request.args for request in requests])
        self._refuse_cut_answers(encoded)
        cut = [_cut(request, self.max_length) for request in encoded]
        lost = [len(whole.context) - len(part.context) for whole, part in zip(encoded, cut, strict=True)]
        self._note(requests, [[request] for request in cut], lost)
        answers = self._score("loglikelihood", requests, cut, [_question(request) for request in requests])
        self._refuse_nonsense([value for value, _ in answers])
        return answers

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Log-likelihood (nats) of each whole document, in windows of max_length."""
        documents = self._require_encoder().documents([request.args[0] for request in requests])
        windows = [window for document in documents for window in document]
        self._note(requests, documents)
        owners = [_question(request) for request, document in zip(requests, documents, strict=True) for _ in document]
        scores = iter(self._score("loglikelihood_rolling", requests, windows, owners))
        answers = [math.fsum(next(scores)[0] for _ in document) for document in documents]
        self._refuse_nonsense(answers)
        return answers

    def _score(
        self, method: str, requests: list[Instance], encoded: list[Request], owners: Sequence[Question]
    ) -> list[tuple[float, bool]]:
        batches = self.backend.score_batches(encoded)
        work = work_of(batches, [len(context) + len(continuation) for context, continuation in encoded])
        self.distinct_tokens += sum(work)

        def answer(index: int) -> tuple[list[Any], int]:
            found = [[value, greedy] for value, greedy in self.backend.score(encoded, batches[index])]
            return found, work[index]

        answers = self._run(method, requests, [batch.members for batch in batches], answer, owners, work)
        return [(value, greedy) for value, greedy in answers]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The text generated after each prompt, cut at the first stop sequence.

        Raises:
            UserError: when max_gen_toks leaves no room for a prompt.
        """
        prompts = self._prompts(requests)
        batches = self.backend.generation_batches(prompts)

        def answer(index: int) -> tuple[list[Any], int]:
            found = self.backend.generate([prompts[at] for at in batches[index]])
            return [[one.text, one.tokens, one.stop, one.seed] for one in found], sum(one.tokens for one in found)

        owners = [_question(request) for request in requests]
        self.distinct_tokens += sum(map(len, {prompt.tokens for prompt in prompts if prompt.tokens is not None}))
        answers = [Generated(*values) for values in self._run("generate_until", requests, batches, answer, owners)]
        for request, generated in zip(requests, answers, strict=True):
            self.generated.setdefault(_question(request), []).append(generated)
        return [generated.text for generated in answers]

    def _prompts(self, requests: list[Instance]) -> list[Prompt]:
        """Each request as the backend is asked it: encoded, cut, with its settings and its seed."""
        known: dict[str, Sampling] = {}
        samplings = []
        for request in requests:
            text = json.dumps(request.args[1], sort_keys=True, default=str)
            if text not in known:
                known[text] = sampling_of(request.args[1])
                self._require_room(known[text].max_gen_toks)
            samplings.append(known[text])
        texts = [request.args[0] for request in requests]
        rows: list[tuple[int, ...] | None] = [None] * len(texts)
        if self._encoder is not None:
            distinct = list(dict.fromkeys(texts))  # the k samples of a question are one text
            encoded = dict(zip(distinct, map(tuple, self._encoder.texts(distinct)), strict=True))
            whole = [encoded[text] for text in texts]
            cut = [
                tokens[max(0, len(tokens) - (self.max_length - sampling.max_gen_toks)) :]
                for tokens, sampling in zip(whole, samplings, strict=True)
            ]
            lost = [len(tokens) - len(part) for tokens, part in zip(whole, cut, strict=True)]
            self._note(requests, [[Request(tokens, ())] for tokens in cut], lost)
            rows = list(cut)
        else:
            self.book.asked.update((_question(request), Asked()) for request in requests)
        repeats: dict[tuple[str, int, int], int] = {}
        prompts = []
        for request, text, tokens, sampling in zip(requests, texts, rows, samplings, strict=True):
            task, doc_id = _question(request)
            repeat = repeats[task, doc_id, request.idx] = repeats.get((task, doc_id, request.idx), -1) + 1
            seed = sample_seed(self.seed, task, doc_id, repeat) if sampling.temperature > 0 else None
            prompts.append(Prompt(text, tokens, sampling, seed))
        return prompts

    def _require_room(self, max_gen_toks: int) -> None:
        if max_gen_toks >= self.max_length:
            raise UserError(
                f"max_gen_toks {max_gen_toks} leaves no room for a prompt in {self.max_length} tokens",
                "lower gen_kwargs.max_gen_toks of the task or raise max_length",
            )

    def _require_encoder(self) -> Encoder:
        if self._encoder is None:
            raise UserError(
                f"{self.label}: the {self.backend.name} backend has no tokenizer, and answers are scored as tokens",
                "give it the model's tokenizer, or evaluate with the hf backend",
            )
        return self._encoder

    def _note(
        self, requests: Sequence[Instance], fed: Sequence[Sequence[Request]], lost: Sequence[int] | None = None
    ) -> None:
        """Keeps what is asked, and refuses prompts that were cut unless that is allowed.

        Args:
            requests: lm-eval's.
            fed: What the model is fed with for each.
            lost: Tokens cut off each; None where none can be.
        """
        lost = lost or [0] * len(requests)
        if not self.allow_truncated and any(lost):
            number, worst = sum(map(bool, lost)), max(range(len(lost)), key=lambda at: lost[at])
            task, doc_id = _question(requests[worst])
            raise UserError(
                f"{self.label}: {number} of {len(requests)} prompts do not fit into {self.max_length} tokens together "
                f"with their answers; that of question {doc_id} of {task} is {lost[worst]} tokens too long",
                "raise max_length, ask with fewer examples, or set evaluate.allow_truncated",
            )
        for request, windows, missing in zip(requests, fed, lost, strict=True):
            self.book.add(_question(request), windows, missing)

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
        answer: Callable[[int], tuple[list[Any], int]],
        owners: Sequence[Question],
        work: Sequence[int] | None = None,
    ) -> list[Any]:
        """All answers, batch by batch, those in the journal from there; `batches` say where each belongs.

        Args:
            method: lm-eval's.
            requests: lm-eval's.
            batches: What is answered together.
            answer: Answers a batch, with the tokens computed or generated for it.
            owners: For the progress bar, the question of each position in `batches`.
            work: And the tokens of each batch, where they are known before.
        """
        answers: list[Any] = [None] * sum(map(len, batches))
        # A server's address is no part of the key: answers of two engines must not meet in one journal.
        key = _requests_digest([self.key, self.backend.engine, method, batches], requests)
        with (
            Journal(self.folder / f"journal-{method}.jsonl", key) as journal,
            Bar(self.label, owners, batches, work) as bar,
        ):
            for index in range(len(journal.entries)):
                bar.known(index)
            for index, batch in enumerate(batches):
                if index == len(journal.entries):
                    start = time.perf_counter()
                    self.backend.told = bar.ended
                    found, size = answer(index)
                    tokens, seconds = self.spent.get(method, (0, 0.0))
                    self.spent[method] = tokens + size, seconds + time.perf_counter() - start
                    journal.append({"answers": found})
                    bar.answered(index, size)
                for at, value in zip(batch, journal.entries[index]["answers"], strict=True):
                    answers[at] = value
        return answers

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests plus tokens generated."""
        return self.book.tokens + sum(one.tokens for samples in self.generated.values() for one in samples)

    @property
    def max_length(self) -> int:
        """Longest input in tokens."""
        return self.backend.max_length

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None where the backend has none."""
        return self.backend.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """lm-eval's name for the tokenizer in its cache of requests."""
        return str(getattr(self.tokenizer, "name_or_path", "")).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The chat template lm-eval would apply; None where none is."""
        return self.backend.chat_template(chat_template)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat rendered by the model's template.

        Raises:
            UserError: when the template refuses it, as many refuse a system prompt, or is none.
        """
        try:
            return self.backend.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in chat_history[:3])
            raise UserError(
                f"the model's chat template does not render a chat that begins with {roles}: {error}",
                "leave out system_prompt or num_fewshot, or mend chat_template.jinja in the model folder",
            ) from error

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes about a model."""
        return self.backend.model_info()


def _question(request: Instance) -> Question:
    return str(request.task_name), int(request.doc_id or 0)


def _cut(request: Request, max_length: int) -> Request:
    """A request whose context is cut from the left so that all but the last token fit into the model."""
    room = max(1, max_length + 1 - len(request.continuation))
    return request if len(request.context) <= room else Request(request.context[-room:], request.continuation)


def _requests_digest(decides: list[Any], requests: list[Instance]) -> str:
    digest = hashlib.sha256(json.dumps(decides).encode("ascii"))
    for request in requests:
        digest.update(json.dumps(request.args, sort_keys=True, default=str).encode("ascii"))
    return digest.hexdigest()
