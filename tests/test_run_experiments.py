"""The experiments' queue: what waits, what is tried again, what is ended, and what is kept of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from experiment_jobs import MODELS, Job, Options, jobs, rate_of, run_names, sweep_name
from experiment_tables import formats_table, methods_table
from run_experiments import Queue, chosen, parse, read_times, tasks

from halfbyte.recipes.find import load_recipe
from halfbyte.records.training import TrainingRecord, Validation


def job(name: str, code: str = "", *, needs: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> Job:
    """A job that runs a line of Python and then makes a file."""
    command = [sys.executable, "-c", f"{code}\nopen('{name}.done', 'w')"]
    return Job(name, lambda _: command, Path(f"{name}.done"), needs=needs, after=after)


@pytest.fixture
def queue(tmp_path: Path) -> Callable[[list[Job]], Queue]:
    (tmp_path / "logs").mkdir()
    return lambda waiting: Queue(waiting, tmp_path, [""], {"train": 1, "score": 2}, 1)


def run(queue: Queue) -> Queue:
    while queue.step():
        time.sleep(0.01)
    return queue


def test_a_job_starts_when_what_it_needs_is_done(queue: Callable[[list[Job]], Queue]) -> None:
    second = job("second", "open('first.done')", needs=("first",))
    assert run(queue([second, job("first", "import time; time.sleep(.2)")])).done == {"first", "second"}


def test_what_fails_is_tried_once_more_and_what_waits_for_it_is_left(queue: Callable[[list[Job]], Queue]) -> None:
    found = run(
        queue(
            [
                job("bad", "open('tries', 'a').write('x'); 1 / 0"),
                job("after", needs=("bad",)),
                job("good", after=("bad",)),
            ]
        )
    )
    assert found.done == {"good"}
    assert found.left == {"bad": "exit code 1", "after": "needs bad"}
    assert (found.work / "tries").read_text() == "xx"
    assert "ZeroDivisionError" in (found.work / "logs/bad.log").read_text()


def test_an_exit_without_a_result_is_a_failure(queue: Callable[[list[Job]], Queue]) -> None:
    nothing = Job("nothing", lambda _: [sys.executable, "-c", ""], Path("never"))
    assert run(queue([nothing])).left == {"nothing": "exit code 0"}


def test_what_is_ended_is_done_by_the_next_call_and_what_was_done_is_not(
    queue: Callable[[list[Job]], Queue], tmp_path: Path
) -> None:
    slow = "import os, time; open('began', 'a').write('x'); time.sleep(0 if os.path.exists('again') else 60)"
    first = queue([job("quick", "open('count', 'a').write('x')"), job("slow", slow)])
    while "quick" not in first.done or not (tmp_path / "began").exists():
        first.step()
        time.sleep(0.01)
    first.end()
    (tmp_path / "again").touch()
    second = run(queue([job("quick", "open('count', 'a').write('x')"), job("slow", slow)]))
    assert second.done == {"quick", "slow"}
    assert (tmp_path / "count").read_text() == "x"
    assert (tmp_path / "began").read_text() == "xx"
    assert [(row["name"], row["code"]) for row in read_times(tmp_path)] == [("quick", 0), ("slow", None), ("slow", 0)]


@pytest.mark.parametrize(("overlap", "together"), [(5.0, True), (4.0, False)])
def test_the_next_training_is_started_when_one_is_near_its_end(tmp_path: Path, overlap: float, together: bool) -> None:
    (tmp_path / "logs").mkdir()
    curves = tmp_path / "runs/first/training/curves.jsonl"
    curves.parent.mkdir(parents=True)
    wait = "import os, time\nwhile not os.path.exists('on'): time.sleep(.01)"
    trainings = [
        replace(job(name, wait), pool="train", steps=20, done=Path(f"runs/{name}/checkpoint/config.json"))
        for name in ("first", "second")
    ]
    queue = Queue(trainings, tmp_path, [""], {"train": 1, "score": 1}, 1, overlap=overlap)
    try:
        queue.step()
        assert [one.job.name for one in queue.running] == ["first"]
        curves.write_text('{"step": 0}\n{"step": 9, "seconds": 4.5}\n')
        queue.step()
        assert [one.job.name for one in queue.running] == ["first"]
        curves.write_text('{"step": 0}\n{"step": 10, "seconds": 5.0}\n{"step": 11, "sec')
        queue.step()
        assert [one.job.name for one in queue.running] == ["first", "second"][: 1 + together]
    finally:
        queue.end()


def options(arguments: list[str]) -> Options:
    parsed = parse(["model", "data", "work", *arguments])
    return Options(Path("data"), tasks(parsed), parsed.rates.split(","), parsed.qat_rate, parsed.steps)


def test_every_job_waits_for_jobs_that_there_are() -> None:
    every = jobs(options([]))
    names = [one.name for one in every]
    assert len(set(names)) == len(names)
    assert {need for one in every for need in (*one.needs, *one.after)} < set(names)
    wanted = {name for model in MODELS for part in run_names(model) for name in part}
    assert wanted < set(names)
    few = {one.name for one in chosen(every, "inhouse-135m-nvfp4-qat-1")}
    assert {"inhouse", "texts", "inhouse-135m-bf16-mmlu", "inhouse-135m-nvfp4-qat-1-train"} < few
    assert not {name for name in few if "fp8" in name or "qad" in name}


def test_commands_are_recipes_that_load(tmp_path: Path) -> None:
    for one in jobs(options(["--limit", "4", "--rates", "3e-4"])):
        command = one.command(tmp_path)
        if command[2:4] in (["halfbyte", "run"], ["halfbyte", "train"]):
            sets = [command[at + 1] for at, word in enumerate(command) if word == "--set"]
            recipe = load_recipe(command[4], sets)
            assert one.done.parts[:2] == ("runs", recipe.name)
            assert [task.limit for task in recipe.evaluate.tasks] == [4] * 4
            assert (recipe.train is None) == ("-qa" not in one.name)
            if recipe.train is not None:
                assert recipe.train.seed == int(recipe.name[-1])
                assert recipe.train.learning_rate == (5e-5 if "-qat-" in one.name else 3e-4)


def test_the_learning_rate_is_the_one_nearest_to_the_teacher_that_did_not_diverge(tmp_path: Path) -> None:
    for rate, kl, stopped in (("1e-4", 0.3, "max_steps"), ("3e-4", 0.2, "max_steps"), ("6e-4", 0.1, "diverged: loss")):
        start, best = Validation(step=0, loss=3.0, kl=0.4), Validation(step=80, loss=3.0, kl=kl)
        TrainingRecord(
            created="now", method="qad", seed=0, steps=80, best_step=80, stopped=stopped, start=start, best=best,
            tokens=1, seconds=1.0,
        ).save(tmp_path / f"runs/{sweep_name(rate)}/training")  # fmt: skip
    assert rate_of(tmp_path, ["1e-4", "3e-4", "6e-4"]) == "3e-4"
    assert rate_of(tmp_path, ["6e-4", "7e-4"]) == "6e-4"
    assert rate_of(tmp_path, ["5e-4"]) == "5e-4"


def compared(score: float, kl: float, perplexity: float) -> dict[str, object]:
    result = {"baseline": 0.5, "candidate": score, "lost": 3, "gained": 1}
    fidelity = {"kl": kl, "top1_agreement": 0.9, "baseline_perplexity": 20.0, "candidate_perplexity": perplexity}
    return {"tasks": [{"settings": {"task": "gsm8k"}, "result": result}], "fidelity": fidelity}


def test_seeds_are_a_mean_and_a_spread_and_the_bounds_hold_for_each() -> None:
    names = ["m-135m-nvfp4", "m-135m-nvfp4-qad-1", "m-135m-nvfp4-qad-2"]
    ptq, first, second = compared(0.4, 0.4, 29.0), compared(0.45, 0.1, 21.0), compared(0.47, 0.2, 23.0)
    text = methods_table([ptq, first, second], names)
    assert "| BF16 | – | 50.00 | – | – | 20.00 | – | – | – |" in text
    assert "| NVFP4 PTQ | – | 40.00 | – | – | 29.00 | 0.4000 | 90.0 | 4 |" in text
    assert "| NVFP4 QAD, 2 seeds | – | 46.00 ± 1.41 | – | – | 22.00 ± 1.41 | 0.1500 ± 0.0707 |" in text
    assert "QAD has 0.375 ± 0.177 of PTQ's KL divergence and 0.222 ± 0.157 of its perplexity gap" in text
    assert ": held by all seeds" in text
    assert ": NOT held by all seeds" in methods_table([ptq, first, compared(0.4, 0.21, 21.0)], names)
    assert "| NVFP4 | – | 40.00 |" in formats_table([ptq], names[:1])
