"""A record is whole or absent, goes on after a kill, and holds what lm-eval says."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from halfbyte.eval.evaluate import evaluate_task, settings_key
from halfbyte.eval.resolve import find_manager, load_task
from halfbyte.eval.scorer import PrefixScorer
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.digests import value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.record import EvaluationRecord, ModelSummary, find_records, load_record, read_samples

TINY = TaskSpec(task="tiny_choice", num_fewshot=2)


def settings(**options: Any) -> EvaluateSpec:
    return EvaluateSpec(tasks=[TINY], **{"batch_tokens": 64, **options})


@pytest.fixture
def evaluate(tiny_llama: Any, tiny_tokenizer: Any, summary: ModelSummary, tiny_tasks: Path, tmp_path: Path) -> Any:
    assert tiny_tasks.is_dir()

    def run(spec: TaskSpec = TINY, folder: str = "record", **options: Any) -> tuple[EvaluationRecord, Path]:
        known = {"model": tiny_llama, "tokenizer": tiny_tokenizer, "summary": summary, "settings": settings()}
        replace = options.pop("replace", False)
        given = {**known, **options}
        record = evaluate_task(
            given["model"], given["tokenizer"], spec, given["settings"], given["summary"], tmp_path / folder,
            replace=replace,
        )  # fmt: skip
        return record, tmp_path / folder

    return run


def answers(folder: Path) -> dict[tuple[str, str, int], Any]:
    """What the model said to each question, and what it was worth."""
    record = load_record(folder)
    return {sample.key: (sample.raw["resps"], sample.metrics) for sample in read_samples(folder, record)}


def test_a_record_is_whole_and_is_what_is_returned(evaluate: Any, summary: ModelSummary) -> None:
    record, folder = evaluate()
    assert load_record(folder) == record
    assert find_records(folder.parent) == {"tiny_choice": folder}
    assert record.model == summary
    names = {"record.json", record.results_file, *record.samples_files.values()}
    assert {path.name for path in folder.iterdir()} == names
    assert not folder.with_name("record.partial").exists()
    assert record.primary == ["acc", "none"]
    assert [(metric.metric, metric.questions) for metric in record.metrics] == [("acc", 24), ("acc_norm", 24)]
    assert record.tokens > 24 * 4


def test_the_fingerprint_holds_what_was_asked(evaluate: Any) -> None:
    record, folder = evaluate()
    rows = list(read_samples(folder, record))
    subtask = record.fingerprint.subtasks["tiny_choice"]
    assert [row.doc_id for row in rows] == list(range(24))
    assert subtask.documents == value_digest([row.doc_hash for row in rows])
    assert subtask.prompts == value_digest([row.prompt_hash for row in rows])
    assert subtask.targets == value_digest([row.target_hash for row in rows])
    assert (subtask.version, subtask.num_fewshot, subtask.questions) == ("2.0", 2, 24)
    fingerprint = record.fingerprint
    assert (fingerprint.dtype, fingerprint.max_length, fingerprint.limit) == ("float32", 512, None)
    assert fingerprint.bos_per_prompt == [0]
    assert fingerprint.seeds == {"python": 1234, "numpy": 1234, "torch": 1234, "fewshot": 1234}


def test_other_prompts_give_another_fingerprint(evaluate: Any) -> None:
    def prompts(spec: TaskSpec, name: str, **options: Any) -> str:
        record, _ = evaluate(spec, name, **options)
        return str(record.fingerprint.subtasks["tiny_choice"].prompts)

    plain = prompts(TINY, "plain")
    assert prompts(TaskSpec(task="tiny_choice", num_fewshot=1), "shots") != plain
    assert prompts(TINY, "chat", settings=settings(apply_chat_template=True)) != plain
    assert prompts(TINY, "seed", settings=settings(seed=5)) != plain  # other examples are drawn


def test_answers_are_those_of_lm_eval_alone(evaluate: Any, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    _, folder = evaluate()
    plain = simple_evaluate(
        model=HFLM(pretrained=tiny_llama, tokenizer=tiny_tokenizer, batch_size=1),
        tasks=load_task("tiny_choice", None),
        num_fewshot=2,
        fewshot_random_seed=1234,
        task_manager=find_manager("tiny_choice"),
    )
    ours = answers(folder)
    assert len(plain["samples"]["tiny_choice"]) == len(ours)
    for row in plain["samples"]["tiny_choice"]:
        responses, metrics = ours["tiny_choice", "none", row["doc_id"]]
        for (first,), theirs in zip(responses, row["resps"], strict=True):
            assert float(first[0]) == pytest.approx(theirs[0][0], abs=1e-4)
        assert metrics == {"acc": row["acc"], "acc_norm": row["acc_norm"]}


def test_the_results_file_is_one_for_lm_evals_table(evaluate: Any) -> None:
    from lm_eval.utils import make_table

    record, folder = evaluate(TaskSpec(task="tiny_group", limit=1))  # one question has no standard error
    results = json.loads((folder / record.results_file).read_text(encoding="utf-8"))
    assert "acc" in make_table(results)
    assert "tiny_group" in make_table(results, "groups")
    assert results["results"]["tiny_choice"]["acc_stderr,none"] == "N/A"
    assert set(results) >= {
        "results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples",
        "config", "git_hash", "date", "model_name", "chat_template_sha", "task_hashes", "total_evaluation_time_seconds",
    }  # fmt: skip
    row = json.loads((folder / record.samples_files["tiny_choice"]).read_text(encoding="utf-8").splitlines()[0])
    assert set(row) == {
        "doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash",
        "prompt_hash", "target_hash", "acc", "acc_norm", "asked",
    }  # fmt: skip
    assert row["arguments"]["gen_args_0"]["arg_0"].startswith("question")


def test_a_group_has_its_own_metrics_first(evaluate: Any) -> None:
    record, _ = evaluate(TaskSpec(task="tiny_group", limit=5))
    assert record.metrics[0].subtask == "tiny_group"
    assert record.metrics[0].questions == 10
    assert record.primary == ["acc", "none"]
    assert set(record.fingerprint.subtasks) == {"tiny_choice", "tiny_other"}
    assert record.fingerprint.limit == 5


def test_the_task_itself_comes_before_the_groups_in_it(evaluate: Any, tiny_tasks: Path) -> None:
    nested = """
group: tiny_nested
task:
  - {group: inner, task: [tiny_choice], aggregate_metric_list: [{metric: acc}]}
  - tiny_other
aggregate_metric_list: [{metric: acc}]
"""
    (tiny_tasks / "tiny_nested.yaml").write_text(nested, encoding="utf-8")
    record, _ = evaluate(TaskSpec(task="tiny_nested", limit=3))
    subtasks = list(dict.fromkeys(metric.subtask for metric in record.metrics))
    assert subtasks == ["tiny_nested", "tiny_nested::inner", "tiny_choice", "tiny_other"]
    assert [metric.questions for metric in record.metrics if metric.metric == "acc"] == [6, 3, 3, 3]


def test_generation_is_recorded_with_its_settings_and_health(evaluate: Any) -> None:
    record, folder = evaluate(TaskSpec(task="tiny_generate", gen_kwargs={"max_gen_toks": 4}))
    generation = record.fingerprint.subtasks["tiny_generate"].generation
    assert generation == {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 4, "temperature": 0.0}
    assert record.primary == ["exact_match", "number"]
    rows = [sample for sample in read_samples(folder, record) if sample.filter == "number"]
    assert record.fingerprint.subtasks["tiny_generate"].questions == len(rows) == 24
    assert record.health.unanswered == sum("[invalid]" in sample.raw["filtered_resps"] for sample in rows)
    assert record.health.hit_cap is not None
    assert record.health.empty is not None


def test_a_temperature_makes_a_task_sample(evaluate: Any) -> None:
    warm = TaskSpec(task="tiny_generate", gen_kwargs={"temperature": 0.7})
    record, folder = evaluate(warm, "warm")
    generation = record.fingerprint.subtasks["tiny_generate"].generation
    assert generation is not None
    assert generation["do_sample"] is True
    assert generation["temperature"] == 0.7
    evaluate(warm, "again")
    assert answers(folder.with_name("again")) == answers(folder)


def test_rolling_perplexity_is_recorded_with_its_direction(evaluate: Any) -> None:
    record, _ = evaluate(TaskSpec(task="tiny_rolling"))
    assert record.primary == ["bits_per_byte", "none"]
    assert not record.metrics[0].higher_is_better
    assert record.fingerprint.bos_per_prompt == [1]  # lm-eval scores a document behind its prefix token


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (TaskSpec(task="tiny_choice", metric="f1"), {}, "unknown metric 'f1' .*known: acc,none, acc_norm,none"),
        (TaskSpec(task="tiny_choice", gen_kwargs={"temperature": 1}), {}, "generates nothing; gen_kwargs"),
        (TaskSpec(task="tiny_generate", gen_kwargs={"max_gen_toks": 512}), {}, "leaves no room for a prompt"),
    ],
)
def test_settings_without_effect_are_errors(evaluate: Any, spec: TaskSpec, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(spec, **options)


def test_examples_for_a_task_that_takes_none_are_an_error(evaluate: Any, tiny_tasks: Path) -> None:
    path = tiny_tasks / "tiny_choice.yaml"
    path.write_text(path.read_text(encoding="utf-8") + "num_fewshot: 0\n", encoding="utf-8")
    with pytest.raises(UserError, match="num_fewshot 2 would have no effect"):
        evaluate()


def test_a_chat_template_that_is_not_there_is_an_error(evaluate: Any, tokenizer_factory: Any) -> None:
    tokenizer = tokenizer_factory()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        evaluate(tokenizer=tokenizer, settings=settings(apply_chat_template=True))


def test_a_wanted_metric_is_the_primary_one(evaluate: Any) -> None:
    record, _ = evaluate(TaskSpec(task="tiny_choice", metric="acc_norm"))
    assert record.primary == ["acc_norm", "none"]


def test_the_same_evaluation_is_not_done_twice(evaluate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = evaluate()
    monkeypatch.setattr(PrefixScorer, "score", None)
    assert evaluate()[0] == first


def test_a_record_of_something_else_is_kept_unless_replaced(evaluate: Any, summary: ModelSummary) -> None:
    first, folder = evaluate()
    other = summary.model_copy(update={"digest": "1" * 64})
    with pytest.raises(UserError, match="holds a record of task 'tiny_choice' made with other settings"):
        evaluate(summary=other)
    assert load_record(folder) == first
    second, _ = evaluate(summary=other, replace=True)
    assert load_record(folder) == second != first
    assert sorted(path.name for path in folder.parent.iterdir() if path.name.startswith("record")) == ["record"]


def test_a_folder_of_something_else_is_not_touched(evaluate: Any, tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(UserError, match="is not an evaluation record"):
        evaluate()
    assert (tmp_path / "record" / "thesis.txt").exists()


def test_an_evaluation_cut_short_goes_on_and_ends_the_same(evaluate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, undisturbed = evaluate(folder="undisturbed")
    call, calls = PrefixScorer.score, 0

    def fail(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise KeyboardInterrupt
        return call(self, *arguments, **options)

    monkeypatch.setattr(PrefixScorer, "score", fail)
    with pytest.raises(KeyboardInterrupt):
        evaluate()
    monkeypatch.setattr(PrefixScorer, "score", call)
    partial = undisturbed.with_name("record.partial")
    (partial / "results_half.json").write_text("{", encoding="utf-8")  # as a kill during writing leaves it
    with (partial / "journal-loglikelihood.jsonl").open("ab") as journal:
        journal.write(b'{"answers": [[-1.')
    record, folder = evaluate()
    assert answers(folder) == answers(undisturbed)
    ignored = {"created", "seconds", "results_file", "samples_files", "speed", "memory_bytes", "memory_kind"}
    ignored |= {"files", "seal"}
    assert record.model_dump(exclude=ignored) == load_record(undisturbed).model_dump(exclude=ignored)
    assert not (folder / "results_half.json").exists()


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import make_llama, make_tokenizer
from halfbyte.eval import resolve
from halfbyte.eval.evaluate import evaluate_task
from halfbyte.eval.scorer import PrefixScorer
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.record import ModelSummary
import lm_eval.evaluator
lm_eval.evaluator.add_env_info = lambda results: None
resolve.TASKS = Path(sys.argv[2])
resolve.task_manager = resolve.task_manager.__wrapped__
call = PrefixScorer.score
def slow(self, *arguments, **options):
    time.sleep(float(sys.argv[4]))
    return call(self, *arguments, **options)
PrefixScorer.score = slow
spec = TaskSpec(task="tiny_choice", num_fewshot=2)
summary = ModelSummary(name="tiny", digest="0" * 64, format="float32", bytes_on_disk=1000, bits_per_weight=32.0)
settings = EvaluateSpec(tasks=[spec], batch_size=4, batch_tokens=64)
evaluate_task(make_llama(), make_tokenizer(), spec, settings, summary, Path(sys.argv[3]))
"""


def test_a_killed_process_loses_at_most_its_last_batch(tiny_tasks: Path, tmp_path: Path) -> None:
    def start(folder: Path, pause: float) -> subprocess.Popen[bytes]:
        tests = str(Path(__file__).resolve().parent.parent)
        arguments = [tests, str(tiny_tasks), str(folder), str(pause)]
        return subprocess.Popen([sys.executable, "-c", KILLED, *arguments])

    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    journal = tmp_path / "killed.partial" / "journal-loglikelihood.jsonl"
    process = start(killed, 0.5)
    try:
        deadline = time.monotonic() + 120
        while not (journal.exists() and journal.read_bytes().count(b"\n") >= 4):  # the header and three batches
            assert process.poll() is None, "ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not killed.exists()
    lines = journal.read_bytes().splitlines(keepends=True)
    assert start(undisturbed, 0).wait() == 0
    kept = journal.stat().st_mtime_ns
    resumed = start(killed, 0.1)
    while resumed.poll() is None and journal.exists() and journal.stat().st_mtime_ns == kept:
        time.sleep(0.02)
    if journal.exists():  # it went on behind what was there
        assert journal.read_bytes().startswith(b"".join(lines[:4]))
    assert resumed.wait() == 0
    assert answers(killed) == answers(undisturbed)


def test_what_decides_an_answer_is_in_the_key() -> None:
    def key(
        spec: TaskSpec = TINY, device: str = "cpu", dtype: str = "float32", model: str = "m", **options: Any
    ) -> str:
        return settings_key(spec, settings(**options), model, device=device, dtype=dtype)

    keys = {
        key(),
        key(TaskSpec(task="tiny_choice")),
        key(TaskSpec(task="tiny_choice", num_fewshot=2, limit=3)),
        key(device="cuda"),
        key(dtype="bfloat16"),
        key(model="n"),
        key(batch_size=8),
        key(seed=1),
        key(apply_chat_template=True),
        key(system_prompt="Be brief."),
        key(max_length=64),
    }
    assert len(keys) == 11
    assert key() == key()


def test_a_key_needs_no_torch() -> None:
    code = """
import sys
from halfbyte.eval.evaluate import settings_key
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
spec = TaskSpec(task="smoke")
settings_key(spec, EvaluateSpec(tasks=[spec]), "digest", device="cpu", dtype="float32")
assert not {"torch", "transformers", "lm_eval", "datasets"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_answer_longer_than_the_longest_input_is_refused(evaluate: Any) -> None:
    with pytest.raises(UserError, match="tokens does not fit into a max_length of 2"):
        evaluate(settings=settings(max_length=2))


def test_a_tokenizer_without_an_end_of_text_is_refused(evaluate: Any, tokenizer_factory: Any) -> None:
    tokenizer = tokenizer_factory()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="names no token that ends a text"):
        evaluate(tokenizer=tokenizer)


def test_a_second_process_is_kept_out_of_an_evaluation_under_way(evaluate: Any, tmp_path: Path) -> None:
    partial = tmp_path / "record.partial"
    partial.mkdir()
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process evaluates into .*record "):
            evaluate()
    finally:
        os.close(descriptor)
    evaluate()
