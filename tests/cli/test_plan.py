"""halfbyte plan: from a configuration alone, and right where it can be measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from killed import write_tiny_tasks
from line import write_recipe
from own_task import ORDERS, write_orders
from training import write_training

from halfbyte.main import main

CONFIGS = Path(__file__).parents[1] / "public_configs"
_MEASURED = """
import sys
import torch
from halfbyte.eval.memory import DevicePeak
from halfbyte.main import main

watched = DevicePeak(torch.device("cpu"))
assert main(sys.argv[1:]) == 0
print(watched.bytes())
"""
STAGES = {"calibration", "evaluation_baseline", "evaluation_folded", "evaluation_packed"}


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--quiet", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def recipe(tmp_path: Path, tiny_model_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the tiny model, on two of the tiny tasks."""
    from halfbyte.eval import evaluate as evaluating
    from halfbyte.eval import resolve

    assert not cache.exists()
    write_tiny_tasks(tmp_path / "tasks")
    for module in (resolve, evaluating):
        monkeypatch.setattr(module, "TASKS", tmp_path / "tasks")
    monkeypatch.setattr(resolve, "task_manager", resolve.task_manager.__wrapped__)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: results.update(lm_eval_version="test"))
    monkeypatch.chdir(tmp_path)
    tasks = [{"task": "tiny_choice"}, {"task": "tiny_generate", "limit": 4}]
    return write_recipe(tmp_path / "recipe", tiny_model_folder, evaluate={"tasks": tasks}, gate={"policy": "release"})


def test_a_folder_with_a_configuration_and_a_tokenizer_is_enough(
    recipe: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = plan(capsys, str(recipe), "--device", "cpu")
    for path in tiny_model_folder.glob("*.safetensors"):
        path.unlink()
    found = plan(capsys, str(recipe), "--device", "cpu")
    for one in (whole, found):
        one.pop("process_bytes"), one.pop("peak_memory_bytes")
    assert found == whole
    assert found["tokens"]["tiny_choice"]["source"] == "counted with the model's tokenizer"
    assert found["tokens"]["tiny_choice"]["questions"] == 24
    assert found["tokens"]["tiny_generate"]["generated"] > 0
    assert set(found["hours"].values()) == {None}
    assert {row["task"] for row in found["power"]} == {"tiny_choice", "tiny_generate"}


def test_a_metric_of_ones_own_is_planned_within_its_bounds_or_said_to_have_none(
    tmp_path: Path, tiny_model_folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not cache.exists()
    own = {"include_path": str(write_orders(tmp_path / "own")), "tasks": [{"task": "orders"}]}
    policy = {"name": "ours", "description": "Ours.", "release_evidence": False, "margins": {"worth": 0.4}}
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(policy), encoding="utf-8")
    made = write_recipe(tmp_path / "r", tiny_model_folder, evaluate=own, gate={"policy": str(tmp_path / "ours.yaml")})
    asked = [str(made), "--device", "cpu"]
    found = plan(capsys, *asked)
    assert found["power"] == []
    assert "its metrics differ (worth, distinct): name the one that decides" in found["power_notes"]["orders"]
    asked += ["--set", "evaluate.tasks.0.metric=worth"]
    found = plan(capsys, *asked)
    assert "the bounds of worth are not known; say them in the policy" in found["power_notes"]["orders"]
    assert main(["plan", *asked, "--quiet"]) == 0
    assert "no power of orders: the bounds of worth are not known" in capsys.readouterr().out
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(policy | {"bounds": {"worth": [0, 2]}}), encoding="utf-8")
    found = plan(capsys, *asked)
    assert found["power_notes"] == {}
    assert {(row["metric"], *row["bounds"], row["questions"]) for row in found["power"]} == {("worth", 0, 2, ORDERS)}
    assert main(["plan", *asked, "--quiet"]) == 0
    assert "A question of orders/worth is worth 0 to 2" in " ".join(capsys.readouterr().out.split())


def test_the_size_is_that_of_the_checkpoint_to_the_byte(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from halfbyte.quant.checkpoint import Tensors

    found = plan(capsys, str(recipe), "--device", "cpu")
    assert main(["quantize", str(recipe), "--device", "cpu", "--quiet", "--output", "out"]) == 0
    with Tensors(Path("out/checkpoint")) as tensors:
        size = sum(tensors[name].numel() * tensors[name].element_size() for name in tensors)
    assert found["checkpoint_bytes"] == size


def test_stated_speeds_give_hours_and_say_that_they_are_stated(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, str(recipe), "--device", "cpu", "--throughput", "scored=10,generated=2,calibrated=5")
    tokens = found["tokens"]
    seconds = sum(task["prompts"] for task in tokens.values()) / 10 + tokens["tiny_generate"]["generated"] / 2
    assert found["hours"]["evaluation_baseline"] == pytest.approx(seconds / 3600)
    assert found["hours"]["total"] > 2 * found["hours"]["evaluation_baseline"]
    assert found["throughput"]["scored"]["source"] == "stated by --throughput"
    assert found["hours_at_most"] == ["evaluation_baseline", "evaluation_candidate"]
    assert "how much longer folded weights take is not known" in found["hours_notes"]["evaluation_candidate"]
    scored = ["--measure", "--set", "evaluate.tasks=[{task: tiny_choice}]"]
    measured = plan(capsys, str(recipe), "--device", "cpu", *scored)
    assert measured["hours"]["evaluation_candidate"] >= measured["hours"]["evaluation_baseline"]
    assert "evaluation_candidate" not in measured["hours_notes"]


@pytest.mark.slow
def test_the_published_size_of_llama_3_3_70b_is_met_from_its_configuration(
    capsys: pytest.CaptureFixture[str],
    cache: Path,  # noqa: ARG001
) -> None:
    model = CONFIGS / "Llama-3.3-70B-Instruct"
    found = plan(capsys, "llama-3.3-70b-nvfp4", "--device", "h200", "--set", f"model.id={model}")
    assert found["checkpoint_bytes"] == pytest.approx(43.8e9, rel=0.03)
    memory = found["peak_memory_bytes"]
    assert memory.keys() == STAGES
    assert memory["evaluation_packed"] < memory["evaluation_folded"]
    assert memory["calibration"] > 2 * found["weights"]
    assert found["device"] == "H200"
    assert found["tokens"]["mmlu"]["source"].startswith("stated: counted with SmolLM2-135M-Instruct")
    assert all(rate["source"].startswith("reports/measured/") for rate in found["throughput"].values())
    assert found["hours"]["total"] > 0


def test_what_a_person_reads_names_what_does_not_fit_and_what_is_not_known(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = CONFIGS / "Llama-3.1-8B-Instruct"
    assert main(["plan", str(recipe), "--device", "RTX 5090", "--set", f"model.id={model}", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "RTX 5090, which has 34.2 GB" in printed
    assert "not known: no speed" in printed
    assert "the model's tokenizer is not here" in printed


def test_a_training_is_part_of_the_plan(
    tmp_path: Path, tiny_model_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert not cache.exists()
    monkeypatch.chdir(tmp_path)
    path = write_training(tmp_path / "recipe", tiny_model_folder)
    found = plan(capsys, str(path), "--device", "cpu", "--throughput", "trained=100,calibrated=100,scored=100")
    training = found["training"]
    assert found["peak_memory_bytes"]["training"] == training["memory"]["total"] + found["process_bytes"]
    assert found["hours"]["training"] == pytest.approx(training["tokens"] / 100 / 3600)
    assert found["hours"]["total"] == pytest.approx(sum(v for k, v in found["hours"].items() if k != "total"))
    assert found["peak_memory_bytes"]["fidelity"] > 0


def test_what_a_configuration_leaves_to_defaults_is_said(recipe: Path, tmp_path: Path, capsys: Any) -> None:
    from tiny import make_model

    make_model("llama").config.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    asked = [str(recipe), "--device", "cpu", "--set", "model.id=model"]
    assert plan(capsys, *asked)["assumed"] == {}
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["vocab_size"]
    path.write_text(json.dumps(content), encoding="utf-8")
    assert plan(capsys, *asked)["assumed"] == {"vocab_size": 32000}
    assert main(["plan", *asked, "--quiet"]) == 0
    assert "assumed      vocab_size 32000: config.json does not say it" in capsys.readouterr().out
    for wrong in ({"vocab_size": 0, "pad_token_id": 0}, {"dtype": "float7"}):
        path.write_text(json.dumps({**content, **wrong}), encoding="utf-8")
        assert main(["plan", *asked, "--quiet"]) == 2
        assert "transformers cannot open" in capsys.readouterr().err


def test_a_model_of_experts_is_planned_from_its_configuration(
    recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tiny import make_model

    make_model("qwen3_moe").config.save_pretrained(tmp_path / "moe")
    found = plan(capsys, str(recipe), "--device", "cpu", "--set", "model.id=moe")
    assert all(found["peak_memory_bytes"].values())
    assert "tokenizer is not here" in found["tokens"]["tiny_choice"]["source"]


def test_a_pipeline_is_planned_from_its_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers")
    from flux_recipes import PROMPTS, tiny_recipe
    from tiny_flux import save_tiny_flux

    from halfbyte.recipes.find import resolved_yaml

    model, prompts, path = save_tiny_flux(tmp_path / "model"), tmp_path / "prompts.txt", tmp_path / "flux.yaml"
    prompts.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    path.write_text(resolved_yaml(tiny_recipe("flux1-dev-fp8", model, prompts)), encoding="utf-8")
    whole = plan(capsys, str(path), "--device", "cpu")
    for file in model.rglob("*.safetensors"):
        file.unlink()
    found = plan(capsys, str(path), "--device", "cpu")
    assert found["peak_memory_bytes"] == whole["peak_memory_bytes"]
    assert found["peak_memory_bytes"].keys() >= STAGES
    assert found["checkpoint_bytes"] == pytest.approx(whole["checkpoint_bytes"], rel=0.2)  # small files beside weights
    assert found["images"] == whole["images"] > 0
    assert set(found["hours"].values()) == {None}
    said = plan(capsys, str(path), "--device", "cpu", "--throughput", "drawn=10")
    hours, tokens = said["hours"], 2 * (64 + 16)  # two steps of 8 x 8 patches and 16 tokens of a prompt
    assert hours["evaluation_baseline"] == pytest.approx(found["images"] * tokens / 10 / 3600)
    assert hours["calibration"] == pytest.approx(len(PROMPTS) * tokens / 10 / 3600)
    assert hours["total"] == pytest.approx(2 * hours["evaluation_baseline"] + hours["calibration"])
    assert "how much longer" in said["hours_notes"]["evaluation_candidate"]
    measured = plan(capsys, str(path), "--device", "h200")
    assert measured["hours"]["evaluation_candidate"] > 1.5 * measured["hours"]["evaluation_baseline"] > 0
    assert measured["throughput"]["drawn"]["source"].startswith("reports/measured/")
    assert set(measured["hours_at_most"]) == {"calibration", "evaluation_baseline", "evaluation_candidate"}
    assert main(["plan", str(path), "--device", "cpu", "--measure", "--quiet"]) == 2
    assert "--throughput drawn=N" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "H20"], "unknown device 'H20'"),
        (["--device", "H200", "--measure"], "H200 is not on this machine"),
        (["--throughput", "fast"], "unknown kind of throughput 'fast'"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: list[str], said: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(recipe), *arguments, "--quiet"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_hours_from_a_warm_up_are_those_of_the_evaluation(
    recipe: Path, tmp_path: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one process, on a model large enough for its passes to take longer than all around them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from halfbyte.eval.evaluate import evaluate_task
    from halfbyte.quant.load import load_as_it_is
    from halfbyte.recipes.find import load_recipe

    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = LlamaConfig(**shape, vocab_size=384, max_position_embeddings=512, bos_token_id=0, eos_token_id=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "larger")
    tiny_tokenizer.save_pretrained(tmp_path / "larger")
    override = ["--set", "model={id: larger, dtype: float32}", "--set", "evaluate.tasks=[{task: tiny_choice}]"]
    loaded = load_as_it_is(str(tmp_path / "larger"), device="cpu")
    settings = load_recipe(str(recipe), override[1::2]).evaluate
    ratios = []
    for attempt in range(3):  # other work on the machine can spoil one
        found = plan(capsys, str(recipe), "--device", "cpu", "--measure", *override)
        output = tmp_path / f"record-{attempt}"
        record = evaluate_task(loaded.model, loaded.tokenizer, settings.tasks[0], settings, loaded.summary, output)
        assert record.speed is not None
        spent = record.speed.distinct_tokens / (record.speed.scored_per_second or 0)
        ratios.append(3600 * found["hours"]["evaluation_baseline"] / spent)
        if abs(ratios[-1] - 1) < 0.3:
            return
    pytest.fail(f"predicted over measured: {ratios}")


@pytest.mark.real
@pytest.mark.slow
def test_smollm2_is_as_large_and_takes_as_much_as_its_plan_says(
    smollm2: Path, data_root: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The size from the public configuration; the memory of processes of their own."""
    assert not cache.exists()
    texts = tmp_path / "texts.txt"
    texts.write_text("The cat sees the moon.\n" * 8, encoding="utf-8")
    content = {
        "base": "smollm2-135m-nvfp4",
        "name": "mine",
        "model": {"id": str(smollm2)},
        "quantize": {"calibration": {"sources": [{"dataset": str(texts), "samples": 8}]}},
        "evaluate": {"tasks": [{"task": "arc_easy", "limit": 20}], "fidelity": None},
    }
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    configured = f"model.id={CONFIGS / 'SmolLM2-135M-Instruct'}"
    size = plan(capsys, str(path), "--device", "cpu", "--set", configured)["checkpoint_bytes"]
    common = ["--device", "cpu", "--data-root", str(data_root), "--quiet"]
    found = json.loads(halfbyte("plan", str(path), *common, "--json"))
    quantize = [sys.executable, "-c", _MEASURED, "quantize", str(path), *common, "--output", str(tmp_path / "run")]
    taken = int(subprocess.run(quantize, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert found["peak_memory_bytes"]["calibration"] == pytest.approx(taken, rel=0.10)
    (file,) = (tmp_path / "run" / "checkpoint").glob("*.safetensors")
    with file.open("rb") as content_of:
        header = int.from_bytes(content_of.read(8), "little")
    assert found["checkpoint_bytes"] == size == file.stat().st_size - header - 8
    for stage, model, weights in (
        ("evaluation_baseline", smollm2, "folded"),
        ("evaluation_folded", tmp_path / "run", "folded"),
        ("evaluation_packed", tmp_path / "run", "packed"),
    ):
        asked = ("--tasks", "arc_easy", "--limit", "20", "--weights", weights, "--output", str(tmp_path / stage))
        (record,) = json.loads(halfbyte("eval", str(model), *asked, *common, "--json"))
        assert found["peak_memory_bytes"][stage] == pytest.approx(record["memory_bytes"], rel=0.10), stage


def halfbyte(*arguments: str) -> str:
    """What a process of its own prints."""
    return subprocess.run(
        [sys.executable, "-m", "halfbyte", *arguments], capture_output=True, text=True, check=True
    ).stdout
