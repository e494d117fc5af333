"""Finds the answer in a generated text: the last box, "the answer is", GSM8K's ####, or a last line that is one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

NO_ANSWER = "[no answer]"
"""Stands for the answer in a sample line where none was found; a wrong answer stands there itself."""

ANNOUNCEMENTS, LONGEST = 100, 2000
"""The last "the answer is" that are looked at, and characters behind each: a model that repeats itself announces ten
thousand answers in one line."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w\\-])")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\w")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ANNOUNCED = re.compile(
    r"(?:\banswer\s*(?:is|was|:|=)|\banswer\s*\*\*\s*:|"
    r"答案\s*(?:是|为|為|：|:)|答え\s*(?:は|：|:)|답은|답\s*:|"
    r"\brespuesta\s*(?:\w+\s+)?(?:es|:)|\bréponse\s*(?:\w+\s+)?(?:est|:)|\bantwort\s*(?:ist|lautet|:)|"
    r"\brisposta\s*(?:\w+\s+)?(?:è|:)|\bresposta\s*(?:\w+\s+)?(?:é|:)|\bответ\s*(?:—|-|:|равен))\s*:?",
    re.IGNORECASE,
)
_MATH = re.compile(r"\$\$(.+?)\$\$|\$((?:\\\$|[^$])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?:\s?(?:%|°))?")
_LETTER = re.compile(
    r"[\s*_`\"'(\[{]*(?:[Oo]ption|[Cc]hoice)?\s*[(\[]?"
    r"(?:([B-Z]|A(?!\s+(?!because|since|as\b|for\b)[a-z]))(?![A-Za-z0-9])|([a-z])(?=[)\]]|\W*$))"
)
_THINKING = re.compile(r"</?think(?:ing)?>")


def boxed(text: str) -> str | None:
    r"""What is in the last \boxed{...} that is closed, boxes inside it opened; None where there is none."""
    ends = _closing_braces(text)
    found = None
    end = 0
    for match in _BOX.finditer(text):
        content = _content(text, match.end(), ends) if match.start() >= end else None
        if content is not None and text[content].strip():
            found = content
            end = content.stop
    return None if found is None else _opened(text[found]).strip()


def _opened(text: str) -> str:
    """A text without the boxes around parts of it."""
    ends = _closing_braces(text)
    left_out: list[slice] = []
    for match in _BOX.finditer(text):
        content = _content(text, match.end(), ends)
        if content is None:
            break
        left_out.append(slice(match.start(), content.start))
        if text[content.stop : content.stop + 1] == "}" and content.start > match.end():
            left_out.append(slice(content.stop, content.stop + 1))
    kept, at = [], 0
    for part in sorted(left_out, key=lambda part: part.start):
        kept.append(text[at : part.start])
        at = part.stop
    return "".join([*kept, text[at:]])


def _content(text: str, start: int, ends: dict[int, int]) -> slice | None:
    """What the braces at `start` hold, or TeX's one token where there is no brace; None where they do not close."""
    if text[start : start + 1] == "{":
        return slice(start + 1, ends[start]) if start in ends else None
    token = _TOKEN.match(text, start)
    return slice(*token.span()) if token else None


def _closing_braces(text: str) -> dict[int, int]:
    r"""Where each brace that is closed is closed; \{ and \} are braces that are printed.

    All at once: a model that repeats itself opens ten thousand boxes and closes none.
    """
    ends: dict[int, int] = {}
    open_ones: list[int] = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            open_ones.append(match.start())
        elif match.group() == "}" and open_ones:
            ends[open_ones.pop()] = match.start()
    return ends


def mathematical(text: str) -> str | None:
    r"""The answer to a question that asks for \boxed{...}; None where none is to be found.

    In this order: the last box; what follows the last "the answer is" (in a few languages); a last line that is
    nothing but mathematics, or ends in "= x". Of a text that breaks off inside its <think> block only a box counts,
    and a box after the block goes before one in it.
    """
    thought, ended, said = _without_thinking(text)
    found = boxed(said)
    if found is None and thought:
        found = boxed(thought)
    if found is not None or (thought and not ended):
        return found
    found = _after_announcement(said) or _last_line(said)
    return None if found is None or "\\boxed" in found else found  # an empty or unclosed box


def _without_thinking(text: str) -> tuple[str, bool, str]:
    """What was thought, whether the thinking ended, and what was said after it."""
    marks = list(_THINKING.finditer(text))
    if not marks:
        return "", True, text
    last = marks[-1]
    if not last.group().startswith("</"):
        return text, False, ""
    return text[: last.start()], True, text[last.end() :]


def _after_announcement(text: str) -> str | None:
    for rest in _announced(text):
        line = rest.split("\n", 1)[0] if not rest.startswith(("$$", "\\[")) else rest
        found = _first_mathematics(line) or _bare(line.split(". ")[0])
        if found is not None:
            return found
    return None


def _announced(text: str) -> Iterator[str]:
    """What follows "the answer is", the last first."""
    for match in reversed(list(_ANNOUNCED.finditer(text))[-ANNOUNCEMENTS:]):
        yield text[match.end() : match.end() + LONGEST].lstrip(" *_:\n")


def _first_mathematics(line: str) -> str | None:
    match = _MATH.search(line)
    if match is None:
        return None
    before = _unmarked(line[: match.start()])
    content = next(group for group in match.groups() if group is not None).strip()
    # "the answer is 5 since $x > 0$": the first number goes before the mathematics that explains it
    return content if content and not _NUMBER.search(before) else None


def _bare(line: str) -> str | None:
    """A line without its markup when it is short enough to be an answer; else the first number in it."""
    plain = _unmarked(line)
    if plain and (len(plain.split()) <= 3 or _is_mathematics(plain)):
        return plain
    number = _NUMBER.search(plain)
    return number.group().strip("$ ,") if number else None


def _unmarked(line: str) -> str:
    plain = re.sub(r"\*\*|__|`", "", line).strip().strip("。")
    plain = re.sub(r"^(?:#+|[-*•])\s+", "", plain)
    return plain.rstrip(".!").strip(" ,;:") if not plain.endswith("\\!") else plain


def _is_mathematics(text: str) -> bool:
    """Whether a text holds no word but LaTeX's own: 42, \\frac{1}{2}, (3, 4], x = 5, 2x + 1."""
    plain = re.sub(r"\\(?:text|mbox|mathrm|begin|end)\s*\{[^}]*\}|\\[a-zA-Z]+", " ", text)
    return bool(re.search(r"\d|\\", text)) and not re.search(r"[^\W\d_]{2,}", plain)


def _last_line(text: str) -> str | None:
    lines = [line for line in text.strip().split("\n") if line.strip(" *_`#$\\[]")]
    if not lines:
        return None
    plain = _unmarked(lines[-1])
    whole = _MATH.fullmatch(plain)
    if whole is not None:
        plain = next(group for group in whole.groups() if group is not None).strip()
    if _is_mathematics(plain):
        return plain
    mathematics = list(_MATH.finditer(plain))
    if mathematics and mathematics[-1].end() == len(plain):
        content = next(group for group in mathematics[-1].groups() if group is not None)
        return content.strip() or None
    equals = re.search(r"=\s*([^=\s][^=]*)$", plain)
    return equals.group(1).strip() if equals and _is_mathematics(equals.group(1)) else None


def gsm8k(text: str) -> str | None:
    """The answer to a GSM8K question: as `mathematical`, but what follows the last #### goes before words."""
    marks = re.findall(r"####\s*(\S.*)", text)
    return _unmarked(marks[-1]) if marks and boxed(text) is None else mathematical(text)


def letter(text: str, choices: Sequence[str]) -> str | None:
    r"""The letter of the choice that a text names, A for the first; None where it names none.

    From the last box, else after the last "the answer is", else a last line that is nothing but a letter. A box or an
    announcement that repeats one choice's text stands for its letter.
    """
    thought, ended, said = _without_thinking(text)
    found = boxed(said)
    if found is None and thought:
        found = boxed(thought)
    if found is not None:
        return _as_letter(found, choices)
    if thought and not ended:
        return None
    for rest in _announced(said):
        named = _as_letter(rest.split("\n", 1)[0], choices)
        if named is not None:
            return named
    lines = said.strip().split("\n")
    alone = re.fullmatch(r"[\s*_`(\[]*([A-Za-z])[\s*_`)\].]*", lines[-1])
    return _known(alone.group(1), choices) if alone else None


def _as_letter(answer: str, choices: Sequence[str]) -> str | None:
    plain = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", answer).strip().strip("$").strip()
    same = [at for at, choice in enumerate(choices) if _folded(choice) == _folded(plain)]
    if len(same) == 1:
        return chr(ord("A") + same[0])
    match = _LETTER.match(plain)
    return _known(match.group(1) or match.group(2), choices) if match else None


def _known(name: str, choices: Sequence[str]) -> str | None:
    upper = name.upper()
    return upper if ord(upper) - ord("A") < len(choices) else None


def _folded(text: str) -> str:
    return re.sub(r"[\s$*.]+", "", text).casefold()
