"""Opens what answers in the place of transformers: vLLM in this process, or a server, on a model's files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.eval.served import endpoint_of
from halfbyte.quant.load import Described
from halfbyte.recipes.schema import EvaluateSpec
from halfbyte.records.digests import model_digest
from halfbyte.records.errors import UserError

if TYPE_CHECKING:
    from halfbyte.eval.server import ServerBackend
    from halfbyte.eval.vllm import VLLMBackend


def require_two_endpoints(settings: EvaluateSpec) -> None:
    """Refuses, before anything is computed, to ask one served model as both sides of a run.

    Raises:
        UserError: when the recipe names no second endpoint or model.
    """
    server = settings.server
    if server is not None and server.candidate_url is None and server.candidate_model is None:
        raise UserError(
            "a run asks two models, and evaluate.server names one",
            "set evaluate.server.candidate_url, or candidate_model where one endpoint serves both; the candidate is to "
            "be served once its checkpoint is there: until then the run stops, and goes on with the same command",
        )


def open_backend(
    settings: EvaluateSpec, described: Described, *, candidate: bool = False
) -> ServerBackend | VLLMBackend:
    """The backend that `settings` name, other than hf.

    Args:
        settings: The recipe's evaluate block.
        described: The model.
        candidate: Whether it is the candidate of a run, which a server may have under another address or name.

    Raises:
        UserError: see open_server and open_vllm; when vLLM is to read a GGUF file; and when the server has another
            model of this machine than `described`.
    """
    tokenizer, source = described.tokenizer, described.source
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer names no token that ends a text", "name its eos_token in tokenizer_config.json")
    if settings.server is None:
        from halfbyte.eval.vllm import open_vllm

        if source.gguf_file is not None:
            raise UserError(f"backend vllm opens folders, not {source.gguf_file}", "give the model as safetensors")
        return open_vllm(source.folder, tokenizer, settings, penalty=described.penalty)
    from halfbyte.eval.server import open_server

    spec = endpoint_of(settings.server, candidate=candidate)
    backend = open_server(spec, tokenizer, max_length=settings.max_length, penalty=described.penalty)
    place = Path(backend.served.path or "")
    if backend.served.path and place.is_absolute() and place.exists():
        # A recipe's weights may be rounded on loading; the files are those that are served.
        ours = source.folder / source.gguf_file if source.gguf_file else source.folder
        if place.resolve() != ours.resolve() and model_digest(place) != model_digest(ours):
            raise UserError(
                f"{spec.base_url} serves {place}, which is not {described.summary.name}",
                f"serve {ours}, or correct evaluate.server.base_url",
            )
    return backend
