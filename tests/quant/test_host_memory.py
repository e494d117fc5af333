"""What loading takes of this machine's memory, at its peak and afterwards, measured of processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_model, spec

from halfbyte.quant.configs import quant_config
from halfbyte.quant.forward_memory import loading_bytes
from halfbyte.quant.models import locate
from halfbyte.quant.plan import make_plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the peak of a process")

_LOAD = """
import json, sys
import torch
from halfbyte.eval.memory import DevicePeak, resident
from halfbyte.quant.models import locate, open_original

small, source = (locate(path) for path in sys.argv[1:])
options = {"weights": torch.bfloat16, "compute": torch.float32, "device": torch.device("cpu")}
open_original(small, **options)  # imports what the other needs
before = resident()
watched = DevicePeak(torch.device("cpu"))
model = open_original(source, **options)
print(json.dumps([watched.bytes() - before, resident() - before]))
"""


def make(family: str, inner: int, folder: Path) -> Path:
    """A random model of one of three families, in bfloat16; experts are small beside glibc's largest threshold."""
    shape: dict[str, Any] = {
        "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 2048,
        "tie_word_embeddings": False,
    }  # fmt: skip
    sizes: dict[str, dict[str, int]] = {
        "llama": {"intermediate_size": 12 * inner},
        "mixtral": {"intermediate_size": inner, "num_local_experts": 12},
        "qwen3_moe": {"moe_intermediate_size": inner // 2, "num_experts": 24, "head_dim": 64},
    }
    make_model(family, **shape, **sizes[family]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_loading_takes_what_is_predicted_and_keeps_no_more_than_the_weights(family: str, tmp_path: Path) -> None:
    small, folder = make(family, 16, tmp_path / "small"), make(family, 896, tmp_path / "model")
    plan = make_plan(locate(str(folder)), quant_config(spec("fp8")), torch.bfloat16)
    asked = [sys.executable, "-c", _LOAD, str(small), str(folder)]
    peak, kept = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    weights = 4 * plan.weights
    assert kept == pytest.approx(weights, rel=0.10)
    assert peak == pytest.approx(weights + loading_bytes(plan, torch.bfloat16, torch.float32), rel=0.10)
