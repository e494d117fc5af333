"""lm-eval's own work done once: its index of tasks, the templates of its prompts, its look at the machine."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lm_eval.tasks.manager
import lm_eval.utils
from torch.utils import collect_env

from halfbyte.records.digests import cache_folder, value_digest
from halfbyte.records.errors import UserError
from halfbyte.records.files import write_bytes

Index = dict[str, Any]

TASKS_OF_LM_EVAL = Path(lm_eval.tasks.manager.__file__).parent


@lru_cache(maxsize=4096)
def _compiled(template: str) -> Any:
    return lm_eval.utils.env.from_string(template)


def _apply_template(template: str, doc: dict[str, Any]) -> str:
    return str(_compiled(template).render(**doc))


@contextmanager
def quick_templates() -> Iterator[None]:
    """Each template is compiled once and not for every question: full MMLU is built in 4 s instead of 2 minutes."""
    with patch.object(lm_eval.utils, "apply_template", _apply_template):
        yield


_environment = cache(collect_env.get_pretty_env_info)


@contextmanager
def quick_environment() -> Iterator[None]:
    """What lm-eval writes of the machine is asked of compilers and drivers once a process: 1 to 4 s a task."""
    with patch.object(collect_env, "get_pretty_env_info", _environment):
        yield


@contextmanager
def quick_index() -> Iterator[None]:
    """lm-eval's index of its thousands of task files comes from a cache, in under 1 s instead of 6."""
    index = lm_eval.tasks.manager.TaskIndex
    with patch.object(index, "build", staticmethod(_build_with(index.build))):
        yield


def _build_with(build: Callable[..., Index]) -> Callable[..., Index]:
    def build_some(paths: Iterable[Path], **options: Any) -> Index:
        found: Index = {}
        for path in paths:  # later ones override earlier ones, as lm-eval has it
            found |= _cached(build, **options) if Path(path) == TASKS_OF_LM_EVAL else build([path], **options)
        return found

    return build_some


def _cached(build: Callable[..., Index], **options: Any) -> Index:
    """The index of lm-eval's own tasks, remembered by the names, sizes and times of change of their files."""
    files = sorted(TASKS_OF_LM_EVAL.rglob("*.yaml"))
    states = [(str(path), (status := path.stat()).st_size, status.st_mtime_ns) for path in files]
    key = value_digest([version("lm-eval"), states, sorted(options.items())])
    path = cache_folder() / "tasks" / f"{key[:16]}.pickle"
    with suppress(OSError):
        kept = path.read_bytes()
        head, content = kept[: hashlib.sha256().digest_size], kept[hashlib.sha256().digest_size :]
        if hashlib.sha256(content).digest() == head:  # else it is damaged, and made again
            index: Index = pickle.loads(content)
            return index
    made = build([TASKS_OF_LM_EVAL], **options)
    content = pickle.dumps(made)
    with suppress(OSError, UserError):  # the cache saves time and nothing else; a read-only home must not stop a run
        write_bytes(path, hashlib.sha256(content).digest() + content)
    return made
