"""The survey counts, 8 bytes at a time, what decoding every value would count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from halfbyte.quant.numerics import unpack_e2m1
from halfbyte.quant.shards import CHUNK, Shards, open_shards
from halfbyte.quant.survey import Codes, Numbers, Survey, survey

FULL, ZERO, SUBNORMAL = 0x40, 0x38, 0x03


def _survey(folder: Path, **parts: Tensor) -> Survey:
    save_file({f"a.{name}": part.contiguous() for name, part in parts.items()}, folder / "model.safetensors")
    shards: Shards = open_shards(folder)
    layer = shards.layer("a.weight")
    scales = {name for name in shards if name != "a.weight"}
    return survey(shards, [layer] if layer else [], scales if layer else set())


def _codes(folder: Path, **parts: Tensor) -> Codes:
    return _survey(folder, **parts).codes["a.weight"]


def _random_codes(rows: int, columns: int, seed: int) -> Tensor:
    """Bytes of which some rows are small, and some zero."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    small = torch.randint(0, 3, (rows, 1), dtype=torch.uint8, generator=generator)
    return torch.where(small == 0, codes & 0xCC, torch.where(small == 1, codes & 0x88, codes))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), block=st.sampled_from([16, 32]))
def test_blocks_of_nvfp4_are_counted_as_decoding_counts_them(
    seed: int, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    codes = _random_codes(24, 64, seed)
    choices = torch.tensor([FULL, ZERO, SUBNORMAL], dtype=torch.uint8)
    drawn = torch.randint(0, 3, (24, 128 // block), generator=torch.Generator().manual_seed(seed + 1))
    scale = choices[drawn]
    found = _codes(
        tmp_path_factory.mktemp("s"),
        weight=codes,
        weight_scale=scale.view(torch.float8_e4m3fn),
        weight_scale_2=torch.tensor(1.0),
    )
    magnitudes = (unpack_e2m1(codes) & 7).unflatten(-1, (-1, block)).amax(dim=-1)
    assert found.values == codes.numel() * 2
    assert found.groups == scale.numel()
    assert found.empty == int((magnitudes == 0).sum())
    assert found.weak == int(((magnitudes > 0) & (magnitudes < 5) & (scale >= 8)).sum())
    assert found.unmarked == int(((magnitudes == 0) & (scale == FULL)).sum())
    assert found.saturated == pytest.approx(float(((unpack_e2m1(codes) & 7) == 7).float().mean()))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), threshold=st.sampled_from([0x75, 0x76, 0x77, 0x7E]))
def test_blocks_of_mxfp8_are_counted_as_decoding_counts_them(
    seed: int, threshold: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    codes = _random_codes(16, 96, seed) & 0xF5
    codes[3, 40], codes[5, 95] = threshold, threshold | 0x80
    scale = torch.full((16, 3), 120, dtype=torch.uint8)
    found = _codes(tmp_path_factory.mktemp("s"), weight=codes.view(torch.float8_e4m3fn), weight_scale=scale)
    magnitudes = (codes & 0x7F).unflatten(-1, (-1, 32)).amax(dim=-1)
    assert found.groups == scale.numel()
    assert found.empty == int((magnitudes == 0).sum())
    assert found.weak == int(((magnitudes > 0) & (magnitudes < 0x76)).sum())
    assert found.not_a_number == int(((codes & 0x7F) == 0x7F).sum())


def test_rows_squares_and_tensors_of_fp8_are_groups(tmp_path: Path) -> None:
    codes = torch.full((200, 300), 0x30, dtype=torch.uint8)
    codes[7, 9] = codes[199, 299] = 0x7E
    codes[:128, 128:256] = 0
    weight = codes.view(torch.float8_e4m3fn)
    rows = _codes(tmp_path, weight=weight, weight_scale=torch.ones(200))
    assert (rows.groups, rows.weak, rows.empty) == (200, 198, 0)
    squares = _codes(tmp_path, weight=weight, weight_scale=torch.ones(2, 1, 3, 1))
    assert (squares.groups, squares.weak, squares.empty) == (6, 3, 1)
    tensor = _codes(tmp_path, weight=weight, weight_scale=torch.tensor(1.0))
    assert (tensor.groups, tensor.weak, tensor.empty) == (1, 0, 0)
    assert tensor.saturated == pytest.approx(2 / codes.numel())


def test_a_stack_that_lies_across_is_counted_as_the_same_weights_in_rows(tmp_path: Path) -> None:
    codes = torch.stack([_random_codes(32, 24, seed) for seed in range(3)])
    scale = torch.full((3, 32, 3), FULL, dtype=torch.uint8).view(torch.float8_e4m3fn)
    save_file(
        {
            "a.down_proj": codes.mT.contiguous(),
            "a.down_proj_weight_scale": scale.view(torch.uint8).mT.contiguous().view(torch.float8_e4m3fn),
            "a.down_proj_weight_scale_2": torch.tensor(1.0),
        },
        tmp_path / "model.safetensors",
    )
    shards = open_shards(tmp_path)
    layer = shards.layer("a.down_proj")
    assert layer is not None
    across = survey(shards, [layer], {name for name in shards if name != "a.down_proj"}).codes["a.down_proj"]
    inside = _codes(
        tmp_path, weight=codes.flatten(0, 1), weight_scale=scale.flatten(0, 1), weight_scale_2=torch.tensor(1.0)
    )
    assert (across.groups, across.weak, across.empty) == (inside.groups, inside.weak, inside.empty)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1.0, 0.0])
def test_kept_tensors_are_finite_or_not_wherever_the_value_lies(
    dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    values = torch.zeros(CHUNK + 3, dtype=dtype)
    values[-1] = value
    found = _survey(tmp_path, weight=values).kept["a.weight"]
    assert found.not_finite == (value not in (-1.0, 0.0))
    assert (found.zeros == found.values) == (value == 0.0)
    assert found.values == len(values)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0x38, 0x38], Numbers(2, 1.0, 1.0, 0, False, True)),
        ([0x38, 0x00, 0x80], Numbers(3, 0.0, 1.0, 2, False, False)),
        ([0x38, 0xB8, 0x7F, 0x40], Numbers(4, -1.0, 2.0, 0, True, False)),
        ([0x7E, 0x01], Numbers(2, 2.0**-9, 448.0, 0, False, False)),
    ],
)
def test_block_scales_are_read_from_their_codes(codes: list[int], expected: Numbers, tmp_path: Path) -> None:
    scale = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)
    parts = {"weight": torch.zeros(len(codes), 8, dtype=torch.uint8), "weight_scale_2": torch.tensor(1.0)}
    found = _survey(tmp_path, **parts, weight_scale=scale.unsqueeze(1))
    assert found.scales["a.weight_scale"] == expected


def test_e8m0_scales_are_powers_of_two_and_255_is_no_number(tmp_path: Path) -> None:
    scale = torch.tensor([[127], [130], [255]], dtype=torch.uint8)
    found = _survey(tmp_path, weight=torch.zeros(3, 16, dtype=torch.uint8), weight_scale=scale).scales["a.weight_scale"]
    assert found == Numbers(3, 1.0, 8.0, 0, True, False)


def test_tensors_are_read_in_the_order_they_lie_on_disk(tmp_path: Path) -> None:
    save_file({"b": torch.ones(4), "a": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    save_file({"c": torch.ones(4)}, tmp_path / "model-1.safetensors")
    shards = open_shards(tmp_path)
    places = [(shards.entries[name].path.name, shards.entries[name].begin) for name in shards]
    assert places == sorted(places)
    assert next(iter(shards)) == "c"


def test_chunks_are_whole_units_and_make_up_the_tensor(tmp_path: Path) -> None:
    values = torch.arange(3 * CHUNK // 4, dtype=torch.int32).repeat(2)
    save_file({"a": values}, tmp_path / "model.safetensors")
    shards = open_shards(tmp_path)
    parts = [part.copy() for part in shards.chunks("a", 48)]
    assert all(len(part) % 48 == 0 for part in parts[:-1])
    assert b"".join(part.tobytes() for part in parts) == values.numpy().tobytes()
    assert torch.equal(shards["a"], values)
