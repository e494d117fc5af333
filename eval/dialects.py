"""What servers behind OpenAI's interface differ in: who they are, how long prompts may be, what they apply to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from halfbyte.eval.endpoint import Endpoint
from halfbyte.records.errors import UserError, unknown_name
from halfbyte.records.record import UNKNOWN

_VLLM = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_LLAMA = {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}
OFF: dict[str, dict[str, Any]] = {
    "vllm": _VLLM,
    "tensorrt_llm": _VLLM,
    "sglang": {**_VLLM, "top_k": -1},
    "llamacpp": _LLAMA,
    "llama-cpp-python": _LLAMA,
}
"""What turns off each server's own defaults for sampling: vLLM and SGLang take some from the model's
generation_config.json, and apply them to greedy decoding too."""
_PENALTY = {"repetition_penalty": "repeat_penalty"}
RENAMED = {"llamacpp": _PENALTY, "llama-cpp-python": _PENALTY}
"""Settings that have another name on a server."""
TAKES_STOP_TOKENS = ("vllm", "sglang", "tensorrt_llm")
_OWNERS = {"me": "llama-cpp-python"}
"""By `owned_by` in the list of models, where that is not the engine's name."""
PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is 2 + 3?"}],
    [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "And 3 + 4?"},
    ],
    [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "What is 2 + 3?"}],
)
"""Conversations whose rendering tells one chat template from another. Some templates take no system prompt."""


@dataclass(frozen=True)
class Served:
    """A server and the model it serves, as it describes them."""

    kind: str
    """vllm, sglang, tensorrt_llm, llamacpp, llama-cpp-python, or what else the server calls itself."""
    version: str | None
    model: str
    """The name it serves the model under."""
    window: int | None
    """Longest sequence in tokens, prompt and generated text together; None where it does not say."""
    path: str | None
    """Where the server has the model from, as far as it says."""
    listed: dict[str, Any] = field(repr=False)
    """Its entry in the list of models."""

    @property
    def name(self) -> str:
        """All that tells it from others: a part of a record's key."""
        return f"{self}: {self.model}"

    def __str__(self) -> str:
        return f"{self.kind} {self.version}" if self.version else self.kind


def identify(endpoint: Endpoint, model: str | None) -> Served:
    """Asks a server who it is and which model it serves.

    Args:
        endpoint: Where it is.
        model: The name of the model; None for the only one.

    Raises:
        UserError: when it cannot be reached, or serves no such model, or several and none is named.
    """
    told = endpoint.get("models").get("data")
    models = {str(one.get("id")): one for one in (told if isinstance(told, list) else []) if isinstance(one, dict)}
    if model is None and len(models) != 1:
        listed = ", ".join(models) or "none"
        raise UserError(f"{endpoint.base} serves {len(models)} models: {listed}", "name one in evaluate.server.model")
    if model is not None and model not in models:
        raise unknown_name("model of the server", model, models)
    name = next(iter(models)) if model is None else model
    entry = models[name]
    owner = str(entry.get("owned_by") or "unknown server")
    kind = _OWNERS.get(owner, owner)
    meta = entry.get("meta")
    window = entry.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
    if not isinstance(window, (int, float)):
        window = None
    properties = endpoint.ask_if_known("/props") or {} if kind == "llamacpp" else {}
    version = _version(endpoint, properties)
    path = entry.get("root") or properties.get("model_path")
    return Served(kind, version, name, int(window) if window else None, str(path) if path else None, entry)


def _version(endpoint: Endpoint, properties: dict[str, Any]) -> str | None:
    told = properties.get("build_info") or (endpoint.ask_if_known("/version") or {}).get("version")
    if not told:
        told = ((endpoint.ask_if_known("/openapi.json") or {}).get("info") or {}).get("version")
    return str(told) if told else None


class Renderer:
    """The tokens that a server makes of messages, asked of its own endpoints.

    Args:
        endpoint: Where it is.
        served: Who it is.
    """

    def __init__(self, endpoint: Endpoint, served: Served) -> None:
        self.endpoint = endpoint
        self.served = served

    def tokens(self, messages: list[dict[str, str]]) -> list[int] | None:
        """Token ids of messages behind the server's chat template, ready for an answer; None where it does not say."""
        found = self.endpoint.ask_if_known(
            "/tokenize", {"model": self.served.model, "messages": messages, "add_generation_prompt": True}
        )
        if found is not None and _ids(found):  # llama.cpp knows no messages here, and gives an empty list
            return _ids(found)
        rendered = (self.endpoint.ask_if_known("/apply-template", {"messages": messages}) or {}).get("prompt")
        if not isinstance(rendered, str):
            return None
        asked = {"content": rendered, "add_special": True, "parse_special": True}
        return _ids(self.endpoint.ask_if_known("/tokenize", asked) or {})

    def template(self, tokenizer: Any | None) -> str | None:
        """What tells the server's chat template from others.

        That is the tokenizer's own template where both render the probes alike, else a word for the server's rendering,
        or UNKNOWN where it cannot be asked for it.

        Args:
            tokenizer: The model's own; None where it is not at hand.
        """
        theirs = [self.tokens(messages) for messages in PROBES]
        if not any(theirs):
            return UNKNOWN
        template: str | None = getattr(tokenizer, "chat_template", None)
        if template and all(_local(tokenizer, messages) == ids for messages, ids in zip(PROBES, theirs, strict=True)):
            return template
        return f"rendered by the server: {theirs}"

    def bos(self, tokenizer: Any) -> list[int]:
        """The numbers of BOS tokens at the head of the rendered probes, sorted; empty where it is unknown."""
        from halfbyte.eval.prompts import bos_count

        rendered = [ids for ids in map(self.tokens, PROBES) if ids]
        return sorted({bos_count(ids, tokenizer.bos_token_id) for ids in rendered})


def _ids(found: dict[str, Any]) -> list[int] | None:
    tokens = found.get("tokens")
    return [int(token) for token in tokens] if isinstance(tokens, list) and tokens else None


def _local(tokenizer: Any, messages: list[dict[str, str]]) -> list[int] | None:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError:
        return None
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
