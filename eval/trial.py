"""Whether a model answers as it does alone where prompts share their beginning: what is not known is tried."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from halfbyte.eval.cascade import PackedRows
from halfbyte.eval.layout import Layout, lay_out, masked, positions_of
from halfbyte.eval.prefix import cached, for_rows, layers_of
from halfbyte.eval.sharing import Row
from halfbyte.eval.slots import running

logger = logging.getLogger(__name__)

_WINDOWS = ("sliding_window", "window_size", "attention_window", "local_attention")


def attention_window(config: Any) -> int | None:
    """The length of a model's shortest attention window; None where every layer sees everything."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and all(kind == "full_attention" for kind in kinds):
        return None
    if not getattr(text, "use_sliding_window", True):
        return None
    found = [getattr(text, name, None) for name in _WINDOWS]
    return min((int(window) for window in found if isinstance(window, int) and window > 0), default=None)


def depends_on_length(config: Any) -> str | None:
    """What makes a model's answer for a token depend on the rest of its batch or on how the text is cut; else None."""
    text = config.get_text_config()
    if getattr(text, "attention_chunk_size", None):
        return "chunked attention"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    found = {str(kind.get("rope_type", kind.get("type", ""))) for kind in kinds}
    return next((f"{name} rotary positions" for name in ("longrope", "dynamic") if name in found), None)


def shares_exactly(model: Any) -> bool:
    """Whether the model reads a prefix from a cache and keeps branches apart.

    What is known not to is refused; the rest is tried on a few tokens. Models with recurrent layers, or with an
    attention that takes no mask of its own, do not.
    """
    reason = depends_on_length(model.config)
    if reason is None and "position_ids" not in inspect.signature(model.forward).parameters:
        reason = f"{type(model).__name__} takes no position_ids"  # as with ALiBi, which counts places in the row
    # Rounded activations at the edge of two codes may differ on one text, and hardly on three.
    reasons = [reason] if reason else [_try(model, seed, cascade=False) for seed in range(3)]
    if None in reasons:
        return True
    logger.info("prompts are scored one by one: %s", reasons[0])
    return False


def alike(logits: Tensor, alone: Tensor) -> bool:
    """Whether logits [vocabulary] are those of a pass alone, up to rounding.

    By the mean of the differences: in bfloat16 the largest of 150,000 is far off in any model.
    """
    return float((logits - alone).square().mean().sqrt()) <= 0.2 * float(alone.std()) + 1e-6


def cascades_exactly(model: Any) -> bool:
    """Whether the model reads packed rows through cascade.PackedRows, tried on a few tokens."""
    reasons = [_try(model, seed, cascade=True) for seed in range(3)]
    if None in reasons:
        return True
    logger.info("packed prompts are masked: %s", reasons[0])
    return False


@torch.inference_mode()
def _try(model: Any, seed: int, *, cascade: bool) -> str | None:
    """Why two rows with a prefix and two branches each differ from single forward passes; None: they do not."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    prefix, rows = _rows(model, seed)
    size, device = len(prefix), model.device
    try:
        alone = [
            [model(torch.tensor([[*row.context, *branch]], device=device), use_cache=False).logits[0, -1].float()
             for branch in row.branches]
            for row in rows
        ]  # fmt: skip
        if cascade:
            layout = lay_out(rows, size, packed=True)
            with running(model, PackedRows(rows, layers_of(model, prefix), size, device)) as cache:
                positions = positions_of(rows, size, layout).to(device)
                ids = layout.ids.to(device)
                together = model(ids, position_ids=positions, past_key_values=cache, use_cache=True).logits.float()
            if not all(alike(*pair) for pair in _pairs(rows, size, layout, together, alone)):
                return f"{type(model).__name__} has another attention"
            return None
        kept = cached(model, prefix)
        if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in kept.layers):
            return f"{type(model).__name__} caches more than keys and values"
        for packed in (False, True):
            layout = lay_out(rows, size, packed=packed)
            options = {"past_key_values": for_rows(kept, len(layout.ids)), **masked(model, rows, size, layout)}
            together = model(layout.ids.to(device), use_cache=True, **options).logits.float()
            if not all(alike(*pair) for pair in _pairs(rows, size, layout, together, alone)):
                return f"{type(model).__name__} does not read them from a cache"
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        return f"a shared prefix fails: {error}"
    return None


def _rows(model: Any, seed: int) -> tuple[tuple[int, ...], list[Row]]:
    """A prefix, and two rows behind it."""
    window = attention_window(model.config)
    size = 12 if window is None or window > 5 * 12 else 1  # a row below is four times as long, and stays in a window
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (8, size), generator=draw).tolist()
    prefix = tuple(tokens[0])
    rows = [
        Row((*prefix, *tokens[1]), [tuple(tokens[2]), tuple(tokens[3])]),
        Row((*prefix, *tokens[4], *tokens[5]), [tuple(tokens[6][: size // 2 + 1]), tuple(tokens[7][: size // 2])]),
    ]
    return prefix, rows


def _pairs(
    rows: list[Row], size: int, layout: Layout, together: Tensor, alone: list[list[Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each branch the logits of its last token, among the others and alone."""
    for row, logits, (sequence, start) in zip(rows, alone, layout.starts, strict=True):
        end = start + len(row.context) - size - 1
        for branch, expected in zip(row.branches, logits, strict=True):
            end += len(branch)
            if branch:
                yield together[sequence, end], expected
