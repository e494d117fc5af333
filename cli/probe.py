"""What `halfbyte doctor` asks in processes of its own, where a library that hangs or crashes harms nobody.

    python -m halfbyte.probe torch
    python -m halfbyte.probe import torchvision
    python -m halfbyte.probe formats
    python -m halfbyte.probe hub

Prints one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from typing import Any

LEAST_FOR_E4M3 = (8, 9)
"""Compute capability from which Triton has FP8's type, and with it ModelOpt's NVFP4 kernel."""
EMULATED = "halfbyte's numerics on the CPU, with the kernels' bits"


def probe_torch() -> dict[str, Any]:
    """torch and the GPUs it sees."""
    import torch

    found: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    found["gpus"] = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        capability = list(torch.cuda.get_device_capability(index))
        name = torch.cuda.get_device_name(index)
        found["gpus"].append({"name": name, "capability": capability, "free": free, "total": total})
    return found


def probe_import(name: str) -> dict[str, Any]:
    """Whether a library can be imported at all."""
    importlib.import_module(name)
    return {"imported": name}


def probe_formats() -> dict[str, str]:
    """By format, what computes it on the device halfbyte would take; where nothing must be built, it is tried.

    What starts with "not: " does not run.
    """
    import torch
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

    from halfbyte.quant.backend import register
    from halfbyte.quant.elements import E2M1_BITS, E4M3_BITS, E8M0_BITS
    from halfbyte.quant.upstream import quiet_upstream

    def tried(bits: tuple[int, int], block: int | None, scale: tuple[int, int] | None) -> None:
        blocks = {} if block is None else {"block_sizes": {-1: block, "type": "dynamic", "scale_bits": scale}}
        with quiet_upstream():
            quantizer: Any = TensorQuantizer(QuantizerAttributeConfig(num_bits=bits, **blocks)).to(device)
            if scale != E8M0_BITS:
                quantizer.amax = torch.tensor(6.0, device=device)
            values = quantizer(torch.linspace(-6, 6, 64, device=device).reshape(2, 32))
        if not bool(torch.isfinite(values).all()):
            raise RuntimeError(f"numbers that are none came out of {bits}")

    register()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    formats = {
        "FP8": (E4M3_BITS, None, None),
        "NVFP4": (E2M1_BITS, 16, E4M3_BITS),
        "MXFP4": (E2M1_BITS, 32, E8M0_BITS),
        "MXFP8": (E4M3_BITS, 32, E8M0_BITS),
    }
    found = {}
    for name, (bits, block, scale) in formats.items():
        kernel, ready = (EMULATED, True) if device.type == "cpu" else _on_cuda(name)
        found[name] = kernel
        if ready:
            try:
                tried(bits, block, scale)
            except (RuntimeError, AssertionError, ValueError, OSError) as error:
                found[name] = f"not: {kernel} fails: {' '.join(str(error).split())[:200]}"
    return found


def _on_cuda(name: str) -> tuple[str, bool]:
    """ModelOpt's kernel for a format on this GPU, and whether it can be tried without building it first."""
    import torch
    from modelopt.torch.kernels.quantization.gemm import IS_AVAILABLE

    if name == "NVFP4" and IS_AVAILABLE and torch.cuda.get_device_capability() >= LEAST_FOR_E4M3:
        return "ModelOpt's Triton kernel", True
    extension = "modelopt_cuda_ext_fp8" if name == "FP8" else "modelopt_cuda_ext_mx"
    if _is_built(extension):
        return f"ModelOpt's CUDA extension {extension}", False
    missing = _cannot_build()
    if not missing:
        return f"ModelOpt's CUDA extension {extension}, which is built at its first use, in about a minute", False
    if name == "FP8":
        return f"torch, slower than ModelOpt's CUDA extension, for which {missing}", True
    return f"not: ModelOpt's CUDA extension {extension} must be built, and {missing}", False


def _is_built(extension: str) -> bool:
    from halfbyte.checkup import extension_roots

    return any(path for root in extension_roots() for path in root.glob(f"**/{extension}/{extension}.so"))


def _cannot_build() -> str:
    """What a build lacks; empty where nothing is missing."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None and shutil.which("nvcc") is None:
        return "nvcc is not here"
    missing = [name for name in ("ninja", "c++") if shutil.which(name) is None]
    return f"{' and '.join(missing)} is not here" if missing else ""


def probe_hub() -> dict[str, Any]:
    """Whether the hub may be asked, answers, and knows the user; no token is shown and none is sent."""
    from huggingface_hub import constants, get_token

    from halfbyte.recipes.data import hub_is_reachable

    token = get_token() is not None
    offline = bool(constants.HF_HUB_OFFLINE)
    return {
        "endpoint": constants.ENDPOINT,
        "offline": offline,
        "reachable": not offline and hub_is_reachable(),
        "token": token,
        "cache": str(constants.HF_HUB_CACHE),
    }


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "torch": probe_torch,
    "import": probe_import,
    "formats": probe_formats,
    "hub": probe_hub,
}


if __name__ == "__main__":
    print("\n" + json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
