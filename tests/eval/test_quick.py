"""What is done once gives what lm-eval gives when it does it each time."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lm_eval.utils
import pytest
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex

from halfbyte.eval import quick
from halfbyte.eval.quick import quick_environment, quick_index, quick_templates


def test_a_template_is_compiled_once_and_renders_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{question.strip()}}\nA. {{choices[0]}} {% if a %}yes{% endif %} of test_quick"
    docs = [{"question": f" q{number} ", "choices": [number], "a": number % 2} for number in range(5)]
    expected = [lm_eval.utils.apply_template(template, doc) for doc in docs]
    compiled = []
    compile_one = lm_eval.utils.env.from_string
    monkeypatch.setattr(lm_eval.utils.env, "from_string", lambda text: compiled.append(text) or compile_one(text))
    with quick_templates():
        assert [lm_eval.utils.apply_template(template, doc) for doc in docs] == expected
    assert compiled == [template]


@pytest.fixture
def few_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    assert not cache.exists()
    folder = tmp_path / "lm-eval"
    folder.mkdir()
    (folder / "one.yaml").write_text("task: one\ndataset_path: json\n", encoding="utf-8")
    monkeypatch.setattr(quick, "TASKS_OF_LM_EVAL", folder)
    monkeypatch.setattr(lm_eval.tasks.manager, "__file__", str(folder / "manager.py"))
    return folder


def indexed(**options: Any) -> dict[str, Any]:
    with quick_index():
        return TaskManager(**options).task_index


def test_the_index_is_the_same_out_of_the_cache_and_is_made_once(
    few_tasks: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = TaskManager().task_index
    assert indexed() == expected
    monkeypatch.setattr(TaskIndex, "build", staticmethod(lambda *_, **__: pytest.fail("made again")))
    assert indexed() == expected
    assert len(list((cache / "tasks").iterdir())) == 1
    assert set(expected) == {"one"}
    assert few_tasks.is_dir()


def test_a_changed_task_and_a_damaged_cache_are_noticed(few_tasks: Path, cache: Path) -> None:
    indexed()
    (few_tasks / "one.yaml").write_text("task: two\ndataset_path: json\n", encoding="utf-8")
    assert set(indexed()) == {"two"}
    for path in (cache / "tasks").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert set(indexed()) == {"two"}


def test_tasks_of_ours_are_read_anew_and_come_first(few_tasks: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.mkdir()
    for version in ("1", "2"):
        (ours / "one.yaml").write_text(f"task: one\nmetadata: {{version: {version}}}\n", encoding="utf-8")
        assert indexed(include_path=str(ours))["one"].cfg["metadata"] == {"version": int(version)}
    assert few_tasks.is_dir()


def test_the_machine_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import collect_env

    looks: list[int] = []
    monkeypatch.setattr(quick, "_environment", functools.cache(lambda: looks.append(1) or "a machine"))
    for _ in range(2):
        with quick_environment():
            assert collect_env.get_pretty_env_info() == "a machine"
    assert looks == [1]
