"""The few classes of vLLM that the vllm backend uses, on a tiny model: same names, same arguments, same answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from brain import Brain


@dataclass
class Logprob:
    """vllm.logprobs.Logprob."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class SamplingParams:
    """vllm.SamplingParams: unknown arguments are a TypeError there too."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    max_tokens: int | None = 16
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_logprobs: int | None = None
    detokenize: bool = True


def make(brain: Brain, *, max_model_len: int = 512) -> tuple[ModuleType, list[dict[str, Any]]]:
    """A module to stand in sys.modules as vllm, and the arguments each LLM was made with."""
    made: list[dict[str, Any]] = []

    class LLM:
        def __init__(self, model: str, **arguments: Any) -> None:
            made.append({"model": model, **arguments})
            if arguments.get("quantization") == "none-such":
                raise ValueError("Unknown quantization method: none-such.")
            window = arguments.get("max_model_len") or max_model_len
            config = SimpleNamespace(max_model_len=window, dtype="torch.float32")
            self.llm_engine = SimpleNamespace(model_config=config)

        def generate(self, prompts: list[Any], sampling_params: list[SamplingParams], *, use_tqdm: bool) -> list[Any]:
            assert not use_tqdm
            assert len(prompts) == len(sampling_params)
            return [self._one(p["prompt_token_ids"], s) for p, s in zip(prompts, sampling_params, strict=True)]

        def _one(self, ids: list[int], params: SamplingParams) -> Any:
            window = self.llm_engine.model_config.max_model_len
            if len(ids) >= window:
                raise ValueError(f"The decoder prompt (length {len(ids)}) is longer than {window}")
            text = brain.generate(
                ids,
                most=min(params.max_tokens or window, window - len(ids)),
                temperature=params.temperature,
                seed=params.seed,
                stop=params.stop,
                stop_ids=params.stop_token_ids,
            )
            end = [brain.tokenizer.eos_token_id] if text.count > len(text.ids) else []
            output = SimpleNamespace(
                index=0,
                text=text.text if params.detokenize else "",
                token_ids=[*text.ids, *end],
                finish_reason=text.reason,
                stop_reason=text.stop,
            )
            known = _prompt_logprobs(brain, ids) if params.prompt_logprobs is not None else None
            return SimpleNamespace(prompt_token_ids=ids, prompt_logprobs=known, outputs=[output], finished=True)

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams, module.TokensPrompt = LLM, SamplingParams, dict  # type: ignore[attr-defined]
    return module, made


def _prompt_logprobs(brain: Brain, ids: list[int]) -> list[dict[int, Logprob] | None]:
    """None for the first token; for each other its own log-probability, and that of the most probable token."""
    table = brain.log_probs(ids)
    found: list[dict[int, Logprob] | None] = [None]
    for row, token in zip(table, ids[1:], strict=False):
        entries = {token: Logprob(float(row[token]), int((row >= row[token]).sum()))}
        best = int(row.argmax())
        entries.setdefault(best, Logprob(float(row[best]), 1))
        found.append(entries)
    return found
