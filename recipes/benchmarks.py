"""Stated figures of benchmarks, for plans where their questions or the model's tokenizer are not at hand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml
from pydantic import Field

from halfbyte.recipes.sources import Strict


class Count(Strict):
    """Tokens of all questions of a benchmark under one number of examples."""

    num_fewshot: int = Field(ge=0)
    distinct: int = Field(ge=1)
    """Prompt tokens that are computed: what prompts share once, the samples of a question once."""
    longest: int = Field(ge=1)
    """Of a prompt."""


class Benchmark(Strict):
    """One task or group."""

    questions: int = Field(ge=1)
    """Of the test set, with all subtasks."""
    subtasks: int = Field(default=1, ge=1)
    """A limit cuts each of them."""
    samples: int = Field(default=1, ge=1)
    """Texts drawn for each question by the task's own definition."""
    most_generated: int = Field(default=0, ge=0)
    """Tokens of a text at most; 0 where nothing is generated, or it is not known."""
    counts: list[Count] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Benchmarks:
    """All of them, and whose tokens are counted."""

    tokenizer: str
    tasks: dict[str, Benchmark]


@cache
def benchmarks() -> Benchmarks:
    """The figures of benchmarks.yaml, which says how they were counted."""
    content = yaml.safe_load((files("halfbyte.recipes") / "benchmarks.yaml").read_text(encoding="utf-8"))
    tasks = {name: Benchmark.model_validate(one) for name, one in content["tasks"].items()}
    return Benchmarks(content["tokenizer"], tasks)
