"""A baseline's last hidden states on a text, kept so that its distributions are known when it is no longer loaded.

A token's logits are the product of the output embedding and the hidden state before it. Both are kept: they give the
logits bit for bit, in about a hundredth of their size (8 KiB a token for Llama 3 8B, and 1 GiB for its embedding).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from halfbyte.records.digests import value_digest
from halfbyte.records.errors import disk_full_is_a_user_error
from halfbyte.records.files import write_bytes

HEAD_FILE = "head.safetensors"
"""The output embedding, written last."""


class Kept:
    """Stands for the baseline on the windows that were kept: called as a model is, it gives the same logits.

    Args:
        folder: What `keep` wrote.
        device: Where the logits are computed; the baseline's, for the same bits.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self.device = device
        head = load_file(folder / HEAD_FILE, device=str(device))
        self._weight, self._bias = head["weight"], head.get("bias")
        with safe_open(folder / HEAD_FILE, framework="pt") as file:
            self.vocabulary = int(file.metadata()["vocabulary"])
        self.dtype = self._weight.dtype

    def __call__(self, ids: Tensor) -> Any:
        """Token ids [1, tokens] of a window to an object with `logits` [1, tokens, vocabulary]."""
        hidden = load_file(self.folder / _name(ids[0].tolist()), device=str(self.device))["hidden"]
        return SimpleNamespace(logits=torch.nn.functional.linear(hidden, self._weight, self._bias))


@torch.inference_mode()
def keep(model: Any, windows: Sequence[list[int]], vocabulary: int, folder: Path) -> bool:
    """Writes what Kept reads; what an earlier process has written is not computed again.

    Args:
        model: A causal LM of transformers, on its device.
        windows: Token ids of each.
        vocabulary: Its size, as the model's configuration says.
        folder: In the cache.

    Returns:
        Whether that was possible: False where the model does more with its logits than to compute them.
    """
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        return False
    with disk_full_is_a_user_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for ids in windows:
            path = folder / _name(ids)
            if path.is_file():
                continue
            hidden = _hidden(model, head, ids)
            if hidden is None:
                return False
            write_bytes(path, save({"hidden": hidden.contiguous().cpu()}))
        tensors = {name: value.detach().contiguous().cpu() for name, value in head.named_parameters()}
        write_bytes(folder / HEAD_FILE, save(tensors, metadata={"vocabulary": str(vocabulary)}))
    return True


def _hidden(model: Any, head: torch.nn.Linear, ids: list[int]) -> Tensor | None:
    """What the output embedding is given for each token; None where the logits are not what it makes of that."""
    given: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _module, arguments: given.append(arguments[0]))
    try:
        logits = model(torch.tensor([ids], device=model.device)).logits
    finally:
        handle.remove()
    made = [torch.nn.functional.linear(hidden, head.weight, head.bias) for hidden in given]
    same = len(made) == 1 and made[0].dtype == logits.dtype and torch.equal(made[0], logits)
    return given[0] if same else None


def is_kept(folder: Path, windows: Sequence[list[int]]) -> bool:
    """Whether all that Kept needs for the windows is there."""
    return (folder / HEAD_FILE).is_file() and all((folder / _name(ids)).is_file() for ids in windows)


def _name(ids: list[int]) -> str:
    return f"{value_digest(ids)[:16]}.safetensors"
