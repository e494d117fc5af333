"""The plan of a training against what is measured, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from step_memory import allocated_by
from tiny import make_model

from halfbyte.quant import configs, ptq
from halfbyte.quant.learned_scales import learn_scales
from halfbyte.quant.models import Source, empty_model, locate
from halfbyte.quant.training_memory import Memory, build, count_step
from halfbyte.quant.training_plan import measure_step, training_plan
from halfbyte.recipes.schema import QuantizeSpec
from halfbyte.recipes.training import TrainSpec
from halfbyte.records.errors import UserError

CPU = torch.device("cpu")


def train_spec(method: str = "qat", **more: Any) -> TrainSpec:
    """A train block whose texts are never read."""
    block = {"method": method, "sources": [{"dataset": "unused.jsonl"}], "max_steps": 10, "length": 64, "batch_size": 2}
    return TrainSpec.model_validate({**block, **({} if method == "qad" else {"teacher": None}), **more})


def quant(preset: str = "nvfp4") -> dict[str, Any]:
    """ModelOpt's configuration of a preset."""
    block = {"preset": preset, "calibration": {"sources": [{"dataset": "unused.txt"}]}}
    return configs.quant_config(QuantizeSpec.model_validate(block))


def allocated(source: Source, config: dict[str, Any], spec: TrainSpec) -> int:
    """Bytes of tensors at the peak of a step on a CPU, by what torch's allocator was asked for."""
    from transformers import AutoModelForCausalLM

    loaded, _ = empty_model(source)
    here = spec.method == "qad"
    step = build(
        lambda dtype: AutoModelForCausalLM.from_config(loaded, dtype=dtype),
        config, spec, CPU, compute=torch.float32, teacher_here=here,
    )  # fmt: skip
    return allocated_by(step)


STATIC = "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG"
CASES = {
    "qat": train_spec(),
    "qat with gradient checkpointing": train_spec(gradient_checkpointing=True, batch_size=8),
    "qad": train_spec("qad"),
    "qad that accumulates": train_spec("qad", gradient_accumulation=3, packing=False),
    "qad with lora": train_spec("qad", lora={"rank": 4}),
    "qat with static block scales": train_spec(),
    "qad with learned scales": train_spec("qad", learned_scales=True),
}


@pytest.mark.parametrize("case", list(CASES))
def test_the_predicted_memory_is_what_torch_allocates(case: str, tiny_model_folder: Path) -> None:
    source, spec = locate(str(tiny_model_folder)), CASES[case]
    config = quant(STATIC if case.endswith("scales") else "nvfp4")
    found = training_plan(source, config, spec, device=CPU, exported=0).memory
    assert found is not None
    assert found.total == pytest.approx(allocated(source, config, spec), rel=0.10)


def test_a_step_is_planned_on_the_quantizers_that_are_trained(
    llama_factory: Any, tiny_model_folder: Path, tiny_tokenizer: Any
) -> None:
    """Ranges of the same shapes, in the same quantizers, as ModelOpt's calibration and learn_scales leave them."""
    source, spec = locate(str(tiny_model_folder)), train_spec(learned_scales=True)
    model = llama_factory()
    rows = tiny_tokenizer(["the cat sees the moon"], return_tensors="pt").input_ids
    ptq.calibrate(model, quant(STATIC), lambda trained: trained(rows))
    learn_scales(model)
    step = build(lambda dtype: empty_model(source, dtype)[1], quant(STATIC), spec, torch.device("meta"),
                 compute=torch.float32, teacher_here=False)  # fmt: skip

    def shapes(one: Any) -> dict[str, Any]:
        tensors = {name: {key: value.shape for key, value in found.state_dict().items()}
                   for name, found in ptq.quantizers(one).items()}  # fmt: skip
        return {name: (type(found).__name__, tensors[name]) for name, found in ptq.quantizers(one).items()}

    ours, theirs = shapes(step.model), shapes(model)
    assert ours == theirs
    assert any("_amax_post" in tensors for _, tensors in ours.values())
    assert {name for name, one in step.model.named_parameters() if one.requires_grad} == {
        name for name, one in model.named_parameters()
    }


def test_learned_scales_without_static_block_scales_are_refused_by_the_plan(tiny_model_folder: Path) -> None:
    spec = train_spec(learned_scales=True)
    with pytest.raises(UserError, match="learned_scales needs weights with static block scales"):
        training_plan(locate(str(tiny_model_folder)), quant(), spec, device=CPU, exported=0)


@pytest.mark.real
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_predicted_memory_of_smollm2_is_what_torch_allocates(checkpointing: bool, smollm2: Path) -> None:
    spec = train_spec(length=128, batch_size=1, gradient_checkpointing=checkpointing)
    found = training_plan(locate(str(smollm2)), quant(), spec, device=CPU, exported=0).memory
    assert found is not None
    assert found.total == pytest.approx(allocated(locate(str(smollm2)), quant(), spec), rel=0.10)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["qat", "qad"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_predicted_memory_is_what_cuda_allocates(method: str, checkpointing: bool, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 32}
    config = LlamaConfig(**shape, num_key_value_heads=8, vocab_size=128256, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    source, device = Source("shape", tmp_path), torch.device("cuda")
    spec = train_spec(method, length=1024, batch_size=4, packing=False, gradient_checkpointing=checkpointing)
    plan = training_plan(source, quant(), spec, device=device, exported=0)
    seconds, peak = measure_step(source, quant(), spec, device)
    assert plan.memory is not None
    assert peak is not None
    print(f"\n{method}, checkpointing {checkpointing}: {peak / 1e9:.2f} GB, {seconds:.3f} s a step\n{plan}")
    assert plan.memory.total == pytest.approx(peak, rel=0.15)


def test_gradient_checkpointing_a_smaller_batch_and_lora_take_less(tiny_model_folder: Path) -> None:
    source = locate(str(tiny_model_folder))
    plan = training_plan(source, quant(), train_spec("qad", batch_size=16), device=CPU, exported=0, capacity=1000)
    assert plan.fits is False
    assert plan.memory is not None
    settings = [change.setting for change in plan.changes]
    for wanted in ("gradient_checkpointing", "batch_size=1", "bfloat16", "lora", "offline_top_k", "FSDP over 64"):
        assert any(wanted in setting for setting in settings), wanted
    assert all(change.memory < plan.memory.total for change in plan.changes[:-1])
    assert not any(change.fits for change in plan.changes)
    assert "does not fit" in str(plan)


def test_a_change_that_fits_is_told_to_fit(tiny_model_folder: Path) -> None:
    source = locate(str(tiny_model_folder))
    spec = train_spec(batch_size=32)
    whole = training_plan(source, quant(), spec, device=CPU, exported=0)
    assert whole.memory is not None
    assert whole.changes == ()
    plan = training_plan(source, quant(), spec, device=CPU, exported=0, capacity=whole.memory.total)
    assert [change.fits for change in plan.changes if "batch_size=1" in change.setting] == [True]


def test_fsdp_divides_weights_gradients_and_optimizer(tiny_model_folder: Path) -> None:
    source, spec = locate(str(tiny_model_folder)), train_spec()

    def model(dtype: torch.dtype) -> Any:
        return empty_model(source, dtype)[1]

    one, two = (count_step(model, quant(), spec, compute=torch.float32, devices=number) for number in (1, 2))
    assert two.weights == one.weights // 2
    assert two.optimizer == one.optimizer // 2
    assert two.gathered > one.gathered == 0


def test_steps_follow_from_epochs_and_rows_and_tokens_from_the_devices(tiny_model_folder: Path) -> None:
    source = locate(str(tiny_model_folder))
    spec = train_spec(max_steps=None, epochs=2.0, gradient_accumulation=4)
    plan = training_plan(source, quant(), spec, device=CPU, exported=0, rows=64, devices=2)
    assert (plan.steps, plan.tokens) == (8, 2 * 4 * 2 * 64)
    assert training_plan(source, quant(), spec, device=CPU, exported=0).steps is None


def test_time_is_steps_times_what_was_measured(tiny_model_folder: Path) -> None:
    source, spec = locate(str(tiny_model_folder)), train_spec()
    seconds, _ = measure_step(source, quant(), spec, CPU, steps=1)
    plan = training_plan(source, quant(), spec, device=CPU, exported=0, seconds=seconds)
    assert plan.as_dict()["seconds_per_step"] == seconds > 0
    assert "a step, measured" in str(plan)
    assert "not measured" in str(training_plan(source, quant(), spec, device=CPU, exported=0))


def test_the_plan_of_a_mixture_of_experts_says_that_its_memory_is_not_predicted(tmp_path: Path) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path)
    plan = training_plan(locate(str(tmp_path)), quant(), train_spec("qad"), device=CPU, exported=0)
    assert (plan.memory, plan.fits, plan.steps) == (None, None, 10)
    assert "not predicted" in str(plan)


def test_a_total_is_the_sum_of_its_parts() -> None:
    assert Memory(1, 2, 3, 4, 5, 6, 7, 8).total == 36


def test_no_lora_is_proposed_to_a_model_whose_linears_have_other_names(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=384, **shape)).save_pretrained(tmp_path)
    found = training_plan(locate(str(tmp_path)), quant(), train_spec("qad"), device=CPU, exported=0, capacity=10_000)
    settings = [change.setting for change in found.changes]
    assert settings
    assert not any("lora" in setting for setting in settings)
