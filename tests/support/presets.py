"""Every FP4 and FP8 preset and general PTQ recipe of ModelOpt, taken through the whole line on a tiny random model.

`measure` gives the row of quant/FORMATS.md; python tests/formats_table.py writes the table anew.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tiny import CPU, make_model, sequences, spec

from halfbyte.quant import calibration, ptq
from halfbyte.quant.checkpoint import quant_format
from halfbyte.quant.configs import quant_config
from halfbyte.quant.load import open_exported
from halfbyte.quant.models import locate, open_original
from halfbyte.quant.plan import Plan, make_plan, plan_of
from halfbyte.quant.verify import verify
from halfbyte.recipes.schema import QuantizeSpec
from halfbyte.records.digests import model_digest
from halfbyte.records.errors import UserError

DOCS = Path(__file__).resolve().parents[2] / "quant" / "FORMATS.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
HEAD = (
    "| preset or recipe | tiny model | calibrate | forward | export | verify | read back | bits/weight | stored as |\n"
    "|---|---|---|---|---|---|---|--:|---|"
)
INPUTS = torch.randint(0, 384, (2, 24), generator=torch.Generator().manual_seed(5))


class Case(NamedTuple):
    """One row of the table."""

    name: str
    """A preset, general/ptq/RECIPE, or PRESET + KV for a KV cache added to a preset."""
    family: str = "llama"

    @property
    def block(self) -> QuantizeSpec:
        """The quantize block of a recipe."""
        if "/" in self.name:
            return spec(None, recipe=self.name)
        preset, _, kv_cache = self.name.partition(" + ")
        return spec(preset, kv_cache or None)


_DENSE = (
    "FP8_DEFAULT_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "NVFP4_DEFAULT_CFG",
    "NVFP4_AWQ_LITE_CFG",
    "NVFP4_AWQ_CLIP_CFG",
    "NVFP4_AWQ_FULL_CFG",
    "NVFP4_SVDQUANT_DEFAULT_CFG",
    "NVFP4_FOUR_OVER_SIX_CFG",
    "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG",
    "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG",
    "NVFP4_MLP_ONLY_CFG",
    "NVFP4_OMLP_ONLY_CFG",
    "NVFP4_MLP_WEIGHT_ONLY_CFG",
    "W4A16_NVFP4_CFG",
    "W4A8_NVFP4_FP8_CFG",
    "W4A8_MXFP4_FP8_CFG",
    "MXFP4_DEFAULT_CFG",
    "MXFP4_MLP_WEIGHT_ONLY_CFG",
    "MXFP8_DEFAULT_CFG",
)
_KV = ("fp8", "fp8_cast", "fp8_affine", "nvfp4", "nvfp4_cast", "nvfp4_affine")
_EXPERTS = (
    "FP8_DEFAULT_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "NVFP4_DEFAULT_CFG",
    "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG",
    "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG",
    "NVFP4_EXPERTS_ONLY_CFG",
    "NVFP4_MLP_WEIGHT_ONLY_CFG",
    "W4A8_NVFP4_FP8_CFG",
    "MXFP4_DEFAULT_CFG",
    "MXFP8_DEFAULT_CFG",
    "NVFP4_AWQ_LITE_CFG",
    "NVFP4_SVDQUANT_DEFAULT_CFG",
)
_STACKED = (  # experts in one tensor with one scale
    "FP8_DEFAULT_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "NVFP4_DEFAULT_CFG",
    "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG",
    "W4A8_NVFP4_FP8_CFG",
    "MXFP4_DEFAULT_CFG",
    "MXFP8_DEFAULT_CFG",
    "NVFP4_AWQ_LITE_CFG",
)
_REFUSED = (
    "MXFP6_DEFAULT_CFG",
    "MXINT8_DEFAULT_CFG",
    "INT4_AWQ_CFG",
    "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "INT8_DEFAULT_CFG",
    "INT8_SMOOTHQUANT_CFG",
    "INT8_WEIGHT_ONLY_CFG",
    "W4A8_AWQ_BETA_CFG",
)


def general_recipes() -> list[str]:
    """The general PTQ recipes in ModelOpt's wheel."""
    from halfbyte.quant.configs import _listed_recipes

    return _listed_recipes()


CASES = (
    *(Case(name) for name in _DENSE),
    Case("NVFP4_FP8_MHA_CONFIG", "qwen2"),  # the tiny Llama's head is tied, and this preset quantizes it
    *(Case(f"NVFP4_DEFAULT_CFG + {kv_cache}") for kv_cache in _KV),
    *(Case(name, "qwen3_moe") for name in _EXPERTS),
    Case("NVFP4_DEFAULT_CFG", "mixtral"),
    *(Case(name, "llama4") for name in _STACKED),
    Case("FP8_DEFAULT_CFG", "gpt_oss"),
    Case("NVFP4_DEFAULT_CFG", "gpt_oss"),
    Case("MXFP4_MLP_WEIGHT_ONLY_CFG", "gpt_oss"),
    Case("NVFP4_DEFAULT_CFG", "deepseek_v3"),
    Case("NVFP4_AWQ_LITE_CFG", "deepseek_v3"),
    Case("NVFP4_SVDQUANT_DEFAULT_CFG", "deepseek_v3"),
    *(Case(name, "qwen3_moe" if "experts" in name else "llama") for name in general_recipes()),
    *(Case(name) for name in _REFUSED),
)


def deepseek() -> Any:
    """A random DeepSeek-V3 of a dense layer and one with experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=384, initializer_range=0.3, moe_intermediate_size=64, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32, tie_word_embeddings=False, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()


def original(family: str, folder: Path) -> Path:
    """A tiny random model of a family, saved."""
    (deepseek() if family == "deepseek_v3" else make_model(family)).save_pretrained(folder)
    return folder


@cache
def _large(family: str) -> Any:
    """The configuration of a model of everyday size: what its checkpoint would weigh can be planned."""
    from transformers import LlamaConfig, MixtralConfig

    shape: dict[str, Any] = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": False,
    }  # fmt: skip
    if family in ("qwen3_moe", "mixtral", "deepseek_v3", "llama4", "gpt_oss"):
        return MixtralConfig(**shape, vocab_size=32000)
    return LlamaConfig(**shape, vocab_size=128256)


def planned(case: Case) -> Plan:
    """The plan for Llama-3.1-8B, or for Mixtral-8x7B where the tiny model has experts."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_large(case.family), dtype=torch.bfloat16)
    return plan_of(model, quant_config(case.block))


def measure(case: Case, tokenizer: Any, folder: Path) -> str:
    """Takes a case through the line; its row of the table. What a later check refutes is written in its column."""
    source = locate(str(original(case.family, folder / "model")))
    try:
        config = quant_config(case.block)
        plan = make_plan(source, config, torch.bfloat16)
    except UserError as error:
        return f"| {case.name} | {case.family} | refused | – | – | – | – | – | {error.message} |"
    model = open_original(source, weights=torch.bfloat16, compute=torch.float32, device=CPU)
    ptq.calibrate(model, config, calibration.forward_loop(sequences(), tokens_per_row=64, pack=True))
    ptq.save_calibration(model, folder / "calibration", "key")
    unstable = ptq.settle(model)
    with torch.no_grad():
        logits = model(INPUTS).logits
    ptq.export(model, tokenizer, folder / "checkpoint", torch.bfloat16, unstable)
    declared = quant_format(folder / "checkpoint")
    assert declared is not None
    failed = [check.name for check in verify(folder / "checkpoint") if not check.passed]
    found = open_exported(locate(str(folder / "checkpoint")), declared, dtype=torch.float32, device=CPU)
    with torch.no_grad():
        again = found(INPUTS).logits
    columns = [
        case.name,
        case.family,
        "kept" if _same_after_a_crash(source, tokenizer, folder) else "NOT KEPT",
        "finite" if bool(torch.isfinite(logits).all()) else "NOT FINITE",
        "planned size" if _tensor_bytes(folder / "checkpoint") == plan.tensor_bytes else "ANOTHER SIZE",
        f"fails: {', '.join(failed)}" if failed else "passes",
        "same bits" if torch.equal(logits, again) else f"APART BY {float((logits - again).abs().max()):.3g}",
        _bits(case),
        declared.label,
    ]
    return f"| {' | '.join(columns)} |"


def _bits(case: Case) -> str:
    try:
        return f"{planned(case).bits_per_weight:.2f}"
    except UserError:  # such as AWQ of Mixtral: only DeepSeek's experts can be exported then
        return "–"


def _same_after_a_crash(source: Any, tokenizer: Any, folder: Path) -> bool:
    """Whether the calibration that was kept gives the same checkpoint."""
    model = open_original(source, weights=torch.bfloat16, compute=torch.float32, device=CPU)
    ptq.load_calibration(model, folder / "calibration")
    unstable = ptq.settle(model)
    ptq.export(model, tokenizer, folder / "again", torch.bfloat16, unstable)
    return model_digest(folder / "again") == model_digest(folder / "checkpoint")


def _tensor_bytes(folder: Path) -> int:
    content = (folder / "model.safetensors").read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


def documented() -> list[str]:
    """The rows of the table in the docs."""
    table = DOCS.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()
    return table.removeprefix(HEAD).strip().splitlines()
