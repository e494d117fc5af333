"""Opening an original model: a hub id, a local folder or a GGUF file, always from files whose digest is known."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from halfbyte.quant.checkpoint import (
    SCALE_SUFFIXES,
    Tensors,
    plain_dtype,
    quant_format,
    read_config,
    summarize,
    torch_dtype,
)
from halfbyte.quant.host_memory import given_back
from halfbyte.quant.patches import staged_loading
from halfbyte.quant.upstream import quiet_upstream
from halfbyte.recipes.schema import ModelSpec
from halfbyte.records.digests import file_digest, model_digest, model_files, read_ahead, value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.files import read_json
from halfbyte.records.record import ModelSummary
from halfbyte.records.run import RunFolder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# What a causal LM needs; pickled weights are left on the hub on purpose.
_CONFIG_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "tokenizer*"]
_HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt", "tokenizer*"]


@dataclass(frozen=True)
class Source:
    """A model's files on this machine."""

    name: str
    """As the recipe or the command line names it."""
    folder: Path
    gguf_file: str | None = None
    rounded_to: str | None = None
    """The type its weights are rounded to on loading; None when they stay as they are."""

    @property
    def digest(self) -> str:
        """Digest of the files that decide its answers, and of the type where that makes another model of them."""
        files = file_digest(self.folder / self.gguf_file) if self.gguf_file else model_digest(self.folder)
        return files if self.rounded_to is None else value_digest([files, self.rounded_to])

    def read_ahead(self) -> None:
        """Begins to hash the files in the background: `digest` then has less to wait for, or nothing."""
        read_ahead([self.folder / self.gguf_file] if self.gguf_file else model_files(self.folder))


def device_of(name: str | None) -> torch.device:
    """A torch device by name; None or "auto" is the first CUDA device, else the CPU.

    Raises:
        UserError: for an unknown device or one this machine lacks.
    """
    if name in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(str(name))
    except RuntimeError:
        raise UserError(f"unknown device '{name}'", "known: auto, cpu, cuda, cuda:0, ...") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device '{name}' is not supported", "known: auto, cpu, cuda, cuda:0, ...")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device '{name}' is not on this machine",
            f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs",
        )
    return device


def wake(device: torch.device) -> None:
    """Begins in the background to make a GPU ready: the driver and cuBLAS take a second to start.

    Not where several processes share the work: which GPU is whose, is not known yet.
    """

    def multiply() -> None:
        with suppress(RuntimeError):  # what goes wrong, loading will meet again
            ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
            torch.mm(ones, ones)

    if device.type == "cuda" and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        Thread(target=multiply, name="wake").start()


def compute_dtype(name: str, device: torch.device, own: torch.dtype) -> torch.dtype:
    """The type to compute in: "auto" is the model's own type on CUDA, and float32 on a CPU.

    Most CPUs multiply bfloat16 matrices several times slower than float32 ones, and not the same way on each.
    """
    if name == "auto":
        return own if device.type == "cuda" else torch.float32
    return torch_dtype(name)


def locate(
    name: str,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    dtype: str | None = None,
    weights: bool = True,
) -> Source:
    """Finds a model's files: a local folder or .gguf file as it is, else a snapshot of a hub repository.

    Args:
        name: Folder, file or hub id.
        revision: Of the hub repository.
        gguf_file: A file in it.
        dtype: The type the weights will have; None for their own.
        weights: Whether the weights must be there; else a folder with a configuration is enough, and no more than
            that and a tokenizer is fetched.

    Raises:
        UserError: when there is no such folder, or the hub has no such repository, is gated or out of reach.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        gguf_file, path = path.name, path.parent
    elif not path.is_dir():
        if path.is_absolute() or name.startswith(".") or name.count("/") != 1:
            raise UserError(f"model folder {name} does not exist", "give a folder, a .gguf file or a hub id ORG/NAME")
        patterns = _HUB_PATTERNS if weights else _CONFIG_PATTERNS
        path = snapshot(name, revision, [gguf_file, *_HUB_PATTERNS[1:]] if gguf_file else patterns)
    elif gguf_file is None and RunFolder(path).recipe.is_file() and RunFolder(path).checkpoint.is_dir():
        path = RunFolder(path).checkpoint  # a run folder stands for the checkpoint in it
    if gguf_file is not None:
        if not (path / gguf_file).is_file():
            raise UserError(f"{path} has no file {gguf_file}", "check model.gguf_file")
        return Source(name, path, gguf_file, None if dtype == "float32" else dtype)
    read_config(path)
    if weights:
        with Tensors(path):  # reads the head of each file: a damaged one is found before anything is computed
            pass
    return Source(name, path, None, None if dtype in ("float32", plain_dtype(path)) else dtype)


def snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    """The folder of a hub repository's files that match `patterns`, fetched where they are not there.

    Raises:
        UserError: when the hub has no such repository, it is gated or out of reach.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        raise UserError(
            f"{name} is gated", "accept its terms on its page, then log in with `hf auth login`, or give a local folder"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"the hub has no model {name} you may read", "check the name or log in with `hf auth login`"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise UserError(
            f"{name} is no folder here and the hub cannot be reached ({type(error).__name__})",
            "give a local folder, or fetch it first with `hf download` on a machine with access",
        ) from None


def has_tokenizer(source: Source) -> bool:
    """Whether there is a tokenizer beside a model's configuration."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
    return source.gguf_file is not None or any((source.folder / name).is_file() for name in names)


def open_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        UserError: when the folder has none that transformers can open.
    """
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        with quiet_upstream():
            tokenizer = AutoTokenizer.from_pretrained(source.folder, **options)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0].rstrip(" :")
        raise UserError(
            f"{source.folder} has no usable tokenizer: {reason}",
            "put the model's tokenizer.json and tokenizer_config.json there",
        ) from None
    if source.gguf_file is not None:
        _set_gguf_specials(tokenizer, source.folder / source.gguf_file)
    return tokenizer


def _set_gguf_specials(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Takes the special tokens from the file: transformers' conversion can name another one as the end of text.

    The conversion also asks for clean_up_tokenization_spaces, which no GGUF file says and decoding warns of.
    """
    from gguf import GGUFReader

    tokenizer.clean_up_tokenization_spaces = False
    fields = GGUFReader(path).fields
    for ours, theirs in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        field = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if field is not None:
            setattr(tokenizer, ours, tokenizer.convert_ids_to_tokens(int(field.contents())))


def require_same_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer that has more tokens than the model; tokens added to it later are not counted.

    Raises:
        UserError: with both sizes.
    """
    rows = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[index]
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {rows}",
            "the tokenizer is of another model; put the right one into the model's folder",
        )


# What transformers raises for a configuration that makes no sense, or weights that are none.
REFUSALS = (
    ValueError, TypeError, LookupError, OSError, RuntimeError, ArithmeticError, ImportError, AssertionError,
    AttributeError,
)  # fmt: skip


@contextmanager
def _opening(source: Source) -> Iterator[None]:
    """Turns what transformers says about a model it cannot open into a UserError."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        with quiet_upstream():
            yield
    except (*REFUSALS, StrictDataclassError, SafetensorError) as error:
        opened, said = source.folder / (source.gguf_file or ""), " ".join(str(error).split())[:300]
        raise UserError(f"transformers cannot open {opened}: {said}", _way_out(error)) from error


def _way_out(error: Exception) -> str | None:
    if "custom code" not in str(error):
        return None
    return "no code of a model's folder is run: register its classes with transformers first, as docs/in-house.md shows"


def _causal_config(source: Source) -> PretrainedConfig:
    from transformers import AutoConfig

    options: dict[str, Any] = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    with _opening(source):
        config: PretrainedConfig = AutoConfig.from_pretrained(source.folder, trust_remote_code=False, **options)
    masked = [name for name in config.architectures or () if name.endswith("ForMaskedLM")]
    if masked:
        raise UserError(f"{source.folder} is a {masked[0]}, which is no causal language model", "give a causal LM")
    return config


def left_to_defaults(source: Source) -> dict[str, Any]:
    """What shapes a language model and its config.json does not say, so that transformers takes its class's default."""
    if source.gguf_file:
        return {}
    said: Any = read_json(source.folder / "config.json")
    said = said.get("text_config") or said
    config: Any = _causal_config(source).get_text_config()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    return {
        name: getattr(config, name)
        for name in names
        if hasattr(config, name) and not {name, config.attribute_map.get(name, name)} & said.keys()
    }


def empty_model(source: Source, dtype: torch.dtype | None = None) -> tuple[PretrainedConfig, PreTrainedModel]:
    """The model's configuration, and the model on the meta device: no weight is read.

    Raises:
        UserError: when it is no causal LM that transformers knows by itself.
    """
    from transformers import AutoModelForCausalLM

    config = _causal_config(source)
    with _opening(source), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return config, model


@given_back()
def open_original(
    source: Source, *, weights: torch.dtype, compute: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The unquantized model in evaluation mode.

    Args:
        source: Its files.
        weights: The type the weights have in the recipe; wider ones are rounded to it, so that a baseline computed in
            float32 still has bfloat16 weights.
        compute: The type to compute in.
        device: Where it is put.

    Raises:
        UserError: when it is an exported checkpoint (from_pretrained would load garbage with only a log line), or its
            architecture is unknown to transformers, or its weights do not fit its configuration.
    """
    from transformers import AutoModelForCausalLM

    if source.gguf_file is None and quant_format(source.folder) is not None:
        raise UserError(f"{source.folder} is an exported checkpoint, not an original model", "give the original model")
    _causal_config(source)  # refuses what transformers would open as another kind of model
    options: dict[str, Any] = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    if device.type == "cuda" and source.gguf_file is None:
        options["device_map"] = {"": device}  # each tensor goes there as it is read, and not all through host memory
    with _opening(source), staged_loading(device):
        opened: Any = AutoModelForCausalLM.from_pretrained(
            source.folder,
            dtype=compute,
            trust_remote_code=False,  # or transformers asks on the terminal whether to run code from the folder
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by name
            **options,
        )
    model, info = opened
    _require_all_weights(info, source.folder)
    if source.gguf_file is not None:
        # transformers marks a dequantized GGUF as quantized, and then refuses to save it.
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    if not model.config.architectures:
        model.config.architectures = [type(model).__name__]  # ModelOpt's export reads it and fails on None
    if torch.finfo(weights).bits < torch.finfo(compute).bits:
        round_weights(model, weights)
    return model.to(device).eval()  # type: ignore[no-any-return]


def _require_all_weights(info: dict[str, Any], folder: Path) -> None:
    """Refuses a model of which a part was left random, which transformers only logs."""
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            first = sorted(map(str, info[kind]))[0]
            raise UserError(
                f"{folder} does not fit its configuration: {len(info[kind])} {kind}, first {first}",
                "copy the model again, whole",
            )
    surplus = sorted(map(str, info["unexpected_keys"]))
    scales = [name for name in surplus if name.endswith(tuple(f".{suffix}" for suffix in SCALE_SUFFIXES))]
    if scales:
        raise UserError(
            f"{folder} holds scales of quantized weights ({scales[0]}), but its configuration names no quantization",
            "copy the checkpoint again, whole, with hf_quant_config.json",
        )
    if surplus:
        logger.warning("%s holds %d tensors the model does not use, first %s", folder, len(surplus), surplus[0])


def round_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Rounds every parameter to `dtype` and keeps its own type."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


def original_summary(source: Source, spec: ModelSpec) -> ModelSummary:
    """What the original weighs; for a GGUF file, the file's own size, since that is what lies on the disk."""
    if source.gguf_file is None:
        found = summarize(source.folder, source.name)
        own = found.format if source.rounded_to is None else f"{source.rounded_to} from {found.format}"
        return found.model_copy(update={"digest": source.digest, "format": own})
    path = source.folder / source.gguf_file
    from gguf import GGUFReader

    weights = sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
    size = path.stat().st_size
    return ModelSummary(
        name=source.name,
        digest=source.digest,
        format=f"{spec.dtype} from GGUF",
        bytes_on_disk=size,
        bits_per_weight=8 * size / weights,
    )
