"""An OpenAI-compatible endpoint over HTTP: retries, time-outs, and everything that can go wrong as one clear line."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

import requests
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase
from urllib3.exceptions import ReadTimeoutError
from urllib3.util import Retry

from halfbyte.recipes.schema import ServerSpec
from halfbyte.records.errors import UserError

Item = TypeVar("Item")
Answer = TypeVar("Answer")

BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
"""Statuses that may pass by themselves."""
CONNECT_SECONDS = 10.0
LONGEST_PAUSE = 60
"""Seconds between two tries at most, whatever the server asks for."""
GO_ON = "the same command goes on where this one stopped"
QUOTED = 300


class Refused(UserError):
    """The server answered with an error.

    Args:
        status: HTTP status.
        message: As for UserError.
        hint: As for UserError.
    """

    def __init__(self, status: int, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.status = status


class Unreachable(UserError):
    """Nothing answers there, or not in time."""


class _Bearer(AuthBase):
    """Sends the key, and nothing where there is none: without it requests would look for a password in ~/.netrc."""

    def __init__(self, key: str | None) -> None:
        self.key = key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.key:
            request.headers["Authorization"] = f"Bearer {self.key}"
        return request


class _Retry(Retry):
    """Tries again, but not after a time-out: the server may still be at the first try, and would take as long."""

    def increment(self, *arguments: Any, **options: Any) -> _Retry:
        if isinstance(options.get("error"), ReadTimeoutError):
            raise options["error"]
        return super().increment(*arguments, **options)


class Endpoint:
    """Requests to one server, several at once.

    Args:
        spec: Where it is, and how patiently it is asked. The API key is read from the environment here.
    """

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.base = spec.base_url.rstrip("/")
        self.root = self.base.removesuffix("/v1")
        """What the endpoints that OpenAI does not have lie below: /tokenize, /version."""
        self._key = os.environ.get(spec.api_key_env) or None
        self._patient = self._session(spec.retries)
        self._quick = self._session(0)

    def _session(self, retries: int) -> requests.Session:
        session = requests.Session()
        session.auth = _Bearer(self._key)
        # A request may be repeated whatever its method: the answer to a prompt changes nothing on the server.
        retry = _Retry(
            total=retries,
            allowed_methods=None,
            status_forcelist=BUSY,
            backoff_factor=0.5,
            backoff_max=LONGEST_PAUSE,
            retry_after_max=LONGEST_PAUSE,
            raise_on_status=False,
        )
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(pool_maxsize=self.spec.concurrency, max_retries=retry))
        return session

    def post(self, path: str, payload: dict[str, Any], *, once: bool = False) -> dict[str, Any]:
        """The JSON object that the server answers with.

        Args:
            path: Below base_url where it begins without a slash (completions), else below the server's root.
            payload: Sent as JSON.
            once: Without further tries: for what a server may answer with an error because it does not know it.

        Raises:
            UserError: when there is no answer, or one that is no JSON object.
            Refused: when the answer is an error.
        """
        return self._ask("POST", path, payload, 0 if once else self.spec.retries)

    def get(self, path: str) -> dict[str, Any]:
        """As `post`, without a payload."""
        return self._ask("GET", path, None, self.spec.retries)

    def ask_if_known(self, path: str, payload: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """What an endpoint that not every server has answers; None where it is not there or refuses."""
        try:
            return self._ask("GET" if payload is None else "POST", path, payload, 0)
        except Refused:
            return None

    def each(
        self, ask: Callable[[Item], Answer], items: Sequence[Item], told: Callable[[], None] | None = None
    ) -> list[Answer]:
        """`ask` of each item, several at once, in order; the first error stops those that have not begun.

        Args:
            ask: Called in threads.
            items: What it is called with.
            told: Called here for each answer that has come.
        """
        with ThreadPoolExecutor(min(self.spec.concurrency, max(1, len(items)))) as pool:
            waiting = [pool.submit(ask, item) for item in items]
            try:
                for answer in as_completed(waiting):
                    answer.result()
                    if told is not None:
                        told()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [answer.result() for answer in waiting]

    def _ask(self, method: str, path: str, payload: dict[str, Any] | None, retries: int) -> dict[str, Any]:
        url = f"{self.root}{path}" if path.startswith("/") else f"{self.base}/{path}"
        session = self._patient if retries else self._quick
        try:
            response = session.request(method, url, json=payload, timeout=(CONNECT_SECONDS, self.spec.timeout))
        except requests.ReadTimeout as error:
            raise Unreachable(
                f"{url} gave no answer within {self.spec.timeout:g} seconds",
                f"raise evaluate.server.timeout or lower evaluate.server.concurrency; {GO_ON}",
            ) from error
        except requests.ConnectionError as error:
            raise Unreachable(
                f"no server answers at {url}: {_reason(error)}",
                f"start it, or correct evaluate.server.base_url; {GO_ON}",
            ) from error
        except (requests.RequestException, ValueError) as error:  # ValueError: a redirection to what is no address
            raise UserError(f"{url} cannot be asked: {_reason(error)}", "check evaluate.server.base_url") from error
        if response.status_code >= 400:
            raise self._refused(url, response, payload, retries)
        return _object(url, response)

    def _refused(self, url: str, response: requests.Response, payload: dict[str, Any] | None, retries: int) -> Refused:
        status, said = response.status_code, _message(response)
        if status in (401, 403):
            variable = self.spec.api_key_env
            given = f"the key in ${variable}" if self._key else f"a request without a key (${variable} is not set)"
            return Refused(status, f"{url} refuses {given}: {said}", f"set ${variable}; {GO_ON}")
        if status == 404 and payload is not None and "model" in said.lower():
            return Refused(
                status,
                f"the server has no model '{payload.get('model')}': {said}",
                f"`curl {self.base}/models` lists those it has; set evaluate.server.model",
            )
        if status == 404:
            return Refused(status, f"there is no {url} (404: {said})", "evaluate.server.base_url should end with /v1")
        if status in BUSY:
            return Refused(
                status,
                f"{url} answers {status}{_tries(retries)}: {said}",
                f"look at the server's log, or lower evaluate.server.concurrency; {GO_ON}",
            )
        return Refused(status, f"{url} refuses the request ({status}): {said}")


def _tries(retries: int) -> str:
    return f", at each of {retries + 1} tries" if retries else ""


def _object(url: str, response: requests.Response) -> dict[str, Any]:
    try:
        content = response.json()
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(
            f"{url} answers with something that is no JSON object: {_quoted(response.text)}",
            "is evaluate.server.base_url that of an OpenAI-compatible server?",
        )
    return content


def _message(response: requests.Response) -> str:
    """What a server says about an error: OpenAI's {"error": {"message": ...}}, FastAPI's {"detail": ...}, or text."""
    try:
        content: Any = response.json()
    except (ValueError, RecursionError):
        return _quoted(response.text)
    for name in ("error", "message", "detail"):
        if isinstance(content, dict) and content.get(name):
            content = content[name]
    return _quoted(content if isinstance(content, str) else str(content))


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return (line[:QUOTED] + "...") if len(line) > QUOTED else line or "an empty answer"


def _reason(error: Exception) -> str:
    """The innermost cause, such as "Connection refused"."""
    cause: BaseException = error
    while (inner := getattr(cause, "reason", None) or cause.__cause__ or cause.__context__) is not None:
        if not isinstance(inner, BaseException):
            break
        cause = inner
    return _quoted(str(getattr(cause, "strerror", None) or cause))
