"""`halfbyte eval`: a baseline is computed once, whoever asks; what it asks can be planned, shown and repeated."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from killed import evaluate, write_tiny_tasks

from halfbyte.main import main
from halfbyte.records.noise import load_noise
from halfbyte.records.record import load_record, read_samples, verify_content
from halfbyte.sides import ASIDE, bring_forward, identify

HEAVY = ("torch", "transformers", "lm_eval", "datasets", "modelopt", "scipy")

Eval = Callable[..., int]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, tiny_model_folder: Path) -> Eval:
    """Runs `halfbyte eval` on the tiny model with the tiny tasks."""
    from halfbyte.eval import evaluate as evaluating
    from halfbyte.eval import resolve

    assert not cache.exists()
    tasks = tmp_path / "tasks"
    write_tiny_tasks(tasks)
    for module in (resolve, evaluating):
        monkeypatch.setattr(module, "TASKS", tasks)
    monkeypatch.setattr(resolve, "task_manager", resolve.task_manager.__wrapped__)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: results.update(lm_eval_version="test"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, tasks: str = "tiny_choice", quiet: bool = True) -> int:
        command = ["eval", str(tiny_model_folder), "--tasks", tasks, *map(str, arguments)]
        return main([*command, "--quiet"] if quiet else command)

    return run


def no_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.quant.load.load_as_it_is", lambda *_, **__: pytest.fail("the model was loaded"))


def test_a_baseline_is_not_computed_again_for_another_folder(tiny: Eval, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny("--output", "one", tasks="tiny_choice,tiny_generate") == 0
    no_computing(monkeypatch)
    assert tiny("--output", "two", tasks="tiny_choice,tiny_generate") == 0
    assert tiny("--output", "two", tasks="tiny_choice,tiny_generate") == 0
    for task in ("tiny_choice", "tiny_generate"):
        assert load_record(Path("one") / task) == load_record(Path("two") / task)


def test_a_second_evaluation_imports_nothing_heavy_and_takes_no_time(
    tiny: Eval, tiny_model_folder: Path, cache: Path
) -> None:
    assert tiny("--output", "one", tasks="smoke") == 2  # the tiny tasks are in the place of ours
    assert tiny("--output", "one") == 0
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from halfbyte.eval import evaluate\nfrom pathlib import Path\n"
        "evaluate.TASKS = Path('tasks').resolve()\n"
        "from halfbyte.main import main\n"
        f"command = ['eval', {str(tiny_model_folder)!r}, '--tasks', 'tiny_choice', '--output', 'two']\n"
        "assert main(command) == 0\n"
        f"print(sorted(set(sys.modules) & set({HEAVY!r})), time.perf_counter() - start)"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if not Path("/dev/nvidiactl").exists():
        heavy, _, seconds = done.stdout.splitlines()[-1].rpartition(" ")
        assert heavy == "[]"
        assert float(seconds) < 5
    assert load_record(Path("two/tiny_choice")) == load_record(Path("one/tiny_choice"))
    assert cache.is_dir()


def test_a_cached_record_that_has_changed_is_computed_again(
    tiny: Eval, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny("--output", "one") == 0
    (samples,) = cache.glob("evaluations/*/*/samples_*.jsonl")
    samples.write_text(samples.read_text(encoding="utf-8").replace('"acc": 0.0', '"acc": 1.0'), encoding="utf-8")
    capsys.readouterr()
    assert tiny("--output", "two") == 0
    assert load_record(Path("two/tiny_choice")).metrics == load_record(Path("one/tiny_choice")).metrics
    assert load_record(Path("two/tiny_choice")).seal != load_record(Path("one/tiny_choice")).seal


def test_what_is_left_of_a_cached_record_is_computed_again(tiny: Eval, cache: Path) -> None:
    assert tiny("--output", "one") == 0
    (record,) = cache.glob("evaluations/*/*/record.json")
    record.unlink()
    assert tiny("--output", "two") == 0
    assert record.is_file()


def test_of_two_processes_one_computes_and_the_other_waits(tmp_path: Path, tiny_model_folder: Path) -> None:
    write_tiny_tasks(tmp_path / "tasks")
    cache = tmp_path / "shared-cache"
    codes: dict[str, int] = {}

    def run(name: str) -> None:
        command = ["eval", str(tiny_model_folder), "--tasks", "tiny_choice,tiny_generate", "--quiet"]
        codes[name] = evaluate([*command, "--output", str(tmp_path / name)], tmp_path / "tasks", cache, None)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == {"one": 0, "two": 0}
    for task in ("tiny_choice", "tiny_generate"):
        assert len(list(cache.glob(f"evaluations/*/{task}@*/record.json"))) == 1
        one, two = (load_record(tmp_path / name / task) for name in ("one", "two"))
        assert one == two  # with its time of day and its seconds: it was computed once
        assert len(list(read_samples(tmp_path / "one" / task, one))) in (24, 48)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_a_model_is_identified_from_its_files_as_by_loading_it(
    tiny_model_folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    from halfbyte import sides
    from halfbyte.quant.load import load_as_it_is

    assert not cache.exists()
    quick = identify(str(tiny_model_folder), dtype=dtype, device="cpu")
    monkeypatch.setattr(sides, "_from_files", lambda *_: None)
    assert identify(str(tiny_model_folder), dtype=dtype, device="cpu") == quick
    loaded = load_as_it_is(str(tiny_model_folder), dtype=dtype, device="cpu")
    assert (quick.digest, quick.dtype, quick.device) == (loaded.summary.digest, loaded.dtype, loaded.model.device.type)
    assert not quick.quantized


def test_a_plan_counts_what_the_evaluation_then_takes(tiny: Eval, capsys: pytest.CaptureFixture[str]) -> None:
    every = "tiny_choice,tiny_generate,tiny_rolling"
    assert tiny("--dry-run", "--json", "--limit", 20, tasks=every) == 0
    plans = {plan["task"]: plan for plan in json.loads(capsys.readouterr().out)}
    assert not Path("out").exists()
    assert tiny("--output", "out", "--limit", 20, tasks=every) == 0
    for task, plan in plans.items():
        record = load_record(Path("out") / task)
        generated = sum(
            one.tokens or 0
            for sample in read_samples(Path("out") / task, record)
            if sample.filter in ("none", "number")
            for one in sample.generated or ()
        )
        assert record.speed is not None
        assert plan["questions"] == 20
        assert plan["prompt_tokens"] == record.tokens - generated
        assert plan["distinct_tokens"] == record.speed.distinct_tokens
        assert plan["texts"] == (record.health.samples or 0)
        assert generated <= plan["most_generated"]
    assert plans["tiny_choice"]["distinct_tokens"] < plans["tiny_choice"]["prompt_tokens"]
    assert plans["tiny_generate"]["most_generated"] == 20 * 6
    capsys.readouterr()
    assert tiny("--dry-run", "--limit", 20, tasks=every) == 0
    table = capsys.readouterr().out
    assert "tiny_rolling" in table
    assert "all" in table


def test_a_plan_says_how_many_prompts_do_not_fit(tiny: Eval, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny("--dry-run", "--max-length", 12) == 0
    assert "--allow-truncated" in capsys.readouterr().out
    assert tiny("--output", "out", "--max-length", 12) == 2
    assert tiny("--output", "out", "--max-length", 12, "--allow-truncated") == 0
    assert load_record(Path("out/tiny_choice")).health.truncated > 0
    assert tiny("--output", "out", "--max-length", 12) == 2  # what was allowed once is not allowed for ever


def test_prompts_and_answers_are_shown_before_and_after_an_evaluation(
    tiny: Eval, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiny("--show", 2, "--apply-chat-template", tasks="tiny_choice,tiny_generate") == 0
    before = capsys.readouterr().out
    assert before.count("== tiny_choice, question") == before.count("== tiny_generate, question") == 2
    assert "⟦<|user|>⟧question" in before.replace("\u27e6", "⟦").replace("\u27e7", "⟧")
    assert "number extracts: " in before
    assert "BOS at its head: 0" in before
    assert "log-likelihoods" in before
    assert tiny("--output", "out", "--apply-chat-template", tasks="tiny_choice") == 0
    capsys.readouterr()
    no_computing(monkeypatch)
    assert tiny("--show", 2, "--apply-chat-template") == 0
    after = capsys.readouterr().out
    assert after.splitlines()[1:4] == before.splitlines()[1:4]
    assert "(of 24)" in before
    assert "(of 24)" in after


def test_a_damaged_record_is_neither_shown_nor_deleted(
    tiny: Eval, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny("--output", "out") == 0
    shutil.rmtree(cache)
    (samples,) = Path("out/tiny_choice").glob("samples_*.jsonl")
    samples.write_text("{}", encoding="utf-8")
    assert tiny("--show", 1, "--output", "out") == 2
    assert "has changed since it was written" in capsys.readouterr().err
    assert samples.is_file()


def test_a_damaged_record_in_the_output_is_computed_again(
    tiny: Eval, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert tiny("--output", "out") == 0
    record = load_record(Path("out/tiny_choice"))
    (samples,) = Path("out/tiny_choice").glob("samples_*.jsonl")
    for cached in (True, False):
        samples.write_text("{}", encoding="utf-8")
        if not cached:
            shutil.rmtree(cache)
        caplog.clear()
        assert tiny("--output", "out") == 0
        assert caplog.text.count(f"{samples} has changed since it was written; evaluating again") == 1
        assert verify_content(Path("out/tiny_choice")).metrics == record.metrics
        (samples,) = Path("out/tiny_choice").glob("samples_*.jsonl")


def test_what_is_shown_says_what_was_cut(tiny: Eval, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny("--show", 24, "--max-length", 12, "--allow-truncated") == 0
    assert "tokens before this were cut off" in capsys.readouterr().out


def test_a_repetition_leaves_the_noise_floor_beside_the_record(
    tiny: Eval, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny("--output", "out", "--repeat-baseline", tasks="tiny_choice,tiny_generate") == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if "n=24" in line]
    assert shown
    assert all("flipped when asked again: " in line for line in shown)
    for task in ("tiny_choice", "tiny_generate"):
        noise = load_noise(Path("out") / task)
        assert noise is not None
        assert not noise.drawn
        assert {flips.questions for flips in noise.flips} == {24}
        assert noise.second_key != noise.key
        assert len(list(cache.glob(f"evaluations/*/{task}@*/record.json"))) == 2
    assert {path.name for path in Path("out").iterdir()} == {"tiny_choice", "tiny_generate"}


def test_records_of_other_settings_are_put_aside_and_found_again(tmp_path: Path) -> None:
    short, whole = (tmp_path / f"mmlu@{name}" for name in ("short", "whole"))
    other = tmp_path / "gsm8k@short"
    for folder in (short, other):
        folder.mkdir()
        (folder / "record.json").write_text(folder.name, encoding="utf-8")
    bring_forward(whole)
    assert not short.exists()
    whole.mkdir()
    bring_forward(short)
    assert (short / "record.json").read_text(encoding="utf-8") == "mmlu@short"
    assert (tmp_path / ASIDE / "mmlu@whole").is_dir()
    assert other.is_dir()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["cache", "prune"], "nothing says what to prune"),
        (["cache", "prune", "absent"], "unknown entry 'absent'"),
        (["eval", "model", "--tasks", "smoke"], "--output is missing"),
        (["eval", "model", "--tasks", "smoke,smoke", "--output", "out"], "task 'smoke' is named twice"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    assert not cache.exists()
    assert main(arguments) == 2
    assert expected in capsys.readouterr().err


def test_the_cache_is_listed_and_pruned(tiny: Eval, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny("--output", "out") == 0
    capsys.readouterr()
    assert main(["cache"]) == 0
    listed = capsys.readouterr().out
    assert "evaluation " in listed
    assert "tiny_choice" in listed
    assert main(["cache", "prune", "evaluations", "--json"]) == 0
    freed = json.loads(capsys.readouterr().out)
    assert len(freed["pruned"]) == 1
    assert freed["bytes"] > 0
    assert not list(cache.glob("evaluations/*/*"))
    assert main(["cache", "prune", "--older-than", "30"]) == 0
    assert "freed 0.0 kB" in capsys.readouterr().out
