"""The distance of a stored weight from its original: in pieces and samples it is what it is of the whole at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from halfbyte.quant import numerics, weight_error
from halfbyte.quant.checkpoint import torch_dtype
from halfbyte.quant.shards import Shards, open_shards
from halfbyte.quant.weight_error import Distance, Misfit, distance

SHAPE = (1031, 768)  # pieces and samples end within it
Stored = dict[str, Tensor]


def _original(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(*shape[:-1], 1, generator=generator).mul(0.5).exp()
    return (torch.randn(shape, generator=generator) * spread * 0.02).bfloat16()


def _fp8(x: Tensor) -> Stored:
    codes, scale = numerics.fp8_quantize(x, numerics.fp8_scale(x.abs().amax()))
    return {"weight": codes, "weight_scale": scale}


def _channel(x: Tensor) -> Stored:
    codes, scale = numerics.fp8_quantize(x, numerics.fp8_scale(x.abs().amax(dim=1, keepdim=True)))
    return {"weight": codes, "weight_scale": scale.flatten()}


def _squares(x: Tensor) -> Stored:
    codes, scale = numerics.fp8_block_quantize(x)
    return {"weight": codes, "weight_scale": scale[:, None, :, None]}


def _nvfp4(x: Tensor) -> Stored:
    codes, scale, scale_2 = numerics.nvfp4_quantize(x, numerics.nvfp4_scale_2(x.abs().amax()))
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": scale_2}


def _mxfp4(x: Tensor) -> Stored:
    return dict(zip(("weight", "weight_scale"), numerics.mxfp4_quantize(x), strict=True))


def _mxfp8(x: Tensor) -> Stored:
    return dict(zip(("weight", "weight_scale"), numerics.mxfp8_quantize(x), strict=True))


STORE: dict[str, Callable[[Tensor], Stored]] = {
    "fp8": _fp8, "channel": _channel, "squares": _squares, "nvfp4": _nvfp4, "mxfp4": _mxfp4, "mxfp8": _mxfp8,
}  # fmt: skip
BACK: dict[str, Callable[[Stored], Tensor]] = {
    "fp8": lambda s: numerics.fp8_dequantize(numerics.FP8(s["weight"], s["weight_scale"])),
    "channel": lambda s: s["weight"].float() * s["weight_scale"][:, None],
    "squares": lambda s: numerics.fp8_block_dequantize(s["weight"], s["weight_scale"][:, 0, :, 0]),
    "nvfp4": lambda s: numerics.nvfp4_dequantize(numerics.NVFP4(s["weight"], s["weight_scale"], s["weight_scale_2"])),
    "mxfp4": lambda s: numerics.mxfp4_dequantize(numerics.MXFP4(s["weight"], s["weight_scale"])),
    "mxfp8": lambda s: numerics.mxfp8_dequantize(numerics.MXFP8(s["weight"], s["weight_scale"])),
}


def _open(folder: Path, name: str, content: dict[str, Tensor]) -> Shards:
    (folder / name).mkdir(exist_ok=True)
    plain = {f"a.{key}": value.contiguous().clone() for key, value in content.items()}
    save_file(plain, folder / name / "model.safetensors")
    return open_shards(folder / name)


def _distance(folder: Path, stored: Stored, original: Tensor, *, folded: bool = False, key: str = "weight") -> Distance:
    ours, theirs = _open(folder, "stored", stored), _open(folder, "source", {key: original})
    layer = ours.layer(f"a.{key}")
    assert layer is not None
    return distance(ours, theirs, layer, f"a.{key}", folded=folded, blocks=not folded)


@pytest.mark.parametrize("kind", STORE)
def test_it_is_that_of_the_whole_at_once(kind: str, tmp_path: Path) -> None:
    original = _original()
    stored = STORE[kind](original.float())
    found = _distance(tmp_path, stored, original)
    error = (BACK[kind](stored) - original.double()).norm() / original.double().norm()
    assert found.size == pytest.approx(float(original.double().norm()), rel=1e-5)
    assert found.error == pytest.approx(float(error), rel=1e-4)
    assert found.close
    assert found.wrong_blocks == 0


@pytest.mark.parametrize("kind", ["fp8", "squares", "nvfp4", "mxfp4", "mxfp8"])
def test_a_sample_of_rows_tells_the_error_of_rounding_them_all(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = _original()
    assert original.numel() > 4 * weight_error._SAMPLE
    found = _distance(tmp_path, STORE[kind](original.float()), original)
    assert found.expected == pytest.approx(found.error, rel=0.03)  # which is that of rounding all
    assert found.expected < weight_error._USUAL
    monkeypatch.setattr(weight_error, "_SAMPLE", original.numel())
    whole = _distance(tmp_path, STORE[kind](original.float()), original)
    assert whole.expected == pytest.approx(whole.error, rel=1e-4)


def _halves_swapped(x: Tensor) -> Tensor:
    return (x << 4) | (x >> 4) if x.dtype == torch.uint8 else x.view(torch.uint8).flip(-1).view(x.dtype)


DAMAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "pairs in another order": _halves_swapped,
    "rows in another order": lambda x: x.view(torch.uint8).roll(1, 0).view(x.dtype),
    "blocks in another order": lambda x: x.view(torch.uint8).roll(32, 1).view(x.dtype),
    "another shard's rows": lambda x: torch.cat([x.view(torch.uint8)[515:], x.view(torch.uint8)[:515]]).view(x.dtype),
    "a transposed weight": lambda x: x.view(torch.uint8).mT.contiguous().reshape(x.shape).view(x.dtype),
    "zeros": lambda x: torch.zeros_like(x.view(torch.uint8)).view(x.dtype),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", STORE)
def test_structural_damage_is_far_off_in_a_weight_larger_than_the_sample(
    kind: str, damage: str, tmp_path: Path
) -> None:
    original = _original()
    stored = STORE[kind](original.float())
    stored["weight"] = DAMAGE[damage](stored["weight"])
    assert not _distance(tmp_path, stored, original).close


@pytest.mark.parametrize("kind", STORE)
def test_another_layer_is_far_off(kind: str, tmp_path: Path) -> None:
    assert not _distance(tmp_path, STORE[kind](_original(1).float()), _original()).close


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8"])
def test_one_block_between_the_sampled_rows_is_found(kind: str, tmp_path: Path) -> None:
    original = _original()
    stored = STORE[kind](original.float())
    stored["weight_scale"].view(torch.uint8)[514, 7] += 16 if kind == "nvfp4" else 2
    found = _distance(tmp_path, stored, original)
    assert (found.close, found.wrong_blocks) == (True, 1)


def test_a_few_blocks_that_a_search_rounded_to_nearly_nothing_are_no_damage(tmp_path: Path) -> None:
    original = _original()
    stored = _nvfp4(original.float())
    stored["weight"][::20, :8] &= 0x99  # a twentieth of the rows, one block of 48: up to 0.5 in the place of 6
    assert _distance(tmp_path, stored, original).wrong_blocks == 0
    stored["weight"][::2, :16] &= 0x99  # 2 of 48 in every other row, which is more than 2 %
    assert _distance(tmp_path, stored, original).wrong_blocks > 0.02 * original.numel() / 16


def test_a_small_half_of_a_block_of_32_is_no_damage(tmp_path: Path) -> None:
    original = _original()
    original[::2, :16] *= 0.01
    codes, scale = numerics.mxfp4_quantize(original.float())  # a block's scale is then a power of two
    scale_2 = torch.tensor(2.0**-12)
    scale = (torch.exp2(scale.float() - 127) / scale_2).to(torch.float8_e4m3fn)
    found = _distance(tmp_path, {"weight": codes, "weight_scale": scale, "weight_scale_2": scale_2}, original)
    assert (found.close, found.wrong_blocks) == (True, 0)


def test_a_sample_that_is_easier_to_round_than_the_rest_condemns_nothing(tmp_path: Path) -> None:
    original = _original()
    stride = -(-original.numel() // weight_error._SAMPLE)
    original[::stride] = original[::stride].float().sign().bfloat16() * 6 * 2**-8  # exact in MXFP4
    found = _distance(tmp_path, _mxfp4(original.float()), original)
    assert found.error > 2 * weight_error._SLACK
    assert found.close
    assert found.expected == pytest.approx(found.error, rel=1e-3)


def test_a_sample_that_is_harder_to_round_than_the_rest_excuses_nothing(tmp_path: Path) -> None:
    """Beside one row of large values, those of the sampled rows are rounded to zero."""
    original = _original().mul(1e-6)
    original[500] = torch.randn(SHAPE[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    stored = _fp8(original.float())
    assert _distance(tmp_path, stored, original).close
    stored["weight"][500] = (stored["weight"][500].float() * 1.25).to(torch.float8_e4m3fn)
    found = _distance(tmp_path, stored, original)
    assert found.expected < 0.05
    assert not found.close


def test_a_nan_is_never_close(tmp_path: Path) -> None:
    original = _original()
    stored = _fp8(original.float())
    stored["weight"].view(torch.uint8)[700, 3] = 0x7F
    assert not _distance(tmp_path, stored, original).close


def test_factors_folded_into_rows_and_columns_are_undone(tmp_path: Path) -> None:
    original = _original()
    generator = torch.Generator().manual_seed(3)
    rows = torch.rand(SHAPE[0], 1, generator=generator) + 0.5
    columns = torch.rand(SHAPE[1], generator=generator) + 0.5
    stored = _nvfp4(original.float() * rows * columns)
    assert not _distance(tmp_path, stored, original).close
    assert _distance(tmp_path, stored, original, folded=True).close
    stored["weight"] = stored["weight"].roll(1, 0)
    assert not _distance(tmp_path, stored, original, folded=True).close


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("across", [False, True])
def test_stacks_are_compared_expert_by_expert(across: bool, square: bool, tmp_path: Path) -> None:
    """[experts, in, out]: blocks along the last dimension, or along the one that linears multiply along."""
    original = _original(shape=(3, 128, 128 if square else 192))
    matrix = original.float().mT if across else original.float()
    codes, scale, scale_2 = numerics.nvfp4_quantize(matrix.contiguous(), numerics.nvfp4_scale_2(matrix.abs().amax()))
    stored = {"down_proj": codes.mT if across else codes, "down_proj_weight_scale": scale.mT if across else scale}
    stored["down_proj_weight_scale_2"] = scale_2
    found = _distance(tmp_path, stored, original, key="down_proj")
    assert (found.close, found.wrong_blocks) == (True, 0)
    stored["down_proj"] = stored["down_proj"].roll(1, 0)
    assert not _distance(tmp_path, stored, original, key="down_proj").close


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1)])
def test_a_stack_may_have_one_scale_for_each_expert(shape: tuple[int, ...], tmp_path: Path) -> None:
    original = _original(shape=(3, 64, 96)) * torch.tensor([1.0, 4.0, 9.0]).bfloat16()[:, None, None]
    scale = numerics.fp8_scale(original.float().abs().amax(dim=(1, 2)))
    codes = (original.float() / scale[:, None, None]).to(torch.float8_e4m3fn)
    stored = {"down_proj": codes, "down_proj_weight_scale": scale.reshape(shape)}
    assert _distance(tmp_path, stored, original, key="down_proj").close
    stored["down_proj_weight_scale"] = scale.flip(0).reshape(shape)
    assert not _distance(tmp_path, stored, original, key="down_proj").close


def test_a_source_of_zeros_fits_zeros_alone(tmp_path: Path) -> None:
    zeros = torch.zeros(SHAPE, dtype=torch.bfloat16)
    stored = _mxfp8(zeros.float())
    assert _distance(tmp_path, stored, zeros) == Distance(0.0, 0.0, 0.0, 0)
    stored["weight"].view(torch.uint8)[5, 5] = 0x38
    assert not _distance(tmp_path, stored, zeros).close


def test_another_shape_is_no_counterpart(tmp_path: Path) -> None:
    with pytest.raises(Misfit, match=re.escape("a weight of [1031, 768], the source has [1030, 768]")):
        _distance(tmp_path, _fp8(_original().float()), _original()[:-1])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_source_may_have_another_type(dtype: str, tmp_path: Path) -> None:
    original = _original().to(torch_dtype(dtype))
    assert _distance(tmp_path, _nvfp4(original.float()), original).close


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's peak")
def test_memory_is_bounded_by_pieces(tmp_path: Path) -> None:
    """Of a weight that would take 64 MiB in float32."""
    original = _original(shape=(8192, 2048))
    stored = _nvfp4(original.float())
    _distance(tmp_path, stored, original)
    ours, theirs = open_shards(tmp_path / "stored"), open_shards(tmp_path / "source")
    layer = ours.layer("a.weight")
    assert layer is not None
    del original, stored
    peaks = []
    for _ in range(3):  # other threads of the process may take memory meanwhile
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        distance(ours, theirs, layer, "a.weight", folded=False, blocks=True)
        peaks.append(_memory("VmHWM") - before)
    assert min(peaks) < 32 << 20


def _memory(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:"))) << 10
