"""A generated program can use up no more than its limits, reaches nothing outside, and cannot pass its own tests."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from halfbyte.eval import confine, sandbox
from halfbyte.eval.sandbox import Job, Limits, Outcome, require_isolation, run_job, run_jobs
from halfbyte.records.errors import UserError

QUICK = Limits(seconds=1, wall_seconds=120.0)


@pytest.fixture(autouse=True, scope="module")
def _isolation() -> None:
    try:
        require_isolation()
    except UserError as error:
        pytest.skip(str(error))


def _run(program: str, test: str = "assert f() == 1", limits: Limits = QUICK) -> Outcome:
    return run_job(Job(program, test), limits)


def _function(body: str) -> str:
    return "def f():\n" + "\n".join(f"    {line}" for line in body.splitlines())


def _answer(body: str, limits: Limits = QUICK) -> str:
    """What the body of a function gives, or raises, in the sandbox."""
    return _run(_function(body), "raise RuntimeError(f())", limits).detail


def test_a_right_program_passes_and_a_wrong_one_fails_with_its_exception() -> None:
    assert _run("def f(): return 1") == Outcome("passed")
    assert _run("def f(): return 2") == Outcome("failed", "AssertionError: ")
    assert _run("def f(): return 1 / 0") == Outcome("failed", "ZeroDivisionError: division by zero")
    assert _run("def f(: return").status == "failed"
    assert _run("def g(): return 1") == Outcome("failed", "NameError: name 'f' is not defined")


def test_many_programs_keep_their_order() -> None:
    jobs = [Job(f"def f(): return {number}", "assert f() == 1") for number in (1, 2, 1)]
    assert [outcome.status for outcome in run_jobs(jobs)] == ["passed", "failed", "passed"]
    assert run_jobs([]) == []


@pytest.mark.parametrize(
    "value",
    [
        "None", "True", "-3", "10**400", "0.1", "float('inf')", "1j", "'Grüße\\n'", "b'\\x00'", "(1, (2,))",
        "[[1], {}]",
        "{1: {'a': (1, 2)}, (3, 4): None}", "{1, 2}", "frozenset([1])", "range(3)",
    ],
)  # fmt: skip
def test_plain_values_come_back_as_they_are(value: str) -> None:
    test = f"found, wanted = f(), {value}\nassert found == wanted and type(found) is type(wanted), found"
    assert _run(f"def f(): return {value}", test) == Outcome("passed")


def test_values_keep_their_types() -> None:
    assert _run("def f(): return (1, 2)", "assert f() == [1, 2]").status == "failed"
    assert _run("def f(): return 1.0", "assert type(f()) is int").status == "failed"
    assert (
        _run("from fractions import Fraction\ndef f(): return Fraction(1, 3)", "assert f() * 3 == 1").status == "passed"
    )
    assert _run("import numpy\ndef f(): return numpy.int64(1)").status == "passed"


def test_instances_and_iterators_of_the_program_can_be_used_by_the_tests() -> None:
    program = """
class Pair:
    def __init__(self, a, b): self.a, self.b = a, b
    def total(self): return self.a + self.b
def f(pairs): return [pair.total() for pair in pairs]
def g():
    yield from range(3)
"""
    test = "assert f([Pair(1, 2), Pair(3, 4)]) == [3, 7]\nassert Pair(1, 2).a == 1\nassert list(g()) == [0, 1, 2]"
    assert _run(program, test) == Outcome("passed")


def test_an_exception_that_a_test_expects_reaches_it() -> None:
    test = "try:\n    f()\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False"
    assert _run("def f(): raise ValueError('no')", test) == Outcome("passed")


def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)"
        assert "PermissionError" in _answer(connect)
    for kind in ("AF_INET, socket.SOCK_DGRAM", "AF_INET6", "AF_UNIX", "AF_NETLINK, socket.SOCK_RAW"):
        assert "PermissionError" in _answer(f"import socket\nsocket.socket(socket.{kind})"), kind


def test_no_other_process_can_be_started() -> None:
    assert "PermissionError" in _answer("import os\nos.fork()")
    assert "PermissionError" in _answer("import subprocess\nsubprocess.run(['true'])")
    assert "PermissionError" in _answer("import os\nos.execv('/bin/true', ['true'])")
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    assert _run(_function(bomb)) == Outcome("timeout", "CPU time")


def test_threads_work_and_are_limited() -> None:
    program = "import threading\nfound = []\ndef f():\n    t = threading.Thread(target=found.append, args=[1])\n"
    assert _run(program + "    t.start()\n    t.join()\n    return found[0]").status == "passed"
    flood = "import threading, time\ndef f():\n    threading.stack_size(65536)\n    while True:\n"
    flood += "        threading.Thread(target=time.sleep, args=[9]).start()"
    assert _run(flood) == Outcome("killed", "more than 64 threads")


def test_memory_is_limited() -> None:
    program = "def f():\n    held = []\n    while True:\n        held.append(bytearray(2**26))"
    outcome = _run(program, limits=Limits())  # filling the memory may take a busy machine more than a second
    assert outcome.status in ("failed", "killed")
    assert "MemoryError" in outcome.detail or outcome.status == "killed"


def test_an_endless_loop_ends_at_the_limit_of_cpu_time() -> None:
    assert _run("def f():\n    while True: pass") == Outcome("timeout", "CPU time")
    assert _run("while True: pass", "pass") == Outcome("timeout", "CPU time")


def test_ignoring_the_signal_of_the_limit_does_not_help() -> None:
    program = "import signal\ndef f():\n    signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n    while True: pass"
    assert _run(program).status in ("killed", "timeout")


def test_a_program_that_sleeps_ends_at_the_limit_of_time() -> None:
    limits = Limits(seconds=2, wall_seconds=1.0)
    assert _run("import time\ndef f(): time.sleep(100)", limits=limits) == Outcome("timeout", "1 s")


def test_nothing_is_written_outside_the_working_folder(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole", encoding="utf-8")
    own = Path(sandbox.__file__)
    attempts = [
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"open({str(victim)!r}, 'a')",
        f"os.open({str(victim)!r}, os.O_RDONLY | os.O_TRUNC)",
        f"os.open({os.__file__!r}, os.O_RDONLY | os.O_TRUNC)",  # it may read this one
        f"os.unlink({str(victim)!r})",
        f"os.rename({str(victim)!r}, {str(tmp_path / 'other')!r})",
        f"os.truncate({str(victim)!r}, 0)",
        f"os.mkdir({str(tmp_path / 'folder')!r})",
        f"os.symlink('/', {str(tmp_path / 'link')!r})",
        f"os.chmod({str(victim)!r}, 0)",
        f"os.utime({str(victim)!r}, (0, 0))",
        f"os.link({str(victim)!r}, 'victim')",
        f"open({str(own)!r})",  # reads beside the Python installation count too
        "open('/etc/passwd')",
        "os.listdir('/')",
        "open('../../x', 'w')",
    ]
    for attempt in attempts:
        assert "PermissionError" in _answer(f"import os\n{attempt}"), attempt
    assert victim.read_text(encoding="utf-8") == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


def test_the_working_folder_can_be_written_and_is_removed() -> None:
    body = "import os, tempfile\nwith open('a', 'w') as file: file.write('x')\nreturn os.getcwd(), open('a').read()"
    detail = _answer(body)
    folder, content = eval(detail.removeprefix("RuntimeError: "))
    assert content == "x"
    assert "halfbyte-sandbox-" in folder
    assert not Path(folder).exists()


def test_files_are_limited_in_size_and_all_together() -> None:
    big = "file = open('a', 'wb')\nfor _ in range(100): file.write(bytes(2**20))"
    assert "File too large" in _answer(big)
    many = (
        "import itertools\nfor n in itertools.count():\n    with open(str(n), 'wb') as file: file.write(bytes(2**23))"
    )
    assert _run(_function(many), limits=Limits(seconds=5)).status == "killed"


def test_folders_cannot_be_made_as_thousands_in_each_other_could_not_be_counted_or_removed() -> None:
    assert "PermissionError" in _answer("import os\nos.mkdir('a')")
    assert "PermissionError" in _answer("import os\nos.mkdir('a', dir_fd=os.open('.', os.O_RDONLY))")


def test_many_empty_files_are_limited() -> None:
    flood = "import itertools\nfor n in itertools.count():\n    open(str(n), 'w').close()"
    assert _run(_function(flood), limits=Limits(seconds=20, folder_size=2**20)).status == "killed"


def test_an_exception_that_is_no_text_can_be_written_down() -> None:
    assert _run("def f(): raise ValueError('\\ud83d')") == Outcome("failed", "ValueError: \\ud83d")


def test_the_environment_is_empty_and_that_of_the_parent_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    assert "s3cret" not in _answer("import os\nreturn dict(os.environ)")
    for name in ("self", "{os.getppid()}"):
        assert "PermissionError" in _answer(f"import os\nreturn open(f'/proc/{name}/environ').read()")
    assert "PermissionError" in _answer(f"return open('/proc/{os.getpid()}/mem').read()")


def test_no_signal_reaches_another_process() -> None:
    assert "PermissionError" in _answer("import os\nos.kill(os.getppid(), 9)")
    assert "PermissionError" in _answer("import os\nos.kill(0, 9)")
    assert "PermissionError" in _answer(f"import os\nos.kill({os.getpid()}, 0)")
    for command in ("F_SETOWN", "F_SETSIG"):  # the kernel would send the signal at the next byte that comes
        assert "PermissionError" in _answer(f"import fcntl, os\nfcntl.fcntl(0, fcntl.{command}, os.getppid())")


def test_limits_cannot_be_raised() -> None:
    body = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))"
    assert "Error" in _answer(body)


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import sys\ndef f(): sys.exit(0)",
        "import os\ndef f(): os._exit(0)",
        "raise SystemExit",
        "def f(): raise KeyboardInterrupt",
    ],
)
def test_leaving_before_the_tests_have_run_is_no_pass(program: str) -> None:
    assert _run(program).status == "failed"


@pytest.mark.parametrize(
    "program",
    [
        "class Yes:\n    def __eq__(self, other): return True\ndef f(): return Yes()",
        "class Yes(int):\n    def __eq__(self, other): return True\ndef f(): return Yes(2)",
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.len = lambda x: 1\ndef f(): return 2",
        "import sys\nsys.modules['json'] = None\ndef f(): return 2",
        "def check(candidate): pass\ndef f(): return 2",
        "import gc, sys\ndef f():\n    for o in gc.get_objects():\n        if isinstance(o, dict):\n"
        "            o.update(passed=True, verdict=[True, ''])\n    return 2",
        "import os\ndef f():\n    for fd in range(3, 64):\n        try: os.write(fd, b'[true, null]\\n[true, 1]\\n')\n"
        "        except OSError: pass\n    return 2",
        "import sys\nframe = sys._getframe()\nwhile frame:\n    frame.f_globals['run_tests'] = print\n"
        "    frame = frame.f_back\ndef f(): return 2",
        "import atexit, os\natexit.register(os._exit, 0)\ndef f(): return 2",
    ],
)
def test_changing_the_checker_is_no_pass(program: str) -> None:
    test = "def check(candidate):\n    assert len([0, 0]) == 2\n    assert candidate() == 1\ncheck(f)"
    assert _run(program, test).status in ("failed", "killed")


def test_a_program_cannot_replace_what_its_tests_build_on() -> None:
    job = Job(
        "import math\nmath.isclose = lambda *_, **__: True\nhelper = lambda x: 1\nabs = lambda x: 0\ndef f(): return 2",
        "assert math.isclose(f(), 1)",
        prelude="import math",
    )
    assert run_job(job, QUICK).status == "failed"
    assert run_job(Job(job.program, "assert math.isclose(f(), 1)"), QUICK).status == "failed"
    assert run_job(Job(job.program, "assert helper(f()) == 1", "def helper(x): return x"), QUICK).status == "failed"
    assert run_job(Job(job.program, "assert abs(f() - 1) < 0.1"), QUICK).status == "failed"


def test_the_function_under_test_may_have_the_name_of_a_builtin() -> None:
    program = "def sum(a, b): return a * b"
    assert run_job(Job(program, "assert sum(2, 3) == 6", entries=("sum",)), QUICK) == Outcome("passed")
    assert run_job(Job(program, "assert sum(2, 3) == 6"), QUICK).status == "failed"


def test_a_flood_of_output_is_dropped() -> None:
    program = (
        "import sys\ndef f():\n    for _ in range(200): print('x' * 2**16); sys.stderr.write('y' * 2**16)\n    return 1"
    )
    assert _run(program) == Outcome("passed")
    assert _run("def f(): return 'x' * 2**25", "assert f()").status == "failed"
    flood = "import os\nfor fd in range(3, 64):\n    try:\n        while True: os.write(fd, b'x' * 65536)\n"
    assert _run(_function(flood + "    except OSError: pass")).status != "passed"


def test_a_test_that_hands_over_a_function_says_so() -> None:
    outcome = _run("def f(g): return g()", "assert f(lambda: 1) == 1")
    assert outcome == Outcome("failed", "TypeError: a test hands over a function, which is no plain data")


def test_sets_come_in_the_same_order_each_time() -> None:
    body = "return list({'a', 'b', 'c', 'd', 'e'})"
    assert _answer(body) == _answer(body)


@pytest.fixture
def _no_trial_yet() -> None:
    require_isolation.cache_clear()


@pytest.mark.usefixtures("_no_trial_yet")
def test_without_isolation_the_task_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_verdict", lambda *_: Outcome("failed", "AssertionError: ['done']"))
    with pytest.raises(
        UserError, match=r"generated code cannot be isolated on this machine.*'done'.*Landlock switched"
    ):
        require_isolation()
    monkeypatch.undo()
    require_isolation.cache_clear()


def test_a_machine_without_landlock_or_of_another_kind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine.platform, "machine", lambda: "riscv64")
    with pytest.raises(confine.NoIsolationError, match="linux on riscv64 is not supported"):
        confine.confine(Path("/nowhere"), seconds=1, memory=1, file_size=1)
    monkeypatch.setattr(confine, "_libc", SimpleNamespace(syscall=lambda *_: -1))
    with pytest.raises(confine.NoIsolationError, match="no Landlock"):
        confine._restrict_files(Path("/nowhere"))


def test_a_process_that_could_not_confine_itself_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.json, "loads", lambda _: [None, "its kernel has no Landlock"])
    with pytest.raises(UserError, match="cannot be isolated on this machine, and is not run without that: its kernel"):
        _run("def f(): return 1")
