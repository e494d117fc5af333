"""How far a candidate's next-token distributions are from its baseline's on a text: KL divergence, agreement."""

from __future__ import annotations

import math
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from halfbyte.eval.kept import Kept
from halfbyte.recipes.schema import FidelitySpec, TextSource
from halfbyte.recipes.texts import load_texts
from halfbyte.records.digests import text_digest, value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.fidelity import FIDELITY_FILE, FidelityRecord, Window, load_fidelity
from halfbyte.records.journal import Journal
from halfbyte.records.manifest import hardware, now, package_versions
from halfbyte.records.progress import progress_bar
from halfbyte.records.record import ModelSummary

JOURNAL_FILE = "journal-fidelity.jsonl"
SLICE = 256
"""Positions whose float32 distributions are in memory at once: 256 x 150,000 tokens x 4 bytes = 154 MB each."""


def measure_fidelity(
    baseline_model: Any,
    candidate_model: Any,
    tokenizer: Any,
    spec: FidelitySpec,
    baseline: ModelSummary,
    candidate: ModelSummary,
    text: str,
    output: Path,
    *,
    replace: bool = False,
) -> FidelityRecord:
    """Measures on a text and writes fidelity.json; goes on where an earlier run was cut short.

    Args:
        baseline_model: A causal LM of transformers on its device, or what was kept of one; its distributions are the
            reference.
        candidate_model: Another with the same vocabulary; may be on another device.
        tokenizer: The tokenizer of both.
        spec: Text and window.
        baseline: Which model the baseline is.
        candidate: Which model the candidate is.
        text: See read_text.
        output: Folder for fidelity.json.
        replace: Measure again where `output` holds a measurement of something else, and replace it.

    Raises:
        UserError: when the text is too short, the vocabularies differ, the window is longer than a
            model takes, the logits hold NaN, or `output` holds another measurement.
    """
    start = time.perf_counter()
    _check_models(baseline_model, candidate_model, spec.window)
    windows = windows_of(tokenizer, text, spec)
    dtype = str(candidate_model.dtype).removeprefix("torch.")
    where = {"device": candidate_model.device.type, "dtype": dtype}
    key = fidelity_key(text, spec, baseline.digest, candidate.digest, **where)
    if (output / FIDELITY_FILE).exists():
        done = load_fidelity(output)
        if done.key == key:
            return done
        if not replace:
            raise UserError(
                f"{output / FIDELITY_FILE} is of other models, another text or other packages",
                "give another --output, or delete that file",
            )
    with (
        Journal(output / JOURNAL_FILE, key) as journal,
        progress_bar(total=len(windows), desc="fidelity", unit="window", initial=len(journal.entries)) as bar,
    ):
        for ids in windows[len(journal.entries) :]:
            journal.append(compare_window(baseline_model, candidate_model, ids).model_dump())
            bar.update()
        rows = [Window.model_validate(entry) for entry in journal.entries]
    tokens = sum(row.tokens for row in rows)
    record = FidelityRecord(
        created=now(),
        key=key,
        baseline=baseline,
        candidate=candidate,
        text=describe_text(spec.source),
        text_digest=text_digest(text),
        window=spec.window,
        dtype=dtype,
        windows=rows,
        tokens=tokens,
        kl=math.fsum(row.kl for row in rows) / tokens,
        top1_agreement=sum(row.agree for row in rows) / tokens,
        baseline_perplexity=math.exp(math.fsum(row.baseline_nll for row in rows) / tokens),
        candidate_perplexity=math.exp(math.fsum(row.candidate_nll for row in rows) / tokens),
        packages=package_versions(),
        hardware=hardware(),
        seconds=time.perf_counter() - start,
    )
    record.save(output)
    (output / JOURNAL_FILE).unlink()
    return record


def read_text(spec: FidelitySpec, data_root: Path | None = None) -> str:
    """The whole text that is measured on.

    Args:
        spec: Where it is.
        data_root: See recipes.data.data_root.

    Raises:
        UserError: when it is not to be had.
    """
    return spec.join.join(load_texts(spec.source, data_root=data_root, whole=True).texts)


def fidelity_key(text: str, spec: FidelitySpec, *digests: str, device: str, dtype: str) -> str:
    """What decides a measurement, or what is kept of a baseline for one.

    Args:
        text: See read_text.
        spec: How it is cut.
        digests: Of the models.
        device: Kind of device both compute on: cpu, cuda.
        dtype: Type both compute in.
    """
    packages = [version("torch"), version("transformers"), version("nvidia-modelopt")]
    return value_digest([digests, text_digest(text), spec.window, spec.max_tokens, device, dtype, packages])


def compare_window(baseline_model: Any, candidate_model: Any, ids: list[int]) -> Window:
    """The sums over the predicted tokens of one window: every token but the first.

    Distributions are computed in float32 and summed in float64, `SLICE` positions at a time.

    Raises:
        UserError: when the two models give logits of different width, or NaN.
    """
    with torch.inference_mode():
        ours = _logits(baseline_model, ids)
        theirs = _logits(candidate_model, ids)
        if ours.shape != theirs.shape:
            raise UserError(
                f"the baseline gives {ours.shape[-1]} logits a token and the candidate {theirs.shape[-1]}",
                "fidelity compares models of one vocabulary",
            )
        targets = torch.tensor(ids[1:], device=ours.device)
        totals = torch.zeros(3, dtype=torch.float64)
        agree = 0
        for first in range(0, len(ids) - 1, SLICE):
            part = slice(first, min(first + SLICE, len(ids) - 1))
            log_p = ours[part].float().log_softmax(-1)
            log_q = theirs[part].to(ours.device).float().log_softmax(-1)
            kl = kl_divergence(log_p, log_q).sum()
            wanted = targets[part].unsqueeze(-1)
            nll = [-log.gather(-1, wanted).sum(dtype=torch.float64) for log in (log_p, log_q)]
            totals += torch.stack([kl, *nll]).cpu()
            agree += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
            if torch.isnan(log_p).any() or torch.isnan(log_q).any():
                totals[0] = math.nan  # torch.where above leaves out NaN probabilities
    if not bool(torch.isfinite(totals).all()):
        raise UserError(
            "a model gives logits that are no numbers, or rules out a token of the text",
            "look at the checkpoint's scales, or compute in another dtype",
        )
    kl_sum, baseline_nll, candidate_nll = totals.tolist()
    return Window(tokens=len(ids) - 1, kl=kl_sum, agree=agree, baseline_nll=baseline_nll, candidate_nll=candidate_nll)


def kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats at each position, float64: log-probabilities [..., vocabulary] to [...]."""
    p = log_p.exp()
    # A token that both models rule out (-inf) adds nothing; -inf - -inf would be NaN.
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1, dtype=torch.float64)


def _logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits of each position but the last, [tokens - 1, vocabulary]."""
    logits: torch.Tensor = model(torch.tensor([ids], device=model.device)).logits
    return logits[0, :-1]


def _check_models(baseline_model: Any, candidate_model: Any, window: int) -> None:
    sizes = [vocabulary_of(model) for model in (baseline_model, candidate_model)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the baseline has a vocabulary of {sizes[0]} tokens and the candidate one of {sizes[1]}",
            "fidelity compares models of one vocabulary",
        )
    for model in (baseline_model, candidate_model):
        if not isinstance(model, Kept):
            check_window(model, window)


def vocabulary_of(model: Any) -> int:
    """Tokens of a model's vocabulary, as its configuration says."""
    return model.vocabulary if isinstance(model, Kept) else int(model.config.get_text_config().vocab_size)


def check_window(model: Any, window: int) -> None:
    """Raises a UserError where a window is longer than what a model takes."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and window > most:
        raise UserError(f"a window of {window} tokens is longer than the {most} the model takes", "lower window")


def windows_of(tokenizer: Any, text: str, spec: FidelitySpec) -> list[list[int]]:
    """Token ids of the windows a text is cut into, which do not overlap; the last may be shorter.

    Each has `spec.window` tokens and is scored without context. Where the tokenizer starts a text with BOS, each window
    starts with it and counts it.

    Raises:
        UserError: when the text is too short.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    head = [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []
    size = spec.window - len(head)
    if spec.max_tokens is not None:
        ids = ids[: math.ceil(spec.max_tokens / spec.window) * size]
    windows = [head + ids[at : at + size] for at in range(0, len(ids), size)]
    windows = [window for window in windows if len(window) >= 2]
    if not windows:
        raise UserError(f"the text of '{spec.source.dataset}' is too short: {len(ids)} token", "give a longer text")
    return windows


def describe_text(source: TextSource) -> str:
    """Where a text is from, for people."""
    path = Path(source.dataset)
    if path.is_file():
        return path.name
    return ", ".join([source.dataset, *([source.name] if source.name else []), source.split])
