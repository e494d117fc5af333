"""A shell completes commands, options, and the names that a command takes; what it is given is run in that shell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from halfbyte.completion import completion
from halfbyte.main import main
from halfbyte.recipes.find import shipped_files
from halfbyte.reports.published import published_tables

SHELLS = ("bash", "zsh", "fish")


def completed(words: list[str], folder: Path) -> list[str]:
    """What bash offers for the last of the words."""
    script = folder / "halfbyte.bash"
    if not script.exists():
        script.write_text(completion("bash"), encoding="utf-8")
    asked = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {script}\nCOMP_WORDS=({asked})\nCOMP_CWORD={len(words) - 1}\nCOMP_LINE='{' '.join(words)}'\n"
        "COMP_POINT=${#COMP_LINE}\n"
        "$(complete -p halfbyte | sed 's/.*-F \\([^ ]*\\).*/echo \\1/') >/dev/null\n"
        "function=$(complete -p halfbyte | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
        '$function halfbyte "${COMP_WORDS[COMP_CWORD]}"\nprintf \'%s\\n\' "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here")
def test_bash_completes_commands_options_and_names(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "models").mkdir()
    assert completed(["halfbyte", "qu"], tmp_path) == ["quantize"]
    assert completed(["halfbyte", "run", "--dr"], tmp_path) == ["--dry-run"]
    assert completed(["halfbyte", "run", "demo-n"], tmp_path) == ["demo-nvfp4"]
    assert set(completed(["halfbyte", "run", ""], tmp_path)) >= {*shipped_files(), "mine.yaml"}
    assert completed(["halfbyte", "run", "demo-fp8", "demo-n"], tmp_path) == ["demo-nvfp4"]
    assert completed(["halfbyte", "quantize", "mi"], tmp_path) == ["mine.yaml"]
    assert completed(["halfbyte", "policies", "rel"], tmp_path) == ["release"]
    assert completed(["halfbyte", "gate", "--policy", "los"], tmp_path) == ["lossless"]
    table = next(iter(published_tables()))
    assert table in completed(["halfbyte", "table", table[:-1]], tmp_path)
    assert completed(["halfbyte", "verify", "mod"], tmp_path) == ["models"]
    assert completed(["halfbyte", "eval", "models", "--dtype", "bfl"], tmp_path) == ["bfloat16"]
    assert completed(["halfbyte", "cache", "pr"], tmp_path) == ["prune"]
    assert completed(["halfbyte", "completion", ""], tmp_path) == ["bash", "zsh", "fish"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_that_its_shell_reads(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "demo-nvfp4" in script
    assert "lossless" in script
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not here")
    done = subprocess.run([found, "-n"], input=script, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not here")
def test_fish_completes_commands_and_names(tmp_path: Path) -> None:
    (tmp_path / "halfbyte.fish").write_text(completion("fish"), encoding="utf-8")
    (tmp_path / "mine.yaml").touch()

    def offered(line: str) -> list[str]:
        code = f"source halfbyte.fish; complete -C '{line}'"
        done = subprocess.run(["fish", "-N", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        return [found.split("\t")[0] for found in done.stdout.splitlines()]

    assert offered("halfbyte qu") == ["quantize"]
    assert offered("halfbyte run demo-n") == ["demo-nvfp4"]
    assert "mine.yaml" in offered("halfbyte run mi")
    assert offered("halfbyte gate --policy los") == ["lossless"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not here")
def test_zsh_takes_the_script_after_compinit(tmp_path: Path) -> None:
    (tmp_path / "halfbyte.zsh").write_text(completion("zsh"), encoding="utf-8")
    code = 'autoload -U compinit; compinit -u -d dump; eval "$(cat halfbyte.zsh)"; print ${_comps[halfbyte]}'
    done = subprocess.run(["zsh", "-f", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("_shtab_halfbyte", "")


def test_an_unknown_shell_is_wrong_usage() -> None:
    with pytest.raises(SystemExit) as stop:
        main(["completion", "powershell"])
    assert stop.value.code == 2
