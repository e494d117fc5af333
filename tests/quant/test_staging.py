"""Weights brought to a GPU through pinned memory: the same bytes, whatever their number and type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_model
from torch import Tensor
from transformers import AutoModelForCausalLM, core_model_loading

from halfbyte.quant import staging
from halfbyte.quant.models import locate, open_original
from halfbyte.quant.patches import staged_loading
from halfbyte.quant.staging import Staging, copy_through

TYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.bool, torch.int64]


def _bytes(tensor: Tensor) -> list[int]:
    return tensor.cpu().reshape(-1).view(torch.uint8).tolist()  # type: ignore[no-any-return]


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (16,), (17,), (5, 7), (64, 1)], ids=str)
def test_all_bytes_arrive_in_parts_of_the_buffer(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    source = _values(shape, dtype)
    target = torch.empty(shape, dtype=dtype)
    waits: list[None] = []
    copy_through(torch.empty(16, dtype=torch.uint8), source, target, lambda: waits.append(None))
    assert _bytes(target) == _bytes(source)
    assert len(waits) == max(1, -(-source.nbytes // 16))


def test_a_buffer_is_not_written_over_before_its_copy_is_through() -> None:
    source, target = torch.arange(40, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)
    buffer = torch.empty(16, dtype=torch.uint8)
    seen: list[list[int]] = []
    copy_through(buffer, source, target, lambda: seen.append(target.tolist()))
    assert seen[0] == [*range(16), *[0] * 24]
    assert seen[-1] == [*range(40)]


def test_it_is_what_transformers_calls_and_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, patches.staged_loading has lost its hold."""
    make_model("llama").save_pretrained(tmp_path / "model")
    real = core_model_loading._materialize_copy
    called: list[Any] = []

    def counted(tensor: Any, device: Any = None, dtype: Any = None) -> Any:
        called.append(device)
        return real(tensor, device, dtype)

    monkeypatch.setattr(core_model_loading, "_materialize_copy", counted)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(called) == len({name for name, _ in model.named_parameters()})
    with staged_loading(torch.device("cuda")):
        assert core_model_loading._materialize_copy is not counted
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")  # to a CPU: as before
    assert core_model_loading._materialize_copy is counted
    with staged_loading(torch.device("cpu")):
        assert core_model_loading._materialize_copy is counted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5), (staging.BUFFER + 3,)], ids=str)
def test_a_gpu_gets_the_same_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    source = _values(shape, dtype)
    found = Staging()(source, torch.device("cuda", 0))
    assert (found.device.type, found.dtype, found.shape) == ("cuda", dtype, source.shape)
    assert torch.equal(found.cpu().reshape(-1).view(torch.uint8), source.reshape(-1).view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32], ids=str)
def test_a_gpu_gets_the_same_model(compute: torch.dtype, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "model")
    source = locate(str(tmp_path / "model"))
    on = {
        name: open_original(source, weights=torch.bfloat16, compute=compute, device=torch.device(name)).state_dict()
        for name in ("cpu", "cuda")
    }
    assert on["cpu"].keys() == on["cuda"].keys()
    for name, value in on["cpu"].items():
        assert torch.equal(value, on["cuda"][name].cpu()), name
