"""The corruption matrix: what can be wrong with a checkpoint, the check that must catch it, and what it must name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from damage import (
    INDEX,
    Damage,
    Tensors,
    bits,
    both,
    configure,
    copy,
    declare,
    drop,
    edit_json,
    every,
    exchange_files,
    exclude,
    file_of,
    put,
    remove,
    scale,
    swap,
    tensors,
)  # fmt: skip

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.1.mlp"
DOWN, UP, OUT = f"{MLP}.down_proj", f"{MLP}.up_proj", f"{ATTENTION}.o_proj"
EXPERT = "model.layers.1.mlp.experts"
ROUTER = "model.layers.1.mlp.gate"
LORA = f"{DOWN}.weight_quantizer._svdquant_lora"


@dataclass(frozen=True)
class Case:
    """One damaged checkpoint."""

    name: str
    kind: str
    check: str
    """What must catch it."""
    culprit: str
    """What must be named."""
    damage: Damage
    source: bool = False
    """Whether it takes the source to see it."""


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def garbage(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(b"<html>404</html>" + path.read_bytes()[16:])


def trailing(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 64)


def lose(index: int) -> Damage:
    return lambda folder: sorted(folder.glob("*.safetensors"))[index].unlink()


def store_twice(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    first, second, _ = sorted(folder.glob("*.safetensors"))
    values, others = load_file(first), load_file(second)
    name = f"{DOWN}.weight"
    both_hold = {name: values[name]} if name in values else {name: others.get(name, torch.zeros(2))}
    for path, own in ((first, values), (second, others)):
        save_file({**own, **both_hold}, path, metadata={"format": "pt"})


def overlap(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][0])
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [begin - 8, end - 8]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(content[:8] + text + content[8 + length :])


def index_entry(name: str, file: str | None) -> Damage:
    def damage(folder: Path) -> None:
        def change(content: Any) -> None:
            if file is None:
                del content["weight_map"][name]
            else:
                content["weight_map"][name] = file

        edit_json(folder / INDEX, change)

    return damage


def move_entry(folder: Path) -> None:
    own = file_of(folder, f"{DOWN}.weight").name
    other = next(path.name for path in sorted(folder.glob("*.safetensors")) if path.name != own)
    index_entry(f"{DOWN}.weight", other)(folder)


def write(name: str, text: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text, encoding="utf-8")

    return damage


def tokenizer(**changes: Any) -> Damage:
    return configure("tokenizer.json", **changes)


def new_token(folder: Path) -> None:
    token = {"id": 384, "content": "<new>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    edit_json(folder / "tokenizer.json", lambda content: content["added_tokens"].append({**token, "normalized": False}))


def other_vocabulary(folder: Path) -> None:
    def change(content: Any) -> None:
        vocabulary = content["model"]["vocab"]
        first, second = list(vocabulary)[10:12]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    edit_json(folder / "tokenizer.json", change)


def without_layer(number: int) -> Damage:
    def change(values: Tensors) -> None:
        for name in [name for name in values if f".layers.{number}." in name]:
            del values[name]

    return tensors(change)


def flip(name: str, byte: int, bit: int) -> Damage:
    def change(value: torch.Tensor) -> torch.Tensor:
        value.flatten()[byte] ^= 1 << bit
        return value

    return bits(name, change)


def unquantize(module: str) -> Damage:
    """In the place of a quantized weight, one of the same shape in bfloat16."""

    def change(values: Tensors) -> None:
        rows, columns = values[f"{module}.weight"].shape
        for name in [name for name in values if name.startswith(f"{module}.") and not name.endswith("bias")]:
            del values[name]
        values[f"{module}.weight"] = torch.ones(rows, 2 * columns, dtype=torch.bfloat16)

    return tensors(change)


def add(name: str, *shape: int) -> Damage:
    return tensors(lambda values: values.update({name: torch.ones(shape, dtype=torch.bfloat16)}))


def reshape(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return tensors(lambda values: values.update({name: change(values[name])}))


def set_byte(name: str, index: int, value: int) -> Damage:
    def change(old: torch.Tensor) -> torch.Tensor:
        old.flatten()[index] = value
        return old

    return bits(name, change)


def zero_blocks(value: torch.Tensor) -> torch.Tensor:
    value[3, :16] = 0
    return value


def raise_one(value: torch.Tensor) -> torch.Tensor:
    value[1, 1] += 8  # one more in an E4M3 exponent
    return value


def nibbles_swapped(value: torch.Tensor) -> torch.Tensor:
    return (value << 4) | (value >> 4)


def fallback(expert: int, divisor: float) -> Damage:
    def change(values: Tensors) -> None:
        for name in [n for n in values if n.startswith(f"{EXPERT}.{expert}.") and n.endswith("input_scale")]:
            values[name] = torch.tensor(0.5 / divisor)

    return tensors(change)


def columns_reversed(name: str, block: int) -> Damage:
    """The blocks of each row in the reverse order."""

    def change(value: torch.Tensor) -> torch.Tensor:
        return value.reshape(len(value), -1, block).flip(1).reshape(value.shape)

    return bits(name, change)


FILES = [
    Case("a file cut short", "nvfp4", "files", "is cut short", cut),
    Case("a file cut short names its tensor", "nvfp4", "files", "self_attn", cut),
    Case("a missing shard", "sharded", "files", "model-00002-of-00003.safetensors", lose(1)),
    Case("a file that is no safetensors", "sharded", "files", "model-00001-of-00003.safetensors", garbage),
    Case("bytes after the last tensor", "nvfp4", "files", "64 bytes that belong to no tensor", trailing),
    Case("tensors that overlap", "nvfp4", "files", "does not begin where", overlap),
    Case("a tensor stored twice", "sharded", "files", f"{DOWN}.weight is stored twice", store_twice),
    Case("a meta tensor", "nvfp4", "files", f"{DOWN}.bias is empty",
         tensors(lambda values: values.update({f"{DOWN}.bias": torch.empty(0)}))),
    Case("a tensor of the index in no file", "sharded", "index", "ghost.weight",
         index_entry("ghost.weight", "model-00001-of-00003.safetensors")),
    Case("a tensor that the index lacks", "sharded", "index", f"{DOWN}.weight", index_entry(f"{DOWN}.weight", None)),
    Case("an index that names the wrong file", "sharded", "index", f"{DOWN}.weight", move_entry),
    Case("swapped shards", "sharded", "index", "the index says", exchange_files),
    Case("a wrong total_size", "sharded", "index", "total_size 1", configure(INDEX, metadata={"total_size": 1})),
    Case("shards without index", "sharded", "index", "no index", remove(INDEX)),
    Case("a file that no index names", "sharded", "index", "extra.safetensors",
         lambda folder: shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "extra.safetensors")),
    Case("a lost layer", "nvfp4", "layers", "layer 1 has no tensors", without_layer(1)),
    Case("a layer too many", "nvfp4", "layers", "layer 1 has tensors", configure("config.json", num_hidden_layers=1)),
    Case("a lost norm", "nvfp4", "layers", "layer 1 lacks input_layernorm",
         drop("model.layers.1.input_layernorm.weight")),
    Case("a missing tokenizer", "nvfp4", "companions", "tokenizer.json", remove("tokenizer.json")),
    Case("a missing tokenizer_config", "nvfp4", "companions", "tokenizer_config", remove("tokenizer_config.json")),
    Case("a missing generation config", "nvfp4", "companions", "generation_config", remove("generation_config.json")),
    Case("a tokenizer that truncates", "nvfp4", "companions", "cuts every text to 8 tokens",
         tokenizer(truncation={"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"})),
    Case("a token without embedding", "nvfp4", "companions", "token 384", new_token),
    Case("a missing chat template", "nvfp4", "companions", "chat template", remove("chat_template.jinja"), True),
    Case("another chat template", "nvfp4", "companions", "chat template", write("chat_template.jinja", "x"), True),
    Case("another end of text", "nvfp4", "companions", "eos_token_id",
         configure("generation_config.json", eos_token_id=7), True),
    Case("another vocabulary", "nvfp4", "companions", "tokenizer.json is not", other_vocabulary, True),
    Case("other weights beside it", "nvfp4", "size", "pytorch_model.bin", write("pytorch_model.bin", "x")),
    Case("one flipped bit", "run", "manifest", "have changed", flip(f"{DOWN}.weight", 100, 3)),
    Case("a changed configuration", "run", "manifest", "have changed", configure("config.json", rope_theta=1.0)),
]  # fmt: skip

DECLARED = [
    Case("another quant_algo", "nvfp4", "declared", f"{DOWN} is stored as NVFP4, declared as FP8",
         declare(quant_algo="FP8")),
    Case("weights without activations declared", "nvfp4", "declared", DOWN, declare(quant_algo="W4A16_NVFP4")),
    Case("an unknown quant_algo", "nvfp4", "declarations", "NVFP3", declare(quant_algo="NVFP3")),
    Case("no quant_algo", "nvfp4", "declarations", "quant_algo", declare(quant_algo=None)),
    Case("two declarations of the algorithm", "nvfp4", "declarations", "quant_algo differs",
         lambda folder: edit_json(folder / "config.json",
                                  lambda content: content["quantization_config"].update(quant_algo="FP8"))),
    Case("two exclude lists", "nvfp4", "declarations", "ignore", declare(exclude_modules=["lm_head"])),
    Case("a KV cache in one declaration", "nvfp4", "declarations", "kv_cache", declare(kv_cache_quant_algo=None)),
    Case("another group_size", "mxfp8", "declarations", "group_size", both(
        declare(group_size=64), lambda folder: edit_json(folder / "config.json", lambda content: content[
            "quantization_config"].update(config_groups={"group_0": {"weights": {"group_size": 32}}})))),
    Case("NVFP4 with blocks of 32", "nvfp4", "declarations", "32", declare(group_size=32)),
    Case("a wrong group_size", "w4a8", "shapes", f"{DOWN}.weight_scale has shape", declare(group_size=16)),
    Case("a missing weight_scale", "nvfp4", "complete", DOWN, drop(f"{DOWN}.weight_scale")),
    Case("a missing weight_scale_2", "nvfp4", "complete", DOWN, drop(f"{DOWN}.weight_scale_2")),
    Case("a missing FP8 weight_scale", "fp8", "complete", DOWN, drop(f"{DOWN}.weight_scale")),
    Case("a scale without weight", "fp8", "complete", "model.norm.weight_scale", put("model.norm.weight_scale", 1.0)),
    Case("a missing input_scale", "fp8", "input scales", DOWN, drop(f"{DOWN}.input_scale")),
    Case("a missing input_scale of NVFP4", "nvfp4", "declared", DOWN, drop(f"{DOWN}.input_scale")),
    Case("block scales of another shape", "nvfp4", "shapes", f"{DOWN}.weight_scale",
         reshape(f"{DOWN}.weight_scale", lambda value: value[:, :4])),
    Case("block scales of another type", "nvfp4", "shapes", f"{DOWN}.weight_scale",
         reshape(f"{DOWN}.weight_scale", lambda value: value.float())),
    Case("transposed block scales", "mxfp4", "shapes", f"{DOWN}.weight_scale",
         reshape(f"{DOWN}.weight_scale", lambda value: value.T)),
    Case("a transposed weight", "fp8", "shapes", f"{DOWN}.weight has 128 outputs",
         reshape(f"{DOWN}.weight", lambda value: value.T)),
    Case("several input scales", "fp8", "shapes", f"{DOWN}.input_scale",
         reshape(f"{DOWN}.input_scale", lambda value: value.repeat(3))),
    Case("a cut smoothing scale", "svd", "shapes", f"{DOWN}.pre_quant_scale",
         reshape(f"{DOWN}.pre_quant_scale", lambda value: value[:64])),
    Case("a cut low-rank factor", "svd", "shapes", f"{LORA}_a",
         reshape(f"{LORA}_a", lambda value: value[:8])),
    Case("a lost low-rank factor", "svd", "shapes", "_svdquant_lora_a",
         drop(f"{LORA}_b")),
    Case("a tensor of another model", "nvfp4", "model", "model.stray.weight", add("model.stray.weight", 4)),
    Case("a lost final norm", "nvfp4", "model", "model.norm.weight is missing", drop("model.norm.weight")),
    Case("a lost bias", "fp8", "model", f"{ATTENTION}.k_proj.bias is missing", drop(f"{ATTENTION}.k_proj.bias")),
    Case("embeddings of another size", "fp8", "model", "model.embed_tokens.weight has shape",
         reshape("model.embed_tokens.weight", lambda value: value[:100])),
    Case("a configuration of another model", "moe", "model", "mlp", configure("config.json", moe_intermediate_size=32)),
    Case("a quantized router", "nvfp4", "kept", f"{MLP}.router", copy(f"{DOWN}.", f"{MLP}.router.")),
    Case("a quantized router of experts", "moe", "kept", ROUTER,
         both(drop(f"{ROUTER}.weight"), copy(f"{EXPERT}.0.up_proj.", f"{ROUTER}."))),
    Case("a quantized head", "moe", "kept", "lm_head",
         both(drop("lm_head.weight"), copy(f"{EXPERT}.0.up_proj.", "lm_head."))),
    Case("an excluded layer that is quantized", "nvfp4", "kept", f"{DOWN} is quantized and on the exclude list",
         exclude(lambda names: [*names, "*down_proj"])),
    Case("a linear that is neither", "nvfp4", "kept", f"{MLP}.extra_proj", add(f"{MLP}.extra_proj.weight", 4, 4)),
    Case("a router that is not listed", "moe", "kept", ROUTER,
         exclude(lambda names: [name for name in names if name != ROUTER])),
    Case("experts of multi-token prediction that are not listed", "moe", "kept", "mtp.experts.0.up_proj",
         add("mtp.experts.0.up_proj.weight", 4, 4)),
    Case("an exclude list of another model", "nvfp4", "exclude list", "'mtp*'",
         exclude(lambda names: [*names, "mtp*"])),
    Case("an exclude list with a misspelled module", "moe", "exclude list", "model.layers.9.mlp.gate",
         exclude(lambda names: [*names, "model.layers.9.mlp.gate"])),
    Case("one of q, k and v kept", "nvfp4", "one precision", f"{ATTENTION}.k_proj is not quantized",
         both(unquantize(f"{ATTENTION}.k_proj"), exclude(lambda names: [*names, f"{ATTENTION}.k_proj"]))),
    Case("a tied head stored as well", "nvfp4", "tied", "lm_head.weight", copy("model.embed_tokens.", "lm_head.")),
    Case("a lost head", "moe", "tied", "lm_head.weight", drop("lm_head.weight")),
]  # fmt: skip

SCALES = [
    Case("a NaN scale", "nvfp4", "finite", f"{DOWN}.weight_scale_2", put(f"{DOWN}.weight_scale_2", float("nan"))),
    Case("an infinite scale", "nvfp4", "finite", f"{DOWN}.input_scale", put(f"{DOWN}.input_scale", float("inf"))),
    Case("a zero scale", "nvfp4", "finite", f"{DOWN}.input_scale", put(f"{DOWN}.input_scale", 0.0)),
    Case("a negative scale", "fp8", "finite", f"{DOWN}.weight_scale", scale(f"{DOWN}.weight_scale", -1)),
    Case("zeroed block scales", "nvfp4", "finite", f"{DOWN}.weight_scale", scale(f"{DOWN}.weight_scale", 0)),
    Case("one block scale that underflowed", "nvfp4", "finite", f"{DOWN}.weight_scale has 1 of 512",
         set_byte(f"{DOWN}.weight_scale", 7, 0)),
    Case("one block scale that is NaN", "nvfp4", "finite", f"{DOWN}.weight_scale",
         set_byte(f"{DOWN}.weight_scale", 7, 0x7F)),
    Case("one E8M0 scale that is NaN", "mxfp4", "finite", f"{DOWN}.weight_scale",
         set_byte(f"{DOWN}.weight_scale", 7, 255)),
    Case("a NaN norm", "nvfp4", "finite", "model.norm.weight", put("model.norm.weight", [float("nan")] * 64)),
    Case("one infinite embedding", "nvfp4", "finite", "model.embed_tokens.weight",
         both(set_byte("model.embed_tokens.weight", 201, 0x7F), set_byte("model.embed_tokens.weight", 200, 0x80))),
    Case("one FP8 code that is NaN", "fp8", "finite", f"{DOWN}.weight has 1 codes",
         set_byte(f"{DOWN}.weight", 7, 0xFF)),
    Case("a flipped exponent bit of weight_scale_2", "nvfp4", "range", f"{DOWN}.weight_scale",
         flip(f"{DOWN}.weight_scale_2", 3, 6)),
    Case("a flipped exponent bit of input_scale", "fp8", "range", f"{DOWN}.input_scale",
         flip(f"{DOWN}.input_scale", 3, 6)),
    Case("block scales under weight_scale_2 of another", "nvfp4", "range", f"{DOWN}.weight_scale",
         scale(f"{DOWN}.weight_scale", 1 / 8)),
    Case("block scales made for FP8 inputs", "w4a8", "range", f"{DOWN}.weight_scale", scale(f"{DOWN}.weight_scale", 6)),
    Case("E8M0 scales with a flipped bit", "mxfp4", "range", f"{DOWN}.weight_scale",
         bits(f"{DOWN}.weight_scale", lambda value: value ^ 0x80)),
    Case("input scales that are all 1", "nvfp4", "calibrated", "input_scale", every(".input_scale", 1.0)),
    Case("FP8 scales that are all 1", "fp8", "calibrated", "weight_scale", every(".weight_scale", 1.0)),
    Case("block scales that are all 1", "nvfp4", "calibrated", f"{DOWN}.weight_scale",
         bits(f"{DOWN}.weight_scale", lambda value: torch.full_like(value, 0x38))),
    Case("gate and up apart", "nvfp4", "fused", f"{UP}.weight_scale_2", scale(f"{UP}.weight_scale_2", 2)),
    Case("inputs of gate and up apart", "nvfp4", "fused", f"{UP}.input_scale", scale(f"{UP}.input_scale", 2)),
    Case("inputs of q and v apart", "nvfp4", "fused", f"{ATTENTION}.v_proj.input_scale",
         scale(f"{ATTENTION}.v_proj.input_scale", 0.5)),
    Case("inputs of q and k apart in FP8", "fp8", "fused", f"{ATTENTION}.k_proj.input_scale",
         scale(f"{ATTENTION}.k_proj.input_scale", 2)),
    Case("smoothing of q and k apart", "svd", "fused", f"{ATTENTION}.k_proj.pre_quant_scale",
         reshape(f"{ATTENTION}.k_proj.pre_quant_scale", lambda value: value.flip(0))),
    Case("an expert's w1 and w3 apart", "mixtral", "fused", "experts.2.w3.weight_scale_2",
         scale("model.layers.0.block_sparse_moe.experts.2.w3.weight_scale_2", 2)),
    Case("a lost expert", "moe", "experts", f"{EXPERT}.3.down_proj is missing",
         drop(*(f"{EXPERT}.3.down_proj.{x}" for x in ("weight", "weight_scale", "weight_scale_2", "input_scale")))),
    Case("an expert without input_scale", "moe", "experts", f"{EXPERT}.2.up_proj has no input_scale",
         drop(f"{EXPERT}.2.up_proj.input_scale")),
    Case("an expert with an input_scale of zero", "moe", "finite", f"{EXPERT}.2.up_proj.input_scale",
         put(f"{EXPERT}.2.up_proj.input_scale", 0.0)),
    Case("an expert no token reached", "moe", "experts", f"{EXPERT}.1 has an input_scale", fallback(1, 6 * 448)),
    Case("an expert no token reached in FP8", "moe-fp8", "experts", f"{EXPERT}.1 has", fallback(1, 448)),
    Case("an expert with an absurd scale", "moe", "experts", f"{EXPERT}.1.down_proj.weight_scale_2",
         scale(f"{EXPERT}.1.down_proj.weight_scale_2", 64)),
    Case("an expert with a dwindling input", "moe", "experts", f"{EXPERT}.1.down_proj.input_scale",
         scale(f"{EXPERT}.1.down_proj.input_scale", 1e-4)),
    Case("a missing k_scale", "nvfp4", "kv cache", f"{ATTENTION}.k_proj.k_scale", drop(f"{ATTENTION}.k_proj.k_scale")),
    Case("a missing v_scale", "nvfp4", "kv cache", f"{ATTENTION}.v_proj.v_scale", drop(f"{ATTENTION}.v_proj.v_scale")),
    Case("no KV scales at all", "run", "kv cache", "has no scales",
         drop(*(f"model.layers.{i}.self_attn.{x}_proj.{x}_scale" for i in (0, 1) for x in "kv"))),
    Case("KV scales that are all 1", "nvfp4", "kv cache", "k_proj.k_scale",
         both(every(".k_scale", 1.0), every(".v_scale", 1.0))),
    Case("an absurd KV scale", "nvfp4", "kv cache", f"{ATTENTION}.k_proj.k_scale",
         put(f"{ATTENTION}.k_proj.k_scale", 1e9)),
    Case("KV scales without declaration", "nvfp4", "kv cache", f"{ATTENTION}.k_proj.k_scale",
         declare(kv_cache_quant_algo=None)),
]  # fmt: skip

CODES = [
    Case("codes at the maximum", "nvfp4", "saturation", f"{DOWN}.weight",
         bits(f"{DOWN}.weight", lambda value: torch.full_like(value, 0x77))),
    Case("FP8 codes at the maximum", "fp8", "saturation", f"{DOWN}.weight",
         bits(f"{DOWN}.weight", lambda value: torch.full_like(value, 0x7E))),
    Case("zeroed codes", "nvfp4", "dead blocks", f"{DOWN}.weight: 100%",
         bits(f"{DOWN}.weight", lambda value: value * 0)),
    Case("zeroed FP8 rows", "channel", "dead blocks", f"{DOWN}.weight",
         bits(f"{DOWN}.weight", lambda value: value * (torch.arange(len(value)) < 8).unsqueeze(1))),
    Case("two blocks never written", "nvfp4", "dead blocks", f"{DOWN}.weight: 2 blocks",
         bits(f"{DOWN}.weight", zero_blocks)),
    Case("zeroed embeddings", "nvfp4", "dead blocks", "model.embed_tokens", scale("model.embed_tokens.weight", 0)),
    Case("NVFP4 codes that use half the range", "nvfp4", "codes", f"{DOWN}.weight",
         bits(f"{DOWN}.weight", lambda value: value & 0xBB)),
    Case("MXFP4 codes that use half the range", "mxfp4", "codes", f"{DOWN}.weight",
         bits(f"{DOWN}.weight", lambda value: value & 0xBB)),
    Case("MXFP8 codes that use a fraction of the range", "mxfp8", "codes", f"{DOWN}.weight",
         scale(f"{DOWN}.weight", 0.25)),
    Case("FP8 codes that use a fraction of the range", "fp8", "codes", f"{DOWN}.weight", scale(f"{DOWN}.weight", 0.25)),
    Case("FP8 rows that use a fraction of the range", "channel", "codes", f"{DOWN}.weight",
         scale(f"{DOWN}.weight", 0.25)),
]  # fmt: skip

AGAINST_SOURCE = [
    Case("nibbles in the wrong order", "nvfp4", "weight error", f"{DOWN}.weight",
         bits(f"{DOWN}.weight", nibbles_swapped), True),
    Case("blocks in the wrong order", "nvfp4", "weight error", f"{DOWN}.weight",
         columns_reversed(f"{DOWN}.weight", 8), True),
    Case("block scales in the wrong order", "nvfp4", "weight error", f"{DOWN}.weight",
         bits(f"{DOWN}.weight_scale", lambda value: value.flip(1)), True),
    Case("E8M0 scales in the wrong order", "mxfp4", "weight error", f"{DOWN}.weight",
         bits(f"{DOWN}.weight_scale", lambda value: value.flip(1)), True),
    Case("MXFP8 blocks in the wrong order", "mxfp8", "weight error", f"{DOWN}.weight",
         columns_reversed(f"{DOWN}.weight", 32), True),
    Case("swapped layers", "nvfp4", "weight error", "model.layers.0.mlp.down_proj.weight",
         swap("model.layers.0.", "model.layers.1."), True),
    Case("swapped FP8 layers", "fp8", "weight error", "model.layers.0.mlp.down_proj.weight",
         swap("model.layers.0.mlp.", "model.layers.1.mlp."), True),
    Case("swapped experts", "moe", "weight error", f"{EXPERT}.0.up_proj.weight",
         swap(f"{EXPERT}.0.", f"{EXPERT}.1."), True),
    Case("swapped experts of Mixtral", "mixtral", "weight error", "experts.0.w1.weight",
         swap("model.layers.0.block_sparse_moe.experts.0.", "model.layers.0.block_sparse_moe.experts.1."), True),
    Case("swapped gate and up", "nvfp4", "weight error", f"{UP}.weight", swap(f"{MLP}.gate_proj.", f"{UP}."), True),
    Case("block scales of another layer", "nvfp4", "weight error", f"{DOWN}.weight",
         swap("model.layers.0.mlp.down_proj.weight_scale", f"{DOWN}.weight_scale"), True),
    Case("an FP8 scale of another layer", "fp8", "weight error", f"{DOWN}.weight",
         scale(f"{DOWN}.weight_scale", 1.5), True),
    Case("a square weight that was transposed", "fp8", "weight error", f"{OUT}.weight",
         reshape(f"{OUT}.weight", lambda v: v.T), True),
    Case("flipped signs", "nvfp4", "weight error", f"{DOWN}.weight",
         bits(f"{DOWN}.weight", lambda value: value ^ 0x88), True),
    Case("one block scale twice as large", "nvfp4", "weight error", f"{DOWN}.weight: 1 blocks",
         bits(f"{DOWN}.weight_scale", raise_one), True),
    Case("a lost low-rank branch", "svd", "weight error", f"{DOWN}.weight",
         scale(f"{LORA}_b", 0), True),
    Case("a smoothing scale of another layer", "svd", "weight error", f"{DOWN}.weight",
         scale(f"{DOWN}.pre_quant_scale", 1.5), True),
    Case("swapped norms", "nvfp4", "kept weights", "model.layers.0.input_layernorm.weight",
         put("model.layers.0.input_layernorm.weight", [2.0] * 64), True),
    Case("embeddings of another model", "nvfp4", "kept weights", "model.embed_tokens.weight",
         reshape("model.embed_tokens.weight", lambda value: value.flip(0)), True),
    Case("a lost norm", "moe", "kept weights", "model.norm.weight", drop("model.norm.weight"), True),
    Case("embeddings in another type", "nvfp4", "predicted size", "bytes",
         reshape("model.embed_tokens.weight", lambda value: value.float()), True),
]  # fmt: skip

CASES = [*FILES, *DECLARED, *SCALES, *CODES, *AGAINST_SOURCE]
