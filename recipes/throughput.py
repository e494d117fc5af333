"""How many tokens a second a plan reckons with: measured in a report, stated by the user, or measured just now."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

import yaml
from pydantic import Field

from halfbyte.recipes.sources import Strict
from halfbyte.records.errors import UserError, unknown_name

_TEXT = ("scored", "generated", "calibrated", "trained")
DRAWN = "drawn"
KINDS = (*_TEXT, DRAWN)
"""Prompt tokens scored, tokens generated, tokens calibrated on, and tokens trained on; of a model that draws, patches
of the image and tokens of the prompt, once a step."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One speed."""

    tokens_per_second: float
    source: str
    at_least: bool = False
    """Whether it is known of a larger model, so that this one's is no lower and the hours are at most these."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """All speeds that are known; what is not known is not there."""

    rates: dict[str, Rate] = field(default_factory=dict)
    """By KINDS."""
    slower: dict[str, float] = field(default_factory=dict)
    """How many times longer a pass takes on a checkpoint, folded or packed."""
    prompts_included: bool = False
    """Whether the seconds of generated tokens are with those of their prompts."""

    def without(self, *kinds: str) -> Throughput:
        """What is left when some kinds are not known."""
        return replace(self, rates={kind: rate for kind, rate in self.rates.items() if kind not in kinds})

    def over(self, other: Throughput) -> Throughput:
        """These speeds, and the other ones where these say nothing."""
        included = self.prompts_included if "generated" in self.rates else other.prompts_included
        rates, slower = {**other.rates, **self.rates}, {**other.slower, **self.slower}
        return replace(other, rates=rates, slower=slower, prompts_included=included)


class _Measured(Strict):
    tokens: int = Field(ge=1)
    seconds: float = Field(gt=0)
    source: str


class _Slower(Strict):
    folded: float = Field(ge=1)
    packed: float = Field(ge=1)
    source: str


class _Drawing(Strict):
    model: str
    weights: int = Field(ge=1)
    drawn: _Measured
    slower: _Slower


class _Profile(Strict):
    model: str
    weights: int = Field(ge=1)
    scored: _Measured | None = None
    generated: _Measured | None = None
    calibrated: _Measured | None = None
    trained: _Measured | None = None
    slower: _Slower | None = None
    drawing: _Drawing | None = None


@cache
def _profiles() -> dict[str, _Profile]:
    content = yaml.safe_load((files("halfbyte.recipes") / "throughput.yaml").read_text(encoding="utf-8"))
    return {name: _Profile.model_validate(one) for name, one in content.items()}


def measured_on(device: str, weights: float) -> Throughput:
    """The speeds of throughput.yaml for a model that moves so many weights a token; none for an unknown device.

    A larger model than the measured one is slower by the ratio of their weights, which is what limits both matrix
    products and reading weights from memory. A smaller one is faster by less than that ratio: it gets the measured
    speed, as one that it has at least.

    Args:
        device: A name of recipes/facts.py.
        weights: Of the layers, that a token passes through.
    """
    profile = _profiles().get(device)
    if profile is None:
        return Throughput()
    rates = {}
    for kind in _TEXT:
        row: _Measured | None = getattr(profile, kind)
        if row is not None:
            rates[kind] = _scaled(row, profile, weights)
    slower = {} if profile.slower is None else {"folded": profile.slower.folded, "packed": profile.slower.packed}
    return Throughput(rates, slower, prompts_included=True)


def drawing_on(device: str, weights: float) -> Throughput:
    """As measured_on, for a model that draws; `weights` are its transformer's. What was measured is a lower bound.

    Args:
        device: A name of recipes/facts.py.
        weights: Of the transformer.
    """
    profile = _profiles().get(device)
    if profile is None or profile.drawing is None:
        return Throughput()
    known = profile.drawing
    rate = replace(_scaled(known.drawn, known, weights), at_least=True)
    return Throughput({DRAWN: rate}, {"folded": known.slower.folded, "packed": known.slower.packed})


def _scaled(row: _Measured, profile: _Profile | _Drawing, weights: float) -> Rate:
    ratio = min(1.0, profile.weights / weights)
    scaled = f", scaled by {ratio:.3g}" if ratio < 1 else ""
    source = f"reports/measured/{row.source}; {profile.model}{scaled}"
    return Rate(row.tokens / row.seconds * ratio, source, at_least=weights < profile.weights)


def stated(text: str) -> Throughput:
    """Speeds as the command line has them: scored=9600,generated=2700.

    Raises:
        UserError: for an unknown kind, one named twice, or what is no number above zero.
    """
    rates = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        kind, _, number = part.partition("=")
        if kind not in KINDS:
            raise unknown_name("kind of throughput", kind, KINDS)
        if kind in rates:
            raise UserError(f"--throughput names {kind} twice", "name each kind once")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise UserError(f"--throughput: '{part}' names no tokens a second", f"write {kind}=1000")
        rates[kind] = Rate(value, "stated by --throughput")
    if not rates:
        raise UserError("--throughput names no speed", "write scored=9600,generated=2700")
    return Throughput(rates)
