"""Layer errors: each weight's error is that of what is stored, and a checkpoint of another model is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import export, make_model, spec

from halfbyte.quant.layer_errors import layer_errors
from halfbyte.quant.load import load_as_it_is
from halfbyte.records.errors import UserError


@pytest.mark.parametrize(("preset", "bits"), [("fp8", 8.0), ("nvfp4", 4.5)])
def test_the_errors_are_those_of_the_weights_as_read_back(
    tmp_path: Path, tiny_tokenizer: Any, preset: str, bits: float
) -> None:
    checkpoint = export("llama", spec(preset), tiny_tokenizer, tmp_path)
    found = layer_errors(checkpoint, tmp_path / "source")
    assert len(found) == 14
    original = load_as_it_is(str(tmp_path / "source"), device="cpu").model
    stored = load_as_it_is(str(checkpoint), device="cpu").model
    for row in found:
        theirs, ours = (model.get_submodule(row.layer).weight.detach().float() for model in (original, stored))
        assert row.weights == theirs.numel()
        assert row.error == pytest.approx(float((ours - theirs).norm() / theirs.norm()), rel=1e-4)
        assert 0.5 < row.error / row.expected < 1.5
        assert bits <= row.bits_per_weight < bits + 0.1
        assert row.format == preset.upper()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    checkpoint = export("llama", spec("fp8"), tiny_tokenizer, tmp_path)
    make_model("qwen3_moe").save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="counterpart"):
        layer_errors(checkpoint, tmp_path / "other")
    with pytest.raises(UserError, match="no exported checkpoint"):
        layer_errors(tmp_path / "source", tmp_path / "source")
