"""What runs in the sandbox: a process with the generated program, and one with the tests, which asks the first.

The tests never run beside the program. They see its functions as remote ones: plain data goes over and plain data comes
back, so all a program can do is answer calls. Run by halfbyte.eval.sandbox as `python -m halfbyte.eval.isolated`.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from halfbyte.eval.confine import NoIsolationError, confine

LONGEST = 16 * 2**20
"""Bytes of one message between the two."""


class ProgramError(Exception):
    """An exception of the program that is none of Python's own, or its end."""


class Remote:
    """An object in the program's process that is no plain data: a function, an instance, an iterator."""

    def __init__(self, ask: Callable[..., Any], key: int) -> None:
        self._ask = ask
        self._key = key

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._ask("call", self._key, list(arguments), options)

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", self._key, name)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._ask("iterate", self._key)
        while True:
            found = self._ask("next", iterator._key)
            if not found:
                return
            yield found[0]

    def __next__(self) -> Any:
        found = self._ask("next", self._key)
        if not found:
            raise StopIteration
        return found[0]

    def __bool__(self) -> bool:
        return bool(self._ask("bool", self._key))

    def __len__(self) -> int:
        return int(self._ask("len", self._key))

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", self._key, key)

    def __str__(self) -> str:
        return str(self._ask("str", self._key))


def pack(value: Any, keep: Callable[[Any], int]) -> Any:
    """A value as JSON that tells Python's types apart; what is no plain data is kept here under a number."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return ["i", hex(int(value))] if isinstance(value, int) else ["f", float(value).hex()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        kind = next(name for name, base in _ROWS.items() if isinstance(value, base))
        return [kind, [pack(entry, keep) for entry in value]]
    if isinstance(value, dict):
        return ["d", [[pack(key, keep), pack(entry, keep)] for key, entry in value.items()]]
    if isinstance(value, (complex, Fraction, Decimal)):
        kind = next(name for name, base in _TEXTS.items() if isinstance(value, base))
        return [kind, str(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["b", bytes(value).hex()]
    if isinstance(value, range):
        return ["r", [value.start, value.stop, value.step]]
    if isinstance(value, ModuleType):
        return ["m", value.__name__]
    if isinstance(value, Remote):
        return ["o", value._key]
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return pack(value.item(), keep)
    return ["o", keep(value)]


_ROWS: dict[str, type[Any]] = {"l": list, "t": tuple, "s": set, "z": frozenset, "q": deque}
_TEXTS: dict[str, type[Any]] = {"c": complex, "F": Fraction, "D": Decimal}


def unpack(value: Any, fetch: Callable[[int], Any]) -> Any:
    """The value that `pack` made JSON of; `fetch` gives the object of a number."""
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind in _ROWS:
        return _ROWS[kind](unpack(entry, fetch) for entry in content)
    if kind in _TEXTS:
        return _TEXTS[kind](content)
    if kind == "d":
        return {unpack(key, fetch): unpack(entry, fetch) for key, entry in content}
    if kind == "m":
        return importlib.import_module(content) if content.partition(".")[0] in sys.stdlib_module_names else None
    simple: dict[str, Callable[[Any], Any]] = {
        "i": lambda text: int(text, 16),
        "f": float.fromhex,
        "b": bytes.fromhex,
        "r": lambda ends: range(*ends),
        "o": fetch,
    }
    return simple[kind](content)


class _Channel:
    def __init__(self, descriptor: int) -> None:
        # Not as a socket: its calls are refused in here, while read and write are not.
        self.reader = os.fdopen(descriptor, "rb")
        self.writer = os.fdopen(descriptor, "wb", closefd=False)

    def send(self, value: Any) -> None:
        self.writer.write(json.dumps(value).encode("ascii") + b"\n")
        self.writer.flush()

    def receive(self) -> Any:
        line = self.reader.readline(LONGEST)
        if not line.endswith(b"\n"):
            raise ProgramError("it gave an answer that is too long" if line else "the program has ended")
        return json.loads(line)


def run_program(source: str, channel: _Channel) -> NoReturn:
    """Runs the program and then answers calls of its functions, until the other side is gone."""
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def answer(request: list[Any]) -> Any:
        method, key, *rest = request
        target = objects[key]
        if method == "call":
            arguments, options = (unpack(part, objects.__getitem__) for part in rest)
            return target(*arguments, **options)
        if method == "next":
            return [entry] if (entry := next(target, objects)) is not objects else []
        if method in ("get", "item"):
            name = unpack(rest[0], objects.__getitem__)
            return getattr(target, name) if method == "get" else target[name]
        simple: dict[str, Callable[[Any], Any]] = {"iterate": iter, "len": len, "str": str, "bool": bool}
        return simple[method](target)

    def reply(work: Callable[[], Any]) -> None:
        try:
            message = [True, pack(work(), keep)]
        except BaseException as error:  # whatever the program raises, SystemExit too, is its answer
            message = [False, type(error).__name__, str(error)[:500]]
        channel.send(message)

    def load() -> Any:
        space: dict[str, Any] = {"__name__": "program"}
        exec(compile(source, "program", "exec"), space)
        return {name: value for name, value in space.items() if not name.startswith("__")}

    reply(load)
    while True:
        reply(partial(answer, channel.receive()))


def run_tests(prelude: str, test: str, entries: Sequence[str], channel: _Channel) -> None:
    """Runs the tests against the program at the other end of the channel.

    Args:
        prelude: Trusted code that the tests build on; of what it defines only `entries` are taken from the program.
        test: The tests.
        entries: The functions under test.
        channel: To the program.

    Raises:
        Exception: what a failed test raises.
    """

    def ask(method: str, key: int, *rest: Any) -> Any:
        channel.send([method, key, *(pack(part, _refuse) for part in rest)])
        return result()

    def result() -> Any:
        done, *content = channel.receive()
        if not done:
            error = getattr(builtins, str(content[0]), None)
            if isinstance(error, type) and issubclass(error, Exception):
                raise error(content[1])
            raise ProgramError(f"{content[0]}: {content[1]}")
        return unpack(content[0], lambda key: Remote(ask, key))

    space: dict[str, Any] = {"__name__": "tests"}
    exec(compile(prelude, "prelude", "exec"), space)
    for name, value in result().items():
        # The tests' own names and Python's stay theirs: a program's `sum` or `math` must not judge it.
        if name in entries:
            space[name] = value
        elif name not in space and not hasattr(builtins, name):
            space[name] = importlib.import_module(name) if name in sys.stdlib_module_names else value
    exec(compile(test, "tests", "exec"), space)


def _refuse(value: Any) -> int:
    raise TypeError(f"a test hands over a {type(value).__name__}, which is no plain data")


def main() -> None:
    """Confines itself, then runs the part that its standard input names."""
    job = json.load(sys.stdin)
    channel = _Channel(job["channel"])
    verdict: list[Any] = [True, ""]
    try:
        confine(Path(job["folder"]), seconds=job["seconds"], memory=job["memory"], file_size=job["file_size"])
        if job["part"] == "program":
            run_program(job["program"], channel)
        run_tests(job["prelude"], job["test"], job["entries"], channel)
    except NoIsolationError as error:
        verdict = [None, str(error)]
    except Exception as error:  # a test that fails may raise anything
        verdict = [False, f"{type(error).__name__}: {error}"]
    if job["part"] == "tests":
        os.write(job["verdict"], json.dumps([verdict[0], verdict[1][:500]]).encode("ascii"))
    os._exit(0)


if __name__ == "__main__":
    main()
