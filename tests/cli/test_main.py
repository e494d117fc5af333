"""The front door answers quickly, keeps results on stdout, and turns outcomes into exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from halfbyte import __version__
from halfbyte.main import main
from halfbyte.parser import build_parser
from halfbyte.records.errors import UserError

HEAVY = ("torch", "transformers", "lm_eval", "scipy", "matplotlib", "modelopt", "datasets", "omegaconf", "statsmodels")

# What is not here can be said in a recipe. An option is added to this list on purpose or not at all.
OPTIONS = {
    "run": "--data-root --device --dry-run --force --json --limit --output --quiet --repeat-baseline --set recipe",
    "plan": "--data-root --device --json --limit --measure --quiet --set --throughput recipe",
    "quantize": "--data-root --device --dry-run --force --json --model --output --quiet --set recipe",
    "train": "--data-root --device --dry-run --force --json --output --quiet --set recipe",
    "eval": "--allow-truncated --apply-chat-template --batch-size --data-root --device --dry-run --dtype --json "
    "--limit --max-length --num-fewshot --output --prompts --quiet --reference --repeat-baseline --samples --set "
    "--show --tasks --weights model",
    "memory": "--device --json --output --quiet --set recipe",
    "compare": "--format --json --output --policy --quiet baseline candidate",
    "gate": "--json --junit --policy --quiet baseline candidate",
    "verify": "--json --quiet --source checkpoint",
    "dequantize": "--dtype --json --output --quiet checkpoint",
    "report": "--json --output --policy --published --quiet run",
    "power": "--json --policy --quiet --tasks records",
    "table": "--json --quiet --with table",
    "recipes": "--json --quiet --resolved --set recipe",
    "policies": "--json --quiet policy",
    "cache": "--all --json --older-than --quiet action name",
    "doctor": "--json --quiet",
    "init": "--json --output --quiet model",
    "completion": "--json --quiet shell",
}


def subparsers() -> dict[str, ArgumentParser]:
    (action,) = (one for one in build_parser()._actions if isinstance(one, _SubParsersAction))
    return dict(action.choices)


def test_the_options_are_frozen() -> None:
    found = {
        name: " ".join(
            sorted(action.option_strings[-1] if action.option_strings else action.dest for action in parser._actions)
        ).replace("--help ", "")
        for name, parser in subparsers().items()
    }
    assert found == {name: " ".join(sorted(options.split())) for name, options in OPTIONS.items()}


def test_every_option_has_a_help_text() -> None:
    missing = [
        (name, action.dest) for name, parser in subparsers().items() for action in parser._actions if not action.help
    ]
    assert missing == []


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["recipes"], ["policies"], ["--version"]])
def test_no_heavy_library_is_imported_before_a_command_needs_it(arguments: list[str]) -> None:
    heavy = [name for name in HEAVY if name != "omegaconf" or arguments != ["recipes"]]
    code = (
        "import sys\nfrom halfbyte.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_help_answers_in_half_a_second() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "halfbyte", "--help"], check=True, capture_output=True)
        return time.perf_counter() - start

    # The quickest of several: what else the machine does must not fail this test.
    assert min(seconds() for _ in range(5)) < 0.5


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"halfbyte {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["run"], ["run", "demo-fp8", "--limit", "0"], ["eval"]])
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "halfbyte" in capsys.readouterr().err


Commands = Callable[[Callable[[Namespace], int]], None]


@pytest.fixture
def replace_recipes(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Puts a function in the place of `halfbyte recipes`."""

    def replace(run: Callable[[Namespace], int]) -> None:
        module = ModuleType("halfbyte.catalogue")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "halfbyte.catalogue", module)

    return replace


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_exit_code_is_the_commands(code: int, replace_recipes: Commands) -> None:
    replace_recipes(lambda _args: code)
    assert main(["recipes"]) == code


def test_a_users_mistake_is_one_line_and_a_hint_and_exits_2(
    replace_recipes: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_args: Namespace) -> int:
        raise UserError("the sky is green", "wait for the evening")

    replace_recipes(run)
    assert main(["recipes"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "halfbyte: error: the sky is green\nhalfbyte: hint: wait for the evening\n"


def test_ctrl_c_exits_130_and_names_the_command_to_go_on_with(
    replace_recipes: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_args: Namespace) -> int:
        raise KeyboardInterrupt

    replace_recipes(run)
    assert main(["recipes", "my recipe.yaml"]) == 130
    assert "goes on where it stopped: halfbyte recipes 'my recipe.yaml'" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback_and_is_no_verdict(
    replace_recipes: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_recipes(lambda _args: 1 // 0)
    assert main(["recipes"]) == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_the_data_root_option_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_DATA", "/one")
    seen: list[str | None] = []
    module = ModuleType("halfbyte.run")
    module.run = lambda _args: seen.append(os.environ["HALFBYTE_DATA"]) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "halfbyte.run", module)
    assert main(["run", "demo-fp8", "--data-root", "/two"]) == 0
    assert main(["run", "demo-fp8"]) == 0
    assert seen == ["/two", "/two"]


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = "import sys\nfrom halfbyte.main import main\nsys.exit(main(['recipes', 'demo-fp8', '--json']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_recipes_lists_prints_and_resolves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    assert "demo-fp8 " in capsys.readouterr().out
    assert main(["recipes", "--json"]) == 0
    assert {"name", "description"} == set(json.loads(capsys.readouterr().out)[0])
    assert main(["recipes", "demo-nvfp4"]) == 0
    assert "base: demo-fp8" in capsys.readouterr().out
    assert main(["recipes", "demo-nvfp4", "--set", "evaluate.seed=7"]) == 0
    assert "seed: 7" in capsys.readouterr().out
    assert main(["recipes", "demo-nvfp4", "--set", "evaluate.seed=7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["evaluate"]["seed"] == 7


def test_policies_lists_and_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["policies"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == sorted(line.split()[0] for line in listed)
    assert next(line for line in listed if line.startswith("release ")).endswith("question by question at 95%.")
    assert main(["policies", "--json"]) == 0
    assert {"name", "description"} == set(json.loads(capsys.readouterr().out)[0])
    assert main(["policies", "release"]) == 0
    shown = capsys.readouterr().out
    assert "margin: 0.01 " in shown
    (tmp_path / "mine.yaml").write_text(shown, encoding="utf-8")
    assert main(["policies", str(tmp_path / "mine.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["margin"] == 0.01
    assert main(["policies", "relaese"]) == 2
    assert "did you mean 'release'?" in capsys.readouterr().err


def test_recipes_refuses_overrides_without_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--set", "evaluate.seed=7"]) == 2
    assert "need a recipe" in capsys.readouterr().err
