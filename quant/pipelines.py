"""Diffusers pipelines on disk: where their parts are, the transformer that is quantized, and opening what is not.

A pipeline is a folder with model_index.json and one folder for each part. Only the transformer is quantized; an export
holds the other parts as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from halfbyte.quant.checkpoint import Tensors, plain_dtype, quant_format, read_config, summarize
from halfbyte.quant.models import REFUSALS, Source, round_weights, snapshot
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.records.digests import PIPELINE_FILE, model_digest, model_files, read_ahead, value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.files import read_json
from halfbyte.records.record import ModelSummary
from halfbyte.records.run import RunFolder

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

TRANSFORMER = "transformer"
CONTROL = "FluxControlPipeline"
QUANTIZABLE = ("FluxPipeline", CONTROL)
"""Pipelines whose transformer can be calibrated: their prompts are encoded and their images drawn by the same calls."""

_HUB_PATTERNS = ["*.json", "*.txt", "*/*.json", "*/*.txt", "*/*.model", "*/*.safetensors"]


@dataclass(frozen=True)
class PipelineSource(Source):
    """A pipeline's files on this machine; what is rounded to another type on loading is its transformer."""

    @property
    def transformer(self) -> Path:
        """The folder of the transformer."""
        return self.folder / TRANSFORMER

    @property
    def class_name(self) -> str:
        """The pipeline's class, as model_index.json has it: FluxPipeline."""
        return str(read_json(self.folder / PIPELINE_FILE).get("_class_name"))

    @property
    def digest(self) -> str:
        """Digest of the files that decide its images, and of the type where that makes another model of them."""
        files = model_digest(self.folder)
        return files if self.rounded_to is None else value_digest([files, self.rounded_to])

    def read_ahead(self) -> None:
        """Begins to hash the files in the background: `digest` then has less to wait for, or nothing."""
        read_ahead(model_files(self.folder))


def is_pipeline(folder: Path) -> bool:
    """Whether a folder is a diffusers pipeline."""
    return (folder / PIPELINE_FILE).is_file()


def transformer_of(folder: Path) -> Path:
    """The folder with the weights that are quantized: of a pipeline its transformer, else the folder itself."""
    return folder / TRANSFORMER if is_pipeline(folder) else folder


def denoiser_of(folder: Path) -> Path:
    """The folder of what a pipeline draws with: its transformer or, in ones that are only evaluated, its U-Net."""
    index = read_json(folder / PIPELINE_FILE)
    return folder / (TRANSFORMER if TRANSFORMER in index else "unet")


def parts(folder: Path) -> list[str]:
    """The folders of a pipeline's parts, by its model_index.json; parts that it leaves out have none."""
    index = read_json(folder / PIPELINE_FILE)
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
    return [name for name, entry in entries.items() if entry[0] is not None]


def copied_files(folder: Path) -> list[Path]:
    """Of a pipeline, what an export holds as it was: all parts but the transformer; pickled weights are left out."""
    within = [path for name in parts(folder) if name != TRANSFORMER for path in sorted((folder / name).rglob("*"))]
    pickled = (".bin", ".pt", ".pth", ".ckpt", ".msgpack")
    return [folder / PIPELINE_FILE, *(path for path in within if path.is_file() and path.suffix not in pickled)]


def locate_pipeline(
    name: str, *, revision: str | None = None, dtype: str | None = None, weights: bool = True
) -> PipelineSource:
    """Finds a pipeline's files: a local folder or a run folder as it is, else a snapshot of a hub repository.

    Args:
        name: Folder or hub id.
        revision: Of the hub repository.
        dtype: The type the transformer's weights will have; None for their own.
        weights: Whether the weights must be there; else a folder with the configurations is enough.

    Raises:
        UserError: when there is none, it is out of reach, or has no transformer as safetensors.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith(".") or name.count("/") != 1:
            raise UserError(f"pipeline folder {name} does not exist", "give a folder or a hub id ORG/NAME")
        folder = snapshot(name, revision, _HUB_PATTERNS if weights else _HUB_PATTERNS[:-1])
    elif RunFolder(folder).recipe.is_file() and RunFolder(folder).checkpoint.is_dir():
        folder = RunFolder(folder).checkpoint  # a run folder stands for the checkpoint in it
    if not is_pipeline(folder):
        raise UserError(f"{folder} is no diffusers pipeline: it has no {PIPELINE_FILE}", "give the pipeline's folder")
    index = read_json(folder / PIPELINE_FILE)
    if not isinstance(index, dict) or "_class_name" not in index:
        raise UserError(f"{folder / PIPELINE_FILE} names no pipeline", "restore it from its source")
    if denoiser_of(folder).name not in parts(folder):
        raise UserError(
            f"{folder} is a {index['_class_name']}, which has no transformer", "give a pipeline that has one"
        )
    for part in parts(folder):
        if not (folder / part).is_dir():
            raise UserError(f"{folder} has no folder {part}, which its {PIPELINE_FILE} names", "copy it again, whole")
    own = plain_dtype(denoiser_of(folder)) if weights else dtype
    return PipelineSource(name, folder, None, None if dtype in (None, "float32", own) else dtype)


def require_quantizable(source: PipelineSource) -> None:
    """Refuses pipelines that are drawn by other calls than Flux, and exported ones.

    Raises:
        UserError: which it is.
    """
    if source.class_name not in QUANTIZABLE:
        raise UserError(
            f"{source.name} is a {source.class_name}, which cannot be quantized", f"supported: {', '.join(QUANTIZABLE)}"
        )
    if quant_format(source.transformer) is not None:
        raise UserError(f"{source.name} is an exported checkpoint already", "give the original pipeline")


def summarize_pipeline(folder: Path, name: str) -> ModelSummary:
    """What the transformer, or U-Net, weighs, under the digest of the whole pipeline."""
    return summarize(denoiser_of(folder), name).model_copy(update={"digest": model_digest(folder)})


@contextmanager
def opening(folder: Path) -> Iterator[None]:
    """Turns what diffusers and transformers say about a folder they cannot open into a UserError."""
    from safetensors import SafetensorError

    try:
        with quiet_upstream(), quiet_diffusers():
            yield
    except (*REFUSALS, SafetensorError) as error:
        raise UserError(f"diffusers cannot open {folder}: {' '.join(str(error).split())[:300]}") from error


@contextmanager
def quiet_diffusers() -> Iterator[None]:
    """Silences diffusers' bars and its advice within the block."""
    from diffusers.utils import logging as diffusers_logging

    upstream: Any = diffusers_logging
    level, bars = upstream.get_verbosity(), upstream.is_progress_bar_enabled()
    upstream.set_verbosity_error()
    upstream.disable_progress_bar()
    try:
        yield
    finally:
        upstream.set_verbosity(level)
        if bars:
            upstream.enable_progress_bar()


def transformer_class(folder: Path) -> Any:
    """The class of a transformer, by its configuration.

    Raises:
        UserError: when this version of diffusers has none of that name.
    """
    import diffusers

    name = str(read_config(folder).get("_class_name"))
    found = getattr(diffusers, name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.ModelMixin)):
        raise UserError(f"{folder} is a {name}, which diffusers {diffusers.__version__} does not know")
    return found


def configuration(folder: Path) -> dict[str, Any]:
    """A transformer's configuration without what is said of its quantization."""
    return {key: value for key, value in read_config(folder).items() if key != "quantization_config"}


def empty_transformer(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The transformer on the meta device: no weight is read.

    Raises:
        UserError: when its configuration makes none.
    """
    kind = transformer_class(folder)
    with opening(folder), torch.device("meta"):
        model: nn.Module = kind.from_config(configuration(folder))
        return model if dtype is None else model.to(dtype)


def open_transformer(folder: Path, *, weights: torch.dtype, compute: torch.dtype, device: torch.device) -> Any:
    """The unquantized transformer in evaluation mode; see models.open_original for the two types.

    Raises:
        UserError: when it is an exported one, or its weights do not fit its configuration.
    """
    if quant_format(folder) is not None:
        raise UserError(f"{folder} is an exported checkpoint, not an original", "give the original pipeline")
    kind = transformer_class(folder)
    require_all_weights(folder)
    with opening(folder):
        model = kind.from_pretrained(folder, torch_dtype=compute, local_files_only=True)
    if torch.finfo(weights).bits < torch.finfo(compute).bits:
        round_weights(model, weights)
    return model.to(device).eval().requires_grad_(False)


def require_all_weights(folder: Path) -> None:
    """Compares a transformer's tensors with its configuration: diffusers fills what is missing with random numbers.

    Raises:
        UserError: naming the first that is missing or has another shape.
    """
    expected = {name: tuple(value.shape) for name, value in empty_transformer(folder).state_dict().items()}
    with Tensors(folder) as tensors:
        for name, shape in expected.items():
            if name not in tensors:
                raise UserError(f"{folder} lacks {name}", "copy the pipeline again, whole")
            if tensors.shape(name) != shape:
                raise UserError(
                    f"{folder}: {name} has shape {list(tensors.shape(name))}, its configuration {list(shape)}",
                    "copy the pipeline again, whole",
                )


def open_parts(source: PipelineSource, dtype: torch.dtype) -> DiffusionPipeline:
    """The pipeline on the CPU without its transformer.

    Raises:
        UserError: when a part cannot be opened.
    """
    from diffusers import DiffusionPipeline

    opener: Any = DiffusionPipeline.from_pretrained
    with opening(source.folder):
        pipeline: Any = opener(source.folder, transformer=None, torch_dtype=dtype, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline  # type: ignore[no-any-return]
