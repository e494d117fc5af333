"""Makes the tables of SmolLM2 and the in-house model: seven formats, and PTQ, QAT and QAD with three seeds each.

    python tests/run_experiments.py models/SmolLM2-135M-Instruct DATA work --until 560 --collect kept

Every job is a command of halfbyte in a process of its own, several at once on each GPU: the most important first, and
few trainings a GPU at a time. Baselines are evaluated once; all find them in one cache. A job that fails is tried once
more and then left, with what waits for it. At `--until` seconds the jobs under way are ended, and what is done is
collected. The same command again goes on. The logs of all jobs are in work/logs, their times in work/jobs.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiment_jobs import Job, Options, jobs
from experiment_tables import collect

TRIES = 2
GRACE = 8.0
"""Seconds that a job has to end when it is told to."""
DISK_FULL = 6 * 2**30
"""Bytes that must be free for a training to be started."""


@dataclass
class Running:
    """A job under way."""

    job: Job
    process: subprocess.Popen[bytes]
    gpu: str
    began: float


@dataclass
class Queue:
    """Starts what can be started, and keeps what came of it."""

    waiting: list[Job]
    work: Path
    gpus: Sequence[str]
    """As CUDA_VISIBLE_DEVICES names them; "" for none."""
    room: dict[str, int]
    """Jobs of each pool at once on a GPU."""
    threads: int
    running: list[Running] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    left: dict[str, str] = field(default_factory=dict)
    """Jobs that were given up, with the reason."""
    tries: dict[str, int] = field(default_factory=dict)
    zero: float = field(default_factory=time.monotonic)
    overlap: float = 0.0
    """A training with no more seconds to go makes room: the next loads, calibrates and reads its texts meanwhile."""

    def step(self) -> bool:
        """Looks at what has ended and starts what can be; False when nothing is under way and nothing can be."""
        for one in [one for one in self.running if one.process.poll() is not None]:
            self._ended(one)
        for job in list(self.waiting):
            if (self.work / job.done).exists() and self._is_recorded(job):
                self._say(job, "done already")
                self.waiting.remove(job)
                self.done.add(job.name)
        for job in list(self.waiting):
            lost = [name for name in job.needs if name in self.left]
            if lost:
                self._leave(job, f"needs {lost[0]}")
            elif set(job.needs) <= self.done and set(job.after) <= self.done | self.left.keys():
                gpu = self._free(job.pool)
                if gpu is not None:
                    self._start(job, gpu)
        return bool(self.running)

    def end(self) -> None:
        """Ends all jobs under way, with their children."""
        for signal_ in (signal.SIGTERM, signal.SIGKILL):
            for one in self.running:
                if one.process.poll() is None:
                    os.killpg(one.process.pid, signal_)
            limit = time.monotonic() + GRACE
            while time.monotonic() < limit and any(one.process.poll() is None for one in self.running):
                time.sleep(0.1)
        for one in self.running:
            self._write(one, None)
        self.running.clear()

    def _free(self, pool: str) -> str | None:
        busy = {gpu: [one for one in self.running if one.gpu == gpu] for gpu in self.gpus}
        free = [gpu for gpu in self.gpus if sum(self._fills(one, pool) for one in busy[gpu]) < self.room[pool]]
        return min(free, key=lambda gpu: len(busy[gpu]), default=None)

    def _fills(self, one: Running, pool: str) -> bool:
        """Whether a job under way takes a place of its pool's room."""
        return one.job.pool == pool and seconds_to_go(self.work, one.job) > self.overlap

    def _start(self, job: Job, gpu: str) -> None:
        if job.pool == "train" and shutil.disk_usage(self.work).free < DISK_FULL:
            self._leave(job, "no room on the disk for a training")
            return
        command = job.command(self.work)
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": gpu,
            "HALFBYTE_CACHE": str(self.work / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(self.threads),
            "PYTHONUNBUFFERED": "1",
            "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
            "TOKENIZERS_PARALLELISM": "false",
            "TQDM_DISABLE": "1",
        }
        log = self.work / "logs" / f"{job.name}.log"
        with log.open("ab") as file:
            file.write(f"$ {' '.join(command)}\n".encode())
            file.flush()
            process = subprocess.Popen(
                command, cwd=self.work, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.waiting.remove(job)
        self.running.append(Running(job, process, gpu, time.monotonic()))
        self._say(job, f"started on {gpu or 'the CPU'}")

    def _ended(self, one: Running) -> None:
        self.running.remove(one)
        code = one.process.returncode
        self._write(one, code)
        seconds = time.monotonic() - one.began
        good = code in one.job.codes and (self.work / one.job.done).exists()
        self._say(one.job, f"{'done' if good else 'FAILED'} in {seconds:.0f} s, exit code {code}")
        if good:
            self.done.add(one.job.name)
            if one.job.name.endswith("-train") or "-rate-" in one.job.name:
                # What is exported needs them no more, and they are 2 GB each.
                shutil.rmtree((self.work / one.job.done).parents[1] / "training/checkpoints", ignore_errors=True)
            return
        self.tries[one.job.name] = self.tries.get(one.job.name, 0) + 1
        if self.tries[one.job.name] < TRIES:
            self.waiting.append(one.job)
        else:
            self._leave(one.job, f"exit code {code}", known=True)

    def _leave(self, job: Job, why: str, *, known: bool = False) -> None:
        self.left[job.name] = why
        if not known:
            self.waiting.remove(job)
        self._say(job, f"left: {why}")

    def _is_recorded(self, job: Job) -> bool:
        """Whether an earlier call has seen it end: a checkpoint, say, may be there before its process is through."""
        return any(row["name"] == job.name and row["code"] in job.codes for row in read_times(self.work))

    def _write(self, one: Running, code: int | None) -> None:
        row = {
            "name": one.job.name,
            "gpu": one.gpu,
            "began": round(one.began - self.zero, 1),
            "seconds": round(time.monotonic() - one.began, 1),
            "code": code,
            "neighbours": len([other for other in self.running if other.gpu == one.gpu and other is not one]),
        }
        with (self.work / "jobs.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _say(self, job: Job, what: str) -> None:
        print(f"{time.monotonic() - self.zero:6.0f} s  {job.name}: {what}", flush=True)


def read_times(work: Path) -> list[dict[str, Any]]:
    """What jobs.jsonl has of all jobs that have ended, in this call and earlier ones."""
    path = work / "jobs.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def seconds_to_go(work: Path, job: Job) -> float:
    """Of a training under way, as its steps have gone so far; infinite before the first and for other jobs."""
    path = work / job.done.parents[1] / "training/curves.jsonl" if job.steps else None
    if path is None or not path.is_file():
        return math.inf
    # A line that is being written has no end yet.
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    taken = [(line["step"], line["seconds"]) for line in lines if "seconds" in line]
    if not taken:
        return math.inf
    step, seconds = taken[-1]
    return float(job.steps - step) * seconds / step


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="SmolLM2-135M-Instruct, as tests/fetch_smollm2.py makes it")
    parser.add_argument("data", type=Path, help="data root")
    parser.add_argument("work", type=Path, help="folder for all that is made; the same again to go on")
    parser.add_argument("--collect", type=Path, help="folder for what is worth keeping, a few MB")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which jobs are ended")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for the last reports, after that")
    parser.add_argument("--gpus", help="as CUDA_VISIBLE_DEVICES has them (0,1); by default all there are")
    parser.add_argument("--trainings", type=int, default=2, help="at once on a GPU")
    parser.add_argument(
        "--overlap", type=float, default=0.0, help="seconds before a training's end at which the next is started"
    )
    parser.add_argument("--scorings", type=int, default=6, help="at once on a GPU")
    parser.add_argument("--limit", type=int, help="questions of each task")
    parser.add_argument("--mmlu", type=int, help="questions of each of MMLU's 57 subjects")
    parser.add_argument("--gsm8k", type=int, help="questions of GSM8K")
    parser.add_argument("--rates", default="1e-4,3e-4,6e-4", help="learning rates of QAD that are tried first")
    parser.add_argument("--qat-rate", default="5e-5")
    parser.add_argument("--steps", type=int, default=420, help="of each training")
    parser.add_argument(
        "--only",
        help="jobs with one of these in their name, as regular expressions, and what they need (inhouse-135m,texts)",
    )
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="for every recipe")
    parser.add_argument("--training-set", action="append", default=[], metavar="FIELD=VALUE", help="where one trains")
    parser.add_argument("--inhouse", default="", help="more arguments of tests/make_inhouse.py")
    parser.add_argument("--continuations", default="", help="more arguments of tests/experiment_continuations.py")
    return parser.parse_args(given)


def tasks(arguments: argparse.Namespace) -> list[str]:
    """As a recipe has them. Of GSM8K's own solutions 2.3 % are longer than lm-eval's 256 tokens, and 0.1 % than 384."""
    limits = {"mmlu": arguments.mmlu, "gsm8k": arguments.gsm8k}
    settings = {"mmlu": ", num_fewshot: 5", "gsm8k": ", num_fewshot: 5, gen_kwargs: {max_gen_toks: 384}"}
    found = []
    for name in ("arc_easy", "arc_challenge", "mmlu", "gsm8k"):
        limit = limits.get(name) or arguments.limit
        found.append(f"{{task: {name}{settings.get(name, '')}{f', limit: {limit}' if limit else ''}}}")
    return found


def chosen(every: list[Job], only: str | None) -> list[Job]:
    """The jobs in whose name one of some regular expressions is found, and what they need."""
    if only is None:
        return every
    words = only.split(",")
    names = {job.name for job in every if any(re.search(word, job.name) for word in words)}
    while True:
        more = {name for job in every if job.name in names for name in (*job.needs, *job.after)} - names
        if not more:
            return [job for job in every if job.name in names]
        names |= more


def all_gpus() -> list[str]:
    """The GPUs that torch sees, asked in a process of its own; [""] without one."""
    code = "import torch; print(torch.cuda.device_count())"
    count = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    return [str(at) for at in range(count)] or [""]


def main(given: Sequence[str] | None = None) -> int:
    """The command; its exit code is 0 when all is done, 3 when the time was up before, and 1 when a job failed."""
    arguments = parse(given)
    started = time.monotonic()
    work = arguments.work.resolve()
    for folder in ("logs", "models", "runs"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    link = work / "models/SmolLM2-135M-Instruct"
    if not link.exists():
        link.symlink_to(arguments.model.resolve(strict=True))
    paths = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "HALFBYTE_DATA": str(arguments.data.resolve(strict=True))}
    options = Options(
        data=arguments.data.resolve(),
        tasks=tasks(arguments),
        rates=arguments.rates.split(","),
        qat_rate=arguments.qat_rate,
        steps=arguments.steps,
        settings=arguments.set,
        training=arguments.training_set,
        inhouse=arguments.inhouse.split(),
        continuations=arguments.continuations.split(),
    )
    gpus = arguments.gpus.split(",") if arguments.gpus else all_gpus()
    room = {"train": arguments.trainings, "score": arguments.scorings}
    threads = max(1, len(os.sched_getaffinity(0)) // (len(gpus) * sum(room.values())))
    waiting = chosen(jobs(options), arguments.only)
    queue = Queue(waiting, work, gpus, room, threads, zero=started, overlap=arguments.overlap)
    try:
        while queue.step() and time.monotonic() - started < arguments.until:
            time.sleep(0.2)
    finally:
        queue.end()
    print(f"{time.monotonic() - started:6.0f} s  {len(queue.done)} done, {len(queue.left)} left, "
          f"{len(queue.waiting)} not begun or not ended", flush=True)  # fmt: skip
    if arguments.collect is not None:
        collect(work, arguments.collect, read_times(work), arguments.patience)
        print(f"{time.monotonic() - started:6.0f} s  collected in {arguments.collect}", flush=True)
    return 1 if queue.left else 3 if len(queue.done) < len(chosen(jobs(options), arguments.only)) else 0


if __name__ == "__main__":
    sys.exit(main())
