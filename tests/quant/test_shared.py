"""Layers that read the same input quantize it once, and nothing changes by that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import make_model, sequences, spec

from halfbyte.quant import calibration, configs, ptq
from halfbyte.quant.shared import share_inputs


@pytest.fixture
def quantized() -> Any:
    model = make_model("llama").float()
    model.config.architectures = [type(model).__name__]
    loop = calibration.forward_loop(sequences(), tokens_per_row=64, pack=True)
    ptq.calibrate(model, configs.quant_config(spec("nvfp4", None)), loop)
    ptq.settle(model)
    return model


def test_the_logits_are_the_same_and_three_of_seven_quantizations_are_saved(
    quantized: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelopt.torch.quantization.nn import TensorQuantizer

    ids = torch.arange(40).reshape(2, 20)
    layer = quantized.model.layers[0]
    inputs = [getattr(layer.self_attn, f"{x}_proj").input_quantizer for x in "qkvo"]
    inputs += [getattr(layer.mlp, f"{x}_proj").input_quantizer for x in ("gate", "up", "down")]
    calls = []
    real = TensorQuantizer.forward

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(any(self is one for one in inputs))
        return real(self, x)  # type: ignore[no-any-return]

    monkeypatch.setattr(TensorQuantizer, "forward", counted)
    with torch.inference_mode():
        before = quantized(ids).logits
        assert sum(calls) == 7
        assert share_inputs(quantized) == 3 * len(quantized.model.layers)
        calls.clear()
        assert torch.equal(quantized(ids).logits, before)
        assert sum(calls) == 4
        assert torch.equal(quantized(ids + 1).logits, quantized(ids + 1).logits)


def test_siblings_with_different_scales_share_nothing(quantized: Any) -> None:
    for layer in quantized.model.layers:
        layer.self_attn.k_proj.input_quantizer.amax = layer.self_attn.k_proj.input_quantizer.amax * 2
        layer.mlp.up_proj.input_quantizer.num_bits = (4, 3)
    assert share_inputs(quantized) == len(quantized.model.layers)  # q and v


def test_an_equal_input_that_is_another_tensor_is_quantized_anew(quantized: Any) -> None:
    attention = quantized.model.layers[0].self_attn
    share_inputs(quantized)
    x = torch.randn(2, attention.q_proj.in_features)
    first = attention.q_proj.input_quantizer(x)
    assert attention.k_proj.input_quantizer(x) is first
    assert attention.v_proj.input_quantizer(x.clone()) is not first


@pytest.mark.parametrize("preset", ["nvfp4", "mxfp8"])
def test_no_activation_is_kept_alive_after_a_forward_pass(preset: str) -> None:
    """MXFP8 has no scale of its own, so that all quantizers of an attention are equal, whatever they read."""
    import gc

    model = make_model("llama").float()
    model.config.architectures = [type(model).__name__]
    loop = calibration.forward_loop(sequences(), tokens_per_row=64, pack=True)
    ptq.calibrate(model, configs.quant_config(spec(preset, None)), loop)
    assert share_inputs(model) >= 3 * len(model.model.layers)
    tokens = 37  # a number that no weight has
    with torch.inference_mode():
        model(torch.arange(tokens).unsqueeze(0), use_cache=False, logits_to_keep=1)
    gc.collect()
    alive = [tuple(one.shape) for one in gc.get_objects() if isinstance(one, torch.Tensor) and tokens in one.shape]
    assert alive == []


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_the_same_bits_with_and_without_sharing(llama_factory: Any, checkpointing: bool) -> None:
    found = []
    for shares in (False, True):
        model = llama_factory()
        loop = calibration.forward_loop(sequences(), tokens_per_row=64, pack=True)
        ptq.calibrate(model, configs.quant_config(spec()), loop)
        ptq.share_scales(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        if shares:
            assert share_inputs(model) == 6
        ids = torch.randint(0, 384, (2, 24), generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            model(ids, labels=ids, use_cache=False).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
