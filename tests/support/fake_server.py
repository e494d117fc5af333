"""An OpenAI-compatible server on a tiny model, faithful to vLLM's answers but for the faults it is told to have."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from brain import Brain

from halfbyte.recipes.schema import ServerSpec


@dataclass
class Faults:
    """What is wrong with the server, or other than with vLLM."""

    owner: str = "vllm"
    models: tuple[str, ...] = ("tiny",)
    window: int | None = 512
    path: str | None = None
    """Where the model is served from."""
    shifted_echo: bool = False
    """Each token has the log-probability of the next one."""
    no_echo: bool = False
    """The log-probability of the generated token alone, whatever is echoed."""
    bias_ignored: bool = False
    biased: bool = False
    """Log-probabilities from after the bias."""
    llama_shape: bool = False
    """Log-probabilities in the shape of chat completions."""
    seed_ignored: bool = False
    one_seed: bool = False
    limit_ignored: bool = False
    text_only: bool = False
    adds_bos: bool = False
    """To prompts of text."""
    cuts_to: int | None = None
    """Prompts are cut from the left to so many tokens, without a word."""
    no_usage: bool = False
    no_reason: bool = False
    """finish_reason without stop_reason."""
    no_tokenize: bool = False
    other_template: bool = False
    key: str | None = None
    statuses: list[int] = field(default_factory=list)
    """Answers to the next requests, in place of what was asked for."""
    fails_after: int | None = None
    """So many completions are answered, and then there is status 500."""
    says: str | None = None
    """The body of every answer, in place of JSON."""
    slow: float = 0.0
    """Seconds before each answer."""
    null_content: bool = False
    overwrites: dict[str, Any] = field(default_factory=dict)
    """Parts of each choice, in place of what is right."""


@dataclass
class Server:
    """A running fake."""

    url: str
    faults: Faults
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Path and payload of each request."""

    def spec(self, **settings: Any) -> ServerSpec:
        """How to reach it, without waiting between tries."""
        return ServerSpec(**{"base_url": f"{self.url}/v1", "concurrency": 2, "retries": 1, "timeout": 20.0, **settings})


class _Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def serving(brain: Brain, faults: Faults | None = None) -> Iterator[Server]:
    """A server on a free port of this machine, stopped at the end whatever happens."""
    faults = faults or Faults()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, payload: dict[str, Any]) -> None:
            server.asked.append((self.path, payload))
            time.sleep(faults.slow)
            status, content = 200, {}
            try:
                if faults.key is not None and self.headers["Authorization"] != f"Bearer {faults.key}":
                    raise _Refusal(401, "Unauthorized")
                content = _reply(brain, faults, self.path, payload)
            except _Refusal as refusal:
                status, content = refusal.status, {"error": {"message": str(refusal)}}
            body = (faults.says or json.dumps(content)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = Server(f"http://127.0.0.1:{http.server_port}", faults)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def _reply(brain: Brain, faults: Faults, path: str, payload: dict[str, Any]) -> dict[str, Any]:
    if path == "/v1/models":
        entry = {"owned_by": faults.owner, "max_model_len": faults.window, "root": faults.path}
        return {"data": [{"id": name, **entry} for name in faults.models]}
    if path == "/version":
        return {"version": "9.9"}
    if path == "/tokenize" and not faults.no_tokenize:
        return {"tokens": _rendered(brain, faults, payload["messages"])}
    if path not in ("/v1/completions", "/v1/chat/completions"):
        raise _Refusal(404, "Not Found")
    if faults.statuses:
        raise _Refusal(faults.statuses.pop(0), "not now")
    if faults.fails_after is not None:
        faults.fails_after -= 1
        if faults.fails_after < 0:
            raise _Refusal(500, "CUDA error: an illegal memory access was encountered")
    if payload["model"] not in faults.models:
        raise _Refusal(404, f"The model `{payload['model']}` does not exist.")
    return _completion(brain, faults, payload, chat=path.endswith("chat/completions"))


def _rendered(brain: Brain, faults: Faults, messages: list[dict[str, str]]) -> list[int]:
    if faults.other_template:
        text = "".join(message["content"] for message in messages)
    else:
        text = brain.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(brain.tokenizer(text, add_special_tokens=False)["input_ids"])


def _prompt(brain: Brain, faults: Faults, payload: dict[str, Any], *, chat: bool) -> list[int]:
    if chat:
        ids = _rendered(brain, faults, payload["messages"])
    elif isinstance(payload["prompt"], str):
        ids = list(brain.tokenizer(payload["prompt"], add_special_tokens=False)["input_ids"])
        ids = [brain.tokenizer.bos_token_id, *ids] if faults.adds_bos else ids
    elif faults.text_only:
        raise _Refusal(422, "Input should be a valid string")
    else:
        ids = list(payload["prompt"])
    return ids if faults.cuts_to is None else ids[-faults.cuts_to :]


def _completion(brain: Brain, faults: Faults, payload: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    ids = _prompt(brain, faults, payload, chat=chat)
    bias = {int(token): value for token, value in (payload.get("logit_bias") or {}).items()}
    seed = payload.get("seed")
    if faults.seed_ignored:
        seed = time.monotonic_ns() % 2**31
    made = brain.generate(
        ids,
        most=payload["max_tokens"] + 5 * faults.limit_ignored,
        temperature=payload["temperature"],
        seed=7 if faults.one_seed else seed,
        stop=payload.get("stop") or (),
        stop_ids=payload.get("stop_token_ids") or (),
        bias={} if faults.bias_ignored else bias,
    )
    choice: dict[str, Any] = {"index": 0, "finish_reason": made.reason, "stop_reason": made.stop}
    if faults.no_reason:
        del choice["stop_reason"]
    if chat:
        choice["message"] = {"role": "assistant", "content": None if faults.null_content else made.text}
    else:
        choice["text"] = made.text
    if payload.get("logprobs"):
        choice["logprobs"] = _logprobs(brain, faults, ids, made.ids, bias, echo=bool(payload.get("echo")))
    choice.update(faults.overwrites)
    usage = {"prompt_tokens": len(ids), "completion_tokens": made.count}
    return {"choices": [choice], **({} if faults.no_usage else {"usage": usage})}


def _logprobs(
    brain: Brain, faults: Faults, ids: list[int], made: list[int], bias: dict[int, float], *, echo: bool
) -> dict[str, Any]:
    whole = [*ids, *made]
    table = brain.log_probs(whole)
    if faults.biased:
        for token, value in bias.items():
            table[:, token] += value
        table = table.log_softmax(-1)
    first = 0 if echo and not faults.no_echo else len(ids)
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for at in range(first, len(whole)):
        row = table[at if faults.shifted_echo and at < len(ids) else at - 1]
        best = int(row.argmax())
        known = at > 0
        values.append(float(row[whole[at]]) if known else None)
        tops.append({f"{one}": float(row[one]) for one in (whole[at], best)} if known else None)
    if faults.llama_shape and not echo:
        entry = {"id": whole[first], "logprob": values[0], "top_logprobs": [{"logprob": max((tops[0] or {}).values())}]}
        return {"content": [entry]}
    return {"token_logprobs": values, "top_logprobs": tops, "tokens": [str(token) for token in whole[first:]]}
