"""Generated programs are cut out of the text, run in the sandbox, and judged by their tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.eval import programs
from halfbyte.eval.answers import NO_ANSWER
from halfbyte.eval.resolve import load_task
from halfbyte.eval.sandbox import require_isolation
from halfbyte.records.errors import UserError

HUMANEVAL = {
    "task_id": "T/0",
    "prompt": 'import math\n\ndef twice(x):\n    return 2 * x\n\ndef area(r):\n    """The area of a circle."""\n',
    "canonical_solution": "    return math.pi * r * r\n",
    "test": "def check(area):\n    assert abs(area(1) - math.pi) < 1e-9\n    assert twice(area(0)) == 0\n",
    "entry_point": "area",
}
MBPP = {
    "task_id": 11,
    "text": "Write a function that adds two numbers.",
    "code": "def sum(a, b):\n    return a + b",
    "test_list": ["assert sum(1, 2) == 3", "assert sum(0, 0) == 0", "assert sum(-1, 1) == 0"],
    "test_setup_code": "",
    "challenge_test_list": [],
}


@pytest.fixture
def _sandbox() -> None:
    try:
        require_isolation()
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("First:\n```python\nx = 1\n```\nbetter:\n```py\nx = 2\n```\ndone", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n", "x = 1\n"),  # cut at the limit of tokens
        ("<think>```python\nx = 1\n```</think>\n```python\nx = 2\n```", "x = 2\n"),
        ("```python\r\nx = 1\r\n```", "x = 1\r\n"),
        ("```python\n\n```", None),
        ("x = 1", None),
        ("<think>```python\nx = 1\n```</think> Sorry.", None),
        ("", None),
    ],
)
def test_the_last_block_of_code_counts(text: str, code: str | None) -> None:
    assert programs.code_block(text) == code


@pytest.mark.usefixtures("_sandbox")
def test_continuations_of_a_function_are_judged_by_its_tests() -> None:
    right, cheat = HUMANEVAL["canonical_solution"], "    return 1\ntwice = lambda x: 0\nmath.pi = 1\n"
    (row,) = programs.humaneval_completions([[right, "    return r\n", "", cheat]], [HUMANEVAL])
    assert row == ["passed", "failed: AssertionError: ", NO_ANSWER, "failed: AssertionError: "]
    assert programs.judge_program(HUMANEVAL, [row]) == {"pass@1": 0.25, "correct": [1, 0, 0, 0]}


@pytest.mark.usefixtures("_sandbox")
def test_blocks_may_leave_out_what_the_question_brought() -> None:
    block = "Sure.\n```python\ndef area(r):\n    return math.pi * twice(r) * r / 2\n```"
    assert programs.humaneval_blocks([[block, "I cannot."]], [HUMANEVAL]) == [["passed", NO_ANSWER]]


@pytest.mark.usefixtures("_sandbox")
def test_a_function_under_test_may_be_called_as_one_of_pythons() -> None:
    right, wrong = MBPP["code"], "def sum(a, b):\n    return a - b"
    assert programs.mbpp_completions([[right], [wrong]], [MBPP, MBPP]) == [["passed"], ["failed: AssertionError: "]]
    assert programs.mbpp_blocks([[f"```python\n{right}\n```"]], [MBPP]) == [["passed"]]


def _root(tmp_path: Path) -> Path:
    files: dict[str, list[dict[str, Any]]] = {
        "openai/openai_humaneval/test.jsonl": [HUMANEVAL],
        "google-research-datasets/mbpp/full/test.jsonl": [MBPP],
        "google-research-datasets/mbpp/full/prompt.jsonl": [
            {**MBPP, "task_id": number, "text": f"Task {number}."} for number in range(1, 11)
        ],
    }
    for name, rows in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    splits = "".join(f"  - {{split: {split}, path: full/{split}.jsonl}}\n" for split in ("prompt", "test"))
    readme = f"---\nconfigs:\n- config_name: full\n  data_files:\n{splits}---\n"
    (tmp_path / "google-research-datasets" / "mbpp" / "README.md").write_text(readme, encoding="utf-8")
    return tmp_path


@pytest.mark.usefixtures("_sandbox")
@pytest.mark.parametrize("name", ["humaneval_sandboxed", "humaneval_chat", "mbpp_sandboxed", "mbpp_chat"])
def test_the_tasks_load_and_ask(tmp_path: Path, name: str) -> None:
    (task,) = load_task(name, _root(tmp_path))
    task.build_all_requests()
    prompt = task.instances[0].args[0]
    if name == "mbpp_sandboxed":
        assert [prompt.count(f"Task {number}.") for number in (1, 2, 3, 4, 5)] == [0, 1, 1, 1, 0]
        assert prompt.count("[DONE]") == 3
        assert prompt.endswith("assert sum(-1, 1) == 0\n[BEGIN]\n")
    if name == "humaneval_sandboxed":
        assert prompt == HUMANEVAL["prompt"]
    if name.endswith("chat"):
        assert prompt.count("```") == 2


@pytest.mark.parametrize("name", ["humaneval_sandboxed", "humaneval_chat", "mbpp_sandboxed", "mbpp_chat"])
def test_a_machine_without_isolation_is_refused_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse() -> None:
        raise UserError("generated code cannot be isolated on this machine")

    monkeypatch.setattr(programs, "require_isolation", refuse)
    with pytest.raises(UserError, match="cannot be isolated"):
        load_task(name, _root(tmp_path))
