"""Whether two mathematical answers are equal, by math-verify, in a process of its own that can be stopped."""

from __future__ import annotations

import atexit
import json
import os
import re
import resource
import select
import subprocess
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from fractions import Fraction
from functools import lru_cache
from typing import Any

SECONDS = 20.0
"""Longest comparison; what takes longer is not equal. The longest of MATH-500's takes half a second."""
START_SECONDS = 300.0
"""Longest start of that process, which imports sympy."""
READY = "ready\n"
MEMORY = 4 * 2**30
"""Bytes of address space of the process that compares."""
LONGEST = 1000
"""Characters; a longer answer is not equal. The longest of MATH-500's has 53, and a text that repeats 1 for ever ends
in a number that Python refuses to read."""
DIGITS = 12
"""Decimal places in which a decimal number must agree."""

_UNICODE = {
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "∞": "\\infty ", "∪": "\\cup ",
    "∩": "\\cap ", "∈": "\\in ", "≤": "\\le ", "≥": "\\ge ", "±": "\\pm ", "°": "^\\circ ", "½": "\\frac{1}{2}",
    "²": "^2", "³": "^3", "，": ",", "（": "(", "）": ")", "\u00a0": " ", "\u202f": " ", "∅": "\\emptyset ",
}  # fmt: skip
_UNITS = {
    "degree": "deg", "degrees": "deg", "°": "deg", "radian": "rad", "radians": "rad", "percent": "%",
    "dollar": "$", "dollars": "$", "usd": "$", "cents": "cent", "¢": "cent",
    "inch": "in", "inches": "in", "foot": "ft", "feet": "ft", "yards": "yd", "yard": "yd", "miles": "mi", "mile": "mi",
    "meter": "m", "meters": "m", "metre": "m", "metres": "m", "centimeter": "cm", "centimeters": "cm",
    "centimetre": "cm", "centimetres": "cm", "kilometer": "km", "kilometers": "km", "kilometre": "km",
    "kilometres": "km", "millimeter": "mm", "millimeters": "mm", "seconds": "s", "second": "s", "sec": "s",
    "minutes": "min", "minute": "min", "hours": "h", "hour": "h", "hr": "h", "hrs": "h", "days": "day",
    "grams": "g", "gram": "g", "kilograms": "kg", "kilogram": "kg", "pounds": "lb", "pound": "lb", "lbs": "lb",
    "liters": "l", "liter": "l", "litres": "l", "litre": "l", "units": "unit", "mph": "mi/h",
}  # fmt: skip
_PREFIXES = {"square": "2", "sq": "2", "sq.": "2", "cubic": "3", "cu": "3"}
_FUNCTIONS = re.compile(r"\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|or|and|mod|base)\b")
_TEXT = r"\\(?:text|mbox|textrm|textbf|mathrm|operatorname|hbox)\s*\{([^{}]*)\}"
_UNIT = re.compile(rf"\s*(?:{_TEXT}|(?<![A-Za-z\\])([A-Za-z][A-Za-z. ]*[A-Za-z.]))\s*(?:\^\s*\{{?\s*(\d)\s*\}}?)?$")
_BASE = re.compile(r"(\w+)\s*(?:_\s*\{?\s*(\d+)\s*\}?|\(?\s*(?:\\text\{)?\s*\(?base\s+(\d+)\)?\}?\)?)$")
_TIMES = r"(?:\\times|\\cdot|\*)"
_DECIMAL = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)"


def equal(gold: str, answer: str) -> bool:
    """Whether an answer is the reference answer, written as it may be.

    Numbers must agree exactly, so 0.33 is not 1/3. A unit may be left out, another one may not be given: 3 m is 3, and
    not 3 cm. The order of a tuple counts, that of a list or set does not.

    Args:
        gold: The reference answer, as LaTeX.
        answer: The answer, without text around it.
    """
    if not answer.strip() or len(answer) > LONGEST:
        return False
    wanted, unit = _value_and_unit(gold)
    given, other = _value_and_unit(answer)
    if unit is not None and other is not None and unit != other:
        return False
    if _folded(wanted) == _folded(given):
        return True
    if wanted.startswith("(") and given.startswith(("[", "\\{")) and "," in wanted:
        return False  # neither an interval with its ends nor a set is a tuple
    if _is_text(wanted):
        return _words(wanted) == _words(given)
    one, two = _rational(wanted), _rational(given)
    if one is not None and two is not None:
        return one == two or (unit == "%" != other and one == 100 * two) or (other == "%" != unit and two == 100 * one)
    return _judge(wanted, given)


def _value_and_unit(text: str) -> tuple[str, str | None]:
    """An answer in plain LaTeX without its unit, and its unit where that is a known one."""
    plain = re.sub(r",\\!\s*", ",", text.strip())
    for sign, latex in _UNICODE.items():
        plain = plain.replace(sign, latex)
    plain = re.sub(r"√\s*\(?(\w+)\)?", r"\\sqrt{\1}", plain)
    plain = re.sub(r"\\(?:displaystyle|left|right|!|limits)(?![A-Za-z])|\\[bB]ig+[lr]?(?![A-Za-z])", "", plain)
    plain = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", plain)
    plain = re.sub(r"(?<!\\)\\[,;: ]|~", " ", plain)
    plain = re.sub(r"^\\[(\[]|\\[)\]]$|(?<!\\)\$", " ", plain).strip().rstrip(".").strip()
    plain = re.sub(r"\\(?:mathrm\{(\w)\}|text\{(i)\})", r"\1\2", plain).replace("\\varnothing", "\\emptyset")
    plain = re.sub(r"^\\text\s*\{[^{}]*(?:\bis|[:=])\s*\}\s*(?=.)", "", plain)  # \text{The answer is } 42
    if re.search(r"\d|\\", plain):
        joint = "or" if re.search(r"[<>]|\\[lg]e", plain) else "or|and"  # both of two inequalities are no list
        plain = re.sub(rf"(?:\\text\{{)?\s*\b(?:{joint})\b\s*\}}?", ",", plain)
        plain = re.sub(r",(?:\s*,)+", ",", plain)
    plain = re.sub(r"^[A-Za-z]\s*\\in(?![a-z])\s*", "", plain)
    if not re.search(r"[(\[]|\\\{", plain):  # (12,102) is a pair
        plain = re.sub(r"(?<![\d.,])(\d{1,3}(?:,\s?\d{3})+)(?![\d,])", _without_commas, plain)
    base = _BASE.fullmatch(plain)
    if base:
        return base.group(1), f"base {base.group(2) or base.group(3)}"
    if plain.startswith(("\\$", "-\\$")):
        return plain.replace("\\$", "", 1).strip(), "$"
    for pattern, unit in ((r"\s*\\?%$", "%"), (r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)$", "deg")):
        stripped = re.sub(pattern, "", plain)
        if stripped != plain and stripped:
            return stripped, unit
    return _split_unit(plain)


def _without_commas(match: re.Match[str]) -> str:
    # "10, 080" is typesetting of 10,080, "100, 200" is two numbers: only a group that starts with 0 tells
    parts = re.split(r",\s?", match.group(1))
    spaced = ", " in match.group(1)
    return match.group(1) if spaced and not any(part.startswith("0") for part in parts[1:]) else "".join(parts)


def _split_unit(plain: str) -> tuple[str, str | None]:
    match = _UNIT.search(plain)
    value = plain[: match.start()].strip() if match else ""
    if match is None or not re.search(r"\d|\\pi", value) or value.endswith(("+", "-", "*", "/", "=", "\\", "^", "_")):
        return plain, None
    words = (match.group(1) if match.group(1) is not None else match.group(2)).strip().lower()
    if match.group(1) is None and _FUNCTIONS.search(words):
        return plain, None
    first, _, rest = words.partition(" ")
    power = match.group(3) or _PREFIXES.get(first, "")
    name = rest if first in _PREFIXES else words
    known = _UNITS.get(name, name if name in _UNITS.values() else None)
    if match.group(1) is not None and known is None and len(words) == 1:
        return plain, None  # 2\text{i} is a number
    if match.group(1) is None and known is None and not re.fullmatch(rf"{_DECIMAL}\s+[a-z ]+", plain.lower()):
        return plain, None  # 2ab is a product
    return value, None if known is None else known + (f"^{power}" if power not in ("", "1") else "")


def _folded(text: str) -> str:
    return re.sub(r"[\s{}]+", "", text)


def _is_text(text: str) -> bool:
    return bool(re.fullmatch(rf"\s*(?:{_TEXT}|[A-Za-z]{{3,}}[A-Za-z ]*)\s*", text))


def _words(text: str) -> str:
    plain = re.sub(r"\\[a-z]+\s*\{([^{}]*)\}", r"\1", text).lower().strip(" .,()'\"")
    return re.sub(r"^(?:the|an?)\s+", "", plain)


@lru_cache(maxsize=4096)
def _rational(text: str) -> Fraction | None:
    """A number, fraction, mixed number or power of ten as it stands; None for all else."""
    plain = re.sub(r"\s+", " ", text).strip()
    power = re.fullmatch(rf"({_DECIMAL})(?: ?{_TIMES} ?10 ?\^|[eE])\s*\{{?\s*([+-]?\d{{1,3}})\s*\}}?", plain)
    if power:
        return Fraction(power.group(1)) * Fraction(10) ** int(power.group(2))
    if re.fullmatch(_DECIMAL, plain) and len(plain) < 1000:
        return Fraction(plain)
    part = re.fullmatch(
        rf"(-?)\s*(\d+)?\s*\\frac\s*(?:\{{\s*({_DECIMAL})\s*\}}|(\d))\s*(?:\{{\s*({_DECIMAL})\s*\}}|(\d))", plain
    )
    if part is None:
        part = re.fullmatch(rf"(-?)(?:(\d+)\s+)?()(\d+)\s*/\s*()({_DECIMAL})", plain)
    if part is None:
        return None
    sign, whole, *parts = part.groups()
    below = Fraction(parts[2] or parts[3])
    if below == 0:
        return None
    found = int(whole or 0) + Fraction(parts[0] or parts[1]) / below
    return -found if sign else found


class _Judge:
    """The process that compares, started when it is first needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def ask(self, gold: str, answer: str) -> bool:
        with self.lock:
            process = self.process if self.process is not None and self.process.poll() is None else self._start()
            assert process.stdin is not None
            process.stdin.write(json.dumps([gold, answer]) + "\n")
            process.stdin.flush()
            line = _line(process, SECONDS)
            if line:
                return bool(json.loads(line))
            self.stop()  # it took too long, or ran out of memory: whatever it is, it is not the reference answer
            return False

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "halfbyte.eval.equivalence"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(self.stop)
        self.process = process
        if _line(process, START_SECONDS) != READY:
            self.stop()
            raise RuntimeError("the process that compares answers did not start; it says why on stderr")
        return process

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def _line(process: subprocess.Popen[str], seconds: float) -> str:
    """The next line a process writes; "" where none comes in time."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else ""


_PROCESS = _Judge()


@lru_cache(maxsize=65536)
def _judge(gold: str, answer: str) -> bool:
    return _PROCESS.ask(gold, answer)


def _verify(gold: str, answer: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import FiniteSet, Set, Union
    from sympy.core.relational import Relational

    options: dict[str, Any] = {"extraction_config": [LatexExtractionConfig()], "parsing_timeout": None}
    wanted, given = (parse(f"${text}$", **options) for text in (gold, answer))
    if not wanted or not given:
        return False
    if isinstance(wanted[0], Set) and isinstance(given[0], FiniteSet):
        parts = list(given[0])
        if all(isinstance(part, Relational) and len(part.free_symbols) == 1 for part in parts):
            given = [Union(*(part.as_set() for part in parts))]  # x < 2 or x > 3
    return bool(verify(wanted, given, float_rounding=DIGITS, allow_set_relation_comp=True, timeout_seconds=None))


def _serve() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = sys.stdout
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        if not _verify("\\frac{1}{2}", "2^{-1}"):  # a package that lacks or fails would make every answer wrong
            raise RuntimeError("math-verify does not take 2^{-1} for \\frac{1}{2}")
        answers.write(READY)
        answers.flush()
        for line in sys.stdin:  # the parser writes about what it does not understand
            answers.write(json.dumps(_verify(*json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    _serve()
