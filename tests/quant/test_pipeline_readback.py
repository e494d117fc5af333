"""An exported Flux pipeline draws what the model in memory drew, bit for bit on a CPU, for every shipped recipe."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import drop
from flux_recipes import LENGTH, SIZE, control_images, flux_recipes, tiny_recipe
from tiny_flux import save_tiny_flux

from halfbyte.quant import produce, ptq
from halfbyte.quant.load import load_transformer
from halfbyte.quant.pipeline_making import PipelineMaking
from halfbyte.quant.pipelines import locate_pipeline, open_parts, open_transformer
from halfbyte.quant.processes import Processes
from halfbyte.quant.verify import verify
from halfbyte.records.digests import file_digest, model_digest, model_files
from halfbyte.records.errors import UserError
from halfbyte.records.files import atomic_folder
from halfbyte.records.run import RunFolder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("flux")
    return {
        "dev": save_tiny_flux(root / "dev"),
        "schnell": save_tiny_flux(root / "schnell", guidance=False),
        "control": save_tiny_flux(root / "control", control=True),
        "prompts": control_images(root),
    }


def kind_of(name: str) -> str:
    return "control" if "depth" in name or "canny" in name else name.split("-")[1]


def drawn(folder: Path, transformer: Any, image: Path | None, steps: int = 8) -> torch.Tensor:
    """The latents after all steps, by diffusers' own pipeline."""
    pipeline: Any = open_parts(locate_pipeline(str(folder)), torch.float32)
    pipeline.register_modules(transformer=transformer)
    more: dict[str, Any] = {}
    if image is not None:
        from PIL import Image

        more["control_image"] = Image.open(image)
    found: torch.Tensor = pipeline(
        "a small red circle", num_inference_steps=steps, height=SIZE, width=SIZE, output_type="latent",
        generator=torch.Generator().manual_seed(3), max_sequence_length=LENGTH, **more,
    ).images  # fmt: skip
    return found


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", flux_recipes())
def test_what_is_read_back_draws_what_the_model_in_memory_drew(
    name: str, pipelines: dict[str, Path], tmp_path: Path
) -> None:
    source, image = pipelines[kind_of(name)], None
    if kind_of(name) == "control":
        image = pipelines["prompts"].parent / "0.png"
    recipe = tiny_recipe(name, source, pipelines["prompts"], steps=1)
    job, run = produce.prepare(recipe, "cpu"), RunFolder(tmp_path / "run")
    made = PipelineMaking(job, run, None, Processes(CPU))
    model = made.ready(None)
    unstable = ptq.settle(model, torch.bfloat16)
    memory = drawn(source, model, image)
    with atomic_folder(run.checkpoint) as partial:
        made.export(model, partial, unstable)
    for weights in ("folded", "packed"):
        read = load_transformer(run.checkpoint / "transformer", device=CPU, weights=weights)
        assert torch.equal(drawn(run.checkpoint, read, image), memory), weights
    original = open_transformer(source / "transformer", weights=torch.bfloat16, compute=torch.float32, device=CPU)
    assert not torch.equal(drawn(source, original, image), memory)
    assert [str(check) for check in verify(run.checkpoint, source) if not check.passed] == []


@pytest.fixture(scope="module")
def made(pipelines: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = RunFolder(tmp_path_factory.mktemp("made") / "run")
    recipe = tiny_recipe("flux1-dev-nvfp4", pipelines["dev"], pipelines["prompts"], steps=1)
    produce.produce(produce.prepare(recipe, "cpu"), run)
    return run


@pytest.mark.usefixtures("cache")
def test_the_other_parts_are_the_originals(made: RunFolder, pipelines: dict[str, Path]) -> None:
    source = pipelines["dev"]
    names = [path.relative_to(source) for path in model_files(source) if path.parent.name != "transformer"]
    assert len(names) > 8
    assert [file_digest(made.checkpoint / name) for name in names] == [file_digest(source / name) for name in names]


@pytest.mark.usefixtures("cache")
def test_packed_weights_take_four_and_a_half_bits(made: RunFolder) -> None:
    model = load_transformer(made.checkpoint / "transformer", device=CPU, weights="packed")
    linear = model.single_transformer_blocks[0].proj_out
    stored = sum(buffer.numel() * buffer.element_size() for buffer in linear.packed.buffers())
    assert linear.weight is None
    assert 8 * (stored - 4) / (160 * 32) == 4.5


@pytest.mark.usefixtures("cache")
def test_the_digest_of_a_pipeline_is_of_all_its_parts(pipelines: dict[str, Path], tmp_path: Path) -> None:
    before = model_digest(pipelines["dev"])
    other = save_tiny_flux(tmp_path / "other", seed=1)
    assert model_digest(other) != before
    config = pipelines["dev"] / "scheduler" / "scheduler_config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"shift": ', '"shift": 2'), encoding="utf-8")
    assert model_digest(pipelines["dev"]) != before
    config.write_text(text, encoding="utf-8")
    assert model_digest(pipelines["dev"]) == before


@pytest.mark.usefixtures("cache")
def test_an_export_is_no_original(made: RunFolder, pipelines: dict[str, Path]) -> None:
    recipe = tiny_recipe("flux1-dev-nvfp4", made.checkpoint, pipelines["prompts"])
    with pytest.raises(UserError, match="exported checkpoint already"):
        produce.prepare(recipe, "cpu")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", ["x_embedder.weight", "transformer_blocks.0.attn.to_q.weight"])
def test_a_transformer_without_a_tensor_is_not_filled_with_random_numbers(
    name: str, pipelines: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(pipelines["dev"] / "transformer", tmp_path / "transformer")
    drop(name)(tmp_path / "transformer")
    with pytest.raises(UserError, match=f"lacks {name}"):
        open_transformer(tmp_path / "transformer", weights=torch.bfloat16, compute=torch.float32, device=CPU)
