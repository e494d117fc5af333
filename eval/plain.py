"""Generates with transformers' own generate, batch by batch, for models that continuous batching does not fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from halfbyte.eval.generation import Choose, Ended, Sample

logger = logging.getLogger(__name__)


class _Ended(StoppingCriteria):
    """Each row by itself; keeps what each had generated when it ended."""

    def __init__(self, samples: Sequence[Sample], ended: Ended) -> None:
        self.samples = samples
        self.ended = ended

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # noqa: ARG002
        """Whether each row has ended, bool [rows]."""
        for sample, token in zip(self.samples, input_ids[:, -1].tolist(), strict=True):
            if sample.stop is None:
                sample.take(token)
                sample.stop = self.ended(sample.tokens)
        return torch.tensor([sample.stop is not None for sample in self.samples], device=input_ids.device)


class _Chosen(LogitsProcessor):
    """Leaves of each row's logits only the token that is chosen for it."""

    def __init__(self, samples: Sequence[Sample], choose: Choose) -> None:
        self.samples = list(samples)
        self.choose = choose

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Scores [rows, vocabulary], minus infinity but for one of each row."""
        chosen = self.choose(scores.float(), self.samples)[:, None]
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


def generate_plainly(
    model: Any,
    samples: Sequence[Sample],
    choose: Choose,
    ended: Ended,
    *,
    size: int,
    most: int,
    options: dict[str, Any],
) -> int:
    """Fills in the tokens of all samples and why they stopped; returns the sequences at once that fitted into memory.

    Args:
        model: A causal LM of transformers.
        samples: Without tokens.
        choose: Picks the next tokens.
        ended: Why a text ends with its last token.
        size: Sequences at once.
        most: Tokens of a text.
        options: Further arguments of transformers' generate.
    """
    waiting = sorted(samples, key=lambda sample: -len(sample.prompt))
    while waiting:
        chunk = waiting[:size]
        try:
            _generate(model, chunk, choose, ended, most, options)
            waiting = waiting[size:]
            continue
        except torch.OutOfMemoryError as error:
            lacking = error.with_traceback(None)  # a traceback holds the tensors that are to be freed
        if len(chunk) == 1:
            raise lacking
        size = len(chunk) // 2
        logger.info("out of memory with %d sequences; from now on at most %d at once", len(chunk), size)
        torch.cuda.empty_cache()
        for sample in chunk:
            sample.restart()
    return size


@torch.inference_mode()
def _generate(
    model: Any,
    samples: Sequence[Sample],
    choose: Choose,
    ended: Ended,
    most: int,
    options: dict[str, Any],
) -> None:
    width = max(len(sample.prompt) for sample in samples)
    ids = torch.tensor([[*[0] * (width - len(sample.prompt)), *sample.prompt] for sample in samples])
    seen = torch.tensor([[0] * (width - len(sample.prompt)) + [1] * len(sample.prompt) for sample in samples])
    # Not transformers' own penalty, which takes the padding of a shorter prompt for text.
    processors = LogitsProcessorList([_Chosen(samples, choose)])
    model.generate(
        input_ids=ids.to(model.device),
        attention_mask=seen.to(model.device),
        max_new_tokens=most,
        do_sample=False,
        pad_token_id=0,
        use_cache=True,
        stopping_criteria=StoppingCriteriaList([_Ended(samples, ended)]),
        logits_processor=processors,
        **{**options, "repetition_penalty": 1.0},
    )
