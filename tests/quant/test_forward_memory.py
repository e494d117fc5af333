"""The predicted memory of passes and calibrations is what torch allocates for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from step_memory import peak_of
from tiny import make_model, spec

from halfbyte.eval.passes import Shape, begin, score
from halfbyte.quant import calibration, ptq
from halfbyte.quant.calibration_memory import calibration_memory
from halfbyte.quant.checkpoint import quant_format
from halfbyte.quant.configs import quant_config
from halfbyte.quant.forward_memory import counting, weight_bytes
from halfbyte.quant.load import open_exported
from halfbyte.quant.models import Source, empty_model, locate, open_original
from halfbyte.quant.plan import make_plan
from halfbyte.quant.training_memory import Counter, Unpredictable
from halfbyte.recipes.schema import QuantizeSpec

CPU = torch.device("cpu")
F32 = torch.float32
SHAPES = [
    Shape(1, 96, 40, 12, masked=True),
    Shape(3, 64, 0, 6, masked=True),
    Shape(2, 120, 0, 240),
    Shape(3, 48, 0),
    Shape(2, 32, 64),
]
LENGTH, TEXTS = 64, 4


def llama(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=1024, tie_word_embeddings=False)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def stacked(family: str, inner: int, folder: Path) -> Path:
    """A model whose experts are one tensor each: Llama 4's, or gpt-oss's."""
    from transformers import GptOssConfig, GptOssForCausalLM, Llama4ForCausalLM, Llama4TextConfig

    shape: dict[str, Any] = {
        "hidden_size": 192, "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "vocab_size": 1024, "head_dim": 32, "num_local_experts": 4,
    }  # fmt: skip
    if family == "llama4":
        more = {"intermediate_size_mlp": 512, "interleave_moe_layer_step": 1, "pad_token_id": 1}
        model: Any = Llama4ForCausalLM(Llama4TextConfig(**shape, **more, attention_chunk_size=512))
    else:
        model = GptOssForCausalLM(GptOssConfig(**shape, num_experts_per_tok=2, sliding_window=64))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def exported(source: Path, block: QuantizeSpec, folder: Path) -> Path:
    model = open_original(locate(str(source)), weights=torch.bfloat16, compute=F32, device=CPU)
    loop = calibration.forward_loop([[1] * LENGTH] * TEXTS, tokens_per_row=LENGTH * TEXTS, pack=True)
    ptq.calibrate(model, quant_config(block), loop)
    ptq.export(model, None, folder, torch.bfloat16, ptq.settle(model))
    return folder


@pytest.mark.parametrize("preset", ["fp8", "nvfp4", "NVFP4_AWQ_LITE_CFG", "NVFP4_SVDQUANT_DEFAULT_CFG"])
@pytest.mark.parametrize("state", ["original", "folded", "packed"])
def test_the_predicted_memory_of_a_pass_is_what_torch_allocates(
    state: Literal["original", "folded", "packed"], preset: str, tmp_path: Path
) -> None:
    source, block = llama(tmp_path / "model"), spec(preset)
    where, config = locate(str(source)), quant_config(block)
    plan = make_plan(where, config, torch.bfloat16)
    if state == "original":
        model: Any = open_original(where, weights=torch.bfloat16, compute=F32, device=CPU)
    else:
        checkpoint = exported(source, block, tmp_path / "checkpoint")
        declared = quant_format(checkpoint)
        assert declared is not None
        model = open_exported(locate(str(checkpoint)), declared, dtype=F32, device=CPU, weights=state)
    tensors = {id(one): one for one in (*model.parameters(), *model.buffers())}.values()
    weights = sum(one.numel() * one.element_size() for one in tensors)
    assert weight_bytes(plan, state, F32) == pytest.approx(weights, rel=0.01)
    for shape in SHAPES:
        pass_ = score if shape.scored else begin
        with counting(lambda dtype: empty_model(where, dtype)[1], config, plan, state, F32) as (empty, count):
            found, _ = count(lambda pass_=pass_, shape=shape, empty=empty: pass_(empty, shape))
        with torch.inference_mode():
            pass_(model, shape)  # tables of reciprocals are made once
            real = peak_of(lambda pass_=pass_, shape=shape: pass_(model, shape))
        assert found.total == pytest.approx(weights + real, rel=0.10), shape


def measured(source: Path, block: QuantizeSpec, folder: Path) -> tuple[int, int]:
    """Bytes of the weights and of all tensors at the peak of calibrating, settling and exporting."""
    model = open_original(locate(str(source)), weights=torch.bfloat16, compute=F32, device=CPU)
    counter = Counter(1024, [], {})
    for tensor in (*model.parameters(), *model.buffers()):
        counter.hold(tensor, "weights")
    before = sum(counter.now.values())
    loop = calibration.forward_loop([[1] * LENGTH] * TEXTS, tokens_per_row=LENGTH * TEXTS, pack=True)
    with counter:
        ptq.calibrate(model, quant_config(block), loop)
        unstable = ptq.settle(model)
        ptq.export(model, None, folder, torch.bfloat16, unstable)
    return before, sum(counter.peak.values())


def predicted(source: Path, block: QuantizeSpec) -> Any:
    where, config = Source("model", source), quant_config(block)
    plan = make_plan(where, config, torch.bfloat16)
    known = block.calibration.model_copy(update={"length": LENGTH, "batch_size": TEXTS})
    return calibration_memory(
        lambda dtype: empty_model(where, dtype)[1], config, plan, known, compute=F32, own=torch.bfloat16, device="cpu"
    )


@pytest.mark.parametrize(
    "preset", ["fp8", "nvfp4", "MXFP8_DEFAULT_CFG", "NVFP4_AWQ_LITE_CFG", "NVFP4_SVDQUANT_DEFAULT_CFG"]
)
def test_the_predicted_memory_of_a_calibration_is_what_it_takes(preset: str, tmp_path: Path) -> None:
    source = llama(tmp_path / "model")
    weights, peak = measured(source, spec(preset), tmp_path / "checkpoint")
    found = predicted(source, spec(preset))
    assert found.weights == pytest.approx(weights, rel=0.01)
    assert found.total == pytest.approx(peak, rel=0.10)


@pytest.mark.parametrize("inner", [384, 2048])
@pytest.mark.parametrize(
    ("family", "preset"), [("llama4", "fp8"), ("llama4", "nvfp4"), ("gpt_oss", "MXFP4_MLP_WEIGHT_ONLY_CFG")]
)
def test_so_it_is_for_experts_in_one_tensor(family: str, preset: str, inner: int, tmp_path: Path) -> None:
    """Of which ModelOpt makes copies, turned around; the larger the experts, the more these count."""
    source = stacked(family, inner, tmp_path / "model")
    weights, peak = measured(source, spec(preset), tmp_path / "checkpoint")
    found = predicted(source, spec(preset))
    assert found.weights == pytest.approx(weights, rel=0.01)
    assert found.total == pytest.approx(peak, rel=0.10)


@pytest.mark.parametrize("family", ["llama4", "gpt_oss"])
@pytest.mark.parametrize("state", ["folded", "packed"])
def test_passes_over_experts_in_one_tensor_take_what_is_predicted(
    state: Literal["folded", "packed"], family: str, tmp_path: Path
) -> None:
    source, block = stacked(family, 384, tmp_path / "model"), spec("fp8")
    where, config = locate(str(source)), quant_config(block)
    plan = make_plan(where, config, torch.bfloat16)
    checkpoint = exported(source, block, tmp_path / "checkpoint")
    declared = quant_format(checkpoint)
    assert declared is not None
    model: Any = open_exported(locate(str(checkpoint)), declared, dtype=F32, device=CPU, weights=state)
    tensors = {id(one): one for one in (*model.parameters(), *model.buffers())}.values()
    weights = sum(one.numel() * one.element_size() for one in tensors)
    assert weight_bytes(plan, state, F32) == pytest.approx(weights, rel=0.01)
    shape = Shape(2, 120, 0, 240)  # all tokens are the same, and so are gpt-oss's experts
    with counting(lambda dtype: empty_model(where, dtype)[1], config, plan, state, F32) as (empty, count):
        found, _ = count(lambda: score(empty, shape))
    with torch.inference_mode():
        score(model, shape)
        real = peak_of(lambda: score(model, shape))
    assert found.total == pytest.approx(weights + real, rel=0.10)


def test_an_algorithm_whose_memory_is_not_known_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(Unpredictable, match="what mse takes is not known"):
        predicted(llama(tmp_path / "model"), spec("NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG"))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_of_experts_one_is_given_all_tokens(family: str, tmp_path: Path) -> None:
    """No more than transformers' loop takes when that happens, and the weights are what they are."""
    make_model(family).save_pretrained(tmp_path)
    where, config = locate(str(tmp_path)), quant_config(spec("nvfp4"))
    plan = make_plan(where, config, torch.bfloat16)
    model = cast(Any, open_original(where, weights=torch.bfloat16, compute=F32, device=CPU))
    shape = Shape(2, 100, 0, 8)
    with counting(lambda dtype: empty_model(where, dtype)[1], config, plan, "original", F32) as (empty, count):
        found, _ = count(lambda: score(empty, shape))
    model.config._experts_implementation = "eager"
    with torch.inference_mode():
        real = peak_of(lambda: score(model, shape))  # all tokens are the same, and so are their experts
    assert found.working == pytest.approx(real, rel=0.25)
    assert weight_bytes(plan, "packed", F32) < weight_bytes(plan, "folded", F32) == found.weights
