"""The plan says exactly what will be written, and refuses before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FORMATS, make_model, quantize_both, spec

from halfbyte.quant.configs import quant_config
from halfbyte.quant.models import locate
from halfbyte.quant.plan import make_plan
from halfbyte.recipes.schema import QuantizeSpec
from halfbyte.records.errors import UserError

INPUTS = torch.zeros(1, 4, dtype=torch.long)


def _plan(folder: Path, block: QuantizeSpec) -> Any:
    return make_plan(locate(str(folder)), quant_config(block), torch.bfloat16, block.keep)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize(("preset", "kv_cache"), FORMATS)
def test_the_predicted_size_is_the_size(
    family: str, preset: str, kv_cache: str | None, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    make_model(family).save_pretrained(tmp_path / "model")
    block = spec(preset, kv_cache)
    plan = _plan(tmp_path / "model", block)
    quantize_both(tmp_path / "model", tiny_tokenizer, tmp_path / "out", block, torch.float32, INPUTS)
    content = (tmp_path / "out" / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    assert plan.tensor_bytes == len(content) - header


@pytest.mark.parametrize(("preset", "kv_cache"), [("NVFP4_AWQ_LITE_CFG", None), ("nvfp4", "nvfp4_affine")])
def test_a_model_that_counts_positions_from_the_mask_is_planned(
    preset: str, kv_cache: str | None, tmp_path: Path
) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    shape: dict[str, Any] = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "num_hidden_layers": 2}
    model: Any = OPTForCausalLM(OPTConfig(**shape, num_attention_heads=4, vocab_size=384))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    plan = _plan(tmp_path, spec(preset, kv_cache))
    assert plan.quantized
    assert plan.kv_layers == (2 if kv_cache else 0)


def test_the_plan_names_what_is_kept(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    plan = _plan(tmp_path, spec("nvfp4", "fp8"))
    assert {layer.name for layer in plan.layers if not layer.format} == {"model.embed_tokens", "lm_head"}
    assert len(plan.quantized) == 14
    assert (plan.kv_cache, plan.kv_layers) == ("FP8", 2)
    assert "NVFP4" in str(plan)
    assert "bits per weight" in str(plan)


def test_a_recipe_that_matches_no_layer_is_refused(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    nothing = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*experts*weight_quantizer", "cfg": {"num_bits": [4, 3]}},
    ]
    with pytest.raises(UserError, match=r"matches no layer.*\*experts\*weight_quantizer"):
        _plan(tmp_path, spec(None, quant_cfg=nothing))


@pytest.mark.parametrize(
    ("preset", "said"),
    [
        ("int8", "int8_sq"),
        ("INT8_SMOOTHQUANT_CFG", "'smoothquant' is not supported"),
        ("int4_awq", "int4_awq"),
        ("MXFP6_DEFAULT_CFG", "MXFP6"),
        ("MXINT8_DEFAULT_CFG", "MXINT8"),
        ("nvfp5", "did you mean 'nvfp4'"),
    ],
)
def test_what_cannot_be_exported_or_read_back_is_refused_by_name(preset: str, said: str, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=said):
        _plan(tmp_path, spec(preset))


def test_an_unknown_modelopt_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'general/ptq/nvfp4_default-kv_fp8'"):
        quant_config(spec(None, recipe="general/ptq/nvfp4_default_kv_fp8"))


def test_a_recipe_of_modelopt_and_the_same_preset_give_one_plan(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    recipe = _plan(tmp_path, spec(None, recipe="general/ptq/nvfp4_default-kv_fp8"))
    assert recipe.as_dict() == _plan(tmp_path, spec("nvfp4", "fp8")).as_dict()
    assert recipe.as_dict() == _plan(tmp_path, spec("NVFP4_DEFAULT_CFG", "fp8")).as_dict()


SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 384,
}  # fmt: skip


def test_what_the_export_would_get_wrong_is_refused_before_calibration(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM

    GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=384)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match="is a Conv1D, as in GPT-2"):
        _plan(tmp_path / "gpt2", spec("fp8"))
    GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=2, head_dim=16)).save_pretrained(tmp_path / "gpt-oss")
    with pytest.raises(UserError, match=r"experts\.gate_up_proj would be MXFP8, whose blocks ModelOpt's export cuts"):
        _plan(tmp_path / "gpt-oss", spec("MXFP8_DEFAULT_CFG"))


def test_a_linear_of_a_class_that_the_export_would_leave_as_it_is_is_refused(tmp_path: Path) -> None:
    from transformers import FalconConfig, FalconForCausalLM

    FalconForCausalLM(FalconConfig(**SMALL)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"query_key_value is a FalconLinear, .* would export as it is") as caught:
        _plan(tmp_path, spec("fp8"))
    assert "transformer.h.*.mlp.dense_h_to_4h" in _hinted(caught)


@pytest.mark.parametrize(
    ("preset", "said"),
    [
        (
            "NVFP4_AWQ_LITE_CFG",
            r"cannot export Qwen3MoeForCausalLM after awq_lite: .* experts of model\.layers\.0\.mlp",
        ),
        ("NVFP4_SVDQUANT_DEFAULT_CFG", "cannot export Qwen3MoeForCausalLM after svdquant"),
        ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", r"experts\.0\.gate_proj has 64 outputs: a block of 128 would hold"),
    ],
)
def test_experts_that_the_export_does_not_know_are_refused(preset: str, said: str, tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**SMALL, num_experts=2, moe_intermediate_size=64)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=said):
        _plan(tmp_path, spec(preset))


def test_a_block_that_does_not_divide_the_inputs_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**{**SMALL, "intermediate_size": 112})).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"down_proj has 112 inputs, which is no multiple of the MXFP4 block of 32"):
        _plan(tmp_path, spec("MXFP4_DEFAULT_CFG"))


def test_a_rotated_kv_cache_is_refused(tmp_path: Path) -> None:
    import modelopt.torch.quantization as mtq

    make_model("llama").save_pretrained(tmp_path)
    entries = [*mtq.NVFP4_DEFAULT_CFG["quant_cfg"], *mtq.NVFP4_KV_ROTATE_CFG["quant_cfg"]]
    with pytest.raises(UserError, match="would rotate its values"):
        _plan(tmp_path, spec(None, quant_cfg=entries))


def test_fp8_weights_without_quantized_inputs_are_refused(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    weights_only = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*proj*weight_quantizer", "cfg": {"num_bits": [4, 3]}},
    ]
    with pytest.raises(UserError, match="FP8 weight and unquantized inputs"):
        _plan(tmp_path, spec(None, quant_cfg=weights_only))


def test_a_tied_head_is_not_quantized_through_the_embeddings(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    head = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*lm_head*weight_quantizer", "cfg": {"num_bits": [4, 3]}},
        {"quantizer_name": "*lm_head*input_quantizer", "cfg": {"num_bits": [4, 3]}},
    ]
    with pytest.raises(UserError, match=r"lm_head shares its weight with model\.embed_tokens"):
        _plan(tmp_path, spec(None, quant_cfg=head))


@pytest.mark.parametrize("pattern", ["*.layers.0.*", "model.layers.0", "*layers.0*"])
def test_kept_layers_stay_in_the_kv_cache(pattern: str, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    plan = _plan(tmp_path, spec("nvfp4", "fp8", keep=[pattern]))
    assert len(plan.quantized) == 7
    assert all(layer.name.startswith("model.layers.1.") for layer in plan.quantized)
    assert (plan.kv_cache, plan.kv_layers) == ("FP8", 2)


@pytest.mark.parametrize("kv_cache", ["fp8", "nvfp4_affine"])
def test_a_checkpoint_with_a_kept_layer_and_a_kv_cache_can_be_read_back(
    kv_cache: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    make_model("llama").save_pretrained(tmp_path / "model")
    block = spec("nvfp4", kv_cache, keep=["*.layers.0.*"])
    _, memory, read_back = quantize_both(
        tmp_path / "model", tiny_tokenizer, tmp_path / "out", block, torch.float32, INPUTS
    )
    assert torch.equal(memory, read_back)


def _hinted(caught: Any) -> list[str]:
    """The patterns of the option that a hint gives, as a shell and a recipe read it."""
    import shlex

    import yaml

    hint = caught.value.hint
    option = shlex.split(hint[hint.index("--set ") :])[1]
    found = yaml.safe_load(option.removeprefix("quantize.keep="))
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize(
    ("keep", "said", "hinted"),
    [
        ("*gate_proj", r"layers\.0\.mlp\.gate_proj kept, .*up_proj NVFP4", "model.layers.*.mlp.up_proj"),
        ("*.1.mlp.up_proj", r"layers\.1\.mlp\.gate_proj NVFP4, .*up_proj kept", "model.layers.1.mlp.gate_proj"),
        ("*.0.self_attn.q_proj", r"q_proj kept, .*k_proj NVFP4, .*v_proj NVFP4", "model.layers.0.self_attn.v_proj"),
    ],
)
def test_a_part_of_a_fused_group_is_not_kept_alone(keep: str, said: str, hinted: str, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=said) as caught:
        _plan(tmp_path, spec("nvfp4", keep=[keep]))
    patterns = _hinted(caught)
    assert patterns[0] == keep
    assert hinted in patterns
    assert _plan(tmp_path, spec("nvfp4", keep=patterns)).quantized


@pytest.mark.parametrize("keep", ["lm_haed", "", "[", "model.layers.7", "*bmm*"])
def test_a_pattern_that_keeps_nothing_is_refused(keep: str, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"quantize\.keep: .* matches no layer") as caught:
        _plan(tmp_path, spec("nvfp4", "fp8", keep=["lm_head", keep]))
    assert f"'{keep}'" in caught.value.message
    assert keep != "lm_haed" or "did you mean 'lm_head'" in str(caught.value)


def test_one_list_keeps_all_layers_that_a_block_does_not_fit(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {**SMALL, "hidden_size": 72, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"q_proj has 72 inputs.* block of 16; nor do 11 more layers fit") as caught:
        _plan(tmp_path, spec("nvfp4", keep=["lm_head"]))
    patterns = _hinted(caught)
    assert patterns[0] == "lm_head"
    assert {layer.name for layer in _plan(tmp_path, spec("nvfp4", keep=patterns)).quantized} == {
        f"model.layers.{i}.mlp.down_proj" for i in range(2)
    }


def test_an_attention_that_modelopt_cannot_rewrite_is_refused(tmp_path: Path) -> None:
    """When this fails, ModelOpt may have learned to read Bloom's source."""
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(hidden_size=64, n_layer=1, n_head=4, vocab_size=64))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="cannot put quantizers into the attention of BloomForCausalLM"):
        _plan(tmp_path / "model", spec("fp8"))


def test_an_unknown_class_of_layers_is_refused(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    entries = [{"quantizer_name": "*", "parent_class": "foo", "enable": False}]
    with pytest.raises(UserError, match="parent_class 'foo' not found"):
        _plan(tmp_path, spec(None, quant_cfg=entries))


@pytest.mark.parametrize("preset", ["NVFP4_AWQ_LITE_CFG", "NVFP4_AWQ_FULL_CFG"])
def test_a_kept_layer_that_smoothing_would_be_folded_into_is_refused(preset: str, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    keep = ["*.0.mlp.gate_proj", "*.0.mlp.up_proj"]
    with pytest.raises(UserError, match=r"0\.mlp\.up_proj would not stay .* scale of .*0\.mlp\.down_proj") as caught:
        _plan(tmp_path, spec(preset, keep=keep))
    patterns = _hinted(caught)
    assert patterns == [*keep, "model.layers.0.mlp.down_proj"]
    assert len(_plan(tmp_path, spec(preset, keep=patterns)).quantized) == 11


def test_svdquant_folds_nothing_into_a_kept_layer(tmp_path: Path, tiny_tokenizer: Any) -> None:
    make_model("llama").save_pretrained(tmp_path / "model")
    block = spec("NVFP4_SVDQUANT_DEFAULT_CFG", keep=["*.0.mlp.gate_proj", "*.0.mlp.up_proj"])
    assert len(_plan(tmp_path / "model", block).quantized) == 12
    both, _, _ = quantize_both(tmp_path / "model", tiny_tokenizer, tmp_path / "out", block, torch.float32, INPUTS)
    original = make_model("llama").state_dict()
    for name in ("gate_proj", "up_proj"):
        stored = both.read_back.model.layers[0].mlp.get_submodule(name).weight
        assert torch.equal(stored.float(), original[f"model.layers.0.mlp.{name}.weight"].float())


def test_a_kept_layer_that_reads_a_norm_with_a_smoothing_scale_is_refused(tmp_path: Path) -> None:
    from transformers import CohereConfig, CohereForCausalLM

    CohereForCausalLM(CohereConfig(**SMALL)).save_pretrained(tmp_path)  # attention and MLP read one norm
    assert len(_plan(tmp_path, spec("NVFP4_AWQ_LITE_CFG")).quantized) == 7
    with pytest.raises(UserError, match=r"mlp\.gate_proj is kept and reads the same layer norm as .*q_proj"):
        _plan(tmp_path, spec("NVFP4_AWQ_LITE_CFG", keep=["*.mlp.*"]))
    assert _plan(tmp_path, spec("NVFP4_SVDQUANT_DEFAULT_CFG", keep=["*.mlp.*"])).quantized
