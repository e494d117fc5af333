"""Training texts that the teacher writes itself, where there is no data; the same again for the same seed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch

from halfbyte.quant.training_texts import Sampled
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.recipes.texts import load_texts
from halfbyte.recipes.training import SampledTexts
from halfbyte.records.digests import value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.journal import Journal
from halfbyte.records.manifest import package_versions
from halfbyte.records.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SAMPLED_FILE = "sampled.jsonl"
BATCH = 32
"""Texts written at once. The last digits of a logit depend on it, and with them what is drawn: it is no setting."""


def sample_texts(
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    spec: SampledTexts,
    folder: Path,
    *,
    digest: str,
    data_root: Path | None = None,
) -> list[Sampled]:
    """What the teacher writes, by sampling from its whole distribution; kept in folder / SAMPLED_FILE batch by batch.

    Each batch has a seed of its own, so that work cut short goes on as if it had not been, and the same device, seed
    and versions give the same tokens. A text ends with an end-of-text token or at `spec.length`.

    Args:
        teacher: A causal LM.
        tokenizer: Its tokenizer.
        spec: How many texts, how long, from what.
        folder: The run's training folder.
        digest: The teacher's.
        data_root: For the prompts, see recipes.data.data_root.

    Raises:
        UserError: when the prompts cannot be read, or there are none and the model has no token to begin with.
    """
    prompts = _prompts(tokenizer, spec, data_root)
    job = [digest, spec.model_dump(mode="json"), prompts, BATCH, teacher.device.type, str(teacher.dtype)]
    batches = list(_batches(prompts, spec.samples))
    texts: dict[int, Sampled] = {}
    with Journal(folder / SAMPLED_FILE, value_digest([*job, package_versions()])) as journal:
        done = len(journal.entries)
        if done:
            logger.info("sampling: %d of %d batches are there", done, len(batches))
        with progress_bar(total=len(batches), initial=done, unit="batch", desc="sample texts") as bar:
            for number in range(done, len(batches)):
                given = [prompts[sample % len(prompts)] for sample in batches[number]]
                written = _write(teacher, tokenizer, given, spec, number)
                journal.append({"samples": batches[number], "prompts": list(map(len, given)), "tokens": written})
                bar.update(1)
        for entry in journal.entries:
            for sample, prompt, tokens in zip(entry["samples"], entry["prompts"], entry["tokens"], strict=True):
                texts[sample] = Sampled(tokens, prompt, str(tokenizer.decode(tokens, skip_special_tokens=True)))
    return [texts[sample] for sample in range(spec.samples)]


def _prompts(tokenizer: PreTrainedTokenizerBase, spec: SampledTexts, root: Path | None) -> list[list[int]]:
    """Token ids of what texts begin with; a long prompt leaves half of a text to be written."""
    if spec.prompts is None:
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if begin is None:
            raise UserError(
                "the model has neither a beginning-of-text token nor an end-of-text token to write from",
                "give train.sampled.prompts",
            )
        return [[int(cast(int, begin))]]
    found = load_texts(spec.prompts, seed=spec.seed, data_root=root).texts
    rows = [[int(token) for token in ids] for ids in tokenizer(found, verbose=False)["input_ids"] if len(ids)]
    longest = max(1, spec.length // 2)
    cut = sum(len(row) > longest for row in rows)
    if cut:
        logger.info("sampling: %d of %d prompts are cut to %d tokens", cut, len(rows), longest)
    return [row[:longest] for row in rows]


def _batches(prompts: Sequence[Sequence[int]], samples: int) -> Iterator[list[int]]:
    """Samples of each batch; those with prompts of about one length go together."""
    order = sorted(range(samples), key=lambda sample: (len(prompts[sample % len(prompts)]), sample))
    for first in range(0, samples, BATCH):
        yield order[first : first + BATCH]


@torch.no_grad()
def _write(
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    spec: SampledTexts,
    batch: int,
) -> list[list[int]]:
    """Token ids of a text for each prompt, the prompt among them."""
    ends = _ends(teacher, tokenizer)
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    device = teacher.device
    settings = _settings(spec, spec.length - min(map(len, prompts)), ends)
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        quiet_upstream(),
        # transformers fills what is not set from the model's own settings, which may be there for chatting.
        patch.object(teacher, "generation_config", settings),
    ):
        torch.manual_seed(int(value_digest([spec.seed, batch])[:15], 16))
        found = cast(Any, teacher).generate(input_ids=ids.to(device), attention_mask=mask.to(device))
    return [
        [*prompt, *_until(row[width:].tolist(), ends, spec.length - len(prompt))]
        for prompt, row in zip(prompts, found, strict=True)
    ]


def _settings(spec: SampledTexts, tokens: int, ends: Sequence[int]) -> Any:
    from transformers import GenerationConfig

    return cast(Any, GenerationConfig)(
        max_new_tokens=tokens,
        do_sample=True,
        temperature=spec.temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
        use_cache=True,
    )


def _ends(teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """End-of-text tokens, the tokenizer's first."""
    named = getattr(teacher.generation_config, "eos_token_id", None)
    others = named if isinstance(named, list) else [named]
    return [int(cast(int, end)) for end in dict.fromkeys([tokenizer.eos_token_id, *others]) if end is not None]


def _until(tokens: list[int], ends: Sequence[int], most: int) -> list[int]:
    """Tokens up to the first that ends a text, which is kept."""
    first = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: min(first + 1, most)]
