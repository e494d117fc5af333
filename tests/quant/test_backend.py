"""ModelOpt's quantizers on a CPU: they give our numerics, and what was replaced in ModelOpt is still needed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from halfbyte.quant import backend, patches
from halfbyte.quant import fake_quantize as fq
from halfbyte.records.errors import UserError

X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))


def _quantizer(num_bits: Any, blocks: dict[Any, Any] | None, **more: Any) -> Any:
    from modelopt.torch.quantization.nn import TensorQuantizer

    backend.register()
    quantizer = TensorQuantizer()
    quantizer.set_from_attribute_config({"num_bits": num_bits, "axis": None, "block_sizes": blocks, **more})
    return quantizer


def test_dynamic_nvfp4_runs_on_our_numerics() -> None:
    quantizer = _quantizer((2, 1), {-1: 16, "type": "dynamic", "scale_bits": (4, 3)})
    quantizer.amax = X.abs().max()
    assert torch.equal(quantizer(X), fq.nvfp4_fake_quantize(X, X.abs().max()))


@pytest.mark.parametrize(("num_bits", "ours"), [((2, 1), fq.mxfp4_fake_quantize), ((4, 3), fq.mxfp8_fake_quantize)])
def test_mx_formats_run_on_our_numerics(num_bits: Any, ours: Any) -> None:
    quantizer = _quantizer(num_bits, {-1: 32, "type": "dynamic", "scale_bits": (8, 0)})
    assert torch.equal(quantizer(X), ours(X))


def test_fp8_runs_on_our_numerics_per_tensor_channel_and_token() -> None:
    for axis, amax in ((None, X.abs().max()), (0, X.abs().amax(1, keepdim=True))):
        quantizer = _quantizer((4, 3), None)
        quantizer.axis = axis
        quantizer.amax = amax
        assert torch.equal(quantizer(X), fq.fp8_fake_quantize(X, amax))
    token = _quantizer((4, 3), {-1: None, "type": "dynamic"}, type="dynamic")
    assert torch.equal(token(X), fq.fp8_fake_quantize(X, X.abs().amax(1, keepdim=True)))


def test_a_format_without_numerics_is_an_error_and_not_left_alone() -> None:
    quantizer = _quantizer((3, 2), {-1: 32, "type": "dynamic", "scale_bits": (8, 0)})
    with pytest.raises(NotImplementedError, match=r"\(3, 2\) bits"):
        quantizer(X)


def test_integer_formats_stay_with_modelopt() -> None:
    quantizer = _quantizer(8, None)
    quantizer.amax = X.abs().max()
    step = X.abs().max() / 127
    assert torch.allclose(quantizer(X), (X / step).round() * step, atol=1e-6)


def test_gradients_pass_where_modelopt_lets_them_pass() -> None:
    quantizer = _quantizer((2, 1), {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}, pass_through_bwd=False)
    quantizer.amax = torch.tensor(1.0)
    x = X.clone().requires_grad_()
    quantizer(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (x.abs() <= 1).float())


STILL_NEEDED = """
import torch
from modelopt.torch.quantization.tensor_quant import dynamic_block_quant, static_blockwise_fp4_fake_quant
x, amax = torch.ones(2, 32), torch.tensor(1.0)
wrong = []
for name, call in {
    "NVFP4": lambda: dynamic_block_quant(x, 16, amax, None, (2, 1), (4, 3)),
    "MX": lambda: dynamic_block_quant(x, 32, None, None, (4, 3), (8, 0)),
    "static NVFP4": lambda: static_blockwise_fp4_fake_quant(x.reshape(-1, 16), torch.ones(4), amax),
}.items():
    try:
        call()
        wrong.append(name)
    except (AssertionError, RuntimeError):
        pass
print(wrong)
"""


def test_what_is_replaced_does_not_work_without_it() -> None:
    """Fails when ModelOpt mends one: then its replacement can go."""
    done = subprocess.run(
        [sys.executable, "-c", STILL_NEEDED],
        capture_output=True, text=True, check=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_second_fusing_would_move_settled_scales() -> None:
    """Why an export must not fuse again. Fails when the mean of three equal scales is that scale."""
    scale = torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 1
    assert not torch.equal(torch.stack([scale] * 3).mean(dim=0), scale)


def test_another_modelopt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "version", lambda _: "0.48.0")
    with pytest.raises(UserError, match=r"nvidia-modelopt 0\.48\.0 is not supported"):
        patches.require_known_modelopt()
    with pytest.raises(UserError, match="is not supported"), patches.fused_once():
        pass
