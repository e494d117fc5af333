"""What a check is, and what all of them look at: an open checkpoint, its declaration, and one pass over its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from halfbyte.quant.checkpoint import QuantFormat, quant_format, read_config
from halfbyte.quant.layouts import StoredLayer, is_scale
from halfbyte.quant.models import Source, empty_model
from halfbyte.quant.shards import Shards, open_shards
from halfbyte.quant.survey import Survey, survey
from halfbyte.records.digests import PIPELINE_FILE
from halfbyte.records.errors import UserError
from halfbyte.records.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN = 5

# Linears that loaders fuse into one, whose scales must therefore agree: the last parts of their names. Sources:
# packed_modules_mapping of vLLM's models, WeightMode of TensorRT-LLM's Linear, stacked_params_mapping of SGLang's, and
# fuse_qkv_projections of diffusers for Flux.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
)


@dataclass
class Check:
    """One row of verification.json."""

    name: str
    asks: str
    """What holds in a sound checkpoint."""
    faults: list[str] = field(default_factory=list)
    """The tensors or modules at fault, each with what is wrong; empty when the check passed."""

    @property
    def passed(self) -> bool:
        """Whether nothing is at fault."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"check": self.name, "passed": self.passed, "asks": self.asks, "faults": self.faults}

    def __str__(self) -> str:
        if self.passed:
            return f"ok    {self.name}"
        more = f" and {len(self.faults) - _SHOWN} more" if len(self.faults) > _SHOWN else ""
        return f"FAIL  {self.name}: {'; '.join(self.faults[:_SHOWN])}{more}"


@dataclass
class Checkpoint:
    """An open checkpoint and what is known of it."""

    folder: Path
    config: dict[str, Any]
    declared: QuantFormat
    declaration: dict[str, Any]
    """The block that names the algorithm, as it is on disk."""
    shards: Shards
    layers: list[StoredLayer]
    """The quantized weights, as stored."""
    incomplete: list[str]
    """Weights without the scales that belong to them."""
    misfits: list[str]
    """Weights with scales of a type or shape that no format has."""
    seen: Survey
    source: Shards | None = None
    """The original model, where it was given."""

    def __post_init__(self) -> None:
        self.by_module: dict[str, StoredLayer] = {layer.module: layer for layer in self.layers}
        self.modules = {name.rpartition(".")[0] for name in self.shards}
        self._scalars: dict[str, float] = {}

    @property
    def is_part(self) -> bool:
        """Whether it is the transformer of a diffusers pipeline."""
        return "_class_name" in self.config

    @property
    def root(self) -> Path:
        """The exported folder: of a pipeline's transformer the folder that holds all parts."""
        whole = self.folder.resolve().parent
        return whole if self.is_part and (whole / PIPELINE_FILE).is_file() else self.folder

    @property
    def text_config(self) -> dict[str, Any]:
        """The configuration of the language model: nested in that of a model that also sees or hears."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def tied(self) -> bool:
        """Whether the configuration ties the head to the embeddings."""
        outer = self.config.get("tie_word_embeddings")
        return bool(self.text_config.get("tie_word_embeddings") if outer is None else outer)

    @cached_property
    def model(self) -> PreTrainedModel | UserError | None:
        """The model on the meta device, or why transformers refuses it; None where it does not know such a model."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        kind = self.config.get("model_type")
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return None
        try:
            return empty_model(Source(str(self.folder), self.folder))[1]
        except UserError as error:
            return None if isinstance(error.__cause__, ImportError) else error

    @cached_property
    def source_prefix(self) -> str:
        """What stands before a language model's names in a source that also sees, of which it was taken: or nothing."""
        prefix = f"{getattr(self.model, 'base_model_prefix', '')}."
        inside = self.source is not None and any(name.startswith(prefix) for name in self.source)
        return prefix if inside and not any(name.startswith(prefix) for name in self.shards) else ""

    def format_of(self, layer: StoredLayer) -> str | None:
        """The format declared for a quantized weight."""
        return self.declared.format_of(layer.module)

    def scalar(self, name: str | None) -> float | None:
        """The largest value of a scale; None where there is no such tensor."""
        found = self.seen.scales.get(name or "")
        return None if found is None else found.largest

    def groups(self) -> Iterator[list[StoredLayer]]:
        """The quantized weights that loaders fuse, group by group; groups of which one member is there are left out."""
        for first, *rest in FUSED:
            for module, layer in self.by_module.items():
                parent, _, last = module.rpartition(".")
                if last == first:
                    others = [
                        self.by_module[f"{parent}.{name}"] for name in rest if f"{parent}.{name}" in self.by_module
                    ]
                    if others:
                        yield [layer, *others]


Finder = Callable[[Checkpoint], Iterator[str]]


class Rule(NamedTuple):
    """A check before it has run."""

    name: str
    asks: str
    find: Finder


def open_checkpoint(folder: Path, source: Path | None = None) -> Checkpoint:
    """Reads the declaration and, once, every byte of the tensors.

    Raises:
        UserError: when it is no exported checkpoint, or its declaration cannot be understood.
    """
    config = read_config(folder)
    declared = quant_format(folder)
    if declared is None:
        raise UserError(f"{folder} is no exported checkpoint: it declares no quantization", "give the exported folder")
    shards = open_shards(folder)
    layers, incomplete, misfits = [], [], []
    for name in shards:
        try:
            layer = shards.layer(name)
        except UserError as error:
            scale = f"{name}_scale"
            if scale in shards and (shards.dtype(name) != "U8" or f"{name}_scale_2" in shards):
                kind, shape = shards.dtype(scale), list(shards.shape(scale))
                misfits.append(f"{scale} is {kind} {shape}, which no format has beside {shards.dtype(name)} weights")
            else:
                incomplete.append(error.message)
            continue
        if layer is not None:
            layers.append(layer)
    own = folder / "hf_quant_config.json"
    block = read_json(own)["quantization"] if own.is_file() else config["quantization_config"]
    seen = survey(shards, layers, {name for name in shards if is_scale(name)})
    original = None if source is None else open_shards(source)
    return Checkpoint(folder, config, declared, block, shards, layers, incomplete, misfits, seen, original)
