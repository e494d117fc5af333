"""Read-back: opens a model for evaluation, an original or an exported FP8 or FP4 checkpoint, from its files alone.

transformers' from_pretrained loads a ModelOpt export as garbage with only a log line. Here weights are dequantized by
what the checkpoint stores, once or while they run, and ModelOpt's quantizers are set to the stored input and KV-cache
scales, so that activations and cache are quantized by the same code as in the quantized model in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from halfbyte.quant import checkpoint as ck
from halfbyte.quant.attach import attach_kv_cache, prepare
from halfbyte.quant.build import Builder, Weights, checked, require_fitting, transposes
from halfbyte.quant.checkpoint import QuantFormat, Tensors
from halfbyte.quant.host_memory import given_back
from halfbyte.quant.load_transformer import load_transformer
from halfbyte.quant.models import (
    Source,
    compute_dtype,
    device_of,
    empty_model,
    locate,
    open_original,
    open_tokenizer,
    original_summary,
    require_same_vocabulary,
)
from halfbyte.quant.pipelines import locate_pipeline, summarize_pipeline
from halfbyte.quant.places import Places, find_places
from halfbyte.quant.shared import share_inputs
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.recipes.schema import ModelSpec
from halfbyte.records.errors import UserError
from halfbyte.records.record import ModelSummary

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "Described",
    "Loaded",
    "Weights",
    "describe",
    "describe_as_it_is",
    "load",
    "load_as_it_is",
    "load_transformer",
    "locate_pipeline",
    "open_exported",
    "summarize_pipeline",
]


@dataclass(frozen=True)
class Loaded:
    """A model ready to be evaluated."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    summary: ModelSummary
    dtype: str
    """What it computes in: bfloat16, float16 or float32."""


@dataclass(frozen=True)
class Described:
    """A model for an engine that loads its weights itself."""

    source: Source
    tokenizer: PreTrainedTokenizerBase
    summary: ModelSummary
    penalty: float | None
    """The repetition penalty of its generation_config, which transformers' generate applies too; None for none."""


def describe(spec: ModelSpec) -> Described:
    """What is known of a model from its files without loading it; see load."""
    source = locate(spec.id, revision=spec.revision, gguf_file=spec.gguf_file, dtype=spec.dtype)
    declared = None if source.gguf_file else ck.quant_format(source.folder)
    summary = original_summary(source, spec) if declared is None else ck.summarize(source.folder, source.name)
    return Described(source, open_tokenizer(source), summary, _penalty(source))


def describe_as_it_is(name: str) -> Described:
    """As `describe`, for a folder, GGUF file or hub id; see load_as_it_is."""
    return describe(_as_it_is(name))


def _penalty(source: Source) -> float | None:
    from transformers import GenerationConfig

    if source.gguf_file or not (source.folder / "generation_config.json").is_file():
        return None
    found = GenerationConfig.from_pretrained(source.folder).repetition_penalty
    return None if found in (None, 1.0) else float(found)


def load(spec: ModelSpec, *, dtype: str = "auto", device: str | None = None, weights: Weights = "folded") -> Loaded:
    """Opens an original model or an exported checkpoint.

    Args:
        spec: Where it is; a bare path or hub id goes in as ModelSpec(id=...).
        dtype: bfloat16, float16, float32, or auto: the model's own on CUDA and float32 on a CPU.
        device: cpu, cuda, cuda:1, ...; None takes the first CUDA device, else the CPU.
        weights: Whether a checkpoint's weights are dequantized once or stay in 4 or 8 bits; see open_exported.

    Raises:
        UserError: when the model cannot be found, is damaged, or is in a format that cannot be read back.
    """
    source = locate(spec.id, revision=spec.revision, gguf_file=spec.gguf_file, dtype=spec.dtype)
    where = device_of(device)
    declared = None if source.gguf_file else ck.quant_format(source.folder)
    if declared is None:
        own = ck.torch_dtype(spec.dtype)
        computed = compute_dtype(dtype, where, own)
        model = open_original(source, weights=own, compute=computed, device=where)
        summary = original_summary(source, spec)
    else:
        computed = compute_dtype(dtype, where, ck.torch_dtype(ck.plain_dtype(source.folder)))
        model = open_exported(source, declared, dtype=computed, device=where, weights=weights)
        summary = ck.summarize(source.folder, source.name)
    tokenizer = open_tokenizer(source)
    require_same_vocabulary(model, tokenizer)
    return Loaded(model, tokenizer, summary, str(computed).removeprefix("torch."))


def load_as_it_is(name: str, *, dtype: str = "auto", device: str | None = None, weights: Weights = "folded") -> Loaded:
    """Opens a model with its weights in the type its configuration names; a GGUF file in bfloat16. See load."""
    return load(_as_it_is(name), dtype=dtype, device=device, weights=weights)


def _as_it_is(name: str) -> ModelSpec:
    source = locate(name)
    own: Any = "bfloat16" if source.gguf_file else ck.plain_dtype(source.folder)
    ck.torch_dtype(own)  # refuses other types
    return ModelSpec(id=name, dtype=own)


@given_back()
def open_exported(
    source: Source,
    declared: QuantFormat,
    *,
    dtype: torch.dtype,
    device: torch.device,
    weights: Weights = "folded",
) -> PreTrainedModel:
    """The exported checkpoint as a transformers model in evaluation mode.

    Tensors are views of the mapped files: on a CPU, packed weights take no memory of their own, and neither does what
    is stored in `dtype`.

    Args:
        source: Its files.
        declared: What it declares.
        dtype: To compute in.
        device: Where it is put.
        weights: "packed" keeps quantized weights as they are stored and dequantizes each layer while it runs; "folded"
            dequantizes them once. The answers are equal bit for bit.

    Raises:
        UserError: when tensors are missing, damaged or do not fit what the checkpoint declares.
    """
    config, empty = empty_model(source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # or transformers looks for a quantizer of its own
    prepare(device)
    with Tensors(source.folder) as tensors:
        places = find_places(tensors, declared, empty)
        require_fitting(tensors, places, empty)
        build = Builder(tensors, declared, dtype, device)
        model: Any = _without_quantized(source, config, type(empty), tensors, places, build)
        model.to(device).eval()
        for name, layer in places.linears.items():
            linear = build.linear(layer, getattr(model.get_submodule(name), "bias", None))
            if weights == "folded":
                linear.fold()
            model.set_submodule(name, linear)
        for stack in [*places.stacks, *places.whole]:
            experts: Any = model.get_submodule(stack.module)
            transposed = transposes(experts)
            if stack in places.whole:
                built = build.whole(places.whole[stack], transposed=transposed)
            else:
                built = build.stack(places.stacks[stack], transposed=transposed)
            if weights == "folded":
                built.fold()
            delattr(experts, stack.parameter)
            setattr(experts, stack.parameter, built)
        # One view of a scale would keep the whole file mapped.
        stored = {name: checked(tensors, at).clone() for name, at in places.kv_cache.items()}
    _use_eager_experts(model.config)
    share_inputs(model)
    if declared.kv_cache is not None:
        attach_kv_cache(model, stored, declared.kv_cache, device)
    return model  # type: ignore[no-any-return]


def _without_quantized(
    source: Source,
    config: PretrainedConfig,
    architecture: type[PreTrainedModel],
    tensors: Tensors,
    places: Places,
    builder: Builder,
) -> Any:
    """The model with everything loaded that is not quantized, and gaps in the place of what is.

    transformers builds the model and loads the rest, with all its renaming and tying; a subclass makes the gaps between
    the two, so that no memory is ever taken for weights that the checkpoint does not hold.
    """

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        architecture.__init__(self, *arguments, **options)
        for name in places.linears:
            gap = nn.Module()
            gap.register_parameter("bias", self.get_submodule(name).bias)
            gap.weight = torch.empty(0, 0)  # no parameter: for what initializes the weights of a module's children
            self.set_submodule(name, gap)
        for stack in [*places.stacks, *places.whole]:
            experts = self.get_submodule(stack.module)
            setattr(experts, stack.parameter, None)
            experts._is_hf_initialized = True  # or transformers initializes the gap

    gapped: Any = type(
        architecture.__name__, (architecture,), {"__init__": __init__, "__module__": architecture.__module__}
    )
    state = {name: tensors[name] for name in places.plain}
    state |= {name: builder.values(layer) for name, layer in places.others.items()}
    with quiet_upstream():
        model, info = gapped.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=builder.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by name
        )
    model.__class__ = architecture
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if info[kind]:
            first = sorted(map(str, info[kind]))[0]
            raise UserError(
                f"{source.folder} does not fit its configuration: {len(info[kind])} {kind}, first {first}",
                "copy the checkpoint again, whole, or export it again",
            )
    return model


def _use_eager_experts(config: Any) -> None:
    """Chooses transformers' loop over experts, in which each expert's input can be rounded; ModelOpt does the same."""
    parts: list[Any] = [config, getattr(config, "text_config", None)]
    for part in parts:
        if hasattr(part, "_experts_implementation"):
            part._experts_implementation = "eager"
