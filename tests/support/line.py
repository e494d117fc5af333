"""A whole run on a tiny model: its recipe, a child process that can be killed at a chosen moment, and its result."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from halfbyte.records.digests import model_digest

TEXTS = [f"the {a} {b} sees the {c} and the {a} runs" for a in ("cat", "dog", "bird", "fish") for b in ("is", "was")
         for c in ("moon", "sun", "tree")]  # fmt: skip

# Imported once by the fork server and not by every child; ModelOpt alone takes seconds.
PRELOADED = [
    "halfbyte.stages", "halfbyte.eval.recording", "halfbyte.eval.hf", "halfbyte.quant.produce", "halfbyte.quant.verify",
    "halfbyte.reports.write", "lm_eval.evaluator",
    "modelopt.recipe.presets", "modelopt.torch.export", "modelopt.torch.quantization", "transformers.models.llama",
    "transformers.models.llama.modeling_llama", "transformers.generation",
]  # fmt: skip


def write_recipe(folder: Path, model: Path, **changes: Any) -> Path:
    """A recipe for the tiny model and the smoke task, with its texts beside it; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    content: dict[str, Any] = {
        "name": "tiny-nvfp4",
        "description": "A random model of two layers.",
        "model": {"id": str(model)},
        "quantize": {
            "preset": "nvfp4",
            "calibration": {"sources": [{"dataset": "texts.txt", "samples": 16}], "length": 32, "batch_size": 2},
        },
        "evaluate": {
            "batch_tokens": 64,
            "tasks": [{"task": "smoke", "limit": 16}],
            "fidelity": {"source": {"dataset": "texts.txt"}, "window": 64},
        },
        "gate": {"policy": "smoke"},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content | changes), encoding="utf-8")
    return path


def _child(argv: list[str], cwd: Path, cache: Path, hook: Callable[[], None] | None) -> None:
    os.chdir(cwd)
    os.environ["HALFBYTE_CACHE"] = str(cache)
    import torch

    from halfbyte.main import main

    torch.set_num_threads(1)
    if hook is not None:
        hook()
    os._exit(main(argv))


def run_child(argv: list[str], cwd: Path, cache: Path, hook: Callable[[], None] | None = None) -> int:
    """Runs a command in a fresh process and returns its exit code, -9 when it was killed.

    A fork server has the libraries imported already: each child starts at once and is as fresh as a new process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_child, args=(argv, cwd, cache, hook))
    process.start()
    process.join(300)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def kill() -> None:
    """kill -9, by the process itself."""
    os.kill(os.getpid(), signal.SIGKILL)


def interrupted(stage: Callable[[], None]) -> None:
    """At the moment of `stage`, Ctrl-C in place of kill -9."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    globals()["kill"] = lambda: os.kill(os.getpid(), signal.SIGINT)
    stage()


# The moments to be killed at. They live here since a child process must be able to import them.


def _at_call(module: Any, name: str, number: int, where: Callable[..., bool] = lambda *_, **__: True) -> None:
    """Replaces `module.name` by one that kills the process at its `number`th call."""
    real = getattr(module, name)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += where(*args, **kwargs)
        if calls == number:
            kill()
        return real(*args, **kwargs)

    setattr(module, name, counted)


def in_baseline_evaluation() -> None:
    """After two whole batches of the baseline, whose journal is in the cache."""
    from halfbyte.records.journal import Journal

    _at_call(Journal, "append", 3, lambda journal, _: "cache" in journal.path.parts)


def in_calibration() -> None:
    """With some texts seen."""
    from halfbyte.quant import calibration

    real = calibration.progress_bar

    def watched(**options: Any) -> Any:
        bar = real(**options)
        _at_call(bar, "update", 2)
        return bar

    calibration.progress_bar = watched


def in_export() -> None:
    """With half of a weight file written."""
    import transformers.modeling_utils as upstream

    real = upstream.safe_save_file

    def half(tensors: Any, path: Any, **options: Any) -> None:
        real(tensors, path, **options)
        whole = Path(path).read_bytes()
        Path(path).write_bytes(whole[: len(whole) // 2])
        kill()

    upstream.safe_save_file = half


def fill(disk: Path, left: int) -> None:
    """Leaves `left` bytes free on a disk."""
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - left))


def fill_at_export(disk: Path, stderr: Path) -> None:
    """No kill: something else fills the disk once the export has begun; what is said on stderr goes into a file."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    import transformers.modeling_utils as upstream

    real = upstream.safe_save_file

    def save(tensors: Any, path: Any, **options: Any) -> None:
        fill(disk, 64 * 1024)
        real(tensors, path, **options)

    upstream.safe_save_file = save


def in_canary() -> None:
    """Before the candidate has seen the canary's prompts; the baseline has."""
    from halfbyte.eval import canary

    _at_call(canary, "observe", 1)


def with_broken_logits(stderr: Path) -> None:
    """No kill: the candidate's logits are no numbers; what is said on stderr goes into a file."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    from halfbyte.quant.produce import Job

    real = Job.open_candidate

    def broken(self: Job, run: Any) -> Any:
        loaded = real(self, run)
        loaded.model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, out: out * float("nan"))
        return loaded

    Job.open_candidate = broken  # type: ignore[method-assign]


def in_candidate_evaluation() -> None:
    """After two whole batches of the candidate."""
    from halfbyte.records.journal import Journal

    _at_call(
        Journal, "append", 3, lambda journal, _: "runs" in journal.path.parts and "fidelity" not in str(journal.path)
    )


def in_fidelity() -> None:
    """After one window."""
    from halfbyte.records.journal import Journal

    _at_call(Journal, "append", 2, lambda journal, _: "fidelity" in str(journal.path))


def in_report() -> None:
    """With one of its files written."""
    from halfbyte.reports import write

    _at_call(write, "write_text", 2)


def result(folder: Path) -> dict[str, Any]:
    """What a run found: all figures and the checkpoint, without times of day and durations."""
    comparison = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    return {
        "comparison": _timeless(comparison),
        "verdict": _timeless(json.loads((folder / "verdict.json").read_text(encoding="utf-8"))),
        "checkpoint": model_digest(folder / "checkpoint"),
        "samples": {
            path.parent.name: [_answer(line) for line in path.read_text(encoding="utf-8").splitlines()]
            for path in sorted(folder.glob("evaluations/*/*/samples_*.jsonl"))
        },
        "fidelity": [
            json.loads(path.read_text(encoding="utf-8"))["windows"] for path in sorted(folder.rglob("fidelity.json"))
        ],
    }


def _answer(line: str) -> Any:
    sample = json.loads(line)
    return [sample[key] for key in ("doc_id", "doc_hash", "prompt_hash", "resps", "filtered_resps")]


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        gone = (
            "created",
            "not_before",
            "seconds",
            "baseline_seconds",
            "candidate_seconds",
            "tokens_per_second",
            "memory_bytes",
            "memory_kind",
            "git_commit",
        )  # others may commit while tests run
        return {key: _timeless(item) for key, item in value.items() if key not in gone}
    return [_timeless(item) for item in value] if isinstance(value, list) else value
