"""The vllm backend: a checkpoint in vLLM's engine in this process, on the kernels it will be served with."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from halfbyte.eval.backend import Generated, Prompt, Stop
from halfbyte.eval.external import Chunk, chunks, cut, further_settings, group_prompts, render, special_stops, stop_of
from halfbyte.eval.sharing import Request
from halfbyte.recipes.schema import EvaluateSpec
from halfbyte.records.errors import UserError

BATCH = 512
"""Requests handed to the engine at once, which makes its own batches of them: what is lost at a kill."""
OURS = ("model", "tokenizer", "dtype", "seed", "max_model_len")
"""Arguments of the engine that the recipe says elsewhere."""


class VLLMBackend:
    """See eval.backend.Backend.

    Args:
        llm: vllm.LLM.
        tokenizer: The model's own.
        arguments: What the engine was started with beyond the model; part of what is compared.
        max_length: Longest input in tokens, what is generated included; None for the engine's.
        penalty: The repetition penalty of the model's generation_config, which transformers' generate applies too.
    """

    name = "vllm"
    bos = ()
    told: Callable[[], None] | None = None

    def __init__(
        self,
        llm: Any,
        tokenizer: Any,
        *,
        arguments: dict[str, Any] | None = None,
        max_length: int | None = None,
        penalty: float | None = None,
    ) -> None:
        self.llm = llm
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        self.penalty = penalty
        config = llm.llm_engine.model_config
        self.dtype = str(config.dtype).removeprefix("torch.")
        # The engine must have room for one token behind a prompt that is scored whole.
        room = int(config.max_model_len) - 2
        if max_length is not None and max_length > room:
            raise UserError(f"max_length {max_length} is longer than the {room} tokens vLLM takes", "lower max_length")
        self.max_length = room if max_length is None else max_length

    @property
    def engine(self) -> str:
        """What answers, for the fingerprint."""
        said = f" {json.dumps(self.arguments, sort_keys=True, default=str)}" if self.arguments else ""
        return f"vllm {version('vllm')}{said}"

    def score_batches(self, requests: list[Request]) -> list[Chunk]:
        """See eval.backend.Backend; the longest first, so that a lack of memory shows at once."""
        order = sorted(range(len(requests)), key=lambda at: -len(requests[at].context) - len(requests[at].continuation))
        return chunks(order, BATCH)

    def score(self, requests: list[Request], batch: Chunk) -> list[tuple[float, bool]]:
        """See eval.backend.Backend."""
        from vllm import SamplingParams

        wanted = [requests[at] for at in batch.members]
        # One log-probability a position: that of the most probable token; the token's own is always there.
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        outputs = self._run([[*request.context, *request.continuation] for request in wanted], [params] * len(wanted))
        return [_scored(request, output) for request, output in zip(wanted, outputs, strict=True)]

    def generation_batches(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """See eval.backend.Backend."""
        return group_prompts(prompts, BATCH)

    def generate(self, prompts: Sequence[Prompt]) -> list[Generated]:
        """See eval.backend.Backend."""
        outputs = self._run([_tokens(prompt) for prompt in prompts], [self._params(prompt) for prompt in prompts])
        return [self._generated(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]

    def _run(self, rows: list[list[int]], params: list[Any]) -> list[Any]:
        from vllm import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=row) for row in rows]
        outputs: list[Any] = self.llm.generate(prompts, params, use_tqdm=False)
        return outputs

    def _params(self, prompt: Prompt) -> Any:
        from vllm import SamplingParams

        wanted = prompt.sampling
        penalty = {} if self.penalty is None else {"repetition_penalty": self.penalty}
        return SamplingParams(
            max_tokens=wanted.max_gen_toks,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            seed=prompt.seed,
            stop=list(wanted.until),
            stop_token_ids=special_stops(self.tokenizer, wanted.until),
            **{**penalty, **further_settings(wanted)},
        )

    def _generated(self, prompt: Prompt, output: Any) -> Generated:
        (found,) = output.outputs
        until = prompt.sampling.until
        stop: Stop | None = None
        if found.finish_reason == "length":
            stop = "length"
        elif found.finish_reason == "stop":
            stop = stop_of(found.stop_reason, special_stops(self.tokenizer, until))
        return Generated(cut(found.text, until, self.tokenizer), len(found.token_ids), stop, prompt.seed)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """See eval.backend.Backend."""
        found: str | None = None if chat_template is False else self.tokenizer.chat_template
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """See eval.backend.Backend."""
        return render(self.tokenizer, chat_history, add_generation_prompt)

    def model_info(self) -> dict[str, Any]:
        """See eval.backend.Backend."""
        return {"model_dtype": f"torch.{self.dtype}", "model_sha": ""}


def _tokens(prompt: Prompt) -> list[int]:
    if prompt.tokens is None:
        raise TypeError("vLLM is asked with tokens")
    return list(prompt.tokens)


def _scored(request: Request, output: Any) -> tuple[float, bool]:
    """Sum over the continuation; `prompt_logprobs` has a dict of Logprob by token for each position but the first."""
    first = len(request.context)
    values, greedy = [], True
    for token, found in zip(request.continuation, output.prompt_logprobs[first:], strict=True):
        value = float(found[token].logprob)
        values.append(value)
        greedy = greedy and value >= max(float(entry.logprob) for entry in found.values())
    return math.fsum(values), greedy


def open_vllm(folder: Path, tokenizer: Any, settings: EvaluateSpec, *, penalty: float | None = None) -> VLLMBackend:
    """Starts vLLM on a model folder.

    Args:
        folder: Original model or exported checkpoint, as `vllm serve` would get it.
        tokenizer: The model's own.
        settings: dtype, seed, max_length, and the arguments in `vllm`.
        penalty: See VLLMBackend.

    Raises:
        UserError: when vLLM is not installed or cannot run the model with these arguments.
    """
    twice = sorted(set(settings.vllm) & set(OURS))
    if twice:
        raise UserError(f"evaluate.vllm.{twice[0]} has a place of its own", "see evaluate.dtype, seed and max_length")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # its log would get into our output on stdout
    try:
        from vllm import LLM
    except ImportError as error:
        raise UserError(
            f"backend vllm needs the package vllm: {error}",
            "run `pip install '.[vllm]'` in halfbyte's repository, or start `vllm serve` in an environment of its own "
            "and use backend server",
        ) from error
    arguments: dict[str, Any] = {"dtype": settings.dtype, "seed": settings.seed, **settings.vllm}
    if settings.max_length is not None:
        arguments["max_model_len"] = settings.max_length + 2
    try:
        llm = LLM(model=str(folder), tokenizer=str(folder), **arguments)
    except (ValueError, TypeError, RuntimeError, OSError, NotImplementedError) as error:
        raise UserError(
            f"vLLM cannot run {folder}: {' '.join(str(error).split())[:400]}", "see its log above and evaluate.vllm"
        ) from error
    return VLLMBackend(llm, tokenizer, arguments=settings.vllm, max_length=settings.max_length, penalty=penalty)
