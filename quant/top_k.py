"""The KL divergence from a teacher of which each token's k largest log-probabilities are known, and the rest's sum.

For a token let S be the k tokens the teacher finds most likely, p its probabilities and q the student's. What is left
of the vocabulary is one event, with p_rest = 1 - sum of p over S, and q_rest alike. The loss is

    KL_k = sum over S of p log(p / q) + p_rest log(p_rest / q_rest),

the KL divergence of two distributions over k + 1 events. By the data-processing inequality 0 <= KL_k <= KL: it never
punishes what the full divergence does not, and it is the full divergence where k is the whole vocabulary. To drop the
rest, or to scale S up to 1, would teach the student to be surer than its teacher.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TopK(NamedTuple):
    """The teacher's distributions of n tokens, at one temperature."""

    log_probs: Tensor
    """float32 [n, k], falling."""
    indices: Tensor
    """int64 [n, k]: which tokens these are."""
    log_rest: Tensor
    """float32 [n]: the logarithm of what the other tokens have together; minus infinity where k is all of them."""

    def to(self, device: torch.device) -> TopK:
        """The same on another device."""
        return TopK(*(tensor.to(device, non_blocking=True) for tensor in self))


def top_k(logits: Tensor, k: int, temperature: float = 1.0) -> TopK:
    """The k largest log-probabilities of distributions given as logits [n, vocabulary], and the rest."""
    scaled = logits.float() / temperature
    values, indices = scaled.topk(k, dim=-1)
    return TopK(values - scaled.logsumexp(-1, keepdim=True), indices, _log_rest(scaled, indices))


def _log_rest(scaled: Tensor, indices: Tensor) -> Tensor:
    """log of the probability outside of `indices`, [n]; by a sum over it, since 1 minus the others would cancel."""
    if indices.shape[-1] == scaled.shape[-1]:
        return torch.full_like(scaled[:, 0], -torch.inf)
    return scaled.scatter(-1, indices, -torch.inf).logsumexp(-1) - scaled.logsumexp(-1)


def top_k_divergence(logits: Tensor, teacher: TopK, temperature: float = 1.0) -> Tensor:
    """KL_k of the student from the teacher for each token, float32 [n], in nats.

    Args:
        logits: The student's, [n, vocabulary]; the gradient goes through them.
        teacher: Its k largest, at the same temperature.
        temperature: What logits are divided by. The factor temperature^2 that keeps gradients of one size, which
            ModelOpt's LogitsDistillationLoss has, is the caller's.

    Raises:
        ValueError: when the teacher's are of another number of tokens.
    """
    if len(logits) != len(teacher.log_rest):
        raise ValueError(f"the student has logits of {len(logits)} tokens and the teacher of {len(teacher.log_rest)}")
    scaled = logits.float() / temperature
    student = scaled.gather(-1, teacher.indices) - scaled.logsumexp(-1, keepdim=True)
    known = (teacher.log_probs.exp() * (teacher.log_probs - student)).sum(-1)
    if teacher.indices.shape[-1] == scaled.shape[-1]:
        return known
    rest = teacher.log_rest.exp()
    # A teacher that is all but certain has a rest of exactly 0 in float32: its logarithm is then no number.
    log_rest = torch.where(rest > 0, teacher.log_rest, 0.0)
    return known + rest * (log_rest - _log_rest(scaled, teacher.indices))
