"""Waivers: which of a policy's hold for a candidate at a time that no clock can turn back."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime

from halfbyte.records.digests import cache_folder
from halfbyte.records.errors import UserError
from halfbyte.records.files import write_text
from halfbyte.reports.policy import Policy, Waiver

MARK = "latest-time"


def latest_time(times: Iterable[str]) -> str:
    """The latest of `times`, the clock's among them, and of all that this machine has remembered; ISO 8601.

    A clock that was moved back is so of no use for reviving a waiver: the records know when they were made, and the
    cache folder knows when the gate was last asked.

    Raises:
        UserError: when one of `times` is none.
    """
    mark = cache_folder() / MARK
    try:
        seen = [_time(text) for text in times]
    except (ValueError, OverflowError) as error:
        raise UserError(f"a record says of when it was made what is no time: {error}", "evaluate again") from None
    try:
        seen.append(_time(mark.read_text(encoding="ascii").strip()))
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        pass
    except (ValueError, OverflowError):  # a torn or foreign file says nothing
        pass
    return max(seen).isoformat(timespec="seconds")


def remember_time(text: str) -> None:
    """Keeps a time for latest_time.

    Raises:
        UserError: when the cache folder cannot be written.
    """
    write_text(cache_folder() / MARK, f"{text}\n")


def _time(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)


def refuse_unknown_tasks(policy: Policy, tasks: Iterable[str]) -> None:
    """A waiver for a task that is not there is a misspelling, or has outlived its task."""
    known = set(tasks)
    for waiver in policy.waivers:
        if waiver.task not in known:
            raise UserError(
                f"policy '{policy.name}' waives {waiver.task}, which was not evaluated",
                f"evaluated: {', '.join(sorted(known))}",
            )


def waiver_of(policy: Policy, task: str, digest: str, time: str) -> Waiver | None:
    """The waiver that holds for a task of a candidate at `time`."""
    day = _time(time).date()
    return next((one for one in policy.waivers if one.task == task and _refusal(one, digest, day) is None), None)


def sentences(policy: Policy, applied: Iterable[Waiver], digest: str, time: str) -> list[str]:
    """One sentence for each of the policy's waivers: whom it comes from, why, until when, and whether it was used."""
    day = _time(time).date()
    used = list(applied)
    found = []
    for one in policy.waivers:
        state = _refusal(one, digest, day) or ("applied" if one in used else "not needed")
        found.append(
            f"Waiver of {one.task} by {one.by}, granted {one.granted}, expires {one.expires}: {one.reason} ({state})"
        )
    return found


def _refusal(waiver: Waiver, digest: str, day: date) -> str | None:
    if waiver.candidate is not None and not digest.startswith(waiver.candidate):
        return "not applied: it is for another candidate"
    if day < waiver.granted:
        return "not applied: it was not granted yet"
    if day > waiver.expires:
        return "not applied: it has expired"
    return None
