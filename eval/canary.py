"""The canary: sixteen prompts through a checkpoint before hours are spent on it, to tell a broken one from a worse one.

A checkpoint whose scales were lost, swapped or never applied still loads and still scores something; called a loss of
accuracy, that sends people looking in the wrong place. What no quantization explains shows on a few prompts: logits
that are no numbers, distributions far from the baseline's, and one token repeated for ever.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from halfbyte.eval.fidelity import kl_divergence
from halfbyte.recipes.schema import CanarySpec
from halfbyte.records.canary import CanaryRecord, CanaryRow
from halfbyte.records.files import write_bytes
from halfbyte.records.manifest import hardware, now, package_versions
from halfbyte.records.record import ModelSummary

PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "Water boils at one hundred degrees Celsius and freezes at",
    "Question: What is the sum of 17 and 25?\nAnswer: 17 + 25 =",
    "def factorial(n):\n    if n == 0:\n        return 1\n    return",
    "Dear Ms. Johnson,\n\nThank you for your letter of 3 March. I am writing to",
    "1. Preheat the oven to 180 degrees.\n2. Mix the flour and the sugar.\n3.",
    "Die Hauptstadt von Deutschland ist Berlin. Die größte Stadt in Österreich ist",
    "Le soleil se lève à l'est et se couche à",
    "北京是中国的首都。东京是日本的",
    '{"name": "Ada Lovelace", "born": 1815, "field": "mathematics", "known_for": "',
    "User: My computer does not start any more. What should I try first?\nAssistant:",
    "In physics, the force on a body equals its mass times its",
    "SELECT name, price FROM products WHERE price > 100 ORDER BY",
    "Once upon a time there was an old fisherman who lived alone by the sea. Every morning he",
    "If all cats are animals and Tom is a cat, then Tom is",
    "The patient was given 5 mg of the drug twice a day for two weeks, after which the symptoms",
)
POSITIONS = 8
"""Positions of each prompt, counted from its end, whose distributions are compared: 16 x 8 x 150,000 tokens x 4 bytes =
77 MB to keep for a baseline. The first tokens of a text say little: there the baseline itself hardly knows."""
MORE_COLLAPSED = 3
"""So many continuations more than the baseline's may collapse: small models repeat themselves without being broken."""


class Observation(NamedTuple):
    """What a model does with the prompts."""

    log_probs: list[Tensor]
    """For each prompt: natural logarithms, float32 [min(POSITIONS, tokens), vocabulary], on the CPU."""
    collapsed: list[bool]


@torch.inference_mode()
def observe(model: Any, tokenizer: Any, tokens: int) -> Observation:
    """Runs the prompts through a causal LM of transformers: its distributions, and greedy continuations of `tokens`."""
    encoded = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    log_probs = []
    for ids in encoded:
        logits = model(torch.tensor([ids], device=model.device)).logits[0, -POSITIONS:]
        log_probs.append(logits.float().log_softmax(-1).cpu())
    return Observation(log_probs, [collapsed(ids) for ids in _continuations(model, tokenizer, encoded, tokens)])


def _continuations(model: Any, tokenizer: Any, encoded: list[list[int]], tokens: int) -> list[list[int]]:
    """The greedy continuation of each prompt, up to the end of text; all prompts at once, padded on the left."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    width = max(map(len, encoded))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in encoded], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded], device=model.device)
    made = model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=pad,
        temperature=None, top_p=None, top_k=None,
    )[:, width:]  # fmt: skip
    ends = tokenizer.eos_token_id
    return [row[: row.index(ends)] if ends in row else row for row in made.tolist()]


def collapsed(ids: list[int]) -> bool:
    """Whether one token makes up more than half of a continuation of at least eight tokens."""
    return len(ids) >= POSITIONS and 2 * Counter(ids).most_common(1)[0][1] > len(ids)


def save_observation(observation: Observation, path: Path) -> None:
    """Keeps a baseline's observation, so that the baseline need not be loaded beside its candidates."""
    tensors = {f"log_probs.{at}": rows.contiguous() for at, rows in enumerate(observation.log_probs)}
    write_bytes(path, save(tensors | {"collapsed": torch.tensor(observation.collapsed)}))


def load_observation(path: Path) -> Observation:
    """The reverse of save_observation."""
    tensors = load_file(path)
    return Observation([tensors[f"log_probs.{at}"] for at in range(len(PROMPTS))], tensors["collapsed"].tolist())


def judge(
    reference: Observation, model: Any, tokenizer: Any, spec: CanarySpec, *, baseline_digest: str,
    candidate: ModelSummary, key: str,
) -> CanaryRecord:  # fmt: skip
    """Observes the candidate and says whether it may be evaluated.

    Args:
        reference: The baseline's observation, by the same tokenizer.
        model: The candidate, read back from disk.
        tokenizer: The tokenizer of both.
        spec: The bounds.
        baseline_digest: Which model the baseline is.
        candidate: Which model the candidate is.
        key: The record's key.
    """
    start = time.perf_counter()
    seen = observe(model, tokenizer, spec.tokens)
    rows = [
        CanaryRow(finite=finite, kl=kl, collapsed=ours, baseline_collapsed=theirs)
        for (finite, kl), ours, theirs in zip(
            map(_compare, reference.log_probs, seen.log_probs), seen.collapsed, reference.collapsed, strict=True
        )
    ]
    known = [row.kl for row in rows if row.kl is not None]
    mean = math.fsum(known) / len(known) if len(known) == len(rows) else None
    return CanaryRecord(
        created=now(),
        key=key,
        baseline_digest=baseline_digest,
        candidate=candidate,
        max_kl=spec.max_kl,
        kl=mean,
        rows=rows,
        failure=_failure(rows, mean, spec.max_kl),
        packages=package_versions(),
        hardware=hardware(),
        seconds=time.perf_counter() - start,
    )


def _compare(log_p: Tensor, log_q: Tensor) -> tuple[bool, float | None]:
    """Whether the candidate's distributions are numbers, and their mean KL divergence from the baseline's."""
    finite = not bool(torch.isnan(log_q).any() or (log_q == math.inf).any())
    if not finite or log_p.shape != log_q.shape:
        return finite, None
    kl = float(kl_divergence(log_p, log_q).mean())
    return finite, kl if math.isfinite(kl) else None


def _failure(rows: list[CanaryRow], mean: float | None, max_kl: float) -> str | None:
    broken = sum(not row.finite for row in rows)
    if broken:
        return f"its logits are no numbers on {broken} of {len(rows)} prompts"
    if mean is None:
        unknown = sum(row.kl is None for row in rows)
        return f"its distributions cannot be compared with the baseline's on {unknown} of {len(rows)} prompts"
    if mean > max_kl:
        return f"its distributions are {mean:.2f} nats a token from the baseline's, where {max_kl:g} is the most"
    more = sum(row.collapsed for row in rows) - sum(row.baseline_collapsed for row in rows)
    if more > MORE_COLLAPSED:
        return f"it repeats one token in {more} of {len(rows)} continuations more than the baseline does"
    return None
