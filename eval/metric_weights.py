"""Where the weights of image metrics lie: a path in the recipe, the folder in $HALFBYTE_WEIGHTS, or the hub.

evaluate.images.weights_of names a folder, a file or another hub id by metric. $HALFBYTE_WEIGHTS names a folder laid out
like the hub, so that CLIP lies in $HALFBYTE_WEIGHTS/openai/clip-vit-large-patch14. What is found there is never asked
of the hub.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from halfbyte.recipes.data import hub_is_reachable
from halfbyte.records.digests import file_digest, value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.image_metrics import Weights

WEIGHTS_VARIABLE = "HALFBYTE_WEIGHTS"


def find_weights(
    metric: str, weights: Weights, files: list[str], local: str | None = None, also: Sequence[str] = ()
) -> Path:
    """The folder that holds the files of a metric's network.

    Args:
        metric: The metric's name, for messages.
        weights: Where they come from.
        files: Names of the files that must be there; of those joined with a bar one is enough.
        local: A folder, a file in it, or another hub id; see above.
        also: Names of files that are fetched where there are any.

    Raises:
        UserError: when they are not at hand, saying where they come from and how to point to a local copy.
    """
    named = local is not None and not (_is_hub_id(local) and not Path(local).expanduser().exists())
    if local is not None and named:
        path = Path(local).expanduser()
        folder = path.parent if path.is_file() else path
        return _whole(folder, metric, weights, files, f"weights_of names {local} for it")
    hub_id = local or weights.id
    root = os.environ.get(WEIGHTS_VARIABLE)
    if root:
        if not Path(root).expanduser().is_dir():
            raise UserError(f"{root} in ${WEIGHTS_VARIABLE} is not a folder", "name one laid out like the hub")
        below = Path(root).expanduser() / hub_id
        if below.is_dir():
            return _whole(below, metric, weights, files, f"${WEIGHTS_VARIABLE} holds {below}")
    return _whole(
        _from_hub(metric, hub_id, weights, [*files, *also]), metric, weights, files, f"{hub_id} is on the hub"
    )


def missing_weights(metric: str, weights: Weights, why: str) -> UserError:
    """The error for weights that are not at hand: where they come from, and how to point to a local copy."""
    return UserError(
        f"{metric} needs {weights.id}, which comes from {weights.source}: {why}",
        f"put a copy into ${WEIGHTS_VARIABLE}/{weights.id}, or name it in the recipe: "
        f"evaluate.images.weights_of: {{{metric}: PATH}}",
    )


def weights_identity(folder: Path, files: list[str]) -> str:
    """Digest of the files that decide a metric's values, whatever they lie in."""
    found = sorted(path for one in files for path in [_found(folder, one)] if path is not None)
    return value_digest([[path.name, file_digest(path)] for path in found])


def named_file(folder: Path, names: str) -> Path:
    """The first of several file names, joined with bars, that is in a folder; it is known to be there."""
    found = _found(folder, names)
    assert found is not None
    return found


def _found(folder: Path, names: str) -> Path | None:
    return next((folder / name for name in names.split("|") if (folder / name).is_file()), None)


def _whole(folder: Path, metric: str, weights: Weights, files: list[str], where: str) -> Path:
    if not folder.is_dir():
        raise missing_weights(metric, weights, f"{where}, and there is no such folder")
    lacking = [one.replace("|", " or ") for one in files if _found(folder, one) is None]
    if lacking:
        raise missing_weights(metric, weights, f"{where}, which lacks {', '.join(lacking)}")
    return folder


def _is_hub_id(text: str) -> bool:
    return text.count("/") == 1 and not text.startswith(("/", ".", "~"))


def _from_hub(metric: str, hub_id: str, weights: Weights, files: list[str]) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [name for one in files for name in one.split("|")]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, local_files_only=not hub_is_reachable()))
    except LocalEntryNotFoundError:
        raise missing_weights(metric, weights, "the hub cannot be reached, and its cache has no copy") from None
    except (HfHubHTTPError, httpx.HTTPError) as error:
        raise missing_weights(metric, weights, f"the hub does not give them: {' '.join(str(error).split())}") from None
