"""Generates with continuous batching: a sequence that ends leaves its slot to the next; equal beginnings are shared.

What prompts share is computed once (see eval.sharing), the k samples of a question start from one copy, and slots grow
with the longest sequence, so that a budget of 32,768 tokens takes memory only when a text gets that long.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from halfbyte.eval.backend import Stop
from halfbyte.eval.decoding import Decoder, rounded
from halfbyte.eval.sampling import Dice
from halfbyte.eval.scorer import BUDGETS
from halfbyte.eval.sharing import Batch, Request, Row, plan
from halfbyte.eval.slots import Layers, Prefill, bytes_a_token, own_attention, running, shapes_of
from halfbyte.eval.trial import alike, attention_window, depends_on_length

logger = logging.getLogger(__name__)

SLOTS = {"cuda": 256, "cpu": 32}
"""Sequences at once."""
OF_MEMORY = 0.75
"""The part of a GPU's memory, after the weights, that slots may take."""


@dataclass
class Sample:
    """A text on its way."""

    prompt: tuple[int, ...]
    dice: Dice | None = None
    """None: greedy."""
    tokens: list[int] = field(default_factory=list)
    stop: Stop | None = None
    rolled: float | None = None
    """The random number for the next token, kept until there is one: a step that fails is taken again."""

    @property
    def length(self) -> int:
        """Tokens, the prompt's among them."""
        return len(self.prompt) + len(self.tokens)

    @property
    def last(self) -> int:
        """The token to go on from."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    def roll(self) -> float:
        """The random number for the next token."""
        if self.rolled is None and self.dice is not None:
            self.rolled = self.dice.roll()
        return self.rolled or 0.0

    def take(self, token: int) -> None:
        """The next token."""
        self.tokens.append(token)
        self.rolled = None

    def restart(self) -> None:
        """Back to the prompt."""
        self.tokens, self.stop, self.rolled = [], None, None
        if self.dice is not None:
            self.dice = Dice(self.dice.seed)


Choose = Callable[[Tensor, list[Sample]], Tensor]
"""Logits [rows, vocabulary] and the sample of each row to the next tokens [rows]."""
Ended = Callable[[Sequence[int]], Stop | None]
"""Why a text ends with its last token; None: it goes on."""


@dataclass
class _Unit:
    """Beginnings computed together, for samples that wait for a slot: all but the last token of each."""

    prefix: int
    shared: Layers
    layers: Layers
    queue: deque[tuple[int, Sample]]
    """With the row of its beginning."""


class Generator:
    """Continuous batching over a causal LM of transformers.

    Args:
        model: On its device, in the type to compute in.
        slots: Sequences at once; None for the device's own.
        budget: Tokens a forward pass over prompts; None for the device's own.
    """

    def __init__(self, model: Any, *, slots: int | None = None, budget: int | None = None) -> None:
        self.model = model
        self.most = slots or SLOTS[model.device.type]
        self.budget = budget or BUDGETS[model.device.type]
        self.room: int | None = None
        """Tokens that all slots together may have room for, planned from the device; None: no limit is known."""
        self._prefix: tuple[tuple[int, ...], Layers] | None = None
        self._decoder: Decoder | None = None

    @cached_property
    def refusal(self) -> str | None:
        """Why this model cannot be generated with here; None: it can. Tried on a few tokens at the first use."""
        reason = depends_on_length(self.model.config)
        if reason is None and "position_ids" not in inspect.signature(self.model.forward).parameters:
            reason = f"{type(self.model).__name__} takes no position_ids"
        # Rounded activations at the edge of two codes may differ on one text, and hardly on three.
        reasons = [reason] if reason else [self._try(seed) for seed in range(3)]
        return None if None in reasons else reasons[0]

    @property
    def decoder(self) -> Decoder:
        """Made at the first beginning computed, which shows the shapes of keys and values."""
        if self._decoder is None:
            self._compute_beginning((0,), {}, 0)
        assert self._decoder is not None
        return self._decoder

    def generate(self, samples: Sequence[Sample], choose: Choose, ended: Ended) -> None:
        """Fills in the tokens of all samples and why they stopped.

        Out of memory, half as many sequences go on at once, from the tokens they have.

        Args:
            samples: With prompts of a token or more.
            choose: Picks the next tokens.
            ended: Why a text ends with its last token; None: it goes on.
        """
        if samples:
            _Run(self, samples, choose, ended).run()

    @torch.inference_mode()
    def prefill(self, batch: Batch, samples: Sequence[Sample]) -> _Unit:
        """The beginnings of a planned batch; members are positions in `samples`."""
        queue = deque((at, samples[member]) for at, row in enumerate(batch.rows) for member in row.members)
        head = batch.rows[0].context[: batch.prefix]
        shared: Layers = {}
        if head:
            if self._prefix is None or self._prefix[0] != head:
                self._prefix = None  # freed before the next one is made
                self._prefix = head, self._compute_beginning(head, {}, 0)
            shared = self._prefix[1]
        width = batch.width
        rows = [[*row.context[batch.prefix :], *[0] * (width + batch.prefix - row.length)] for row in batch.rows]
        layers = self._compute(torch.tensor(rows), shared, batch.prefix)
        return _Unit(batch.prefix, shared, layers, queue)

    @torch.inference_mode()
    def _compute_beginning(self, tokens: tuple[int, ...], shared: Layers, start: int) -> Layers:
        return self._compute(torch.tensor([tokens]), shared, start)

    def _compute(self, ids: Tensor, shared: Layers, start: int) -> Layers:
        """Keys and values of tokens [rows, width] from position `start` on, behind what they share."""
        device = self.model.device
        current = Prefill(own_attention(self.model), shared)
        positions = torch.arange(start, start + ids.shape[1], device=device)[None]
        with running(self.model, current) as cache:
            self.model.base_model(ids.to(device), position_ids=positions, past_key_values=cache, use_cache=True)
        if self._decoder is None:
            shapes = shapes_of(current.layers)
            self._decoder = Decoder(self.model, own_attention(self.model), shapes)
            if device.type == "cuda" and self.room is None:
                parts = [*self.model.parameters(), *self.model.buffers()]
                weights = sum(part.numel() * part.element_size() for part in parts)
                memory = torch.cuda.get_device_properties(device).total_memory - weights
                self.room = int(OF_MEMORY * memory) // bytes_a_token(shapes)
        return current.layers

    @torch.inference_mode()
    def _try(self, seed: int) -> str | None:
        """Why sequences side by side in slots differ from single forward passes; None: they do not."""
        window = attention_window(self.model.config)
        size = 12 if window is None or window > 5 * 12 else 1  # rows stay in a window
        vocabulary = int(self.model.get_input_embeddings().num_embeddings)
        dice = torch.Generator().manual_seed(seed)
        drawn = torch.randint(vocabulary, (4, size + 2), generator=dice).tolist()
        samples = [Sample((*drawn[0], *drawn[1], 1)), Sample((*drawn[0], *drawn[2][:1], 2))]
        following = [drawn[3], drawn[2]]
        batch = Batch(len(drawn[0]), [Row(sample.prompt[:-1], members=[at]) for at, sample in enumerate(samples)])
        try:
            unit = self.prefill(batch, samples)
            decoder = self.decoder
            decoder.resize(2, rounded(samples[0].length + 2, decoder.step), used=0)
            seat(decoder, unit, [0, 1], 2)
            for step in range(2):
                given = [sample.last for sample in samples], [sample.length - 1 for sample in samples]
                for sample, logits, row in zip(samples, decoder.logits(*given), following, strict=True):
                    whole = torch.tensor([[*sample.prompt, *sample.tokens]], device=self.model.device)
                    alone = self.model(whole, use_cache=False).logits[0, -1].float()
                    if not alike(logits, alone):
                        return f"{type(self.model).__name__} gives other logits there"
                    sample.take(row[step])
            decoder.clear()
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
            return f"{type(self.model).__name__} fails there: {error}"
        return None


def seat(decoder: Decoder, unit: _Unit, slots: Sequence[int], count: int) -> list[Sample]:
    """The next `count` samples of a unit, with their beginnings copied into slots."""
    taken = [unit.queue.popleft() for _ in range(count)]
    parts: list[tuple[int, Layers, Sequence[int]]] = [(unit.prefix, unit.layers, [row for row, _ in taken])]
    if unit.shared:
        parts.append((0, unit.shared, [0] * count))
    decoder.slots.put(slots, parts)
    return [sample for _, sample in taken]


class _Run:
    """One call of Generator.generate."""

    def __init__(self, generator: Generator, samples: Sequence[Sample], choose: Choose, ended: Ended) -> None:
        self.generator = generator
        self.samples = samples
        self.choose = choose
        self.ended = ended
        self.decoder = generator.decoder
        self.rows: list[Sample | None] = []
        """The sample in each slot; None: a slot that was left."""
        self.unit: _Unit | None = None
        self.waiting: deque[tuple[Batch, list[Sample]]] = deque()
        self.returned: list[Sample] = []
        """Samples that lost their slot to longer ones."""

    @property
    def active(self) -> list[Sample]:
        """Samples in slots."""
        return [sample for sample in self.rows if sample is not None]

    @torch.inference_mode()
    def run(self) -> None:
        """Until all samples have stopped."""
        self._plan(self.samples)
        while True:
            try:
                self._fill()
                if not self.active:
                    break
                self._grow()
                self._advance()
                continue
            except torch.OutOfMemoryError as error:
                lacking = error.with_traceback(None)  # a traceback holds the tensors that are to be freed
            self._halve(lacking)
        self.unit = self.generator._prefix = None
        self.decoder.clear()

    def _plan(self, samples: Sequence[Sample]) -> None:
        """Batches of beginnings, those that share a prefix beside each other, the longest first."""
        several = [sample for sample in samples if sample.length > 1]
        wholes = [(*sample.prompt, *sample.tokens) for sample in several]
        requests = [Request(whole[:-1], whole[-1:]) for whole in wholes]
        self.waiting.extend((batch, several) for batch in plan(requests, self.generator.budget) if batch.rows)
        single = [sample for sample in samples if sample.length == 1]
        if single:
            self.waiting.append((Batch(0, []), single))

    def _next_unit(self) -> _Unit | None:
        """The unit that samples are taken from: the one at hand, or the next one computed."""
        if self.unit is not None and self.unit.queue:
            return self.unit
        self.unit = None  # freed before the next one is made
        if not self.waiting and self.returned:
            self._plan(self.returned)
            self.returned = []
        if not self.waiting:
            return None
        batch, samples = self.waiting[0]
        if batch.rows:
            self.unit = self.generator.prefill(batch, samples)
        else:
            self.unit = _Unit(0, {}, {}, deque((0, sample) for sample in samples))
        self.waiting.popleft()
        return self.unit

    def _fill(self) -> None:
        """Gives free slots to waiting samples."""
        while len(self.active) < self.generator.most:
            unit = self._next_unit()
            if unit is None:
                return
            used, longest = len(self.active), max((sample.length for sample in self.active), default=0)
            count = capacity = 0
            for _, sample in unit.queue:
                needed = self._capacity(max(longest, sample.length))
                if used + count == self.generator.most or (used + count and used + count >= self._allowed(needed)):
                    break
                longest, capacity, count = max(longest, sample.length), needed, count + 1
            if not count:
                return
            slots = [at for at, sample in enumerate(self.rows) if sample is None][:count]
            slots += range(len(self.rows), len(self.rows) + count - len(slots))
            self._require(max(slots) + 1, capacity)
            for at, sample in zip(slots, seat(self.decoder, unit, slots, count), strict=True):
                if at < len(self.rows):
                    self.rows[at] = sample
                else:
                    self.rows.append(sample)

    def _capacity(self, length: int) -> int:
        """Tokens a slot needs for a sequence of `length` and some more."""
        return rounded(length + self.decoder.step // 4, self.decoder.step)

    def _allowed(self, capacity: int) -> int:
        room = self.generator.room
        return self.generator.most if room is None else max(1, min(self.generator.most, room // capacity))

    def _require(self, count: int, capacity: int) -> None:
        """At least so many slots with so much room."""
        slots = self.decoder.slots
        if count > slots.count or capacity > slots.capacity:
            wanted = min(self._allowed(capacity), len(self.samples))
            self.decoder.resize(max(count, wanted), capacity, used=len(self.rows))

    def _grow(self) -> None:
        """Room for the next token of each; where that is more than is planned, the shortest give their slots up."""
        self._compact()
        longest = max(sample.length for sample in self.active)
        if longest <= self.decoder.slots.capacity:
            return
        capacity = self._capacity(longest)
        surplus = len(self.active) - self._allowed(capacity)
        if surplus > 0:
            active = self.active
            for at in sorted(range(len(active)), key=lambda at: active[at].length)[:surplus]:
                self.returned.append(active[at])
                self.rows[at] = None
            logger.info("%d of the sequences wait until longer ones are done", surplus)
            self._compact()
        count = max(len(self.rows), min(self.decoder.slots.count, self._allowed(capacity)))
        self.decoder.resize(count, capacity, used=len(self.rows))

    def _compact(self) -> None:
        """The samples in the first slots, without gaps."""
        count = len(self.active)
        gaps = [at for at, sample in enumerate(self.rows[:count]) if sample is None]
        sources = [at for at, sample in enumerate(self.rows) if at >= count and sample is not None]
        if gaps:
            length = max(sample.length for sample in self.active)
            self.decoder.slots.move(sources, gaps, min(length, self.decoder.slots.capacity))
            for source, gap in zip(sources, gaps, strict=True):
                self.rows[gap] = self.rows[source]
        del self.rows[count:]

    def _advance(self) -> None:
        """One more token for each sample in a slot."""
        active = self.active
        logits = self.decoder.logits([sample.last for sample in active], [sample.length - 1 for sample in active])
        for at, (sample, token) in enumerate(zip(active, self.choose(logits, active).tolist(), strict=True)):
            sample.take(token)
            sample.stop = self.ended(sample.tokens)
            if sample.stop is not None:
                self.rows[at] = None

    def _halve(self, error: torch.OutOfMemoryError) -> None:
        """Starts again with half as many sequences at once, from the tokens they have.

        Raises:
            OutOfMemoryError: where there is nothing to halve.
        """
        count, seating = len(self.active), self.unit is not None
        if self.generator.most == 1 and (count or seating):
            raise error
        if count or seating:
            self.generator.most = max(1, (count or self.generator.most) // 2)
        elif self.waiting and len(self.waiting[0][0].rows) > 1:
            self.generator.budget = max(1, self.generator.budget // 2)
        else:
            raise error
        logger.info("out of memory with %d sequences; from now on at most %d at once", count, self.generator.most)
        self.rows, self.unit, self.returned = [], None, []
        self.waiting.clear()
        self.generator._prefix = None
        self.decoder.clear()
        torch.cuda.empty_cache()
        self._plan([sample for sample in self.samples if sample.stop is None])
