"""Quantizers made from a checkpoint round inputs and KV cache as the numerics say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import CPU, make_model

from halfbyte.quant import numerics as nm
from halfbyte.quant.attach import attach_kv_cache, attention_modules, input_quantizer, prepare
from halfbyte.quant.layouts import Activations
from halfbyte.records.errors import UserError

AMAX = torch.tensor(5.25)
X = torch.randn(3, 7, 160, generator=torch.Generator().manual_seed(0)) * 2


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepare(CPU)


def _round(kind: Activations, scale: torch.Tensor | None, x: torch.Tensor = X) -> torch.Tensor:
    quantizer = input_quantizer(kind, scale, None, dtype=torch.float32, device=CPU)
    assert quantizer is not None
    return quantizer(x)  # type: ignore[no-any-return]


def test_block_formats_are_bit_for_bit_those_of_the_numerics() -> None:
    assert torch.equal(_round("nvfp4", nm.nvfp4_scale_2(AMAX)), nm.nvfp4_fake_quantize(X, AMAX))
    assert torch.equal(_round("mxfp4", None), nm.mxfp4_fake_quantize(X))
    assert torch.equal(_round("mxfp8", None), nm.mxfp8_fake_quantize(X))


def _fp8(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    return nm.fp8_dequantize(nm.fp8_quantize(x, amax / nm.E4M3_MAX))


@pytest.mark.parametrize("size", [160, 256, 100])
def test_fp8_inputs_are_rounded_by_tensor_row_or_group_of_128(size: int) -> None:
    """ModelOpt multiplies by 448 / amax where a checkpoint's scale is amax / 448: ties can go either way."""
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(1)) * 3
    groups = list(x.split(128, dim=-1))
    expected: dict[Activations, torch.Tensor] = {
        "fp8": _fp8(x, AMAX),
        "fp8_token": _fp8(x, x.abs().amax(dim=-1, keepdim=True)),
        "fp8_group": torch.cat([_fp8(part, part.abs().amax(dim=-1, keepdim=True)) for part in groups], dim=-1),
    }
    for kind, values in expected.items():
        found = _round(kind, AMAX / nm.E4M3_MAX if kind == "fp8" else None, x)
        close = torch.isclose(found, values, rtol=1e-6, atol=0)
        assert close.float().mean() > 0.998, kind
        torch.testing.assert_close(found, values, rtol=0.07, atol=1e-2)  # a tie is a step apart: 1/16


def test_dynamic_inputs_may_change_their_shape_between_calls() -> None:
    for kind in ("fp8_token", "fp8_group", "mxfp4", "mxfp8"):
        quantizer = input_quantizer(kind, None, None, dtype=torch.float32, device=CPU)  # type: ignore[arg-type]
        assert quantizer is not None
        for rows in (4, 1, 9, 0):
            assert quantizer(torch.ones(2, rows, 160)).shape == (2, rows, 160)


def test_awq_factors_are_multiplied_in_before_rounding_and_without_it() -> None:
    factors = (torch.arange(160) % 4 + 1).bfloat16()
    both = input_quantizer("nvfp4", nm.nvfp4_scale_2(AMAX), factors, dtype=torch.float32, device=CPU)
    alone = input_quantizer(None, None, factors, dtype=torch.float32, device=CPU)
    assert both is not None
    assert alone is not None
    assert torch.equal(both(X), nm.nvfp4_fake_quantize(X * factors.float(), AMAX))
    assert torch.equal(alone(X), X * factors.float())
    assert alone(X.bfloat16()).dtype == torch.float32  # it was made for a model that computes in float32
    assert input_quantizer(None, None, None, dtype=torch.float32, device=CPU) is None


def _stored(**changes: Any) -> dict[str, torch.Tensor]:
    names = [f"model.layers.{i}.self_attn.{side}_proj.{side}_scale" for i in (0, 1) for side in "kv"]
    return {name: torch.tensor(0.05) for name in names} | changes


def _cache(model: Any) -> list[Any]:
    return [getattr(layer.self_attn, f"{side}_bmm_quantizer") for layer in model.model.layers for side in "kv"]


@pytest.mark.parametrize(("kv_cache", "bits"), [("FP8", (4, 3)), ("NVFP4", (2, 1))])
def test_every_attention_layer_gets_its_scales(kv_cache: str, bits: tuple[int, int]) -> None:
    model = make_model("llama")
    attach_kv_cache(model, _stored(), kv_cache, CPU)
    for quantizer in _cache(model):
        assert quantizer.is_enabled
        assert quantizer.num_bits == bits
        assert torch.equal(quantizer.amax / nm.E4M3_MAX, torch.tensor(0.05))
    assert not model.model.layers[0].self_attn.q_bmm_quantizer.is_enabled


def test_no_scale_at_all_means_one() -> None:
    model = make_model("llama")
    attach_kv_cache(model, {}, "FP8", CPU)
    assert [float(quantizer.amax) for quantizer in _cache(model)] == [448.0] * 4


@pytest.mark.parametrize("kv_cache", ["FP8", "NVFP4_AFFINE"])
def test_offsets_make_the_cache_affine(kv_cache: str) -> None:
    """x - offset is rounded and the offset added again, for each head and dimension.

    ModelOpt 0.47 exports the offsets of an NVFP4 cache and leaves them out where it rounds, in memory as here.
    """
    model = make_model("llama")
    offset = torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(2))
    offsets = {f"model.layers.{i}.self_attn.{s}_proj.{s}_bias": offset for i in (0, 1) for s in "kv"}
    attach_kv_cache(model, _stored(**offsets), kv_cache, CPU)
    x = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(3))
    found = _cache(model)[0](x)
    amax = torch.tensor(0.05) * nm.E4M3_MAX
    if kv_cache == "FP8":
        torch.testing.assert_close(found, _fp8(x - offset, amax) + offset, rtol=0.07, atol=1e-3)
        assert not torch.allclose(found, _fp8(x, amax), rtol=0.001, atol=1e-3)
    else:
        assert torch.equal(found, nm.nvfp4_fake_quantize(x, amax))


@pytest.mark.parametrize(
    ("stored", "kv_cache", "said"),
    [
        (
            {"model.layers.0.self_attn.k_proj.k_scale": torch.ones(())},
            "FP8",
            "1 KV-cache scales for 2 attention layers",
        ),
        (_stored(**{"model.layers.7.self_attn.k_proj.k_scale": torch.ones(())}), "FP8", "belongs to no layer"),
        (_stored(), "NVFP4_AFFINE", "k_bias is missing"),
    ],
)
def test_scales_that_are_missing_or_stray_are_named(stored: Any, kv_cache: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        attach_kv_cache(make_model("llama"), stored, kv_cache, CPU)


def test_attention_is_left_as_it_computes() -> None:
    model = make_model("gemma3").float()
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        before = model(ids).logits
        assert set(attention_modules(model)) == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
        assert torch.equal(model(ids).logits, before)
