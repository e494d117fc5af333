"""`halfbyte doctor` names what does not work with a fix for each, whatever hangs or crashes meanwhile."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from halfbyte import checkup
from halfbyte.checkup import Check
from halfbyte.main import main


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that `python -m halfbyte.probe import broken` imports."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "broken.py"


def only(found: list[Check]) -> Check:
    (check,) = found
    assert check.status in ("ok", "note") or check.fix, check
    return check


@pytest.mark.slow
def test_on_this_machine_every_format_runs_and_json_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["status"]) == (0, "ok"), found
    by_name = {check["name"]: check for check in found["checks"]}
    for name in ("FP8", "NVFP4", "MXFP4", "MXFP8"):
        assert (by_name[name]["group"], by_name[name]["status"]) == ("formats", "ok")
    assert by_name["torch"]["found"] == importlib.metadata.version("torch")
    assert str(cache) in by_name["cache"]["found"]
    assert not cache.exists()  # looking leaves nothing behind


def test_a_problem_is_exit_2_with_its_fix_and_a_warning_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Check("places", "hub", "warning", "does not answer", "look at the network")]
    monkeypatch.setattr("halfbyte.doctor.checkup", lambda _: found)
    assert main(["doctor"]) == 0
    assert "everything that is needed works, 1 warning" in capsys.readouterr().out
    found.append(Check("packages", "torch", "problem", "not installed", "pip install torch"))
    assert main(["doctor", "--quiet"]) == 2
    shown = capsys.readouterr()
    assert "problem  torch  not installed\n" in shown.out
    assert "-> pip install torch\n" in shown.out
    assert "1 problem, 1 warning" in shown.out
    assert shown.err == ""


def test_a_library_that_hangs_is_not_waited_for(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(checkup, "DEADLINE", 2.0)
    start = time.monotonic()
    assert checkup.asked("import", "broken") == "no answer within 2 s"
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('operator torchvision::nms does not exist')", "RuntimeError: operator torchvision::nms"),
        ("import os; os._exit(7)", "the process ended with 7"),
        ("import os; os.abort()", "the process ended with -6"),
        ("import sys; print('noise', file=sys.stderr); print('more noise')", "imported"),
    ],
)
def test_a_library_that_crashes_is_named_with_its_reason(module: Path, code: str, reason: str) -> None:
    module.write_text(code)
    assert reason in str(checkup.asked("import", "broken"))


def test_a_file_in_the_current_folder_is_not_taken_for_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yaml.py").write_text("raise RuntimeError('mine')")
    assert checkup.asked("import", "yaml") == {"imported": "yaml"}


def test_what_hangs_in_this_process_is_left_behind(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom halfbyte import checkup\nfrom pathlib import Path\n"
        "checkup.DEADLINE = -8.0\n"
        "for name in 'packages gpus libraries formats extension_locks hub data memory sandbox'.split():\n"
        "    setattr(checkup, name, lambda: [])\n"
        "checkup.cache = lambda: time.sleep(600)\n"
        "print([check.name for check in checkup.checkup(Path(sys.argv[1])) if check.status == 'problem'])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['cache']", done.stderr


def test_a_package_outside_its_range_is_a_problem() -> None:
    check = checkup._package(Requirement("pytest<1"))
    assert (check.status, check.fix) == ("problem", "pip install 'pytest<1'")
    assert check.found.endswith("tested with <1")
    assert checkup._package(Requirement("no-such-package>=1")).found == "not installed"
    assert checkup._package(Requirement("pytest>=1")).status == "ok"


def test_torchvision_for_another_torch_is_a_problem_before_anything_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"torchvision": "0.20.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(checkup, "_version", there.get)
    monkeypatch.setattr(checkup, "requires", lambda name: ["numpy", "torch==2.5.0"] if name == "torchvision" else [])
    check = only(list(checkup._known_bad()))
    assert check.found == "0.20.0 wants torch==2.5.0; here is 2.13.0+cpu"
    assert check.fix is not None
    assert check.fix.startswith("pip uninstall torchvision")
    monkeypatch.setattr(checkup, "requires", lambda _: ["torch==2.13.0"])
    assert list(checkup._known_bad()) == []


def test_deepspeed_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "_version", {"deepspeed": "0.19.0"}.get)
    answers: dict[str, Any] = {"deepspeed": "MissingCUDAException: CUDA_HOME does not exist"}
    monkeypatch.setattr(checkup, "asked", lambda *question: answers.get(question[1], {"imported": question[1]}))
    check = only(checkup.libraries())
    assert check.status == "problem"
    assert "CUDA_HOME does not exist" in check.found
    answers.clear()
    assert only(checkup.libraries()).status == "note"


def test_a_build_that_was_killed_is_found_and_one_that_goes_on_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert checkup.extension_locks() == []
    lock = tmp_path / "modelopt_cuda_ext_mx" / "lock"
    lock.parent.mkdir()
    with lock.open("w"):
        assert checkup.extension_locks() == []
    assert only(checkup.extension_locks()).status == "warning"  # it may be another machine's
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    check = only(checkup.extension_locks())
    assert (check.status, check.fix) == ("problem", f"rm {lock}")
    assert check.found.endswith("since 60 minutes")


def gpu(answer: dict[str, Any] | str, monkeypatch: pytest.MonkeyPatch, *, driver: bool) -> Check:
    monkeypatch.setattr(checkup, "asked", lambda *_: answer)
    monkeypatch.setattr(checkup, "NVIDIA", Path("/dev/null" if driver else "/nothing"))
    return only(checkup.gpus())


def test_a_gpu_is_described_and_one_that_torch_does_not_see_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    none = {"version": "2.13.0", "cuda": None, "hip": None, "gpus": []}
    assert gpu(none, monkeypatch, driver=False).status == "note"
    assert "build for CUDA" in str(gpu(none, monkeypatch, driver=True).fix)
    assert "driver for CUDA 13.0" in str(gpu(none | {"cuda": "13.0"}, monkeypatch, driver=True).fix)
    one = {"name": "H200", "capability": [9, 0], "free": 140_000_000_000, "total": 150_000_000_000}
    found = gpu(none | {"cuda": "13.0", "gpus": [one]}, monkeypatch, driver=True)
    assert found.found == "H200, compute capability 9.0 (tensor cores for FP8), 140 of 150 GB free"
    found = gpu(none | {"cuda": "13.0", "gpus": [one | {"free": 1_000_000_000}]}, monkeypatch, driver=True)
    assert found.status == "warning"
    assert gpu("ImportError: libtorch.so", monkeypatch, driver=False).status == "problem"


def test_a_format_whose_kernel_cannot_be_built_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {
        "FP8": "torch, slower than ModelOpt's CUDA extension, for which nvcc is not here",
        "NVFP4": "ModelOpt's Triton kernel",
        "MXFP4": "not: ModelOpt's CUDA extension must be built, and nvcc is not here",
    }
    monkeypatch.setattr(checkup, "asked", lambda *_: answer)
    assert [check.status for check in checkup.formats()] == ["warning", "ok", "problem"]


def test_offline_is_no_problem_and_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://192.0.2.1")  # nobody has this address
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    hub, cache = checkup.hub()
    assert (hub.status, cache.status) == ("note", "ok")
    assert "HF_HUB_OFFLINE" in hub.found


def test_a_hub_that_does_not_answer_is_a_warning_within_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    start = time.monotonic()
    assert checkup.hub()[0].status == "warning"
    assert time.monotonic() - start < 40


def test_the_data_root_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HALFBYTE_DATA", raising=False)
    assert only(checkup.data()).status == "note"
    monkeypatch.setenv("HALFBYTE_DATA", str(tmp_path / "nothing"))
    assert only(checkup.data()).status == "problem"
    monkeypatch.setenv("HALFBYTE_DATA", str(tmp_path))
    assert only(checkup.data()).status == "warning"
    (tmp_path / "cais" / "mmlu").mkdir(parents=True)
    assert only(checkup.data()).found == f"{tmp_path}, 1 data sets"


def test_a_place_that_cannot_be_written_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "file" / "cache"))
    check = only(checkup.cache())
    assert (check.status, check.fix) == ("problem", "set $HALFBYTE_CACHE to another folder")
    monkeypatch.setattr(checkup, "LEAST_DISK", 1e30)
    assert only(checkup.disk(tmp_path / "runs")).status == "warning"
    assert not (tmp_path / "runs").exists()


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "_container_limit", lambda: 2_000_000_000)
    check = only(checkup.memory())
    assert check.status == "warning"
    assert "no more than 2.0 GB for this container" in check.found
