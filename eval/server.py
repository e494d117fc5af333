"""The server backend: scores and generates through any OpenAI-compatible endpoint, and takes no answer on trust."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from halfbyte.eval.backend import Generated, Prompt, Stop
from halfbyte.eval.completions import Completions, choice, require_length, usage
from halfbyte.eval.dialects import OFF, RENAMED, TAKES_STOP_TOKENS, Renderer, Served, identify
from halfbyte.eval.endpoint import Endpoint
from halfbyte.eval.external import (
    Chunk,
    chunks,
    cut,
    further_settings,
    group_prompts,
    render,
    special_stops,
    stop_of,
)
from halfbyte.eval.server_scores import find_way, total
from halfbyte.eval.sharing import Request
from halfbyte.recipes.schema import ServerSpec
from halfbyte.records.errors import UserError
from halfbyte.records.record import UNKNOWN

PER_WORKER = 4
"""Requests a batch for each that is under way at once: enough to keep a server busy, few enough to lose at a kill."""
SEED_TOKENS = 16
SEED_TRIES = 3


class ServerBackend:
    """A model behind an endpoint; see eval.backend.Backend.

    Args:
        endpoint: Where it is.
        served: What it says of itself.
        tokenizer: The model's own. With api: chat it only serves to recognise the server's chat template.
        max_length: Longest input in tokens, what is generated included; None for the server's window.
        penalty: The repetition penalty of the model's generation_config, which transformers' generate applies too.
    """

    name = "server"
    dtype = "server"

    def __init__(
        self,
        endpoint: Endpoint,
        served: Served,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        penalty: float | None = None,
    ) -> None:
        self.penalty = penalty
        self.told: Callable[[], None] | None = None
        self.endpoint = endpoint
        self.served = served
        self.chat = endpoint.spec.api == "chat"
        self.local = tokenizer
        self.tokenizer = None if self.chat else tokenizer
        self.max_length = _max_length(served, max_length)
        self.completions = Completions(endpoint, served, tokenizer)
        self.renderer = Renderer(endpoint, served)
        self._seeds_work = False

    @property
    def engine(self) -> str:
        """What answers, for the fingerprint."""
        return f"{self.served} (chat)" if self.chat else str(self.served)

    @cached_property
    def bos(self) -> list[int]:
        """With api: chat, the numbers of BOS tokens at the head of what the server makes of messages, as it tells."""
        return self.renderer.bos(self.local) if self.chat else []

    def score_batches(self, requests: list[Request]) -> list[Chunk]:
        """Batches of requests whose contexts begin alike, which servers keep in their prefix caches."""
        if self.chat:
            raise UserError(
                "a chat endpoint gives no log-probabilities of prompts: nothing can be scored",
                "set evaluate.server.api to completions, or choose tasks that generate",
            )
        order = sorted(range(len(requests)), key=lambda at: requests[at])
        return chunks(order, self.endpoint.spec.concurrency * PER_WORKER)

    def score(self, requests: list[Request], batch: Chunk) -> list[tuple[float, bool]]:
        """Log-likelihood (nats) of each continuation, and whether greedy decoding would give it.

        Raises:
            UserError: when the server gives no log-probabilities of prompts, or cuts one, or does not answer.
        """
        way = self._way
        wanted = [requests[at] for at in batch.members]
        return self.endpoint.each(lambda request: total(way(self.completions, request)), wanted)

    @cached_property
    def _way(self) -> Any:
        self.completions.settle()
        return find_way(self.completions)

    def generation_batches(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Batches in the order of the prompts; the samples of one question stay in one."""
        return group_prompts(prompts, self.endpoint.spec.concurrency * PER_WORKER)

    def generate(self, prompts: Sequence[Prompt]) -> list[Generated]:
        """One text for each prompt.

        Raises:
            UserError: when the server cuts a prompt, ignores the seed or the token limit, or does not answer.
        """
        if self.chat:
            _ = self._template  # before several threads would ask for it
        else:
            self.completions.settle()
        if any(prompt.seed is not None for prompt in prompts):
            self._require_seeds()
        return self.endpoint.each(self._generate, prompts, self.told)

    def _generate(self, prompt: Prompt) -> Generated:
        most = prompt.sampling.max_gen_toks
        if self.chat:
            found = self._chat(json.loads(prompt.text), self._settings(prompt))
            text = (found.get("message") or {}).get("content")
        else:
            if prompt.tokens is None:
                raise TypeError("completions are asked for with tokens")
            found = self._completed(prompt.tokens, self._settings(prompt))
            text = found.get("text")
        if found["tokens"] > most:
            raise UserError(
                f"{self.served} generated {found['tokens']} tokens where {most} were the most",
                "this server cannot be used for tasks that generate",
            )
        if text is not None and not isinstance(text, str):
            raise UserError(f"{self.served} gives {text!r} as the generated text", "look at the server's log")
        # A reasoning parser gives no content where the limit was reached while thinking.
        whole = (text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half an emoji is no text
        text = cut(whole, prompt.sampling.until, self.local)
        return Generated(text, found["tokens"], self._stop(found, prompt), prompt.seed)

    def _completed(self, ids: Sequence[int], settings: dict[str, Any]) -> dict[str, Any]:
        reply = self.completions.ask(ids, settings)
        return {**choice(reply, self.served), "tokens": usage(reply, "completion_tokens", self.served)}

    def _chat(self, messages: list[dict[str, str]], settings: dict[str, Any]) -> dict[str, Any]:
        payload = {"model": self.served.model, "messages": messages, **settings}
        reply = self.endpoint.post("chat/completions", payload)
        rendered = self.renderer.tokens(messages) if self._template != UNKNOWN else None
        if rendered is not None:
            require_length(reply, len(rendered), self.served)
        return {**choice(reply, self.served), "tokens": usage(reply, "completion_tokens", self.served)}

    def _settings(self, prompt: Prompt) -> dict[str, Any]:
        """How one text is generated; what the task does not name is turned off, as far as the server is known."""
        wanted, kind = prompt.sampling, self.served.kind
        settings: dict[str, Any] = {
            "max_tokens": wanted.max_gen_toks, "temperature": wanted.temperature, "top_p": 1.0, **OFF.get(kind, {})
        }  # fmt: skip
        if wanted.until:
            settings["stop"] = list(wanted.until)
        if prompt.seed is not None:
            settings |= {"seed": prompt.seed, "top_p": wanted.top_p}
            if wanted.top_k > 0:
                settings["top_k"] = wanted.top_k
        names = RENAMED.get(kind, {})
        penalty = {} if self.penalty is None else {"repetition_penalty": self.penalty}
        further = {**penalty, **further_settings(wanted)}
        settings |= {names.get(name, name): value for name, value in further.items()}
        special = special_stops(self.local, wanted.until)
        if special and kind in TAKES_STOP_TOKENS:
            settings["stop_token_ids"] = special
        return settings

    def _stop(self, found: dict[str, Any], prompt: Prompt) -> Stop | None:
        reason = found.get("finish_reason")
        if reason == "length":
            return "length"
        if reason != "stop":
            return None
        until = prompt.sampling.until
        for name in ("stop_reason", "matched_stop"):
            if name in found:
                return stop_of(found[name], special_stops(self.local, until))
        return "stopped" if until else "end_token"

    def _require_seeds(self) -> None:
        """Asks thrice with two seeds: a server that ignores them gives k equal samples, or others at each try."""
        if self._seeds_work:
            return
        same = differ = False
        for attempt in range(SEED_TRIES):
            first, again, other = (self._drawn(seed) for seed in (attempt, attempt, attempt + 7919))
            same, differ = same or first == again, differ or first != other
            if same and differ:
                self._seeds_work = True
                return
        what = "gives one text for different seeds" if same else "gives different texts for one seed"
        raise UserError(
            f"{self.served} ignores the seed of a request: at temperature 1 it {what}",
            "its samples cannot be repeated; set temperature 0, or use another server",
        )

    def _drawn(self, seed: int) -> str:
        settings = {"max_tokens": SEED_TOKENS, "temperature": 1.0, "seed": seed, **OFF.get(self.served.kind, {})}
        text = "Once upon a time"
        if self.chat:
            return json.dumps(self._chat([{"role": "user", "content": text}], settings)["message"], sort_keys=True)
        return str(self._completed(self.completions.encode(text), settings).get("text"))

    @cached_property
    def _template(self) -> str | None:
        return self.renderer.template(self.local)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template applied: ours, or for api: chat what is known of the server's; see Renderer.template."""
        if chat_template is False:
            return None
        found: str | None = self._template if self.chat else self.local.chat_template
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a prompt; for api: chat the messages as JSON, which `generate` reads again."""
        if not self.chat:
            return render(self.local, chat_history, add_generation_prompt)
        if not add_generation_prompt:
            raise UserError(
                "the task begins the model's answer, which chat endpoints do not let one do",
                "set evaluate.server.api to completions",
            )
        return json.dumps(chat_history, ensure_ascii=False)

    def model_info(self) -> dict[str, Any]:
        """Nothing: a server does not say."""
        return {}


def open_server(
    spec: ServerSpec, tokenizer: Any, *, max_length: int | None = None, penalty: float | None = None
) -> ServerBackend:
    """Connects to a server.

    Args:
        spec: Where it is.
        tokenizer: The model's own.
        max_length: As for ServerBackend.
        penalty: As for ServerBackend.

    Raises:
        UserError: when it cannot be reached, refuses the key, or serves no such model.
    """
    endpoint = Endpoint(spec)
    return ServerBackend(endpoint, identify(endpoint, spec.model), tokenizer, max_length=max_length, penalty=penalty)


def _max_length(served: Served, wanted: int | None) -> int:
    """Two less than the window: a prompt that is scored is sent whole, and the server adds a token to it."""
    room = None if served.window is None else served.window - 2
    if wanted is None and room is None:
        raise UserError(
            f"{served} does not say how long a prompt may be", "set evaluate.max_length to its window less 2 tokens"
        )
    if wanted is not None and room is not None and wanted > room:
        raise UserError(
            f"max_length {wanted} does not fit into the server's window of {served.window} tokens",
            f"set evaluate.max_length to at most {room}, or start the server with a window of {wanted + 2}",
        )
    return int(wanted or room or 0)
