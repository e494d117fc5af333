"""What can be changed in ModelOpt only by replacing a part of it, each with the version it was written for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfbyte.quant.elements import E4M3_MAX, e2m1_round
from halfbyte.quant.fake_quantize import nvfp4_static_fake_quantize
from halfbyte.quant.staging import Staging
from halfbyte.quant.writing import side_by_side
from halfbyte.records.errors import UserError

MODELOPT = "0.47"


def require_known_modelopt() -> None:
    """Refuses a ModelOpt whose inner parts may be others than those replaced here.

    Raises:
        UserError: with both versions.
    """
    found = version("nvidia-modelopt")
    if not found.startswith(f"{MODELOPT}."):
        raise UserError(f"nvidia-modelopt {found} is not supported", f"install 'nvidia-modelopt=={MODELOPT}.*'")


def patch_static_nvfp4() -> None:
    """Lets NVFP4 quantizers with static block scales run on a CPU; on CUDA they keep ModelOpt's kernel.

    ModelOpt calls its Triton kernel there directly: no operator and no backend that another implementation could be
    registered for.
    """
    require_known_modelopt()
    from modelopt.torch.quantization import tensor_quant
    from torch._subclasses.fake_tensor import is_fake

    function = tensor_quant.StaticBlockwiseFP4FakeQuantFunction
    kernel = function.forward

    def forward(
        ctx: Any,
        x: Tensor,
        amax: Tensor,
        global_amax: Tensor | None = None,
        quantize_block_scales: bool = True,
        fp8_max_for_normalization: float = E4M3_MAX,
        out_dtype: torch.dtype | None = None,
        pass_through_bwd: bool = False,
    ) -> Tensor:
        if x.is_cuda or not quantize_block_scales:
            options = (quantize_block_scales, fp8_max_for_normalization, out_dtype, pass_through_bwd)
            return kernel(ctx, x, amax, global_amax, *options)  # type: ignore[no-any-return]
        tensor_quant._save_for_backward_if_needed(ctx, pass_through_bwd, x, amax)
        if is_fake(x):  # training_memory counts it; there are no values to look at
            return torch.empty_like(x, dtype=out_dtype or x.dtype)
        values = nvfp4_static_fake_quantize(x, amax, global_amax, fp8_max_for_normalization)
        return values.to(out_dtype or x.dtype)

    function.forward = staticmethod(forward)
    cast_function = tensor_quant.FP4CastSTEFunction
    cast_kernel = cast_function.forward

    def cast_forward(ctx: Any, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        if x.is_cuda:
            return cast_kernel(ctx, x, out_dtype)  # type: ignore[no-any-return]
        ctx.save_for_backward(x)
        if is_fake(x):
            return torch.empty_like(x, dtype=out_dtype or x.dtype)
        return e2m1_round(x).to(out_dtype or x.dtype)

    cast_function.forward = staticmethod(cast_forward)


@contextmanager
def fused_once() -> Iterator[None]:
    """Within the block, an export leaves scales shared and smoothing folded as they are, instead of doing both again.

    A second time is not the same as none: the mean of three equal smoothing scales need not be that scale, and a second
    decomposition of an SVDQuant layer gives other low-rank factors, so that settled weights would be moved.
    """
    require_known_modelopt()
    from modelopt.torch.export import unified_export_hf

    real = unified_export_hf.requantize_resmooth_fused_llm_layers
    of_pipelines = unified_export_hf._fuse_qkv_linears_diffusion
    unified_export_hf.requantize_resmooth_fused_llm_layers = lambda model: None  # noqa: ARG005
    unified_export_hf._fuse_qkv_linears_diffusion = lambda *_, **__: None
    try:
        yield
    finally:
        unified_export_hf.requantize_resmooth_fused_llm_layers = real
        unified_export_hf._fuse_qkv_linears_diffusion = of_pipelines


@contextmanager
def memory_kept() -> Iterator[None]:
    """Within the block, an export does not give back the GPU's free memory after each weight that it packs.

    It would wait for the device and ask for the same memory again, hundreds of times. torch gives it back by itself
    where it runs short.
    """
    real = torch.cuda.empty_cache
    torch.cuda.empty_cache = lambda: None
    try:
        yield
    finally:
        torch.cuda.empty_cache = real


@contextmanager
def shards_side_by_side() -> Iterator[None]:
    """Within the block, transformers' save_pretrained has its files of weights written by several threads.

    It writes one after the other by itself, because safetensors once kept Python's lock while it wrote.
    """
    from transformers import modeling_utils

    upstream = cast("Any", modeling_utils)
    real = upstream.safe_save_file
    with side_by_side(real) as save:
        upstream.safe_save_file = save
        try:
            yield
        finally:
            upstream.safe_save_file = real


@contextmanager
def staged_loading(device: torch.device) -> Iterator[None]:
    """Within the block, transformers' from_pretrained brings weights to a GPU through pinned memory; see staging."""
    if device.type != "cuda" or find_spec("transformers.core_model_loading") is None:  # which transformers 4 lacks
        yield
        return
    from transformers import core_model_loading

    upstream = cast("Any", core_model_loading)
    real, stage = upstream._materialize_copy, Staging()

    def staged(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return real(tensor, device, dtype)
        return stage(tensor[...], torch.device(device)).to(dtype)

    upstream._materialize_copy = staged
    try:
        yield
    finally:
        upstream._materialize_copy = real


@contextmanager
def unhurried_max() -> Iterator[None]:
    """Within the block, ModelOpt's max calibrator looks at no tensor twice and does not wait for the device.

    - Its three assertions cost a round trip to the GPU for each quantizer and pass. NaN and infinities stay in the
      running maximum, where ptq.calibrate finds them at the end and names the quantizer.
    - It reads each weight anew in every forward pass, and what q, k and v or gate and up read, once for each of them.
    - It reads a tensor once for its maximum and once for its minimum.
    """
    require_known_modelopt()
    from modelopt.torch.quantization.calib.max import MaxCalibrator

    real = MaxCalibrator.collect
    amax_of = _Amax()

    @torch.no_grad()
    def collect(self: Any, x: Tensor) -> None:
        known = self._calib_amax
        if isinstance(x, nn.Parameter):
            state = (x.data_ptr(), x._version)
            if known is not None and getattr(self, "_collected", None) == state:
                return
            self._collected = state
        amax = amax_of(x, self._axis)
        if known is not None and known.shape != amax.shape:
            raise RuntimeError(f"amax of shape {tuple(amax.shape)} after {tuple(known.shape)}")
        self._calib_amax = amax if known is None or x.is_meta else torch.max(known, amax)

    MaxCalibrator.collect = collect
    try:
        yield
    finally:
        MaxCalibrator.collect = real


class _Amax:
    """The largest magnitude in a tensor, as ModelOpt's reduce_amax; that of the last tensor is still known."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, Any, Tensor] | None = None

    def __call__(self, x: Tensor, axis: Any) -> Tensor:
        from modelopt.torch.quantization import utils

        if self._last is not None:
            of, state, along, known = self._last
            if of() is x and (state, along) == (x._version, axis):
                return known.clone()
        if axis is None and x.dtype in (torch.float32, torch.bfloat16, torch.float16):
            least, most = torch.aminmax(x)
            found = torch.maximum(most.abs(), least.abs())
        else:
            reduced = utils.convert_quantization_axis_to_reduce_axis(x, axis)
            found = utils.reduce_amax(x, axis=reduced).detach()
        self._last = (weakref.ref(x), x._version, axis, found)
        return found


@contextmanager
def counted_svd(counted: Callable[[], None]) -> Iterator[None]:
    """Within the block, `counted` is called after each layer that SVDQuant has decomposed; one may take minutes."""
    require_known_modelopt()
    from modelopt.torch.quantization import model_calib

    upstream = cast("Any", model_calib)
    real = upstream.svd

    def svd(weight: Tensor, rank: int) -> Any:
        found = real(weight, rank)
        counted()
        return found

    upstream.svd = svd
    try:
        yield
    finally:
        upstream.svd = real


@contextmanager
def transformers_as_they_are() -> Iterator[None]:
    """Within the block, ModelOpt's trainers leave transformers' from_pretrained and save_pretrained alone.

    They would replace both for the rest of the process, so that models come back with quantizers; the replacement fails
    for a model that is opened without a folder, as the read-back of a checkpoint does.
    """
    require_known_modelopt()
    from modelopt.torch.opt.plugins import transformers

    real = transformers.enable_huggingface_checkpointing
    transformers.enable_huggingface_checkpointing = lambda: None
    try:
        yield
    finally:
        transformers.enable_huggingface_checkpointing = real
