"""The hf backend: a loaded causal LM of transformers, with our scorer and continuous batching."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor

from halfbyte.eval.backend import Generated, Prompt, Sampling, Stop
from halfbyte.eval.generation import Generator, Sample
from halfbyte.eval.plain import generate_plainly
from halfbyte.eval.sampling import Dice, draw
from halfbyte.eval.scorer import PrefixScorer
from halfbyte.eval.sharing import Batch, Request
from halfbyte.eval.stops import Ending
from halfbyte.records.errors import UserError

logger = logging.getLogger(__name__)

ROUNDS, LONG_ROUNDS = 4, 2
"""A batch has so many samples for each slot: at its end slots stay empty, and what a kill loses is one batch."""
LONG = 2048
"""Tokens of a text from which on batches are of LONG_ROUNDS."""
PLAIN = 16
"""Sequences at once where continuous batching does not fit."""
_WITHOUT_EFFECT = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "early_stopping": False}
_SET_HERE = {"use_cache", "pad_token_id", "max_new_tokens", "max_length", "do_sample"}
"""By generate_plainly."""
_FOLLOWED = set(cast(Any, GenerationConfig)().to_dict()) - _SET_HERE
_DRAWING = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
_PROCESSED = (
    "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
    "exponential_decay_length_penalty", "guidance_scale", "remove_invalid_values",
)  # fmt: skip


class HFDescription:
    """What the hf backend says of a model, for which no weights are needed; see backend.Backend.

    Args:
        model: A causal LM of transformers.
        tokenizer: Its tokenizer.
        max_length: Longest input in tokens; None for the model's own.

    Raises:
        UserError: for a max_length beyond the positions that a model learned one by one.
    """

    name = "hf"
    engine = None
    bos = ()

    def __init__(self, model: Any, tokenizer: Any, *, max_length: int | None = None) -> None:
        # lm-eval's backend knows how long a model's inputs may be and which chat template is meant.
        self._lm_eval = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", max_length=max_length)
        self.model = model
        self.tokenizer: Any = self._lm_eval.tokenizer
        self.max_length = int(self._lm_eval.max_length)
        places = getattr(model.config, "max_position_embeddings", None)
        if places and self.max_length > places and getattr(model.config, "rope_parameters", None) is None:
            raise UserError(
                f"max_length {self.max_length} does not fit into the model, which knows {places} positions",
                f"lower evaluate.max_length to {places}",
            )
        self.told: Callable[[], None] | None = None

    @property
    def dtype(self) -> str:
        """See backend.Backend."""
        return str(self.model.dtype).removeprefix("torch.")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """See backend.Backend."""
        found: str | None = self._lm_eval.chat_template(chat_template)
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """See backend.Backend."""
        return str(self._lm_eval.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt))

    def model_info(self) -> dict[str, Any]:
        """See backend.Backend; lm-eval's own version asks the hub, which a folder on disk has no entry in."""
        return {
            "model_num_parameters": self.model.num_parameters(), "model_dtype": str(self.model.dtype), "model_sha": "",
        }  # fmt: skip


class HFBackend(HFDescription):
    """See backend.Backend.

    Args:
        model: A causal LM of transformers, on its device, in the type to compute in.
        tokenizer: Its tokenizer.
        batch_size: Sequences generated at once; None for what suits the device.
        batch_tokens: Tokens a forward pass over prompts; None for what suits the device.
        max_length: Longest input in tokens; None for the model's own.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__(model, tokenizer, max_length=max_length)
        self.scorer = PrefixScorer(model, budget=batch_tokens)
        self.generator = Generator(model, slots=batch_size, budget=batch_tokens)
        self._slots = self.generator.most
        """Not the generator's own, which a lack of memory makes smaller: batches depend on the requests alone."""
        self._plain_size = batch_size or PLAIN

    def score_batches(self, requests: list[Request]) -> Sequence[Batch]:
        """See backend.Backend."""
        return self.scorer.plan(requests)

    def score(self, requests: list[Request], batch: Batch) -> list[tuple[float, bool]]:
        """See backend.Backend."""
        return self.scorer.score(requests, batch)

    def generation_batches(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """See backend.Backend; the longest prompts first, so that a lack of memory shows at once."""
        return plan_batches(prompts, self._slots)

    def generate(self, prompts: Sequence[Prompt]) -> list[Generated]:
        """See backend.Backend.

        Raises:
            UserError: for settings that cannot be followed.
        """
        sampling = prompts[0].sampling
        ending = Ending(self.tokenizer, sampling.until, self._end_tokens, sampling.max_gen_toks)
        samples = [Sample(prompt.tokens or (int(self._lm_eval.prefix_token_id),), _dice(prompt)) for prompt in prompts]
        options = {name: value for name, value in sampling.other if _WITHOUT_EFFECT.get(name) != value}
        penalty = self._penalty(options)
        if (options.get("num_beams") or getattr(self.model.generation_config, "num_beams", None) or 1) > 1:
            raise UserError("beams are not searched here", "leave num_beams out, or set gen_kwargs.num_beams to 1")
        unknown = sorted(set(options) - _FOLLOWED)
        if unknown:
            raise UserError(f"gen_kwargs.{unknown[0]} is no setting that the hf backend can follow", "leave it out")
        reason = self._refusal(options)
        choose = _Choose(sampling, penalty)

        def ended(tokens: Sequence[int]) -> Stop | None:
            stop = ending.of(tokens)
            if stop is not None and self.told is not None:
                self.told()
            return stop

        if reason is None:
            self.generator.generate(samples, choose, ended)
        else:
            drawing = sorted(set(options) & set(_DRAWING))
            if drawing and samples[0].dice is not None:
                raise UserError(f"{drawing[0]} has no effect here", "draw with temperature, top_p and top_k")
            logger.info("texts are generated by transformers' generate: %s", reason)
            self._plain_size = generate_plainly(
                self.model,
                samples,
                choose,
                ended,
                size=self._plain_size,
                most=sampling.max_gen_toks,
                options=options,
            )
        return [
            Generated(ending.text(sample.tokens), len(sample.tokens), sample.stop, prompt.seed)
            for prompt, sample in zip(prompts, samples, strict=True)
        ]

    def _penalty(self, options: dict[str, Any]) -> float | None:
        """The repetition penalty of the task, else of the model, as in transformers' generate; taken from `options`."""
        config = self.model.generation_config
        found = options.pop("repetition_penalty", getattr(config, "repetition_penalty", None))
        return None if found in (None, 1.0) else float(found)

    def _refusal(self, options: dict[str, Any]) -> str | None:
        """Why continuous batching cannot be used; None: it can."""
        if options:
            return f"{min(options)} is set"
        config = self.model.generation_config
        own = [name for name in _PROCESSED if getattr(config, name, None)]
        if own:
            return f"the model's generation_config sets {own[0]}"
        return self.generator.refusal

    @cached_property
    def _end_tokens(self) -> frozenset[int]:
        named = self.model.generation_config.eos_token_id
        ends = named if isinstance(named, (list, tuple)) else [named]
        return frozenset(int(end) for end in (*ends, self.tokenizer.eos_token_id) if end is not None)


class _Choose:
    """Greedy, or drawn with each sample's own random number. See generation.Choose."""

    def __init__(self, sampling: Sampling, penalty: float | None) -> None:
        self.sampling = sampling
        self.penalty = None if penalty is None else RepetitionPenaltyLogitsProcessor(penalty)

    def __call__(self, logits: Tensor, samples: list[Sample]) -> Tensor:
        """Logits float32 [rows, vocabulary] -> tokens int64 [rows].

        Raises:
            UserError: where a row has no largest number.
        """
        if not bool(logits.amax(-1).isfinite().all()):
            raise UserError(
                "the model gives logits that are no numbers",
                "they hold NaN or infinity: look at the checkpoint's scales, or compute in another dtype",
            )
        if self.penalty is not None:
            parts = []
            for at, sample in enumerate(samples):
                ids = torch.tensor([[*sample.prompt, *sample.tokens]], device=logits.device)
                parts.append(self.penalty(ids, logits[at : at + 1]))
            logits = torch.cat(parts)
        if self.sampling.temperature == 0:
            return logits.argmax(-1)
        return draw(logits, self.sampling, [sample.roll() for sample in samples])


def _dice(prompt: Prompt) -> Dice | None:
    if prompt.sampling.temperature == 0:
        return None
    if prompt.seed is None:
        raise UserError("a text cannot be drawn without a seed")
    return Dice(prompt.seed)


def plan_batches(prompts: Sequence[Prompt], slots: int) -> list[list[int]]:
    """Fixed batches of the positions of `prompts`: of one setting, the longest first, equal prompts in one batch.

    Args:
        prompts: In lm-eval's order.
        slots: Sequences at once; a batch has some rounds of them, and more where equal prompts would be parted.
    """
    groups: dict[str, list[int]] = {}
    first: dict[tuple[int, ...], int] = {}
    for at, prompt in enumerate(prompts):
        groups.setdefault(repr(prompt.sampling), []).append(at)
        first.setdefault(prompt.tokens or (), at)
    batches = []
    for members in groups.values():
        ordered = sorted(members, key=lambda at: (-len(prompts[at].tokens or ()), first[prompts[at].tokens or ()]))
        size = slots * (ROUNDS if prompts[members[0]].sampling.max_gen_toks < LONG else LONG_ROUNDS)
        parts: list[list[int]] = []
        for at in ordered:
            if not parts or (len(parts[-1]) >= size and prompts[parts[-1][-1]].tokens != prompts[at].tokens):
                parts.append([])
            parts[-1].append(at)
        batches += parts
    return sorted(batches, key=lambda batch: -len(prompts[batch[0]].tokens or ()))
