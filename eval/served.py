"""Which engine and model answer at an address: a part of a record's key, so that one engine's answers stay its own."""

from __future__ import annotations

from pathlib import Path

from halfbyte.eval.dialects import identify
from halfbyte.eval.endpoint import Endpoint, Unreachable
from halfbyte.recipes.schema import EvaluateSpec, ServerSpec
from halfbyte.records.cache import SERVERS
from halfbyte.records.digests import cache_folder, value_digest
from halfbyte.records.errors import disk_full_is_a_user_error
from halfbyte.records.files import read_json, write_json


def served_by(settings: EvaluateSpec, *, candidate: bool = False) -> str | None:
    """Engine, version and model name, as far as the server tells them: "vllm 0.33.0: my-model".

    Of a server that is not up, what it said last: records that are there are then found without it.

    Args:
        settings: The evaluate block.
        candidate: See endpoint_of.

    Returns:
        None where no server is asked.

    Raises:
        UserError: when it cannot be reached and never was, refuses the key, or serves no such model.
    """
    if settings.server is None:
        return None
    spec = endpoint_of(settings.server, candidate=candidate)
    place = cache_folder() / SERVERS / f"{value_digest([spec.base_url, spec.model])[:16]}.json"
    try:
        served = identify(Endpoint(spec), spec.model).name
    except Unreachable:
        if not place.is_file():
            raise
        return str(read_json(place)["served"])
    _keep(place, served)
    return served


def _keep(place: Path, served: str) -> None:
    if not place.is_file() or read_json(place) != {"served": served}:
        with disk_full_is_a_user_error(place):
            write_json(place, {"served": served})


def endpoint_of(spec: ServerSpec, *, candidate: bool) -> ServerSpec:
    """The endpoint of one of a run's two models.

    Args:
        spec: The recipe's server block.
        candidate: Whether it is the candidate, which may be served elsewhere or under another name.
    """
    if not candidate:
        return spec
    other = spec.candidate_url is not None
    return spec.model_copy(
        update={
            "base_url": spec.candidate_url or spec.base_url,
            "model": spec.candidate_model or (None if other else spec.model),
        }
    )
