"""Which lm-eval task a name means, with its data from the data root where it is there."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import lm_eval.api.metrics
import lm_eval.api.task
import lm_eval.evaluator
import lm_eval.models.huggingface
import numpy as np
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from halfbyte.eval.evaluate import TASKS
from halfbyte.eval.quick import quick_environment, quick_index, quick_templates
from halfbyte.recipes.data import cache_of, find_dataset, folder_digest, loading
from halfbyte.recipes.find import require_distinct
from halfbyte.recipes.schema import EvaluateSpec
from halfbyte.records.errors import UserError, disk_full_is_a_user_error, unknown_name
from halfbyte.records.manifest import git_commit
from halfbyte.records.record import OUR_TASKS, OWN_TASKS

logger = logging.getLogger(__name__)


def _to_the_log(*words: Any) -> None:
    logger.debug("lm-eval prints: %s", " ".join(map(str, words)))


class _SilentBar(tqdm):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "disable": True})


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Without lm-eval's own bars and prints, which cannot be turned off from outside, and below its level of errors."""
    theirs = logging.getLogger("lm_eval")
    level = theirs.level
    theirs.setLevel(logging.ERROR)
    try:
        with (
            patch.object(lm_eval.api.task, "tqdm", _SilentBar),
            patch.object(lm_eval.models.huggingface, "tqdm", _SilentBar),
            # Of a metric of the whole set it prints on stdout that it is bootstrapped, where --json's result goes.
            patch.object(lm_eval.api.metrics, "print", _to_the_log, create=True),
            # lm-eval asks git about the working directory, and git complains on stderr where that is no checkout.
            patch.object(lm_eval.evaluator, "get_git_commit_hash", git_commit),
            quick_templates(),
            quick_environment(),
        ):
            yield
    finally:
        theirs.setLevel(level)


@cache
def _own_manager(folder: Path, content: str) -> TaskManager:  # noqa: ARG001  so that an edited task is read again
    return TaskManager(include_path=str(folder), include_defaults=False)


def own_tasks(include_path: str) -> TaskManager:
    """The index of a user's folder of tasks.

    Raises:
        UserError: when there is no such folder, or no task in it.
    """
    folder = Path(include_path).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"include_path {include_path} is no folder", "name the folder that holds your tasks' YAML")
    manager = _own_manager(folder, folder_digest(folder))
    if not manager.all_tasks:
        raise UserError(f"include_path {include_path} holds no task", "a task is a YAML file with a `task:` line")
    return manager


@cache
def task_manager(*, ours_only: bool) -> TaskManager:
    """lm-eval's index of tasks; with its own tasks this reads thousands of files once."""
    with quick_index():
        return TaskManager(include_path=str(TASKS), include_defaults=not ours_only)


def find_manager(name: str, include_path: str | None = None) -> TaskManager:
    """The index that knows the task, tag or group `name`.

    Args:
        name: The task's.
        include_path: A user's folder of tasks, whose names come first.

    Raises:
        UserError: when there is none; names the nearest.
    """
    own = None if include_path is None else own_tasks(include_path)
    if own is not None and name in own.all_tasks:
        return own
    ours = task_manager(ours_only=True)
    if name in ours.all_tasks:
        return ours
    every = task_manager(ours_only=False)
    if name in every.all_tasks:
        return every
    error = unknown_name("task", name, [*every.all_tasks, *(own.all_tasks if own is not None else [])], likeness=0.75)
    near, _, _ = (error.hint or "").partition("known: ")
    yours = (
        "name the folder of your own: evaluate.include_path"
        if own is None
        else f"in {include_path}: {', '.join(own.all_tasks)}"
    )
    raise UserError(
        error.message, f"{near}`lm-eval ls tasks` lists lm-eval's; ours: {', '.join(ours.all_tasks)}; {yours}"
    )


def require_tasks(settings: EvaluateSpec) -> None:
    """Refuses, before hours are spent on the first task, a later one that is unknown or named twice.

    Raises:
        UserError: naming it.
    """
    require_distinct(settings)
    for spec in settings.tasks:
        find_manager(spec.task, settings.include_path)


def origin(name: str, include_path: str | None = None) -> list[str]:
    """What a record says beside its data sets of where a task is from: our files or the user's; nothing for lm-eval."""
    if include_path is not None and name in own_tasks(include_path).all_tasks:
        return [OWN_TASKS]
    return [OUR_TASKS] if name in task_manager(ours_only=True).all_tasks else []


def load_task(
    name: str,
    root: Path | None,
    seed: int = 1234,
    datasets_used: list[str] | None = None,
    include_path: str | None = None,
) -> list[Any]:
    """lm-eval's objects for a task or group (one), or for a tag (one for each of its tasks).

    Python's and numpy's random numbers are seeded first: some tasks shuffle their choices while they load.

    Args:
        name: As lm-eval knows it, or one of ours.
        root: The data root, see recipes.data.data_root.
        seed: For the order of shuffled choices.
        datasets_used: The names of the data sets it is loaded from are added to it.
        include_path: See find_manager.

    Raises:
        UserError: for an unknown task, a data set that is not to be had, a split it lacks, or no question in it.
    """
    manager = find_manager(name, include_path)
    beside = [TASKS] if include_path is None else [Path(include_path).expanduser().resolve(), TASKS]
    seen: list[_Loaded] = []
    random.seed(seed)
    np.random.seed(seed)
    try:
        with quiet_lm_eval(), patch.object(datasets, "load_dataset", _loader(root, seen, beside)):
            loaded = manager.load([name])
    except KeyError as error:
        if seen and seen[-1].splits is not None and str(error.args[0]) not in seen[-1].splits:
            splits = ", ".join(seen[-1].splits)
            raise UserError(
                f"task '{name}' needs {error.args[0]!r} of data set '{seen[-1].name}', which has: {splits}",
                "add the missing file and split to the folder in the data root",
            ) from error
        raise
    except IndexError as error:
        if "out of bounds for size 0" not in str(error):
            raise
        raise UserError(f"task '{name}' has no question in data set '{seen[-1].name}'") from error
    if datasets_used is not None:
        datasets_used += dict.fromkeys(entry.name for entry in seen)
    groups = loaded.get("groups") or {}
    if name in groups:
        return [groups[name]]
    return list(loaded["tasks"].values())


def _beside(file: Any, folders: list[Path]) -> Any:
    if isinstance(file, str):
        return next((str(folder / file) for folder in folders if (folder / file).is_file()), file)
    return file


class _Loaded:
    def __init__(self, name: str, splits: list[str] | None) -> None:
        self.name = name
        self.splits = splits


def _loader(root: Path | None, seen: list[_Loaded], beside: list[Path]) -> Any:
    """`datasets.load_dataset` with the data root in front of the hub.

    In place of the function rather than of the path in each task's configuration: it reaches tasks written in Python
    and tasks inside groups as well, and leaves the hub id in lm-eval's result files.
    """
    load = datasets.load_dataset

    def load_dataset(path: str, name: str | None = None, *arguments: Any, **options: Any) -> Any:
        files = options.get("data_files")
        if path == "json" and isinstance(files, dict):  # own tasks name files that lie beside them
            options["data_files"] = {split: _beside(file, beside) for split, file in files.items()}
        with loading(path, root):
            folder = find_dataset(path, root)
            if folder != path:
                options["cache_dir"] = cache_of(folder)
            with disk_full_is_a_user_error(Path(options.get("cache_dir") or datasets.config.HF_DATASETS_CACHE)):
                found = load(folder, name, *arguments, **options)
        seen.append(_Loaded(path, list(found) if isinstance(found, dict) else None))
        if isinstance(found, dict) and not any(len(rows) for rows in found.values()):
            raise UserError(f"data set '{path}' has no question in it")
        return found

    return load_dataset
