"""Checks of an exported pipeline: does the transformer fit its class, are scales of attention and all parts there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from halfbyte.quant.attention import OPERANDS, RESULT, amax_names
from halfbyte.quant.build import require_fitting
from halfbyte.quant.checkpoint import Tensors
from halfbyte.quant.checks import Checkpoint, Rule
from halfbyte.quant.pipelines import copied_files, empty_transformer, is_pipeline, parts
from halfbyte.quant.places import find_places
from halfbyte.quant.shards import open_shards
from halfbyte.records.digests import file_digests
from halfbyte.records.errors import UserError

_AMAXES = (1e-6, 1e7)
"""Largest magnitudes that queries, keys, values and results of attention can have; far beyond any seen."""


def _transformer(at: Checkpoint) -> Iterator[str]:
    try:
        model: Any = empty_transformer(at.folder)
        places = find_places(cast(Tensors, at.shards), at.declared, model)
        require_fitting(cast(Tensors, at.shards), places, model)
    except UserError as error:
        yield error.message
        return
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    scales = {tensor for found in amax_names(at.shards).values() for tensor in found.values()}
    stored = [name for name in places.plain if name not in scales]
    for name in stored:
        shape = at.shards.shape(name)
        if name not in expected:
            yield f"{name} belongs to no part of a {type(model).__name__}"
        elif shape != expected[name]:
            kind = type(model).__name__
            yield f"{name} has shape {list(shape)}, a {kind} of this configuration {list(expected[name])}"
    quantized = {f"{name}.weight" for name in places.linears}
    yield from (f"{name} is missing" for name in sorted(expected.keys() - quantized - set(stored)))


def _attention(at: Checkpoint) -> Iterator[str]:
    found = amax_names(at.shards)
    if at.declared.kv_cache is None:
        yield from (f"{name} has scales of FP8 attention, and none is declared" for name in sorted(found))
        return
    queries = {name.removesuffix(".to_q.weight") for name in at.shards if name.endswith(".to_q.weight")}
    for name in sorted(queries | found.keys()):
        wanted = {*OPERANDS, *(quantizer for one in found.values() for quantizer in one if quantizer == RESULT)}
        yield from (f"{name}.{each}._amax is missing" for each in sorted(wanted - found.get(name, {}).keys()))
    for amaxes in found.values():
        for tensor in amaxes.values():
            value = at.shards[tensor].float()
            if value.numel() != 1 or not _AMAXES[0] < float(value) < _AMAXES[1]:
                yield f"{tensor} is {value.flatten()[:3].tolist()}, which no attention's values can have"


def _parts(at: Checkpoint) -> Iterator[str]:
    if not is_pipeline(at.root):
        return  # a transformer by itself
    for name in parts(at.root):
        folder = at.root / name
        if not folder.is_dir():
            yield f"{name} is missing, and model_index.json names it"
        elif any(folder.glob("*.safetensors*")):
            faults = open_shards(folder)
            yield from (f"{name}: {fault}" for fault in [*faults.faults, *faults.index_faults])
    source = None if at.source is None else at.source.folder.parent
    if source is None or not is_pipeline(source):
        return
    theirs = [path.relative_to(source) for path in copied_files(source)]
    there = [name for name in theirs if (at.root / name).is_file()]
    yield from (f"{name} is missing, and the source has it" for name in theirs if name not in there)
    before, after = (file_digests([folder / name for name in there]) for folder in (source, at.root))
    yield from (f"{name} is not the source's" for name, a, b in zip(there, before, after, strict=True) if a != b)


RULES = (
    Rule("transformer", "the tensors are those of a transformer of this configuration", _transformer),
    Rule("attention", "attention that is computed in FP8 has its scales, and no other has", _attention),
    Rule("parts", "all parts of the pipeline are there, and are the source's", _parts),
)
