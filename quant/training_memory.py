"""The memory that a training step takes, counted on tensors without values: nothing is allocated, no weight is read."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from halfbyte.quant.learned_scales import learn_scales
from halfbyte.quant.lora import add_lora
from halfbyte.quant.rounding import fused_experts, quantized_weights, stacked_experts
from halfbyte.quant.shared import share_inputs
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.recipes.training import TrainSpec

Kind = Literal["weights", "gradients", "optimizer", "teacher", "quantized", "logits", "activations", "gathered"]
KINDS: tuple[Kind, ...] = (
    "weights", "gradients", "optimizer", "teacher", "quantized", "logits", "activations", "gathered",
)  # fmt: skip
_SHARDED: tuple[Kind, ...] = ("weights", "gradients", "optimizer")

_OF_WEIGHTS = (torch.ops.aten._to_copy.default, torch.ops.aten.empty_like.default)
"""What makes a tensor of a weight's shape: a cast, and fake quantization with static block scales."""


class Unpredictable(Exception):
    """A model whose step depends on values, such as a mixture of experts that routes tokens one expert at a time."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the moment of the highest total."""

    weights: int
    """Of the model that is trained, and its quantizers' ranges."""
    gradients: int
    optimizer: int
    """AdamW's two moments."""
    teacher: int
    """The teacher's weights."""
    quantized: int
    """Outputs of fake quantization and weights cast to the type that is computed in."""
    logits: int
    """All that is as wide as the vocabulary: logits of model and teacher, in both types, and their probabilities."""
    activations: int
    """What is kept for the backward pass, and what an operation needs for a moment."""
    gathered: int = 0
    """Under FSDP: the layers that are whole at one time, the next one and the outer ones among them."""

    @property
    def total(self) -> int:
        """Bytes altogether."""
        return sum(getattr(self, kind) for kind in KINDS)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are alive, by kind, and keeps the highest total.

    Args:
        vocabulary: Width of logits.
        shapes: Of the weights: a tensor of such a shape made from another type is a weight cast.
        shares: Among how many devices FSDP divides a kind; kinds that are not named are whole.
    """

    def __init__(self, vocabulary: int, shapes: Iterable[torch.Size], shares: Mapping[Kind, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocabulary, self.shapes, self.shares = vocabulary, set(shapes), shares
        self.now: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.peak: dict[Kind, int] = dict(self.now)
        self.optimizing = False
        self.inside: tuple[float, int] = 0.0, 0
        """What a quantizer takes inside, beside its result: bytes a value, for so many values at most."""
        self._known: Any = WeakIdKeyDictionary()

    def hold(self, tensor: Tensor, kind: Kind) -> None:
        """Counts a tensor's storage under a kind; one that is counted already changes its kind."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage)
        if known is None:
            entry: list[Any] = [storage.nbytes(), kind]
            self._known[storage] = entry
            weakref.finalize(storage, self._free, entry)
            self.now[kind] += entry[0]
        elif known[1] != kind:
            self.now[known[1]] -= known[0]
            self.now[kind] += known[0]
            known[1] = kind
        if self._total(self.now) > self._total(self.peak):
            self.peak = dict(self.now)

    def _pass_by(self, size: int) -> None:
        """Looks at a moment in which there was so much more."""
        if self._total(self.now) + size > self._total(self.peak):
            self.peak = {**self.now, "quantized": self.now["quantized"] + size}

    def _total(self, sizes: dict[Kind, int]) -> int:
        return sum(size // self.shares.get(kind, 1) for kind, size in sizes.items())

    def _free(self, entry: list[Any]) -> None:
        self.now[entry[1]] -= entry[0]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation and counts what it returns."""
        found = func(*args, **(kwargs or {}))
        if func.namespace == "tensorrt":
            self._pass_by(int(self.inside[0] * min(self.inside[1], args[0].numel())))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._known:
                self.hold(tensor, self._kind(func, tensor))
        return found

    def _kind(self, func: Any, tensor: Tensor) -> Kind:
        if self.optimizing:
            return "optimizer"
        if func.namespace == "tensorrt" or (func in _OF_WEIGHTS and tensor.shape in self.shapes):
            return "quantized"
        return "logits" if tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary else "activations"


@dataclass(frozen=True)
class Step:
    """A model and its teacher, with values or without, and what one optimizer step is."""

    spec: TrainSpec
    model: Any
    teacher: Any
    device: torch.device
    compute: torch.dtype
    vocabulary: int

    def loss(self) -> Tensor:
        """A forward pass on random tokens, as QuantizedTrainer and DistilledTrainer make it."""
        spec = self.spec
        ids = torch.randint(0, self.vocabulary, (spec.batch_size, spec.length), device=self.device)
        inputs = {"input_ids": ids, "use_cache": False}
        if spec.packing:
            shape = (spec.batch_size, 1, spec.length, spec.length)
            inputs["attention_mask"] = torch.ones(shape, dtype=torch.bool, device=self.device).tril()
        mixed = self.compute == torch.bfloat16
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            found = self.model(**inputs, **({} if spec.method == "qad" else {"labels": ids}))
            if mixed:
                found.logits = found.logits.float()  # accelerate widens what a model returns
        return self._distillation(found.logits, inputs) if spec.method == "qad" else cast(Tensor, found.loss)

    def _distillation(self, logits: Tensor, inputs: dict[str, Any]) -> Tensor:
        from modelopt.torch.distill.losses import LogitsDistillationLoss

        counted = logits[:, :-1].flatten(0, 1).clone()  # QuantizedTrainer picks the labels' rows
        if self.teacher is None:
            k = int(self.spec.teacher.offline_top_k or 1) if self.spec.teacher else 1
            places = torch.randint(0, self.vocabulary, (len(counted), k), device=self.device)
            return -counted.float().log_softmax(-1).gather(-1, places).mean()
        with torch.no_grad():
            theirs = self.teacher(**inputs).logits[:, :-1].flatten(0, 1).clone()
        criterion: Any = LogitsDistillationLoss(reduction="none")
        return cast(Tensor, criterion(counted.float(), theirs.float()).mean())

    def trained(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def make_optimizer(self) -> torch.optim.Optimizer:
        """transformers' own choice."""
        return torch.optim.AdamW(self.trained(), lr=1e-6, fused=True)

    def run(self, optimizer: torch.optim.Optimizer, counter: Counter | None = None) -> None:
        """One optimizer step."""
        for _ in range(self.spec.gradient_accumulation):
            self.loss().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.trained(), self.spec.max_grad_norm)
        with _optimizing(counter):
            optimizer.step()
        optimizer.zero_grad()


@contextmanager
def _optimizing(counter: Counter | None) -> Iterator[None]:
    if counter is not None:
        counter.optimizing = True
    yield
    if counter is not None:
        counter.optimizing = False


def compute_type(spec: TrainSpec, device: torch.device) -> torch.dtype:
    """The type that matrices are multiplied in."""
    if spec.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32


def build(
    make_model: Callable[[torch.dtype], Any],
    config: dict[str, Any],
    spec: TrainSpec,
    device: torch.device,
    *,
    compute: torch.dtype,
    teacher_here: bool,
) -> Step:
    """What is needed for a step: models with random weights and quantizers with ranges of 1.

    Args:
        make_model: Makes the model from its configuration in a type, on the device that is torch's default.
        config: What configs.quant_config made.
        spec: The train block.
        device: Where all of it is.
        compute: The type that matrices are multiplied in.
        teacher_here: Whether the teacher is on this device.

    Raises:
        UserError: when the quantizers are not what the train block asks for.
    """
    with torch.device(device), quiet_upstream():
        model = make_model(kept_type(spec))
        put_quantizers(model, config, spec, device)
        if spec.lora is not None:
            add_lora(model, spec.lora)
        share_inputs(model)
        if spec.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        teacher = make_model(compute).eval().requires_grad_(False) if teacher_here else None
    return Step(spec, model.train(), teacher, device, compute, int(model.config.vocab_size))


def kept_type(spec: TrainSpec) -> torch.dtype:
    """The type that weights are kept in while they are trained."""
    return torch.float32 if spec.weights_dtype == "float32" else torch.bfloat16


def put_quantizers(model: Any, config: dict[str, Any], spec: TrainSpec, device: torch.device) -> None:
    """Gives a model its quantizers, with ranges of 1, and scales that are learned where the train block says so.

    Args:
        model: With random weights or none.
        config: What configs.quant_config made.
        spec: The train block.
        device: Where the model is.
    """
    from modelopt.torch.quantization.conversion import replace_quant_module, set_quantizer_by_cfg
    from modelopt.torch.quantization.nn import TensorQuantizer

    replace_quant_module(model)
    set_quantizer_by_cfg(model, config["quant_cfg"])
    for module in model.modules():
        if isinstance(module, TensorQuantizer) and module.is_enabled and not module.is_mx_format:
            module.amax = torch.ones((), device=device)
    _promote(model)
    if spec.learned_scales:
        learn_scales(model)


def _promote(model: nn.Module) -> None:
    """Gives static NVFP4 weights a range for each block, and the class of quantizer that calibration gives them."""
    from modelopt.torch.quantization.utils import promote_nvfp4_static_quantizers

    for weight in quantized_weights(model):
        if getattr(weight.quantizer, "is_nvfp4_static", False):
            width = int(weight.quantizer.block_sizes[-1])
            blocks = weight.measured[..., 0].numel() * math.ceil(weight.values.shape[-1] / width)
            weight.quantizer.reset_amax()  # its shape is fixed once it is there
            weight.quantizer.amax = torch.ones((blocks, 1), device=weight.values.device)
    promote_nvfp4_static_quantizers(model)


def without_values(*models: nn.Module | None) -> None:
    """Models on the meta device become ones on a CPU whose tensors have no values; within a FakeTensorMode."""
    device = torch.device("cpu")
    made: dict[int, Any] = {}
    for module in (one for model in models if model is not None for one in model.modules()):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in made:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    known = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if known else empty
                if tensor is not None:
                    table[name] = made[id(tensor)]


def teacher_is_here(spec: TrainSpec) -> bool:
    """Whether a teacher takes memory on the device that trains."""
    return spec.teacher is not None and spec.teacher.device is None and spec.teacher.offline_top_k is None


def count_step(
    make_model: Callable[[torch.dtype], Any],
    config: dict[str, Any],
    spec: TrainSpec,
    *,
    compute: torch.dtype,
    devices: int = 1,
) -> Memory:
    """The memory of an optimizer step on each device, on tensors without values.

    Attention is counted as torch's fused kernels do it: nothing that is as large as the text's length squared is kept,
    but for the mask of packed texts.

    Args:
        make_model: As for build().
        config: What configs.quant_config made.
        spec: The train block.
        compute: The type that matrices are multiplied in.
        devices: Among which FSDP divides the model.

    Raises:
        Unpredictable: for a model whose operations depend on values.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    step = build(make_model, config, spec, torch.device("meta"), compute=compute, teacher_here=teacher_is_here(spec))
    if any(fused_experts(module) or stacked_experts(module) for module in step.model.modules()):
        raise Unpredictable("which expert sees which token depends on values")  # ModelOpt is left patched by an error
    try:
        with FakeTensorMode():
            without_values(step.model, step.teacher)
            return count(replace(step, device=torch.device("cpu")), devices)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise Unpredictable(f"the step depends on values ({error.func})") from error


def _gathered(step: Step) -> int:
    """Bytes that FSDP has whole at one time beside its shards: two layers and what is outside, with gradients."""
    lists = [one for one in step.model.modules() if isinstance(one, nn.ModuleList)]
    size: dict[int, int] = {
        id(one): sum(parameter.numel() for parameter in one.parameters()) for one in step.model.modules()
    }
    layers = max(lists, key=lambda one: size[id(one)], default=nn.ModuleList())
    layer = max((size[id(one)] for one in layers), default=0)
    outer = size[id(step.model)] - size.get(id(layers), 0)
    return int(step.compute.itemsize) * (3 * layer + 2 * outer)


def count(step: Step, devices: int = 1) -> Memory:
    """The memory of an optimizer step after the first, which makes the optimizer's states.

    Tensors with values are counted as well, but for what an operation allocates and frees inside of it.

    Args:
        step: What build() made.
        devices: Among which FSDP divides the model; what it gathers is reckoned and not counted.
    """
    shares: dict[Kind, int] = dict.fromkeys(_SHARDED, devices)
    if step.spec.method == "qad":
        shares["teacher"] = devices  # in qat it is for the validation alone, and whole
    counter = Counter(step.vocabulary, (parameter.shape for parameter in step.model.parameters()), shares)
    for kind, module in (("weights", step.model), ("teacher", step.teacher)):
        for tensor in (*module.parameters(), *module.buffers()) if module is not None else ():
            counter.hold(tensor, cast(Kind, kind))
    optimizer = step.make_optimizer()
    trained: list[Any] = list(step.trained())  # its hooks are untyped
    hooks = [one.register_post_accumulate_grad_hook(lambda p: counter.hold(p.grad, "gradients")) for one in trained]
    with counter:
        step.run(optimizer, counter)
        step.run(optimizer, counter)
    for hook in hooks:
        hook.remove()
    sizes: dict[str, int] = {kind: size // shares.get(kind, 1) for kind, size in counter.peak.items()}
    return Memory(**{**sizes, "gathered": _gathered(step) if devices > 1 else 0})
