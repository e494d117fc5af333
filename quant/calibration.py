"""Calibration data: texts to tokens, several texts in one row without padding, and the loop ModelOpt calibrates with.

Padding would let the activations of padding tokens decide a scale. Instead texts are laid end to end in one row whose
position_ids start anew with each text; transformers builds a block-diagonal causal mask from that, so every token sees
what it would see alone and the result does not depend on the batch size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from halfbyte.records.errors import UserError
from halfbyte.records.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int) -> list[list[int]]:
    """Token ids of each text with the tokenizer's own special tokens, cut to `length`.

    Texts without a token are left out.

    Raises:
        UserError: when nothing is left.
    """
    # Not truncation=True: a fast tokenizer keeps that setting and would be saved with it into the checkpoint.
    encoded = tokenizer(list(texts), verbose=False)["input_ids"]
    rows = [[int(token) for token in ids[:length]] for ids in encoded if len(ids) > 0]
    if not rows:
        raise UserError("the calibration texts hold no token", "check quantize.calibration.sources")
    return rows


def rows_of(sequences: Sequence[Sequence[int]], tokens: int) -> Iterator[list[Sequence[int]]]:
    """Groups consecutive sequences into rows of at most `tokens` tokens; a longer sequence gets a row of its own."""
    row: list[Sequence[int]] = []
    size = 0
    for sequence in sequences:
        if row and size + len(sequence) > tokens:
            yield row
            row, size = [], 0
        row.append(sequence)
        size += len(sequence)
    if row:
        yield row


def batches_of(
    sequences: Sequence[Sequence[int]], tokens: int, *, pack: bool
) -> Iterator[tuple[list[Sequence[int]], bool]]:
    """Texts of one forward pass each, of at most `tokens` tokens, and whether they are of one length.

    Those are stacked, [texts, length], as far as they fill batches: no mask is needed then. The rest shares rows, or,
    where that is not exact, goes in smaller batches of one length. Nothing is padded: padding would be calibrated too.
    """
    by_length: dict[int, list[Sequence[int]]] = {}
    for sequence in sequences:
        by_length.setdefault(len(sequence), []).append(sequence)
    rest: list[Sequence[int]] = []
    for length, group in by_length.items():
        size = max(1, tokens // length)
        full = len(group) // size * size if pack else len(group)
        for first in range(0, full, size):
            yield group[first : first + size], True
        rest += group[full:]
    for row in rows_of(rest, tokens):
        yield row, False


def shares_rows(sequences: Sequence[Sequence[int]], tokens: int) -> bool:
    """Whether some texts would share a row of at most `tokens` tokens; those of one length are stacked instead."""
    return any(len(texts) > 1 and not stacked for texts, stacked in batches_of(sequences, tokens, pack=True))


def packed_inputs(row: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """input_ids and position_ids, [1, tokens], of several sequences laid end to end."""
    ids = torch.tensor([[token for sequence in row for token in sequence]], device=device)
    positions = torch.cat([torch.arange(len(sequence)) for sequence in row]).unsqueeze(0).to(device)
    return {"input_ids": ids, "position_ids": positions}


@torch.no_grad()
def packs_exactly(model: PreTrainedModel) -> bool:
    """Whether the model keeps packed texts apart, tried on two short sequences.

    Models with recurrent layers, or with an attention of their own that ignores position_ids, do not.
    """
    vocabulary = int(cast("nn.Embedding", model.get_input_embeddings()).num_embeddings)
    first, second = ([(start + 7 * i) % vocabulary for i in range(6)] for start in (3, 11))
    try:
        packed = model(**packed_inputs([first, second], model.device), use_cache=False).logits[0, len(first) :]
    except (TypeError, ValueError, RuntimeError) as error:
        logger.info("texts are calibrated one by one, since a packed row fails: %s", error)
        return False
    alone = model(**packed_inputs([second], model.device), use_cache=False).logits[0]
    # The mean of all logits: in bfloat16 the largest of 150,000 differences is far off in any model.
    exact = float((packed.float() - alone.float()).square().mean().sqrt()) < 0.2 * float(alone.float().std()) + 1e-6
    if not exact:
        logger.info("texts are calibrated one by one, since %s lets packed texts see each other", type(model).__name__)
    return exact


def forward_loop(
    sequences: Sequence[Sequence[int]], *, tokens_per_row: int, pack: bool
) -> Callable[[torch.nn.Module], None]:
    """The loop that mtq.quantize calls with the model, once or more often as the algorithm needs.

    Args:
        sequences: Token ids of each text.
        tokens_per_row: Most tokens in one forward pass.
        pack: Whether several texts may share a row (see packs_exactly); of no effect unless they would (shares_rows).
    """
    batches = list(batches_of(sequences, tokens_per_row, pack=pack))

    @torch.no_grad()
    def loop(model: torch.nn.Module) -> None:
        device = next(model.parameters()).device
        # Without the logits of every position: nobody reads them, and a large vocabulary would need gigabytes.
        extra = {} if _head_is_quantized(model) else {"logits_to_keep": 1}
        # All at once, since each copy waits for what the device has been given to do.
        inputs_of = [
            {"input_ids": torch.tensor(texts, device=device)} if stacked else packed_inputs(texts, device)
            for texts, stacked in batches
        ]
        with progress_bar(total=sum(map(len, sequences)), unit="token", desc="calibrate") as bar:
            for (texts, _), inputs in zip(batches, inputs_of, strict=True):
                model(**inputs, use_cache=False, **extra)
                bar.update(sum(map(len, texts)))

    return loop


def _head_is_quantized(model: torch.nn.Module) -> bool:
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    quantizer = getattr(head, "input_quantizer", None)
    return quantizer is None or bool(quantizer.is_enabled)
