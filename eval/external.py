"""What the backends outside of transformers share: batches, rendered chats, and how a text ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.eval.backend import Prompt, Sampling, Stop
from halfbyte.records.errors import UserError

PASSED_ON = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Further sampling settings of a task that engines take."""


@dataclass(frozen=True)
class Chunk:
    """A batch of requests to be scored."""

    members: list[int]


def chunks(order: Sequence[int], size: int) -> list[Chunk]:
    """Batches of `size` requests in a given order."""
    return [Chunk(list(order[first : first + size])) for first in range(0, len(order), size)]


def further_settings(sampling: Sampling) -> dict[str, Any]:
    """The settings beyond temperature, top_p and top_k.

    Raises:
        UserError: for one that engines do not take.
    """
    for name, value in sampling.other:
        if name not in PASSED_ON:
            raise UserError(
                f"the generation setting {name}: {value!r} is not one that engines take",
                f"leave it out of gen_kwargs; known: {', '.join(('temperature', 'top_p', 'top_k', *PASSED_ON))}",
            )
    return dict(sampling.other)


def group_prompts(prompts: Sequence[Prompt], size: int) -> list[list[int]]:
    """Positions of prompts in batches of about `size`, in order, equal prompts in one."""
    together: dict[tuple[str, str], list[int]] = {}
    for at, prompt in enumerate(prompts):  # settings may hold lists, which have no hash
        together.setdefault((prompt.text, repr(prompt.sampling)), []).append(at)
    batches: list[list[int]] = []
    for group in together.values():
        if not batches or len(batches[-1]) + len(group) > size:
            batches.append([])
        batches[-1] += group
    return batches


def render(tokenizer: Any, chat_history: list[dict[str, str]], add_generation_prompt: bool) -> str:
    """A chat as text, by the tokenizer's own template."""
    return str(
        tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
    )


def cut(text: str, until: Sequence[str], tokenizer: Any) -> str:
    """A generated text up to its first stop sequence or end token, as lm-eval cuts it."""
    from lm_eval.models.utils import postprocess_generated_text

    stops = [*until, tokenizer.eos_token] if tokenizer.eos_token else list(until)
    return str(postprocess_generated_text(generation=text, stop=stops, think_end_token=None))


def special_stops(tokenizer: Any, until: Sequence[str]) -> list[int]:
    """Those stop sequences that are special tokens: engines leave them out of the text they look for stops in."""
    special = {str(token): int(at) for at, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [special[text] for text in until if text in special]


def stop_of(reason: object, special: Sequence[int]) -> Stop:
    """How a text ended that was stopped: by the stop string or token `reason`; None for the end token."""
    if isinstance(reason, str) or (isinstance(reason, int) and reason in special):
        return "stop_string"
    return "end_token"
