"""On a GPU: what our fake quantization gives on a CPU beside ModelOpt's CUDA kernels, bit for bit.

Each format is compared on more than 100 million values in each of bfloat16, float16 and float32. With HALFBYTE_REPORT
set to a folder, the counts are written there as numerics.json and numerics.md. The first test of MX and the first of
FP8 wait about a minute each for ModelOpt's extension to be built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from distributions import DISTRIBUTIONS, TIES, corners, differing, draw, without_sign
from kernels import divide
from torch import Tensor

from halfbyte.quant import numerics as n
from halfbyte.quant.reciprocal import reciprocal
from halfbyte.records.files import write_json, write_text

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPE = (1024, 4096)
CHUNKS = 4
LEAST = 100_000_000

Pair = tuple[Tensor, Tensor]
"""What ModelOpt's kernel gives on CUDA, and what we give on the CPU."""


def _pick(generator: torch.Generator, first: float, second: float) -> float:
    return first if float(torch.rand((), generator=generator, device=generator.device)) < 0.5 else second


def _nvfp4(x: Tensor, generator: torch.Generator) -> Pair:
    from modelopt.torch.kernels.quantization.gemm import fp4_fake_quant_block

    amax = x.abs().amax().float() * _pick(generator, 1.0, 0.37)
    # amax stays on CUDA, where torch makes a scale of it for both.
    return fp4_fake_quant_block(x, amax), n.nvfp4_fake_quantize(x.cpu(), amax)


def _nvfp4_static(x: Tensor, generator: torch.Generator) -> Pair:
    from modelopt.torch.kernels.quantization.gemm import static_blockwise_fp4_fake_quant

    _fp8_extension()
    blocks = x.float().abs().reshape(-1, 16).amax(dim=-1)
    amax = blocks * torch.rand(blocks.shape, generator=generator, device=x.device)
    largest = _pick(generator, 448.0, 256.0)
    theirs = static_blockwise_fp4_fake_quant(x, amax, amax.amax(), True, largest)
    return theirs, n.nvfp4_static_fake_quantize(x.cpu(), amax, amax.amax(), largest)


def _mxfp4(x: Tensor, generator: torch.Generator) -> Pair:  # noqa: ARG001
    extension = _mx_extension()
    types = extension.Types
    return extension.fused_amax_convert(x, 32, types.E2M1, types.E8M0, None), n.mxfp4_fake_quantize(x.cpu())


def _mxfp8(x: Tensor, generator: torch.Generator) -> Pair:  # noqa: ARG001
    extension = _mx_extension()
    types = extension.Types
    return extension.fused_amax_convert(x, 32, types.E4M3, types.E8M0, None), n.mxfp8_fake_quantize(x.cpu())


def _fp8(x: Tensor, amax: Tensor) -> Pair:
    from modelopt.torch.quantization.tensor_quant import scaled_e4m3_impl

    _fp8_extension()
    return scaled_e4m3_impl(x, amax), n.fp8_fake_quantize(x.cpu(), amax.cpu())


def _fp8_tensor(x: Tensor, generator: torch.Generator) -> Pair:
    return _fp8(x, x.abs().amax().float() * _pick(generator, 1.0, 0.37))


def _fp8_axis(x: Tensor, generator: torch.Generator) -> Pair:
    dim = 1 if _pick(generator, 1.0, 0.37) == 1.0 else 0
    return _fp8(x, x.abs().amax(dim=dim, keepdim=True).float())


def _fp8_blocks(x: Tensor, generator: torch.Generator) -> Pair:  # noqa: ARG001
    squares = x.reshape(x.shape[0] // 128, 128, x.shape[1] // 128, 128)
    theirs, ours = _fp8(squares, squares.abs().amax(dim=(1, 3), keepdim=True).float())
    return theirs.reshape(x.shape), ours.reshape(x.shape)


KERNELS: dict[str, Callable[[Tensor, torch.Generator], Pair]] = {
    "NVFP4, dynamic block scales": _nvfp4,
    "NVFP4, static block scales": _nvfp4_static,
    "MXFP4": _mxfp4,
    "MXFP8": _mxfp8,
    "FP8 per tensor": _fp8_tensor,
    "FP8 per axis": _fp8_axis,
    "FP8 per 128 x 128 block": _fp8_blocks,
}


def _mx_extension() -> Any:
    from modelopt.torch.quantization.extensions import get_cuda_ext_mx

    return get_cuda_ext_mx(raise_if_failed=True)


def _fp8_extension() -> Any:
    """Without it ModelOpt would take other operations in its place, without a word."""
    from modelopt.torch.quantization.extensions import get_cuda_ext_fp8

    return get_cuda_ext_fp8(raise_if_failed=True)


def _signless(name: str, x: Tensor) -> Tensor | None:
    return without_sign(x) if name.startswith("MX") else None


def _examples(x: Tensor, ours: Tensor, theirs: Tensor, where: Tensor) -> list[str]:
    """The first mismatches, with all that is needed to look into them."""
    return [
        f"at {index}: x {float(x[tuple(index)]).hex()}, kernel {float(theirs[tuple(index)]).hex()},"
        f" ours {float(ours[tuple(index)]).hex()}, block {x[index[0]].reshape(-1, 16)[index[1] // 16].tolist()}"
        for index in where.nonzero()[:3].tolist()
    ]


@pytest.fixture(scope="module")
def report() -> Iterator[list[dict[str, Any]]]:
    """Collects the counts; writes them where $HALFBYTE_REPORT says."""
    rows: list[dict[str, Any]] = []
    yield rows
    folder = os.environ.get("HALFBYTE_REPORT")
    if not folder:
        return
    versions = {name: version(name) for name in ("torch", "triton", "nvidia-modelopt")}
    device = torch.cuda.get_device_name()
    Path(folder).mkdir(parents=True, exist_ok=True)
    content = {"device": device, "cuda": torch.version.cuda, "versions": versions, "rows": rows}
    write_json(Path(folder) / "numerics.json", content)
    write_text(Path(folder) / "numerics.md", _markdown(rows, device, versions))


def _markdown(rows: list[dict[str, Any]], device: str, versions: dict[str, str]) -> str:
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    lines = [
        "# Fake quantization on a CPU beside ModelOpt's CUDA kernels",
        "",
        f"{device}, {named}. Values whose bits differ, of all values compared; distributions: "
        + ", ".join(dict.fromkeys(row["distribution"] for row in rows))
        + ".",
        "",
        "| format | type | values | mismatches |",
        "| --- | --- | --: | --: |",
    ]
    for name, dtype in dict.fromkeys((row["format"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["format"], row["dtype"]) == (name, dtype)]
        values, mismatches = (sum(row[key] for row in mine) for key in ("values", "mismatches"))
        lines.append(f"| {name} | {dtype} | {values:,} | {mismatches:,} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_cpu_and_kernel_agree_on_100_million_values(
    name: str, dtype: torch.dtype, report: list[dict[str, Any]]
) -> None:
    generator = torch.Generator(device=CUDA).manual_seed(list(KERNELS).index(name))
    total, examples = 0, []
    for distribution in DISTRIBUTIONS:
        values = mismatches = 0
        for _ in range(CHUNKS):
            x = draw(distribution, SHAPE, dtype, generator).contiguous()
            theirs, ours = KERNELS[name](x, generator)
            ours = ours.to(CUDA)
            where = differing(ours, theirs, _signless(name, x))
            values += x.numel()
            mismatches += int(where.sum())
            if len(examples) < 9:
                examples += [f"{distribution} {line}" for line in _examples(x, ours, theirs, where)]
        print(f"{name}, {dtype}, {distribution}: {mismatches} of {values} values differ")
        row = {"format": name, "dtype": str(dtype).removeprefix("torch."), "distribution": distribution}
        report.append({**row, "values": values, "mismatches": mismatches})
        total += values
    assert total >= LEAST
    assert not examples, "\n".join(examples)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_e2m1_tie_in_every_block_scale_is_decided_as_by_the_kernels(dtype: torch.dtype) -> None:
    from modelopt.torch.kernels.quantization.gemm import fp4_fake_quant_block

    codes = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    block = torch.tensor([6.0, *TIES, *(-tie for tie in TIES), 0.0])
    for power in range(-4, 5):
        x = (codes.unsqueeze(-1) * block * 2.0**power).to(dtype)
        amax = torch.tensor(2688.0 * 2.0**power, device=CUDA)
        theirs, ours = fp4_fake_quant_block(x.to(CUDA), amax), n.nvfp4_fake_quantize(x, amax)
        assert not differing(ours, theirs.cpu()).any(), power
    powers = 2.0 ** torch.arange(-12, 13).unsqueeze(-1)
    x = (torch.nn.functional.pad(block, (0, 16)) * powers).to(dtype)
    extension = _mx_extension()
    theirs = extension.fused_amax_convert(x.to(CUDA), 32, extension.Types.E2M1, extension.Types.E8M0, None)
    assert not differing(n.mxfp4_fake_quantize(x), theirs.cpu(), without_sign(x)).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_infinities_nan_and_subnormals_become_what_the_kernels_make_of_them(dtype: torch.dtype) -> None:
    from modelopt.torch.kernels.quantization.gemm import fp4_fake_quant_block, static_blockwise_fp4_fake_quant

    x = corners(dtype, CUDA)
    found = []

    def compare(name: str, theirs: Tensor, ours: Tensor) -> None:
        where = differing(ours.to(CUDA), theirs, _signless(name, x))
        found.extend(f"{name} {line}" for line in _examples(x, ours, theirs, where))

    for value in (0.0, 1e-45, 1e-38, 2.0**-24, 1e-4, 3.0, 3e38, torch.inf):
        amax = torch.tensor(value, device=CUDA)
        compare(f"NVFP4 with amax {value}", fp4_fake_quant_block(x, amax), n.nvfp4_fake_quantize(x.cpu(), amax))
        compare(f"FP8 with amax {value}", *_fp8(x, amax))
    some = torch.tensor([0.0, 1e-38, 1e-9, 1.0, 300.0, torch.inf, torch.nan], device=CUDA)
    blocks = some.repeat(x.numel() // 16 // 7 + 1)[: x.numel() // 16]
    for value in (0.0, 1e-6, 1.0, 1e4, torch.inf):
        whole = torch.tensor(value, device=CUDA)
        theirs = static_blockwise_fp4_fake_quant(x, blocks, whole)
        compare(f"static NVFP4 with amax {value}", theirs, n.nvfp4_static_fake_quantize(x.cpu(), blocks, whole))
    generator = torch.Generator(device=CUDA)
    compare("MXFP4", *_mxfp4(x, generator))
    compare("MXFP8", *_mxfp8(x, generator))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("columns", [1, 15, 17, 31, 33, 100, 4000])
@pytest.mark.parametrize("name", ["NVFP4, dynamic block scales", "MXFP4", "MXFP8"])
def test_last_blocks_that_are_not_full_are_quantized_as_by_the_kernels(name: str, columns: int) -> None:
    generator = torch.Generator(device=CUDA).manual_seed(columns)
    x = torch.randn(37, columns, generator=generator, device=CUDA)
    theirs, ours = KERNELS[name](x, generator)
    assert not differing(ours.to(CUDA), theirs, _signless(name, x)).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_our_code_gives_the_same_bits_on_cuda(dtype: torch.dtype) -> None:
    generator = torch.Generator(device=CUDA).manual_seed(1)
    for distribution in DISTRIBUTIONS:
        x = draw(distribution, (256, 512), dtype, generator)
        amax = x.abs().amax().float()
        blocks = x.float().abs().reshape(-1, 16).amax(dim=-1)
        for cuda, cpu in (
            (n.nvfp4_fake_quantize(x, amax), n.nvfp4_fake_quantize(x.cpu(), amax)),
            (n.nvfp4_static_fake_quantize(x, blocks), n.nvfp4_static_fake_quantize(x.cpu(), blocks)),
            (n.mxfp4_fake_quantize(x), n.mxfp4_fake_quantize(x.cpu())),
            (n.mxfp8_fake_quantize(x), n.mxfp8_fake_quantize(x.cpu())),
            (n.fp8_fake_quantize(x, amax), n.fp8_fake_quantize(x.cpu(), amax)),
        ):
            assert not differing(cuda.cpu(), cpu).any()


@pytest.mark.parametrize("exponent", [-126, -100, -20, 0, 5, 60, 125])
def test_the_reciprocal_of_every_mantissa_is_the_hardwares(exponent: int) -> None:
    import gpu_division

    x = (torch.arange(2**23, dtype=torch.int32) + ((127 + exponent) << 23)).view(torch.float32)
    assert torch.equal(gpu_division.reciprocal(x.to(CUDA)).cpu().view(torch.int32), reciprocal(x).view(torch.int32))


def test_division_is_tritons() -> None:
    """Where divisor, dividend and quotient are no subnormals and the divisor is at most 2^126, as in the kernels.

    How many of the other quotients differ is printed.
    """
    import gpu_division

    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-(2**31), 2**31, (2**24,), generator=generator).to(torch.int32).view(torch.float32)
        for _ in range(2)
    )
    ours = divide(a, b)
    where = differing(ours, gpu_division.divide(a.to(CUDA), b.to(CUDA)).cpu())
    tiny = 2.0**-126
    occurring = (b.abs() >= tiny) & (b.abs() <= 2.0**126) & (a.abs() >= tiny) & (ours.abs() >= tiny)
    print(f"{int(where[~occurring].sum())} of {int((~occurring).sum())} other quotients differ")
    assert int(occurring.sum()) > 2**23
    assert not where[occurring].any()
