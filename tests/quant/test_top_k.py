"""The KL divergence from k log-probabilities and the rest's sum."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from halfbyte.quant.top_k import TopK, top_k, top_k_divergence


def _logits(seed: int, tokens: int = 12, vocabulary: int = 50, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed))


def _full(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    wanted = functional.log_softmax(teacher / temperature, -1)
    got = functional.log_softmax(student / temperature, -1)
    return functional.kl_div(got, wanted, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_k_of_the_whole_vocabulary_is_the_full_divergence_and_has_its_gradient(temperature: float) -> None:
    teacher, student = _logits(1), _logits(2).requires_grad_()
    ours = top_k_divergence(student, top_k(teacher, 50, temperature), temperature)
    full = _full(student, teacher, temperature)
    torch.testing.assert_close(ours, full, rtol=1e-5, atol=1e-6)
    (one,) = torch.autograd.grad(ours.sum(), student)
    (other,) = torch.autograd.grad(full.sum(), student)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_modelopts_loss_is_ours_with_the_square_of_the_temperature() -> None:
    from modelopt.torch.distill.losses import LogitsDistillationLoss

    teacher, student = _logits(1), _logits(2)
    theirs = LogitsDistillationLoss(temperature=2.0, reduction="none")(student, teacher)
    torch.testing.assert_close(
        4 * top_k_divergence(student, top_k(teacher, 50, 2.0), 2.0), theirs, rtol=1e-4, atol=1e-5
    )


def test_it_lies_between_zero_and_the_full_divergence_and_grows_with_k() -> None:
    for seed in range(20):
        teacher, student = _logits(seed), _logits(seed + 100)
        values = [top_k_divergence(student, top_k(teacher, k)) for k in (1, 4, 16, 49, 50)]
        assert (values[0] >= -1e-6).all()
        for smaller, larger in pairwise(values):
            assert (smaller <= larger + 1e-5).all()
        torch.testing.assert_close(values[-1], _full(student, teacher), rtol=1e-4, atol=1e-5)


def test_a_student_that_is_the_teacher_has_no_loss_and_no_gradient() -> None:
    teacher = _logits(3)
    student = teacher.clone().requires_grad_()
    loss = top_k_divergence(student, top_k(teacher, 5))
    assert loss.abs().max() < 1e-5
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert gradient.abs().max() < 1e-5


def test_it_is_finite_where_teacher_or_student_are_all_but_certain() -> None:
    teacher = torch.zeros(2, 50)
    teacher[0, 7] = 300.0  # its rest is 0 in float32
    student = torch.zeros(2, 50)
    student[1, 9] = 300.0
    for k in (1, 8, 50):
        one = student.clone().requires_grad_()
        loss = top_k_divergence(one, top_k(teacher, k))
        (gradient,) = torch.autograd.grad(loss.sum(), one)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()
        assert (loss > 1).all()


def test_what_the_rest_has_is_kept_where_one_minus_the_others_would_cancel() -> None:
    teacher = torch.zeros(1, 50)
    teacher[0, 0] = 40.0
    assert top_k(teacher, 1).log_rest.item() == pytest.approx(torch.tensor(49.0).log().item() - 40, abs=1e-4)


def test_other_tokens_than_the_teachers_are_an_error() -> None:
    with pytest.raises(ValueError, match="12 tokens and the teacher of 11"):
        top_k_divergence(_logits(1), TopK(*(tensor[:11] for tensor in top_k(_logits(2), 4))))
