"""The checks of `halfbyte doctor`: each says what is there, whether it will do, and what to do where it will not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, Literal

from packaging.requirements import Requirement

from halfbyte.recipes.data import DATA_VARIABLE, data_root
from halfbyte.records.digests import cache_folder
from halfbyte.records.errors import UserError

Status = Literal["ok", "note", "warning", "problem"]
"""note: something is not there that some need; warning: it works, and not as well as it could; problem: it does not."""

DEADLINE = 90.0
"""Seconds for one check; a machine that imports torch in more than that has something wrong with its disk."""
STALE = 600.0
"""Seconds after which a build that no process here is at is taken for dead; ModelOpt's takes one or two minutes."""
LEAST_DISK, LEAST_MEMORY = 5e9, 4e9
NVIDIA = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    group: str
    name: str
    status: Status
    found: str
    fix: str | None = None
    """What to do, in one line."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def checkup(folder: Path) -> list[Check]:
    """Everything, side by side; what does not answer is a problem and holds nobody up.

    Args:
        folder: Where runs would be written.
    """
    parts: list[tuple[str, Callable[[], list[Check]]]] = [
        ("packages", packages),
        ("torch", gpus),
        ("libraries", libraries),
        ("formats", formats),
        ("extensions", extension_locks),
        ("hub", hub),
        ("data", data),
        ("cache", cache),
        ("disk", lambda: disk(folder)),
        ("memory", memory),
        ("sandbox", sandbox),
    ]
    answers: dict[str, Queue[list[Check] | BaseException]] = {name: Queue() for name, _ in parts}

    def ask(name: str, part: Callable[[], list[Check]]) -> None:
        try:
            answers[name].put(part())
        except Exception as error:  # to be raised again where it is seen
            answers[name].put(error)

    for name, part in parts:
        # Not an executor's, which Python waits for at its end: a file system that is gone answers never.
        Thread(target=ask, args=(name, part), daemon=True).start()
    until = time.monotonic() + DEADLINE + 10
    found: list[Check] = []
    for name, _ in parts:
        try:
            answer = answers[name].get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            found.append(Check(name, name, "problem", f"no answer within {DEADLINE + 10:.0f} s", "look at its disk"))
            continue
        if isinstance(answer, BaseException):
            raise answer
        found += answer
    return found


def packages() -> list[Check]:
    """Python, and each package that halfbyte names, with the versions it can work with."""
    found = [Check("packages", "python", "ok", f"{sys.version.split()[0]} at {sys.executable}")]
    extras: dict[str, list[str]] = {}
    for text in requires("halfbyte") or []:
        wanted = Requirement(text)
        extra = _extra(wanted)
        if extra in ("dev", "docs", "notebooks"):
            continue
        if extra is None and (wanted.marker is None or wanted.marker.evaluate()):
            found.append(_package(wanted))
        elif extra is not None:
            if _version(wanted.name) is None:
                extras.setdefault(extra, []).append(wanted.name)
            else:
                found.append(_package(wanted))
    found += [
        Check("packages", f"extra {extra}", "note", f"not installed: {', '.join(names)}", f"pip install '.[{extra}]'")
        for extra, names in extras.items()
    ]
    return found + list(_known_bad())


def _extra(wanted: Requirement) -> str | None:
    text = str(wanted.marker or "")
    return text.partition('extra == "')[2].partition('"')[0] or None


def _package(wanted: Requirement) -> Check:
    there = _version(wanted.name)
    fix = f"pip install '{wanted.name}{wanted.specifier}'"
    if there is None:
        return Check("packages", wanted.name, "problem", "not installed", fix)
    if not wanted.specifier.contains(there, prereleases=True):
        return Check("packages", wanted.name, "problem", f"{there}, tested with {wanted.specifier}", fix)
    return Check("packages", wanted.name, "ok", there)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _known_bad() -> Iterator[Check]:
    """Packages that are each right and do not go together, without importing them."""
    for name, needs in (("torchvision", "torch"), ("torchaudio", "torch"), ("omegaconf", "antlr4-python3-runtime")):
        there = _version(name)
        for text in (requires(name) or []) if there is not None else []:
            wanted, other = Requirement(text), _version(needs)
            if wanted.name != needs or other is None or wanted.specifier.contains(other, prereleases=True):
                continue
            fix = f"pip install '{needs}{wanted.specifier}'"
            if needs == "torch":  # not torch: that would take ModelOpt's kernels along
                fix = f"pip uninstall {name}, which halfbyte does not need, or install the one made for torch {other}"
            yield Check("packages", name, "problem", f"{there} wants {needs}{wanted.specifier}; here is {other}", fix)


def asked(*question: str) -> dict[str, Any] | str:
    """What halfbyte.probe answers in a process of its own, or why it does not, in one line."""
    # Not from the folder the user is in: a file datasets.py there would be taken for the library.
    command = [sys.executable, "-P", "-m", "halfbyte.probe", *question]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"no answer within {DEADLINE:.0f} s"
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"the process ended with {done.returncode}"
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def libraries() -> list[Check]:
    """Whether the libraries can be imported that transformers imports on its own wherever they are installed."""
    found = []
    for name, role in (("torchvision", "transformers then fails too"), ("deepspeed", "transformers then fails too")):
        there = _version(name)
        if there is None:
            continue
        answer = asked("import", name)
        if isinstance(answer, str):
            fix = f"pip uninstall {name}, which halfbyte does not need"
            found.append(Check("libraries", name, "problem", f"{there} cannot be imported: {answer}; {role}", fix))
        elif name == "deepspeed":
            what = f"{there}; a training is divided by FSDP2, and a launch through DeepSpeed is refused"
            found.append(Check("libraries", name, "note", what, "accelerate launch without a DeepSpeed configuration"))
        else:
            found.append(Check("libraries", name, "ok", f"{there}, not needed"))
    for name in ("transformers", "lm_eval"):
        answer = asked("import", name)
        if isinstance(answer, str):
            fix = "pip install -c constraints.txt ., in a fresh environment"
            found.append(Check("libraries", name, "problem", f"cannot be imported: {answer}", fix))
    return found


def gpus() -> list[Check]:
    """torch, whether it sees the GPUs, and what these can do."""
    answer = asked("torch")
    if isinstance(answer, str):
        return [
            Check("devices", "torch", "problem", f"cannot be used: {answer}", "pip install --force-reinstall torch")
        ]
    build = f"CUDA {answer['cuda']}" if answer["cuda"] else f"ROCm {answer['hip']}" if answer["hip"] else "CPUs"
    found = []
    if not answer["gpus"] and NVIDIA.exists():
        what = f"a GPU of NVIDIA is here, and torch {answer['version']}, made for {build}, does not see it"
        remedy = "install torch's build for CUDA: https://pytorch.org/get-started/locally"
        if answer["cuda"]:
            remedy = f"install a driver for CUDA {answer['cuda']}, or give the container the GPU (--gpus all)"
        found.append(Check("devices", "GPU", "problem", what, remedy))
    elif not answer["gpus"]:
        what = f"none; torch {answer['version']} computes on the CPU, enough for models of some hundred million weights"
        found.append(Check("devices", "GPU", "note", what))
    for index, gpu in enumerate(answer["gpus"]):
        capability = tuple(gpu["capability"])
        cores = "FP4 and FP8" if capability >= (10, 0) else "FP8" if capability >= (8, 9) else "neither FP4 nor FP8"
        what = (
            f"{gpu['name']}, compute capability {capability[0]}.{capability[1]} (tensor cores for {cores}), "
            f"{gpu['free'] / 1e9:.0f} of {gpu['total'] / 1e9:.0f} GB free"
        )
        busy = gpu["free"] < gpu["total"] / 2
        other = "nvidia-smi shows who has the memory; CUDA_VISIBLE_DEVICES chooses another GPU" if busy else None
        found.append(Check("devices", f"cuda:{index}", "warning" if busy else "ok", what, other))
    return found


def formats() -> list[Check]:
    """How each format's rounding is computed here; on a CPU, and by kernels that are there, each is tried."""
    answer = asked("formats")
    if isinstance(answer, str):
        fix = "pip install -c constraints.txt ., in a fresh environment"
        return [Check("formats", "all", "problem", f"ModelOpt cannot be used: {answer}", fix)]
    fix = "install the CUDA toolkit of torch's version (nvcc), ninja and a C++ compiler"
    found = []
    for name, kernel in answer.items():
        failed, slow = kernel.startswith("not: "), kernel.startswith("torch, slower")
        status: Status = "problem" if failed else "warning" if slow else "ok"
        found.append(Check("formats", name, status, kernel.removeprefix("not: "), fix if failed or slow else None))
    return found


def extension_roots() -> list[Path]:
    """Where torch builds extensions, ModelOpt's among them."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [Path(named)] if named else [above / "torch_extensions"]


def extension_locks() -> list[Check]:
    """The locks of builds that were killed, for which the next process would wait without end."""
    found = []
    for path in sorted(lock for root in extension_roots() for lock in root.glob("**/modelopt_cuda_ext*/lock")):
        try:
            age = time.time() - path.stat().st_mtime
        except FileNotFoundError:
            continue  # the build has just ended
        if not _is_open(path):
            status: Status = "problem" if age > STALE else "warning"
            what = f"{path.parent.name} is locked by a build that no process here is at, since {age / 60:.0f} minutes"
            found.append(Check("formats", "extension lock", status, what, f"rm {path}"))
    return found


def _is_open(path: Path) -> bool:
    """Whether a process of ours has the file open, as torch has its lock while it builds."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if link.samefile(path):
                return True
        except OSError:
            continue  # it has ended, or is another user's
    return False


def hub() -> list[Check]:
    """Whether models and data sets can be fetched."""
    answer = asked("hub")
    if isinstance(answer, str):
        return [Check("places", "hub", "warning", answer, "give local models, and data sets in a data root")]
    found = [_writable("hub cache", Path(answer["cache"]), "set $HF_HOME to another folder")]
    known = "logged in" if answer["token"] else "not logged in, so that gated models and data sets are refused"
    if answer["offline"]:
        what = "offline by $HF_HUB_OFFLINE: models and data sets are those in its cache, in folders and the data root"
        return [Check("places", "hub", "note", what), *found]
    if not answer["reachable"]:
        fix = "look at the network or set $HF_ENDPOINT; or give local models, a data root, and set HF_HUB_OFFLINE=1"
        return [Check("places", "hub", "warning", f"{answer['endpoint']} does not answer", fix), *found]
    status: Status = "ok" if answer["token"] else "note"
    fix_login = None if answer["token"] else "hf auth login"
    return [Check("places", "hub", status, f"{answer['endpoint']} answers; {known}", fix_login), *found]


def data() -> list[Check]:
    """The data root."""
    try:
        root = data_root()
    except UserError as error:
        return [Check("places", "data root", "problem", error.message, error.hint)]
    if root is None:
        what = f"none: ${DATA_VARIABLE} is not set, so that data sets come from the hub"
        return [Check("places", "data root", "note", what, f"export {DATA_VARIABLE}=FOLDER, where you have a copy")]
    if not os.access(root, os.R_OK | os.X_OK):
        return [Check("places", "data root", "problem", f"{root} cannot be read", f"chmod -R u+rX {root}")]
    count = sum(1 for path in root.glob("*/*") if path.is_dir())
    if not count:
        fix = "lay it out like the hub: cais/mmlu lies in ROOT/cais/mmlu"
        return [Check("places", "data root", "warning", f"{root} has no data set", fix)]
    return [Check("places", "data root", "ok", f"{root}, {count} data sets")]


def cache() -> list[Check]:
    """halfbyte's own cache."""
    return [_writable("cache", cache_folder(), "set $HALFBYTE_CACHE to another folder")]


def _writable(name: str, folder: Path, fix: str) -> Check:
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return Check("places", name, "problem", f"{folder} cannot be written: {error.strerror or error}", fix)
    free = shutil.disk_usage(there).free
    if free < LEAST_DISK:
        return Check("places", name, "warning", f"{folder}, {free / 1e9:.1f} GB free", fix)
    return Check("places", name, "ok", f"{folder}, {free / 1e9:.0f} GB free")


def disk(folder: Path) -> list[Check]:
    """Where runs would be written."""
    return [_writable("runs", folder, "choose another --output, or free some space: `halfbyte cache prune` helps")]


def memory() -> list[Check]:
    """The memory this process may have."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _available() or total
    limit = _container_limit()
    what = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if limit is not None and limit < total:
        free = min(free, limit)
        what += f", and no more than {limit / 1e9:.1f} GB for this container"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    what += f"; {cores} cores"
    if free < LEAST_MEMORY:
        fix = "end other programs; `--set evaluate.weights=packed` and a smaller evaluate.batch_tokens take less"
        return [Check("devices", "memory", "warning", what, fix)]
    return [Check("devices", "memory", "ok", what)]


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _container_limit() -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def sandbox() -> list[Check]:
    """Whether programs that a model writes can be run."""
    from halfbyte.eval.sandbox import require_isolation

    try:
        require_isolation()
    except UserError as error:
        return [Check("places", "sandbox", "note", f"tasks that run programs cannot: {error.message}", error.hint)]
    return [Check("places", "sandbox", "ok", "programs of humaneval and mbpp can be isolated")]
