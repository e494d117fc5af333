"""An original model is opened as its files say, or refused by one line that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CPU, make_model, quantize_both, spec

from halfbyte.quant.load import load, load_as_it_is
from halfbyte.quant.models import locate, open_original
from halfbyte.recipes.schema import ModelSpec
from halfbyte.records.errors import UserError


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    """A tiny Llama in float32 with its tokenizer."""
    make_model("llama").float().save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def opened(folder: Path) -> Any:
    return open_original(locate(str(folder)), weights=torch.float32, compute=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": 3}, r"9 missing_keys, first model\.layers\.2\."),
        ({"intermediate_size": 256}, "6 mismatched_keys, first .*down_proj"),
        ({"hidden_size": "wide"}, "'hidden_size' expected int, got str"),
        ({"num_attention_heads": 0}, "cannot open"),
        ({"model_type": "t5"}, "cannot open"),
        ({"architectures": ["BertForMaskedLM"]}, "no causal language model"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "custom code .* register its classes"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    fields: dict[str, Any], said: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change_config(folder, **fields)
    with pytest.raises(UserError, match=said):
        opened(folder)
    assert capfd.readouterr().out == ""  # and transformers asks no question on the terminal


def test_weights_that_are_not_used_are_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_config(folder, num_hidden_layers=1)
    opened(folder)
    assert "holds 9 tensors the model does not use, first model.layers.1." in caplog.text


def test_a_model_of_another_library_is_refused(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UserError, match="is quantized already, by gptq"):
        load(ModelSpec(id=str(folder)))


def test_a_tokenizer_of_a_larger_model_is_refused(folder: Path, tiny_tokenizer: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=200
    )
    LlamaForCausalLM(small).save_pretrained(folder)
    with pytest.raises(UserError, match=f"the tokenizer has {tiny_tokenizer.vocab_size} tokens and the model 200"):
        load(ModelSpec(id=str(folder)))


def test_rounding_the_weights_makes_another_model_with_a_digest_of_its_own(folder: Path) -> None:
    rounded, own = (load(ModelSpec(id=str(folder), dtype=dtype)) for dtype in ("bfloat16", "float32"))
    assert rounded.summary.digest == locate(str(folder), dtype="bfloat16").digest != own.summary.digest
    assert (rounded.summary.format, own.summary.format) == ("bfloat16 from float32", "float32")


def test_a_model_named_without_a_recipe_keeps_its_weights(folder: Path) -> None:
    as_it_is = load_as_it_is(str(folder))
    assert as_it_is.summary.format == "float32"
    torch.testing.assert_close(
        as_it_is.model.state_dict(), load(ModelSpec(id=str(folder), dtype="float32")).model.state_dict(), rtol=0, atol=0
    )


def test_a_type_that_is_no_type_of_weights_is_named(folder: Path) -> None:
    change_config(folder, dtype="float64", torch_dtype="float64")
    with pytest.raises(UserError, match="unknown dtype 'float64'"):
        load_as_it_is(str(folder))


def test_a_quantized_checkpoint_that_lost_its_declaration_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    make_model("llama").save_pretrained(tmp_path / "model")
    inputs = torch.zeros(1, 4, dtype=torch.long)
    quantize_both(tmp_path / "model", tiny_tokenizer, tmp_path / "out", spec("fp8"), torch.float32, inputs)
    (tmp_path / "out" / "hf_quant_config.json").unlink()
    change_config(tmp_path / "out", quantization_config=None)
    with pytest.raises(UserError, match=r"holds scales of quantized weights .* names no quantization"):
        load(ModelSpec(id=str(tmp_path / "out")))


@pytest.mark.parametrize(
    "content", ["[]", '{"quantization": 3}', '{"quantization": {"quant_algo": "FP8", "quantized_layers": {"a": 3}}}']
)
def test_a_declaration_that_makes_no_sense_is_named(content: str, folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"hf_quant_config\.json: .* is no mapping"):
        load(ModelSpec(id=str(folder)))
