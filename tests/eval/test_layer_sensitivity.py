"""Layer sensitivity is the divergence of the baseline with exactly those layers of the checkpoint, and resumes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import export, spec

from halfbyte.eval import layer_sensitivity as module
from halfbyte.eval.fidelity import compare_window, read_text, windows_of
from halfbyte.eval.layer_sensitivity import layer_sensitivity, quantized_groups
from halfbyte.quant.load import Loaded, load_as_it_is
from halfbyte.recipes.schema import FidelitySpec, TextSource
from halfbyte.records.errors import UserError
from halfbyte.records.layer_sensitivity import load_sensitivity

TEXT = "the cat sees the dog and the sun is hot and the moon is not one two three four five red fish " * 4
BLOCKS = ["model.layers.0", "model.layers.1"]


def both(family: str, block: Any, tokenizer: Any, folder: Path) -> tuple[Loaded, Loaded]:
    checkpoint = export(family, block, tokenizer, folder)
    return load_as_it_is(str(folder / "source"), device="cpu"), load_as_it_is(str(checkpoint), device="cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> tuple[Loaded, Loaded]:
    return both("llama", spec("nvfp4"), tiny_tokenizer, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def text(tmp_path: Path) -> FidelitySpec:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return FidelitySpec(source=TextSource(dataset=str(tmp_path / "text.txt")), window=32, max_tokens=64)


def test_a_group_is_measured_with_its_own_layers_quantized_and_no_other(
    llama: tuple[Loaded, Loaded], text: FidelitySpec, tmp_path: Path
) -> None:
    baseline, candidate = llama
    record = layer_sensitivity(baseline, candidate, text, tmp_path / "out", by="kind")
    assert [group.group for group in record.groups] == [
        f"model.layers.*.{name}" for name in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )
    ]  # fmt: skip
    for group in record.groups:
        mixed = copy.deepcopy(baseline.model)
        for name in group.layers:
            mixed.set_submodule(name, candidate.model.get_submodule(name))
        windows = windows_of(baseline.tokenizer, read_text(text), text)
        rows = [compare_window(baseline.model, mixed, ids) for ids in windows]
        assert group.kl == pytest.approx(sum(row.kl for row in rows) / sum(row.tokens for row in rows), rel=1e-9)
        assert group.kl > 0
    assert record.tokens == sum(len(ids) - 1 for ids in windows)


def test_all_layers_at_once_are_the_candidate_and_the_baseline_is_left_as_it_was(
    llama: tuple[Loaded, Loaded], text: FidelitySpec, tmp_path: Path
) -> None:
    baseline, candidate = llama
    before = dict(baseline.model.named_modules())
    record = layer_sensitivity(baseline, candidate, text, tmp_path)
    windows = windows_of(baseline.tokenizer, read_text(text), text)
    rows = [compare_window(baseline.model, candidate.model, ids) for ids in windows]
    assert record.whole.kl == pytest.approx(sum(row.kl for row in rows) / record.tokens, rel=1e-12)
    assert [group.group for group in record.groups] == BLOCKS
    assert sum(len(group.layers) for group in record.groups) == len(record.whole.layers) == 14
    assert {name: id(one) for name, one in baseline.model.named_modules()} == {n: id(m) for n, m in before.items()}
    assert record.worst_first()[0].kl == max(group.kl for group in record.groups)
    assert load_sensitivity(tmp_path, "block") == record


def test_what_is_done_is_not_computed_again_and_what_was_cut_short_goes_on(
    llama: tuple[Loaded, Loaded], text: FidelitySpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = layer_sensitivity(*llama, text, tmp_path / "whole", by="block")
    calls, real = 0, module.compare_window

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(module, "compare_window", counted)
    with pytest.raises(KeyboardInterrupt):
        layer_sensitivity(*llama, text, tmp_path / "cut", by="block")
    resumed = layer_sensitivity(*llama, text, tmp_path / "cut", by="block")
    assert calls == 2 * 3 + 1  # two windows, the whole and two blocks; the one that was cut short twice
    assert (resumed.groups, resumed.whole) == (whole.groups, whole.whole)
    assert layer_sensitivity(*llama, text, tmp_path / "cut", by="block") == resumed
    assert calls == 7
    assert not list((tmp_path / "cut").glob("journal*"))
    other = text.model_copy(update={"window": 16})
    with pytest.raises(UserError, match="other models, another text"):
        layer_sensitivity(*llama, other, tmp_path / "cut", by="block")
    assert layer_sensitivity(*llama, other, tmp_path / "cut", by="block", replace=True).window == 16


def test_smoothing_folded_into_a_norm_is_measured_in_blocks_alone(
    tmp_path: Path, tiny_tokenizer: Any, text: FidelitySpec
) -> None:
    baseline, candidate = both("llama", spec("nvfp4_awq_lite"), tiny_tokenizer, tmp_path)
    with pytest.raises(UserError, match="norm") as caught:
        quantized_groups(baseline.model, candidate.model, "layer")
    assert "by='block'" in (caught.value.hint or "")
    record = layer_sensitivity(baseline, candidate, text, tmp_path, by="block")
    assert [group.group for group in record.groups] == BLOCKS


def test_experts_and_a_quantized_kv_cache_are_found(tmp_path: Path, tiny_tokenizer: Any) -> None:
    experts, fp8 = both("qwen3_moe", spec("fp8"), tiny_tokenizer, tmp_path / "experts")
    found = quantized_groups(experts.model, fp8.model, "layer")
    assert "model.layers.0.mlp.experts" in found
    assert not any("gate_up_proj" in name for name in found)
    plain, cached = both("llama", spec("nvfp4", "fp8"), tiny_tokenizer, tmp_path / "cache")
    assert len(quantized_groups(plain.model, cached.model, "layer")) == 14
    assert list(quantized_groups(plain.model, cached.model, "block")) == BLOCKS


def test_models_that_do_not_belong_together_are_refused(llama: tuple[Loaded, Loaded], llama_factory: Any) -> None:
    baseline, candidate = llama
    with pytest.raises(UserError, match="no layer of the candidate is quantized"):
        quantized_groups(baseline.model, baseline.model, "block")
    other = copy.deepcopy(baseline.model)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    with pytest.raises(UserError, match=r"model\.norm\.weight of the candidate differs"):
        quantized_groups(other, candidate.model, "block")
    with pytest.raises(UserError, match="differs from the baseline's"):
        quantized_groups(llama_factory(), candidate.model, "block")
