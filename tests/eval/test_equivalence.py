"""Two ways to write an answer are one answer, near misses are not, and no comparison can hang or break a thread."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from halfbyte.eval import equivalence
from halfbyte.eval.equivalence import equal


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("33", "033"),
        ("1,234,567", "1234567"),
        ("0.5", "\\frac12"),
        ("50\\%", "50"),
        ("50\\%", "0.5"),
        ("0.5", "50%"),
        ("\\$5", "5 dollars"),
        ("3 \\text{ m}", "3 meters"),
        ("3", "3 \\text{ apples}"),
        ("12 \\text{ square feet}", "12\\text{ ft}^2"),
        ("45^\\circ", "45 degrees"),
        ("2\\frac{1}{3}", "\\frac{7}{3}"),
        ("2 1/3", "7/3"),
        ("-\\frac{1}{2}", "\\frac{-1}{2}"),
        ("-\\frac{1}{2}", "-0.5"),
        ("10^{-3}", "0.001"),
        ("3 \\times 10^8", "300000000"),
        ("x^2 + 2x + 1", "(x+1)^2"),
        ("\\sqrt{8}", "2\\sqrt{2}"),
        ("\\{1, 2, 3\\}", "3, 2, 1"),
        ("\\pm 2", "2, -2"),
        ("[0, 1)", "0 \\le x < 1"),
        ("x = 3", "3"),
        ("\\text{Monday}", "monday"),
        ("\\text{(A)}", "A"),
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
        ("101_2", "101_{2}"),
        ("\\infty", "∞"),
        ("42", "\\text{The answer is } 42"),
        ("6", "6\\text{ ways}"),
        ("\\text{(B)}", "\\mathbf{B}"),
        ("113", "m+n = 113"),
        ("\\emptyset", "\\varnothing"),
    ],
)
def test_two_ways_to_write_it(gold: str, answer: str) -> None:
    assert equal(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", "-5"),
        ("5", "6"),
        ("5", ""),
        ("5", "\\text{five or so}"),
        ("\\frac{1}{3}", "0.33"),
        ("\\frac{1}{3}", "0.333333"),
        ("0.0000672", "0.0000673"),
        ("(1, 2)", "(2, 1)"),
        ("(1, 2)", "[1, 2]"),
        ("(1, 2)", "\\{1, 2\\}"),
        ("(12,102)", "12102"),
        ("[0, 1)", "[0, 1]"),
        ("\\{1, 2, 3\\}", "\\{1, 2\\}"),
        ("\\{1, 2\\}", "\\{1, 2, 3\\}"),
        ("\\pm 2", "2"),
        ("50\\%", "5"),
        ("3 \\text{ m}", "3 \\text{ cm}"),
        ("3 \\text{ m}^2", "3 \\text{ m}"),
        ("\\$5", "5 \\text{ cents}"),
        ("45^\\circ", "45 \\text{ radians}"),
        ("x^2 + 1", "x^2 - 1"),
        ("x + y", "x + z"),
        ("\\text{Monday}", "\\text{Sunday}"),
        ("\\text{(A)}", "B"),
        ("101_2", "101_3"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}"),
        ("y = 2x + 3", "y = 2x + 4"),
        ("1 + 2i", "1 - 2i"),
        ("2\\pi", "2"),
        ("6", "6\\text{i}"),
        ("6", "6x"),
        ("12", "12 \\text{ and } 13"),
        ("5", "\\frac{1}{0}"),
    ],
)
def test_near_misses(gold: str, answer: str) -> None:
    assert not equal(gold, answer)


@pytest.mark.parametrize(
    "answer", ["\\frac{", "}{", "((((", "\\begin{pmatrix}", "\\text{", "$", "\\", "^", "\x00", "𝟓𝟓"]
)
def test_what_is_no_mathematics_is_wrong_and_no_error(answer: str) -> None:
    assert not equal("\\sqrt{5}", answer)


def test_a_comparison_that_takes_too_long_is_wrong_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence, "SECONDS", 2.0)
    start = time.monotonic()
    assert not equal("\\sqrt{7}", "9^{9^{9^{9^{9}}}} + \\sqrt{7}")
    assert time.monotonic() - start < 20
    monkeypatch.undo()
    assert equal("\\sqrt{28}", "2\\sqrt{7}")


@pytest.mark.parametrize("answer", ["1" * 5000, "1" * 5000 + "/" + "3" * 5000, "x^" * 3000])
def test_an_answer_that_never_ends_is_wrong_and_no_error(answer: str) -> None:
    start = time.monotonic()
    assert not equal("5", answer)
    assert time.monotonic() - start < 1


def test_comparisons_work_in_threads_and_touch_no_signal() -> None:
    before = signal.getsignal(signal.SIGALRM)
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(equal(f"\\sqrt{{{4 * n}}}", f"2\\sqrt{{{n}}}")))
        for n in (11, 13, 14, 15)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_process_that_was_killed_is_started_again() -> None:
    assert equal("\\sqrt{44}", "2\\sqrt{11}")
    process = equivalence._PROCESS.process
    assert process is not None
    process.kill()
    process.wait()
    assert equal("\\sqrt{52}", "2\\sqrt{13}")


def test_a_process_that_does_not_start_is_a_bug_and_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = equivalence._Judge()
    monkeypatch.setattr(equivalence.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start"):
        judge.ask("\\sqrt{5}", "2")


def test_a_package_that_compares_nothing_is_a_bug_and_no_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    useless = "class LatexExtractionConfig: ...\ndef parse(*_, **__): return []\ndef verify(*_, **__): return False\n"
    (tmp_path / "math_verify.py").write_text(useless, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(RuntimeError, match="did not start"):
        equivalence._Judge().ask("\\sqrt{5}", "2")
