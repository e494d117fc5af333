"""Training texts as they are written out: which characters are learned, and which only stand before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfbyte.records.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""First character and the one after the last."""


@dataclass(frozen=True, slots=True)
class Written:
    """A text, written out."""

    text: str
    learned: tuple[Span, ...] | None = None
    """What counts in the loss where prompts are masked; None for all of it."""
    template: bool = False
    """Whether a chat template wrote it, which sets the special tokens itself."""


def write_pair(prompt: str, response: str, layout: str) -> Written:
    """A prompt and its response in `layout`, a text with {prompt} and {response} in it.

    The spaces before the response are learned with it: a prompt that is asked has none at its end.
    """
    head, _, tail = layout.partition("{response}")
    head = head.replace("{prompt}", prompt)
    kept = head.rstrip()
    return Written(head + response + tail, ((len(kept), len(head) + len(response) + len(tail)),))


def write_chat(messages: Any, tokenizer: PreTrainedTokenizerBase, where: str, *, spans: bool) -> Written:
    """A chat in the model's own template; learned are the assistant's turns with the token that ends each.

    A turn begins where the template, asked for the next answer, leaves off, and ends with what the template puts after
    its content. This holds as well for templates that leave out of earlier turns what a model thought.

    Args:
        messages: A list of {"role": ..., "content": ...}.
        tokenizer: The model's; it has a template.
        where: The chat, for messages.
        spans: Whether it is told what is learned; without, all of it is.

    Raises:
        UserError: for something else than a chat, one the template refuses, or a template that rewrites the turns.
    """
    from jinja2 import TemplateError

    turns = _checked(messages, where)
    try:
        text = _render(tokenizer, turns)
        if not spans:
            return Written(text, template=True)
        learned = [
            _turn(tokenizer, turns[: at + 1], text, where)
            for at, turn in enumerate(turns)
            if turn["role"] == "assistant"
        ]
    except TemplateError as error:
        raise UserError(
            f"the model's chat template refuses {where}: {error}", "leave that chat out, or mend it"
        ) from None
    return Written(text, tuple(learned), template=True)


def _checked(messages: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{where} is no list of messages", 'a chat is [{"role": "user", "content": "..."}, ...]')
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            keys = ", ".join(f"{key}: {type(value).__name__}" for key, value in message.items())
            raise UserError(
                f"a message of {where} has no role and content that are texts, but {keys or 'nothing'}",
                'a chat is [{"role": "user", "content": "..."}, ...]',
            )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _render(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], *, ask: bool = False) -> str:
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask))


def _turn(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], text: str, where: str) -> Span:
    """Where the last of these turns stands in the text of the whole chat."""
    content = turns[-1]["content"].strip()
    if not content:
        return 0, 0
    asked = _render(tokenizer, turns[:-1], ask=True)
    until = _render(tokenizer, turns)
    before, _, after = until.rpartition(content)
    found = text.find(content, len(asked)) if text.startswith(asked) and before else -1
    end = found + len(content) + len(after.rstrip())
    if found < 0 or not text.startswith(after.rstrip(), found + len(content)):
        raise UserError(
            f"the model's chat template rewrites the turns of {where}, so that the assistant's part cannot be told",
            "set train.mask_prompts to false",
        )
    return len(asked), end
