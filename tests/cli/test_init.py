"""`halfbyte init` writes a recipe that can be run as it is, and says why where a model can have none."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_model
from tiny_flux import save_tiny_flux

from halfbyte import starter
from halfbyte.main import main
from halfbyte.recipes.find import load_recipe


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def saved(folder: Path, model: Any, tokenizer: Any | None) -> Path:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def runs(recipe: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a dry run of it prints."""
    assert main(["recipes", str(recipe), "--resolved"]) == 0
    assert main(["run", str(recipe), "--dry-run"]) == 0
    return capsys.readouterr().out


def test_the_recipe_of_a_chat_model_calibrates_in_its_template_and_runs(
    here: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tiny_model_folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in here.iterdir()) == ["tiny-llama-fp8-calibration.jsonl", "tiny-llama-fp8.yaml"]
    recipe = load_recipe(found["recipe"])
    assert recipe.name == "tiny-llama-fp8"
    (source,) = recipe.quantize.calibration.sources
    lines = [json.loads(line)["text"] for line in Path(source.dataset).read_text(encoding="utf-8").splitlines()]
    assert source.samples == len(lines) > 32
    assert all(line.startswith("<|user|>Go on from here: ") and "<|assistant|>" in line for line in lines)
    assert recipe.gate.policy == "smoke"  # no GPU
    text = (here / "tiny-llama-fp8.yaml").read_text(encoding="utf-8")
    assert text.startswith("# halfbyte run tiny-llama-fp8.yaml --dry-run")
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "FP8" in runs(here / "tiny-llama-fp8.yaml", capsys)


def test_a_recipe_in_another_folder_finds_its_model_from_everywhere(
    here: Path, tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    relative = os.path.relpath(tiny_model_folder, here)
    (tmp_path / "other").mkdir()
    assert main(["init", relative, "--output", str(tmp_path / "other" / "mine.yaml")]) == 0
    monkeypatch.chdir(tmp_path / "other")
    assert "q_proj" in runs(Path("mine.yaml"), capsys)
    assert list(here.iterdir()) == []


def test_nothing_is_replaced(here: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "tiny-llama-fp8-calibration.jsonl").write_text("mine")
    assert main(["init", str(tiny_model_folder)]) == 2
    assert "calibration.jsonl is there already" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["tiny-llama-fp8-calibration.jsonl"]
    (here / "mine.yaml").write_text("mine")
    assert main(["init", str(tiny_model_folder), "--output", "mine.yaml"]) == 2
    assert (here / "mine.yaml").read_text() == "mine"
    assert main(["init", str(tiny_model_folder), "--output", "mine.txt"]) == 2
    assert "ends in .yaml" in capsys.readouterr().err


def test_a_link_to_nothing_is_not_replaced_and_a_name_too_long_is_refused(
    here: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "link.yaml").symlink_to(here / "nowhere" / "recipe.yaml")
    assert main(["init", str(tiny_model_folder), "--output", "link.yaml"]) == 2
    assert "link.yaml is there already" in capsys.readouterr().err
    assert main(["init", str(tiny_model_folder), "--output", f"{'a' * 300}.yaml"]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_a_model_without_a_template_calibrates_on_plain_texts(
    here: Path, tokenizer_factory: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain = tokenizer_factory()
    plain.chat_template = None
    folder = saved(tmp_path / "Our Model (bést)", make_model("qwen3_moe"), plain)
    assert main(["init", str(folder)]) == 0
    (path,) = here.iterdir()
    assert path.name == "our-model-b-st-fp8.yaml"
    assert load_recipe(str(path)).quantize.calibration.sources[0].dataset.endswith("demo-calibration.txt")
    assert "gate_proj x8" in runs(path, capsys)  # of two layers with four experts


@pytest.mark.parametrize("name", ["a ${b} c", "x: y, [z]", "#1", "true", "1e3", "..a"])
def test_odd_names_of_folders_are_quoted(
    here: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    shutil.copytree(tiny_model_folder, here / name)
    assert main(["init", name, "--output", "mine.yaml"]) == 0, capsys.readouterr().err
    assert load_recipe("mine.yaml").model.id in (name, str(here / name))


@pytest.mark.usefixtures("here")
def test_layers_that_do_not_fit_are_kept_and_the_reason_is_there(
    tmp_path: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr(starter, "_format", lambda: ("nvfp4", "it was wanted"))
    shape = {"hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder = saved(tmp_path / "odd", LlamaForCausalLM(LlamaConfig(**shape, vocab_size=384)), tiny_tokenizer)
    assert main(["init", str(folder)]) == 0
    recipe = load_recipe("odd-nvfp4.yaml")
    assert recipe.quantize.preset == "NVFP4_DEFAULT_CFG"
    assert recipe.quantize.keep == ["model.layers.*.mlp.down_proj"]
    assert "100 inputs, which is no multiple" in " ".join(Path("odd-nvfp4.yaml").read_text().split())
    assert "NVFP4" in runs(Path("odd-nvfp4.yaml"), capsys)


def test_the_format_and_the_tasks_follow_the_gpu(monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path) -> None:
    looked = starter.look_at(str(tiny_model_folder))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    for capability, wanted in (((8, 9), "fp8"), ((9, 0), "fp8"), ((10, 0), "nvfp4"), ((12, 0), "nvfp4")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert starter._format()[0] == wanted

    def tasks(**changes: Any) -> list[str]:
        from dataclasses import replace

        return [one["task"] for one in starter.tasks_for(replace(looked, **{"gpu": True, "context": 8192, **changes}))]

    assert tasks() == ["arc_easy", "mmlu_continuation"]
    assert tasks(weights=8_000_000_000) == ["mmlu", "gsm8k"]
    assert tasks(weights=8_000_000_000, context=None) == ["mmlu", "gsm8k"]
    assert tasks(weights=8_000_000_000, context=2500) == ["gsm8k"]
    assert tasks(context=512) == ["arc_easy"]
    assert tasks(context=64) == tasks(gpu=False) == ["smoke"]


def refused(folder: Path | str, capsys: pytest.CaptureFixture[str]) -> str:
    before = sorted(Path.cwd().iterdir())
    assert main(["init", str(folder)]) == 2
    assert sorted(Path.cwd().iterdir()) == before
    return capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_what_cannot_be_quantized_is_refused_with_the_reason(
    tmp_path: Path, tiny_model_folder: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        T5Config,
        T5ForConditionalGeneration,
    )

    config = tiny_model_folder / "config.json"
    content = json.loads(config.read_text())
    assert "does not exist" in refused(tmp_path / "nothing", capsys)
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused(tmp_path / "empty", capsys)
    bert = BertConfig(vocab_size=384, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    assert "no causal language model" in refused(
        saved(tmp_path / "bert", BertForMaskedLM(bert), tiny_tokenizer), capsys
    )
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4))
    assert "transformers cannot open" in refused(saved(tmp_path / "t5", t5, tiny_tokenizer), capsys)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=384, n_embd=32, n_layer=1, n_head=2))
    assert "cannot be quantized" in refused(saved(tmp_path / "gpt2", gpt2, tiny_tokenizer), capsys)
    assert "tokenizer" in refused(saved(tmp_path / "mute", make_model("llama"), None), capsys)

    def changed(**changes: Any) -> str:
        config.write_text(json.dumps(content | changes))
        return refused(tiny_model_folder, capsys)

    assert "quantized already" in changed(quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    assert "quantized already, by gptq" in changed(quantization_config={"quant_method": "gptq", "bits": 4})
    assert "transformers cannot open" in changed(model_type="ours", auto_map={"AutoConfig": "ours.Config"})
    assert "unknown dtype" in changed(dtype="float8_e4m3fn", torch_dtype="float8_e4m3fn")
    assert "transformers cannot open" in changed(hidden_size="wide")
    config.write_text("{")
    assert "config.json" in refused(tiny_model_folder, capsys)
    config.write_text(json.dumps(content))
    template = tiny_model_folder / "chat_template.jinja"
    template.write_text("{{ raise_exception('only for cats') }}")
    assert "chat template fails on a question and its answer: only for cats" in refused(tiny_model_folder, capsys)


def test_a_pipeline_gets_a_recipe_over_a_shipped_one(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_flux(tmp_path / "tiny-flux")
    assert main(["init", str(tmp_path / "tiny-flux")]) == 0
    recipe = load_recipe("tiny-flux-fp8.yaml")
    assert recipe.model.kind == "flux"
    assert recipe.facts is None
    assert "tiny-flux-fp8" in runs(here / "tiny-flux-fp8.yaml", capsys)


def test_a_hub_model_out_of_reach_is_refused_in_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shown = refused("nobody/has-this-model", capsys)
    assert "the hub cannot be reached" in shown
    assert list(here.iterdir()) == []
