"""The canary tells a broken checkpoint from a worse one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_model

from halfbyte.eval import canary
from halfbyte.eval.canary import PROMPTS, Observation, judge, load_observation, observe, save_observation
from halfbyte.quant import numerics as n
from halfbyte.recipes.schema import CanarySpec
from halfbyte.records.canary import CanaryRecord
from halfbyte.records.record import ModelSummary

SUMMARY = ModelSummary(name="candidate", digest="d", format="NVFP4", bytes_on_disk=1, bits_per_weight=4.5)


def _judge(reference: Observation, model: Any, tokenizer: Any, spec: CanarySpec | None = None) -> CanaryRecord:
    return judge(reference, model, tokenizer, spec or CanarySpec(), baseline_digest="b", candidate=SUMMARY, key="k")


@pytest.fixture(scope="module")
def model() -> Any:
    """A random model that is sure of what it says."""
    made = make_model("llama").float().eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(8)
    return made


@pytest.fixture(scope="module")
def reference(model: Any, tiny_tokenizer: Any) -> Observation:
    return observe(model, tiny_tokenizer, 12)


def _with(model: Any, **hooks: Any) -> Any:
    """A copy of the model whose named modules' outputs are changed."""
    import copy

    changed = copy.deepcopy(model)
    for name, change in hooks.items():
        changed.get_submodule(name.replace("__", ".")).register_forward_hook(lambda _m, _i, out, f=change: f(out))
    return changed


def test_there_are_sixteen_prompts_with_enough_to_compare(reference: Observation) -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) == len(reference.log_probs) == 16
    assert all(rows.shape[0] == canary.POSITIONS for rows in reference.log_probs)


def test_the_same_model_passes_with_no_distance(model: Any, tiny_tokenizer: Any, reference: Observation) -> None:
    record = _judge(reference, model, tiny_tokenizer)
    assert record.failure is None
    assert record.kl == pytest.approx(0, abs=1e-6)


def test_an_observation_survives_the_disk(reference: Observation, tmp_path: Path) -> None:
    save_observation(reference, tmp_path / "o.safetensors")
    again = load_observation(tmp_path / "o.safetensors")
    assert again.collapsed == reference.collapsed
    assert all(torch.equal(a, b) for a, b in zip(again.log_probs, reference.log_probs, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail(bad: float, model: Any, tiny_tokenizer: Any, reference: Observation) -> None:
    def spoil(logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[..., -1, 3] = bad
        return logits

    record = _judge(reference, _with(model, lm_head=spoil), tiny_tokenizer)
    assert record.failure is not None
    assert "no numbers on 16 of 16" in record.failure


def test_a_token_that_is_ruled_out_is_no_failure(model: Any, tiny_tokenizer: Any) -> None:
    def rule_out(logits: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(logits[..., :1], float("-inf")), logits[..., 1:]], dim=-1)

    changed = _with(model, lm_head=rule_out)
    assert _judge(observe(changed, tiny_tokenizer, 12), changed, tiny_tokenizer).failure is None


def test_another_model_is_too_far_away(model: Any, tiny_tokenizer: Any, reference: Observation) -> None:
    record = _judge(reference, _with(model, model__norm=lambda x: x.roll(1, -1)), tiny_tokenizer)
    assert record.failure is not None
    assert "nats a token from the baseline's" in record.failure


def test_the_bound_is_the_recipes(model: Any, tiny_tokenizer: Any, reference: Observation) -> None:
    near = _with(model, lm_head=lambda logits: logits * 0.9)
    distance = _judge(reference, near, tiny_tokenizer).kl
    assert distance is not None
    assert _judge(reference, near, tiny_tokenizer, CanarySpec(max_kl=distance * 1.01)).failure is None
    assert _judge(reference, near, tiny_tokenizer, CanarySpec(max_kl=distance * 0.99)).failure is not None


def test_a_model_that_repeats_one_token_fails_where_its_baseline_does_not() -> None:
    assert canary.collapsed([5] * 9 + [1] * 8)
    assert not canary.collapsed([5] * 8 + [1] * 8)
    assert not canary.collapsed([5] * 7)  # too short to say
    rows = [canary.CanaryRow(finite=True, kl=0.1, collapsed=at < 4, baseline_collapsed=False) for at in range(16)]
    assert "repeats one token in 4 of 16" in str(canary._failure(rows, 0.1, 2.0))
    alike = [row.model_copy(update={"baseline_collapsed": row.collapsed}) for row in rows]
    assert canary._failure(alike, 0.1, 2.0) is None


def _through_nvfp4(model: Any, *, damage: str | None) -> None:
    """Rounds all linear weights of the decoder to NVFP4, in place, and breaks them in a way that loads well."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                q = n.nvfp4_quantize(module.weight, n.nvfp4_scale_2(module.weight.abs().amax()))
                if damage == "halves of a byte swapped":
                    q = q._replace(codes=(q.codes << 4) | (q.codes >> 4))
                elif damage == "block scales never applied":
                    q = q._replace(scale=torch.full_like(q.scale.float(), 64.0).to(q.scale.dtype))
                elif damage == "global scale of another layer":
                    q = q._replace(scale_2=q.scale_2 * 2)
                module.weight.copy_(n.nvfp4_dequantize(q))


@pytest.mark.real
def test_a_broken_real_model_fails_and_a_quantized_one_does_not(smollm2: Path) -> None:
    from halfbyte.quant.load import load
    from halfbyte.recipes.schema import ModelSpec

    spec = ModelSpec(id=str(smollm2))
    baseline = load(spec, dtype="float32", device="cpu")
    reference = observe(baseline.model, baseline.tokenizer, 8)
    damages = [None, "halves of a byte swapped", "block scales never applied", "global scale of another layer"]
    found = {}
    for damage in damages:
        changed = load(spec, dtype="float32", device="cpu")
        _through_nvfp4(changed.model, damage=damage)
        found[damage] = _judge(reference, changed.model, changed.tokenizer, CanarySpec(tokens=8))
    print({damage: (record.kl, record.failure) for damage, record in found.items()})
    assert found[None].failure is None
    assert all(found[damage].failure is not None for damage in damages[1:])
