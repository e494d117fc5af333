"""Published tables: figures of others with their source and how surely they were seen, and ours beside them."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files

import yaml
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from halfbyte.records.errors import unknown_name
from halfbyte.reports import figures
from halfbyte.reports.comparison import Comparison, PublishedCell, PublishedTable, TaskResult
from halfbyte.reports.protocol import asked
from halfbyte.reports.tables import Table

NOT_AT_HAND = "not at hand"
# Names of tasks, as patterns, that measure what a published benchmark does.
_TASKS = {
    "MMLU": r"mmlu",
    "vMMLU_5shot": r"mmlu",
    "MMLU_Pro": r"mmlu_pro",
    "GSM8K": r"gsm8k(_(?!platinum).+)?",  # gsm8k_platinum has other questions
    "AIME_2024": r"aime_?(20)?24",
    "AIME_2025": r"aime_?(20)?25",
    "GPQA_Diamond": r"gpqa_diamond(_.+)?",
    "GPQA": r"gpqa_diamond(_.+)?",
    "MATH_500": r"(hendrycks_)?math_?500",
    "IFEval": r"ifeval",
    "HellaSwag": r"hellaswag",
    "WinoGrande": r"winogrande",
}
_ALGORITHMS = {"rtn", "gptq", "awq", "smoothquant", "svdquant", "quarot", "spinquant", "ht", "mr", "mse"}
_METHODS = {"ptq", "qat", "qad"}
_NO_SCORES = {"std", "se"}
_DESCRIBING = {"official", "ckpt", "or"}
_FORMAT = re.compile(r"(bf|fp|nvfp|mxfp|mxint|int)\d+|w\d+a\d+")
_METRICS = {"ImageReward": "image_reward", "CLIP_IQA": "clip_iqa", "CLIPScore": "clip_score"}
"""Metrics of images by the names that published tables have for them."""
_SCALES = {"pct": 100.0, "frac": 1.0, "score": 1.0}
_HIGH = ("bf16", "fp16", "fp32")


class Published(BaseModel):
    """One published table."""

    model_config = ConfigDict(extra="forbid")

    id: str
    alias: str | None = None
    """A name that is easier to remember: march-2025-table-1."""
    model: str | None = None
    task: str | None = None
    """The benchmark of a table whose rows are models and whose columns are formats."""
    unit: str
    benchmarks: list[str]
    """The columns."""
    rows: dict[str, list[float | None]]
    """Values in the order of `benchmarks`; None where one was not published or not seen."""
    n: list[int] | None = None
    """Questions of each benchmark."""
    repeats: dict[str, int] | None = None
    """Samples a question."""
    settings: str
    source: list[str]
    seen: str
    confidence: str
    warning: str | None = None

    @property
    def name(self) -> str:
        """What to call it by: its alias, where it has one."""
        return self.alias or self.id

    @property
    def about(self) -> str:
        """Whose figures it has."""
        return self.model or "several models"

    @field_validator("rows")
    @classmethod
    def _one_value_a_benchmark(
        cls, rows: dict[str, list[float | None]], info: ValidationInfo
    ) -> dict[str, list[float | None]]:
        expected = len(info.data["benchmarks"])
        for name, values in rows.items():
            if len(values) != expected:
                raise ValueError(f"row {name} has {len(values)} values for {expected} benchmarks")
        return rows


def published_tables() -> dict[str, Published]:
    """All published tables, by id."""
    text = files("halfbyte.reports").joinpath("published", "tables.yaml").read_text(encoding="utf-8")
    found = [Published.model_validate(entry) for entry in yaml.safe_load(text)["tables"]]
    return {one.id: one for one in found}


def published_table(name: str) -> Published:
    """One published table, by its id or alias.

    Raises:
        UserError: for an unknown one; names the nearest.
    """
    tables = published_tables()
    known = tables | {one.alias: one for one in tables.values() if one.alias is not None}
    if name not in known:
        raise unknown_name("published table", name, known)
    return known[name]


def beside(published: Published, comparison: Comparison) -> PublishedTable:
    """The published table with our figures where we measured the same benchmark in a format of the same name."""
    scale = _SCALES.get(published.unit)
    used: dict[str, TaskResult] = {}

    def measured(row: str, benchmark: str) -> float | None:
        named = _named_cell(published, row, benchmark, comparison)
        found = None if scale is None else _ours(comparison, *named)
        if found is None or scale is None:
            return None
        used[named[1]] = found[0]
        return scale * found[1]

    table = overlaid(published, measured)
    return table.model_copy(update={"asked": asked(published, comparison, used)})


def overlaid(published: Published, measured: Callable[[str, str], float | None]) -> PublishedTable:
    """The published table with what we measured of each cell, given its row and benchmark; None where we did not."""
    cells = []
    for row, values in published.rows.items():
        for benchmark, value in zip(published.benchmarks, values, strict=True):
            ours = measured(row, benchmark)
            difference = None if ours is None or value is None else ours - value
            cells.append(PublishedCell(benchmark=benchmark, row=row, value=value, ours=ours, difference=difference))
    return PublishedTable(
        id=published.id,
        model=published.model,
        unit=published.unit,
        source=published.source,
        seen=published.seen,
        settings=published.settings,
        cells=cells,
    )


def _named_cell(published: Published, row: str, benchmark: str, comparison: Comparison) -> tuple[str, str]:
    """What a cell is of, as the name of a row and that of a benchmark; an empty row for one of another model.

    In a table of one benchmark, whose columns are formats, a row is ours that has most of our model's words, and no
    others.
    """
    if published.task is None:
        return row, benchmark
    ours = _words(comparison.baseline.name)
    nearest = max(
        (name for name in published.rows if _words(name) <= ours), key=lambda name: len(_words(name)), default=""
    )
    return (f"{row} {benchmark}" if row == nearest else ""), published.task


def _ours(comparison: Comparison, row: str, benchmark: str) -> tuple[TaskResult, float] | None:
    """The task that measured what a benchmark does, and the score of the side that a row is of."""
    pattern, metric = _TASKS.get(benchmark), _METRICS.get(benchmark)
    side = _side(row, comparison)
    if side is None:
        return None
    for task in comparison.tasks:
        of_text = pattern is not None and re.fullmatch(pattern, task.task) and task.bounds == (0, 1)
        if of_text or (task.draws and task.metric == metric):
            return task, task.result.baseline if side == "baseline" else task.result.candidate
    return None


def _side(row: str, comparison: Comparison) -> str | None:
    """Which of our sides a published row is of, by the format, method, algorithm and model in its name.

    A row without a method is of PTQ, and one without an algorithm of any. Where a row names a model ("70B FP4"), ours
    must have all words of that name.
    """
    words = _words(row)
    if words & _NO_SCORES or not _same_model(words, _words(comparison.baseline.name)):
        return None
    if words & _formats(comparison.baseline.format):
        return "baseline"
    if not words & _formats(comparison.candidate.format):
        return None
    algorithms = words & _ALGORITHMS
    if comparison.method not in (words & _METHODS or {"ptq"}) or algorithms not in (set(), _algorithms(comparison)):
        return None
    return "candidate"


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9.]+", name.lower())) - {""}


def _same_model(row: set[str], ours: set[str]) -> bool:
    named = row - _ALGORITHMS - _METHODS - _DESCRIBING
    named -= {word for word in named if _FORMAT.fullmatch(word)}
    return not any(character.isdigit() for word in named for character in word) or named <= ours


def _formats(format_: str) -> set[str]:
    """The names that a published row has for one of our formats."""
    name = figures.format_label(format_).lower().split()[0]
    name = name.removesuffix("_awq").removesuffix("_svd")  # ModelOpt's names of NVFP4 with an algorithm's scales
    return {name, *(_HIGH if name in _HIGH else ()), *(("fp4",) if name == "nvfp4" else ())}


def _algorithms(comparison: Comparison) -> set[str]:
    """The calibration algorithms of the candidate, in the words of published rows; none where that is not known."""
    if comparison.quantized_by is None:
        return set()
    words = set(re.split(r"[^a-z0-9]+", f"{comparison.quantized_by} {comparison.candidate.format}".lower()))
    return words & _ALGORITHMS or {"rtn"}


def published_rows(published: Published) -> Table:
    """The published table as it was published."""
    rows = [
        [name, *(NOT_AT_HAND if value is None else _plain(value) for value in values)]
        for name, values in published.rows.items()
    ]
    return Table(published.id, ["", *published.benchmarks], rows)


def overlay_rows(table: PublishedTable, label: str, *, measured_only: bool = False) -> Table:
    """The table in the layout it was published in; below each row that we measured, ours and the difference.

    Args:
        table: The table beside ours.
        label: The candidate's short name.
        measured_only: Leave out the rows that we measured nothing of.
    """
    benchmarks = list(dict.fromkeys(cell.benchmark for cell in table.cells))
    rows: list[list[str]] = []
    digits = 3 if table.unit == "score" else 2
    for name in dict.fromkeys(cell.row for cell in table.cells):
        cells = [cell for cell in table.cells if cell.row == name]
        if measured_only and all(cell.ours is None for cell in cells):
            continue
        rows.append([name, *(NOT_AT_HAND if cell.value is None else _plain(cell.value) for cell in cells)])
        if any(cell.ours is not None for cell in cells):
            rows.append([f"ours, as {name}", *(figures.figure(cell.ours, digits) for cell in cells)])
        if any(cell.difference is not None for cell in cells):
            rows.append(["difference", *(figures.figure(cell.difference, digits) for cell in cells)])
    return Table(f"{table.id} ({table.unit}) beside {label}", ["", *benchmarks], rows)


def measured_any(table: PublishedTable) -> bool:
    """Whether one of our figures stands beside a published one."""
    return any(cell.ours is not None for cell in table.cells)


def described(published: Published) -> str:
    """What a reader must know beside the figures: unit, settings, source and how surely they were seen."""
    lines = [f"unit: {published.unit}", f"settings: {published.settings}", f"source: {'; '.join(published.source)}"]
    lines.append(f"seen: {published.seen}, confidence {published.confidence}")
    if published.n is not None:
        lines.append("questions: " + ", ".join(figures.count(number) for number in published.n))
    if published.repeats is not None:
        lines.append("samples a question: " + ", ".join(f"{name} {k}" for name, k in published.repeats.items()))
    if published.warning is not None:
        lines.append(f"note: {published.warning}")
    return "\n".join(lines)


def _plain(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e5 else figures.count(round(value))
