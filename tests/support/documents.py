"""The code blocks of Markdown documents, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
SHELLS = ("bash", "sh", "shell", "console")
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->\s*$")
_FENCE = re.compile(r"^```(?P<language>[\w-]*)(?: title=\"(?P<title>[^\"]+)\")?\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    title: str | None
    """The file that a reader is told to save it as."""
    text: str
    not_run: str | None
    """Why it is not run, where the document says so."""

    @property
    def where(self) -> str:
        """For people."""
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"

    @property
    def is_shell(self) -> bool:
        """Whether it holds commands."""
        return self.language in SHELLS


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in their order."""
    found: list[Block] = []
    opened: re.Match[str] | None = None
    start, lines, above = 0, [], ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if opened is None:
            opened = _FENCE.match(line)
            if opened is None:
                above = line if line.strip() else above
                continue
            start, lines = number, []
        elif line.strip() == "```":
            reason = NOT_RUN.search(above)
            found.append(
                Block(
                    page,
                    start,
                    opened["language"],
                    opened["title"],
                    "\n".join(lines) + "\n",
                    None if reason is None else reason["reason"],
                )
            )
            opened, above = None, ""
        else:
            lines.append(line)
    assert opened is None, f"{page}:{start} is not closed"
    return found


def command_lines(text: str) -> list[str]:
    """The simple commands of a shell text: lines joined at backslashes, split at && || ; and |, without comments."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = []
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word and set(word) <= set("|&;<>"):
                if words:
                    found.append(shlex.join(words))
                words = []
            else:
                words.append(word)
    return found


def halfbyte_arguments(command: str) -> list[str] | None:
    """The arguments of halfbyte in a command, however it is started; None for another program's."""
    words = shlex.split(command)
    while words and re.fullmatch(r"\w+=.*", words[0]):  # variables in front
        words = words[1:]
    if not words:
        return None
    if words[0].rpartition("/")[2] == "halfbyte":
        return words[1:]
    if "-m" in words and words[words.index("-m") + 1 :][:1] == ["halfbyte"]:
        return words[words.index("-m") + 2 :]
    return None
