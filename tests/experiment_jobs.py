"""The jobs of tests/run_experiments.py: what each runs, what it waits for, and how one knows that it is done."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

TESTS = Path(__file__).resolve().parent
MODELS = {"inhouse-135m": Path("models/inhouse-135M"), "smollm2-135m": Path("models/SmolLM2-135M-Instruct")}
"""By the name that their runs begin with; below the work folder."""
FORMATS = ("fp8", "nvfp4", "nvfp4-awq", "nvfp4-svdquant", "mxfp4", "mxfp8", "nvfp4-kv-fp8")
"""Shipped recipes, behind smollm2-135m-."""
SEEDS = (1, 2, 3)
VERDICTS = (0, 1, 3, 4)
"""Exit codes of a run that came to its end."""
SWEEP_STEPS = 150

Pool = Literal["train", "score"]


@dataclass(frozen=True)
class Options:
    """What the command line chooses."""

    data: Path
    tasks: Sequence[str]
    """As YAML mappings."""
    rates: Sequence[str]
    """Learning rates of QAD; of several the best by validation is taken, never by a benchmark."""
    qat_rate: str
    steps: int
    settings: Sequence[str] = ()
    """--set of every recipe."""
    training: Sequence[str] = ()
    """--set of those that train."""
    inhouse: Sequence[str] = ()
    """More arguments of tests/make_inhouse.py."""
    continuations: Sequence[str] = ()
    """More arguments of tests/experiment_continuations.py."""


@dataclass(frozen=True)
class Job:
    """One process."""

    name: str
    command: Callable[[Path], list[str]]
    """Given the work folder, when it is started."""
    done: Path
    """What is there when it has ended well; below the work folder."""
    pool: Pool = "score"
    needs: tuple[str, ...] = ()
    codes: tuple[int, ...] = (0,)
    after: tuple[str, ...] = ()
    """Jobs that it waits for, however they end."""
    steps: int = 0
    """Of a training."""


def run_names(model: str) -> tuple[list[str], list[str]]:
    """The runs of a model: those of the table of formats, and those of the table of methods."""
    trained = [f"{model}-nvfp4-{method}-{seed}" for method in ("qat", "qad") for seed in SEEDS]
    return [f"{model}-{name}" for name in FORMATS], [f"{model}-nvfp4", *trained]


def rate_of(work: Path, rates: Sequence[str]) -> str:
    """The learning rate whose sweep ended nearest to the teacher, by the texts held out of training.

    Where all of them diverged or failed, the smallest.
    """
    if len(rates) == 1:
        return rates[0]
    found = {}
    for rate in rates:
        path = work / f"runs/{sweep_name(rate)}/training/training.json"
        if path.is_file():  # one that diverged has a record too, with its last good step
            record = json.loads(path.read_text(encoding="utf-8"))
            if not record["stopped"].startswith("diverged"):
                found[rate] = float(record["best"]["kl"])
    return min(found, key=lambda rate: found[rate], default=min(rates, key=float))


def sweep_name(rate: str) -> str:
    """The run of a learning rate that is tried."""
    return f"smollm2-135m-nvfp4-qad-rate-{rate}"


def jobs(options: Options) -> list[Job]:
    """All jobs, the most important first."""
    data = str(options.data)
    texts = [sys.executable, str(TESTS / "experiment_texts.py"), data, "texts"]
    making = [
        sys.executable,
        str(TESTS / "make_inhouse.py"),
        *(str(path) for path in (MODELS["smollm2-135m"], options.data, MODELS["inhouse-135m"])),
        *options.inhouse,
    ]
    going_on = [
        sys.executable,
        str(TESTS / "experiment_continuations.py"),
        *(str(MODELS["smollm2-135m"]), "texts"),
        *options.continuations,
    ]
    first = [
        Job("inhouse", lambda _: making, MODELS["inhouse-135m"] / "config.json", "train"),
        Job("texts", lambda _: texts, Path("texts/answers.jsonl")),
        Job("continuations", lambda _: going_on, Path("texts/continued.jsonl"), "train", ("texts",)),
    ]
    sweeps = [_sweep(rate, options) for rate in options.rates] if len(options.rates) > 1 else []
    models = list(MODELS)
    baselines = [job for model in reversed(models) for job in _baselines(model, options)]
    plain = [_format_run(model, "nvfp4", options) for model in models]
    trainings = [
        job
        for seed in SEEDS
        for method in ("qad", "qat")
        for model in models
        for job in _trained(model, method, seed, options, tuple(sweep.name for sweep in sweeps))
    ]
    others = [_format_run(model, name, options) for model in models for name in FORMATS if name != "nvfp4"]
    return [*first, *sweeps, *baselines, *plain, *trainings, *others, *_reports()]


def _reports() -> list[Job]:
    """A report for each table, when all its runs are done."""
    found = []
    for name, runs in report_names().items():
        output = Path("reports") / name
        command = report_command(runs, output)
        job = Job(f"report-{name}", lambda _, command=command: command, output / "comparison.json")  # type: ignore[misc]
        found.append(replace(job, needs=tuple(runs), codes=VERDICTS))
    return found


def report_names() -> dict[str, list[str]]:
    """The reports, two a model, and the runs of each."""
    return {
        f"{model}-{kind}": names
        for model in MODELS
        for kind, names in zip(("formats", "methods"), run_names(model), strict=True)
    }


def report_command(runs: Sequence[str], output: Path) -> list[str]:
    """`halfbyte report` on several runs."""
    return _halfbyte("report", *(f"runs/{run}" for run in runs), "--output", str(output))


def _halfbyte(command: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "halfbyte", command, *arguments]


def _sets(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def _tasks(options: Options) -> str:
    return f"evaluate.tasks=[{', '.join(options.tasks)}]"


def _made(model: str) -> tuple[str, ...]:
    return ("inhouse",) if model == "inhouse-135m" else ()


def _task_name(task: str) -> str:
    return task.strip("{}").partition("task:")[2].partition(",")[0].strip()


def _baselines(model: str, options: Options) -> list[Job]:
    """A process for each task: what they find is kept in the cache, where the runs find it."""
    found = []
    for task in options.tasks:
        name = _task_name(task)
        output = Path("baselines") / model / name
        arguments = ["--tasks", name, "--output", str(output.parent), *_sets(f"evaluate.tasks=[{task}]")]
        command = _halfbyte("eval", str(MODELS[model]), *arguments)
        done = output / "record.json"
        found.append(Job(f"{model}-bf16-{name}", lambda _, command=command: command, done, needs=_made(model)))  # type: ignore[misc]
    return found


def _baseline_names(model: str, options: Options) -> tuple[str, ...]:
    return tuple(f"{model}-bf16-{_task_name(task)}" for task in options.tasks)


def _format_run(model: str, form: str, options: Options) -> Job:
    name = f"{model}-{form}"
    sets = _sets(f"name={name}", f"model.id={MODELS[model]}", _tasks(options), *options.settings)
    command = _halfbyte("run", f"smollm2-135m-{form}", *sets)
    done = Path("runs") / name / "comparison.json"
    return Job(name, lambda _: command, done, needs=_baseline_names(model, options), codes=VERDICTS)


def _recipe(model: str, method: str, seed: int, name: str, options: Options) -> list[str]:
    sets = _sets(
        f"name={name}",
        f"model.id={MODELS[model]}",
        _tasks(options),
        f"train.seed={seed}",
        f"train.max_steps={options.steps}",
        *options.settings,
        *options.training,
    )
    return [str(TESTS / f"experiments/{method}.yaml"), *sets]


def _sweep(rate: str, options: Options) -> Job:
    name = sweep_name(rate)
    recipe = _recipe("smollm2-135m", "qad", 0, name, options)
    steps = min(options.steps, SWEEP_STEPS)
    sets = _sets(f"train.learning_rate={rate}", f"train.max_steps={steps}")
    command = _halfbyte("train", *recipe, *sets, "--output", f"runs/{name}")
    done = Path("runs") / name / "training/training.json"
    # A rate that diverges ends with 2 and is an answer too.
    return Job(name, lambda _: command, done, "train", ("continuations",), (0, 2))


def _trained(model: str, method: str, seed: int, options: Options, sweeps: tuple[str, ...]) -> list[Job]:
    """Training in one process, which has few neighbours on its GPU, and evaluation in another."""
    name = f"{model}-nvfp4-{method}-{seed}"
    recipe = _recipe(model, method, seed, name, options)
    folder = Path("runs") / name
    rates = options.rates if method == "qad" else [options.qat_rate]

    def given(work: Path) -> list[str]:
        return [*recipe, *_sets(f"train.learning_rate={rate_of(work, rates)}")]

    waits = ("continuations", *_made(model))
    training = Job(
        f"{name}-train",
        lambda work: _halfbyte("train", *given(work), "--output", str(folder)),
        folder / "checkpoint/config.json",
        "train",
        waits,
        after=sweeps if method == "qad" else (),
        steps=options.steps,
    )
    scoring = Job(
        name,
        lambda work: _halfbyte("run", *given(work)),
        folder / "comparison.json",
        needs=(training.name, *_baseline_names(model, options)),
        codes=VERDICTS,
    )
    return [training, scoring]
