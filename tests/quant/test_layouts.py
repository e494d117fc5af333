"""What a weight is stored as is told from the tensors beside it; a declared format fits it or does not."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import pytest

from halfbyte.quant import layouts
from halfbyte.quant.checkpoint import QuantFormat
from halfbyte.quant.layouts import FORMATS, find_layer, fits, is_kv, is_scale
from halfbyte.records.errors import UserError

LAYER = "model.layers.0.mlp.up_proj"
Entry = tuple[str, tuple[int, ...]]
NVFP4: dict[str, Entry] = {
    "weight": ("U8", (256, 64)),
    "weight_scale": ("F8_E4M3", (256, 8)),
    "weight_scale_2": ("F32", ()),
}
INPUT: dict[str, Entry] = {"input_scale": ("F32", ())}
SMOOTH: dict[str, Entry] = {"pre_quant_scale": ("BF16", (128,))}
BRANCH: dict[str, Entry] = {
    "weight_quantizer._svdquant_lora_a": ("BF16", (8, 128)),
    "weight_quantizer._svdquant_lora_b": ("BF16", (256, 8)),
}


class Heads(dict[str, Entry]):
    def shape(self, name: str) -> tuple[int, ...]:
        return self[name][1]

    def dtype(self, name: str) -> str:
        return self[name][0]


def _heads(parts: dict[str, Entry], module: str = LAYER) -> Heads:
    return Heads({f"{module}.{part}": entry for part, entry in parts.items()})


def _fp8(scale: tuple[int, ...], name: str = "weight_scale", kind: str = "F32") -> dict[str, Entry]:
    return {"weight": ("F8_E4M3", (256, 384)), name: (kind, scale)}


STORED: list[tuple[str, dict[str, Entry], list[str]]] = [
    ("FP8", _fp8(()) | INPUT, ["FP8"]),
    ("FP8", _fp8((1,)) | INPUT, ["FP8"]),
    ("FP8_PER_CHANNEL_PER_TOKEN", _fp8((256,)), ["FP8_PER_CHANNEL_PER_TOKEN"]),
    ("FP8_PER_CHANNEL_PER_TOKEN", _fp8((256, 1)), ["FP8_PER_CHANNEL_PER_TOKEN"]),
    ("FP8_PB_WO", _fp8((2, 1, 3, 1)), ["FP8_PB_WO", "FP8_BLOCK"]),
    ("FP8_PB_WO", _fp8((2, 3)), ["FP8_PB_WO", "FP8_BLOCK"]),
    ("FP8_BLOCK", _fp8((2, 3), "weight_scale_inv"), ["FP8_PB_WO", "FP8_BLOCK"]),
    ("MXFP8", _fp8((256, 12), kind="U8"), ["MXFP8"]),
    ("NVFP4", NVFP4 | INPUT, ["NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8"]),
    ("W4A16_NVFP4", NVFP4, ["W4A16_NVFP4"]),
    ("NVFP4_AWQ", NVFP4 | INPUT | SMOOTH, ["NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8"]),
    ("NVFP4_SVD", NVFP4 | INPUT | SMOOTH | BRANCH, ["NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8"]),
    (
        "MXFP4",
        {"weight": ("U8", (256, 64)), "weight_scale": ("U8", (256, 4))},
        ["MXFP4", "W4A16_MXFP4", "W4A8_MXFP4_FP8"],
    ),
    (
        "W4A8_MXFP4_FP8",
        {"weight": ("U8", (256, 64)), "weight_scale": ("U8", (256, 4))} | INPUT,
        ["W4A8_MXFP4_FP8"],
    ),
]


@pytest.mark.parametrize(("name", "parts", "declared"), STORED)
def test_a_stored_layer_is_recognised_and_fits_what_may_be_declared_of_it(
    name: str, parts: dict[str, Entry], declared: list[str]
) -> None:
    layer = find_layer(_heads(parts), f"{LAYER}.weight")
    assert layer is not None
    assert layer.format == name
    assert layer.module == LAYER
    assert {tensor.removeprefix(f"{LAYER}.") for tensor in layer.tensors} == set(parts)
    assert [one for one in FORMATS if fits(layer, one)] == sorted(declared, key=list(FORMATS).index)
    assert not fits(layer, None)


def test_a_weight_of_one_square_has_one_scale() -> None:
    layer = find_layer(_heads({"weight": ("F8_E4M3", (64, 64)), "weight_scale": ("F32", ())}), f"{LAYER}.weight")
    assert layer is not None
    assert fits(layer, "FP8_PB_WO")
    assert not fits(layer, "FP8")  # which has an input scale


@pytest.mark.parametrize(
    "parts",
    [
        {"weight": ("U8", (256, 64))},
        {"weight": ("F8_E4M3", (256, 64))},
        {"weight": ("U8", (256, 64)), "weight_scale": ("F8_E4M3", (256, 8))},
        {"weight": ("U8", (256, 64)), "weight_scale": ("U8", (256, 4)), "weight_scale_2": ("F32", ())},
        {"weight": ("BF16", (256, 128)), "weight_scale": ("F32", ())},
        {"weight": ("I8", (256, 128)), "weight_scale": ("F32", (256,))},
    ],
)
def test_codes_without_their_scales_are_an_error(parts: dict[str, Entry]) -> None:
    with pytest.raises(UserError, match="without the scales that belong to it"):
        find_layer(_heads(parts), f"{LAYER}.weight")


def test_what_is_not_quantized_is_no_layer() -> None:
    heads = _heads({"weight": ("BF16", (256, 128)), "bias": ("BF16", (256,))})
    assert find_layer(heads, f"{LAYER}.weight") is None
    assert find_layer(heads, f"{LAYER}.bias") is None


def _stack(codes: tuple[int, ...], scale: tuple[int, ...]) -> Any:
    names = {"gate_up_proj": ("U8", codes), "gate_up_proj_weight_scale": ("F8_E4M3", scale)}
    heads = _heads({**names, "gate_up_proj_weight_scale_2": ("F32", (4,))}, "mlp.experts")
    return find_layer(heads, "mlp.experts.gate_up_proj")


def test_stacks_of_experts_are_layers_whose_blocks_lie_along_either_dimension() -> None:
    first, last = _stack((4, 32, 256), (4, 4, 256)), _stack((4, 64, 128), (4, 64, 16))
    assert (first.blocks_first, last.blocks_first) == (True, False)
    assert first.transposed
    assert last.transposed
    heads = _heads({"down_proj_blocks": ("U8", (4, 64, 3, 16)), "down_proj_scales": ("U8", (4, 64, 3))}, "mlp.experts")
    published = find_layer(heads, "mlp.experts.down_proj_blocks")
    assert published is not None
    assert published.format == layouts.W4A16_MXFP4
    assert not published.transposed


def test_names_of_scales_are_told_from_names_of_weights() -> None:
    scales = ["weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale", "pre_quant_scale"]
    assert all(is_scale(f"{LAYER}.{name}") for name in scales)
    assert all(is_scale(f"mlp.experts.down_proj_{name}") for name in scales)
    assert all(
        is_scale(f"a.{name}") for name in ("k_proj.k_scale", "k_proj.k_bias", "weight_quantizer._svdquant_lora_a")
    )
    assert is_scale("mlp.experts.gate_up_proj_scales")
    weights = ["weight", "bias", "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias", "k_proj.bias", "scale"]
    assert not any(is_scale(f"a.{name}") for name in weights)
    assert is_kv("self_attn.v_proj.v_bias")
    assert not is_kv("self_attn.v_proj.input_scale")


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("model.layers.0.mlp.up_proj", "NVFP4"),
        ("lm_head", None),
        ("model.layers.1.self_attn.q_proj", None),
        ("model.layers.10.self_attn.q_proj", "NVFP4"),
        ("model.layers.2.mlp.router", None),
        ("model.layers.3.mlp.down_proj", None),
        ("model.layers.30.mlp.down_proj", "NVFP4"),
    ],
)
def test_exclude_lists_name_modules_by_pattern_or_by_what_contains_them(layer: str, expected: str | None) -> None:
    exclude = ("lm_head", "model.layers.1.self_attn*", "model.layers.*.router", "model.layers.3.mlp")
    assert QuantFormat("NVFP4", exclude=exclude).format_of(layer) == expected


def test_a_mixed_checkpoint_is_declared_by_layer_or_by_what_contains_it() -> None:
    layers = {"model.layers.0.mlp.experts": "NVFP4", "model.layers.0.self_attn.q_proj": "FP8"}
    declared = QuantFormat("MIXED_PRECISION", layers=layers)
    assert declared.format_of("model.layers.0.mlp.experts.17.up_proj") == "NVFP4"
    assert declared.format_of("model.layers.0.self_attn.q_proj") == "FP8"
    assert declared.format_of("model.layers.0.self_attn.k_proj") is None
    assert declared.label == "MIXED_PRECISION"


@pytest.mark.parametrize("pattern", ["a*", "*b", "a.?", "[ab].c", "[!a].c", "a.b|c", "a.(b)", "a", "", "*.b*"])
@pytest.mark.parametrize("layer", ["a", "a.b", "a.b.c", "b.c", "ab", "a.b|c", "a.(b)", "c.a.b", ""])
def test_exclude_patterns_are_those_of_the_shell(layer: str, pattern: str) -> None:
    expected = fnmatch(layer, pattern) or fnmatch(layer, f"{pattern}.*")
    assert QuantFormat("NVFP4", exclude=("lm_head", pattern, "x*")).excludes(layer) == expected
    assert not QuantFormat("NVFP4").excludes(layer)
