"""The keys and values of what several prompts begin with."""

from __future__ import annotations

import copy
from typing import Any

import torch

from halfbyte.eval.slots import Layers, Prefill, own_attention, running


def cached(model: Any, prefix: tuple[int, ...]) -> Any:
    """The keys and values of a prefix."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    ids = torch.tensor([prefix], device=model.device)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def for_rows(cache: Any, rows: int) -> Any:
    """A cache of one row as one of several: views, which a forward pass copies and does not change."""
    cache = copy.copy(cache)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in cache.layers:
        layer.keys = layer.keys.expand(rows, -1, -1, -1)
        layer.values = layer.values.expand(rows, -1, -1, -1)
    return cache


def layers_of(model: Any, prefix: tuple[int, ...]) -> Layers:
    """The keys and values of a prefix, as attention reads them: a quantized KV cache has rounded them."""
    ids = torch.tensor([prefix], device=model.device)
    current = Prefill(own_attention(model))
    with running(model, current) as cache:
        positions = torch.arange(len(prefix), device=model.device)[None]
        model(ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return current.layers
