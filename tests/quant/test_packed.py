"""Weights in 4 or 8 bits give the answers of folded ones bit for bit, take a third of their memory, and are mapped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from stored import STORE, logits_of, open_plain, without_rounding, write_all
from tiny import CPU

from halfbyte.quant.checkpoint import quant_format
from halfbyte.quant.load import Weights, open_exported
from halfbyte.quant.models import locate
from halfbyte.quant.packed import ExpertStack, Packed, QuantizedLinear


def _open(folder: Path, weights: Weights, dtype: torch.dtype = torch.float32) -> Any:
    declared = quant_format(folder)
    assert declared is not None
    return open_exported(locate(str(folder)), declared, dtype=dtype, device=CPU, weights=weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("declared", sorted(STORE))
def test_packed_and_folded_answer_alike_bit_for_bit(
    declared: str, family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    if family == "mixtral" and declared == "NVFP4_SVD":
        pytest.skip("ModelOpt has no low-rank branch for stacked experts")
    write_all(tmp_path / "checkpoint", declared, family)
    packed, folded = _open(tmp_path / "checkpoint", "packed", dtype), _open(tmp_path / "checkpoint", "folded", dtype)
    assert torch.equal(logits_of(packed), logits_of(folded))
    assert any(isinstance(module, Packed) for module in packed.modules())
    assert not any(isinstance(module, Packed) for module in folded.modules())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("declared", sorted(STORE))
def test_weights_have_the_values_their_codes_stand_for(declared: str, family: str, tmp_path: Path) -> None:
    """The reference is a plain checkpoint of those values in float32, opened by transformers alone."""
    if declared in ("NVFP4_AWQ", "NVFP4_SVD"):
        pytest.skip("their values are spread over weight, factors and branch: see the next test")
    plain = write_all(tmp_path / "checkpoint", declared, family)
    read = without_rounding(_open(tmp_path / "checkpoint", "packed"))
    assert torch.equal(logits_of(read), logits_of(open_plain(plain)))


@pytest.mark.parametrize("declared", ["NVFP4_AWQ", "NVFP4_SVD"])
def test_factors_and_branch_give_the_values_back(declared: str, tmp_path: Path) -> None:
    """(W + B A) s x in another order of float32 operations: equal up to its rounding, which 2 layers carry on."""
    plain = write_all(tmp_path / "checkpoint", declared)
    read = without_rounding(_open(tmp_path / "checkpoint", "packed"))
    torch.testing.assert_close(logits_of(read), logits_of(open_plain(plain)), rtol=1e-4, atol=1e-4)


def test_rounding_of_inputs_changes_the_answers(tmp_path: Path) -> None:
    """Guards the tests above: models whose inputs were never rounded would agree as well."""
    for declared in ("FP8", "NVFP4", "MXFP4", "MXFP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_BLOCK", "W4A8_MXFP4_FP8"):
        write_all(tmp_path / declared, declared)
        read = _open(tmp_path / declared, "folded")
        rounded = logits_of(read)
        assert not torch.equal(rounded, logits_of(without_rounding(read))), declared


@pytest.mark.parametrize(("declared", "most"), [("NVFP4", 0.30), ("MXFP4", 0.30), ("FP8", 0.51), ("MXFP8", 0.52)])
def test_quantized_layers_take_a_third_of_the_memory(declared: str, most: float, tmp_path: Path) -> None:
    write_all(tmp_path / "checkpoint", declared, "mixtral")
    packed = _open(tmp_path / "checkpoint", "packed", torch.bfloat16)
    folded = _open(tmp_path / "checkpoint", "folded", torch.bfloat16)
    held = {"packed": 0, "folded": 0}
    for kind, model in (("packed", packed), ("folded", folded)):
        for module in model.modules():
            if isinstance(module, QuantizedLinear | ExpertStack):
                tensors = [*module.parameters(), *module.buffers()]
                held[kind] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert 0 < held["packed"] <= most * held["folded"]


def _mapped(path: Path) -> list[range]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line) for line in lines if line.endswith(str(path.resolve()))]
    return [range(int(found[1], 16), int(found[2], 16)) for found in ranges if found]


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="the system does not list memory maps")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_packed_weights_lie_in_the_mapped_file(family: str, tmp_path: Path) -> None:
    """Opening makes no copy: neither of codes and scales, nor of what is stored in the type it is computed in."""
    write_all(tmp_path / "checkpoint", "NVFP4", family)
    model = _open(tmp_path / "checkpoint", "packed", torch.bfloat16)
    mapped = _mapped(tmp_path / "checkpoint" / "model.safetensors")
    tensors = [buffer for module in model.modules() if isinstance(module, Packed) for buffer in module.buffers()]
    assert len(tensors) >= 3 * 7 * 2
    tensors += [model.get_input_embeddings().weight, model.model.norm.weight]
    assert all(any(tensor.data_ptr() in part for part in mapped) for tensor in tensors)


def test_codes_keep_their_type_when_the_model_changes_its_own(tmp_path: Path) -> None:
    write_all(tmp_path / "checkpoint", "NVFP4")
    model = _open(tmp_path / "checkpoint", "packed")
    before = logits_of(model)
    assert torch.equal(logits_of(model.double().float()), before)


def test_an_expert_offers_products_only() -> None:
    stack = ExpertStack([[Packed(None, torch.ones(4, 8))]], torch.float32, transposed=False)
    with pytest.raises(TypeError, match="conv1d"):
        torch.conv1d(torch.ones(1, 8), stack[0])  # type: ignore[call-overload]
