"""What tests/run_experiments.py keeps of its runs: reports, records in short, curves, times, and the overall tables."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiment_jobs import FORMATS, report_command, report_names, sweep_name

import halfbyte
from halfbyte.records.files import write_json, write_text

COMPARISON = "comparison.json"
COLUMNS = {"mmlu": "MMLU, 5-shot", "gsm8k": "GSM8K, 5-shot", "arc_challenge": "ARC-Challenge", "arc_easy": "ARC-Easy"}
KL_BOUND, GAP_BOUND = 1 / 2, 1 / 3
"""Of PTQ's KL divergence and of its perplexity above the baseline's, what QAD may have."""
KEPT = ("recipe.yaml", "manifest.json", "training/training.json", "training/curves.jsonl")
LOG_LINES = 30


def collect(work: Path, output: Path, times: Sequence[dict[str, Any]], patience: float = 60.0) -> None:
    """Writes what is worth keeping of the runs that are done; nothing of it holds a question's text or a weight.

    Args:
        work: Where tests/run_experiments.py worked.
        output: Folder to write; what is there is replaced.
        times: What it knows of its jobs.
        patience: Seconds to wait for reports of tables of which not all runs are done.
    """
    output = output.resolve()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    limit = time.monotonic() + patience
    reports = []
    lines = []
    for name, runs in report_names().items():
        there = [run for run in runs if (work / "runs" / run / COMPARISON).is_file()]
        if not there:
            continue
        comparisons = [_read(work / "runs" / run / COMPARISON)["comparisons"][0] for run in there]
        table = formats_table if name.endswith("formats") else methods_table
        lines += [f"## {name}\n", table(comparisons, there), ""]
        whole = work / "reports" / name
        process = None if (whole / COMPARISON).is_file() else _report(work, there, whole.with_name(f"{name}-partial"))
        reports.append((whole, there, process))
    write_text(output / "tables.md", "\n".join(lines))
    for run in sorted((work / "runs").iterdir()) if (work / "runs").is_dir() else []:
        for file in KEPT:
            if (run / file).is_file():
                (output / "runs" / run.name).mkdir(parents=True, exist_ok=True)
                shutil.copy(run / file, output / "runs" / run.name / Path(file).name)
    write_json(output / "records.json", [*_records(work)])
    write_text(output / "jobs.md", _jobs_table(times))
    _keep_logs(work, output, times)
    for whole, runs, process in reports:
        folder = whole
        if process is not None:
            folder = whole.with_name(f"{whole.name}-partial")
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                continue
        if (folder / COMPARISON).is_file():
            _keep_report(folder, output / whole.name, runs)
    _without_places(output, work)


def _without_places(output: Path, work: Path) -> None:
    """Takes out where things lie on this machine: what is kept is read on others."""
    places = {
        str(Path(halfbyte.__file__).with_name("__main__.py")): "halfbyte",
        f"{work}/": "",
        f"{Path(__file__).resolve().parents[1]}/": "",
        sys.executable: "python",
        os.environ.get("HALFBYTE_DATA") or "\0": "DATA",
    }
    for path in [path for path in output.rglob("*") if path.is_file()]:
        text = path.read_text(encoding="utf-8")
        for place, name in places.items():
            text = text.replace(place, name)
        write_text(path, text, durable=False)


def _report(work: Path, runs: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    shutil.rmtree(output, ignore_errors=True)
    command = report_command(runs, output.relative_to(work))
    with (work / "logs" / f"report-{output.name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=work, stdout=log, stderr=subprocess.STDOUT)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _keep_report(folder: Path, output: Path, runs: Sequence[str]) -> None:
    """Keeps report.md and comparison.json, without the questions and answers that flipped."""
    content = _read(folder / COMPARISON)
    for one in content["comparisons"]:
        for task in one["tasks"]:
            task["flips"] = []
    write_text(output / COMPARISON, json.dumps(content, indent=1) + "\n")
    text = (folder / "report.md").read_text(encoding="utf-8")
    write_text(output / "report.md", f"Runs: {', '.join(runs)}\n\n{text}")


def _markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headers)} |", f"| --- |{' --: |' * (len(headers) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _spread(values: Sequence[float], digits: int) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else "–"
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def _row(label: str, side: str, several: Sequence[dict[str, Any]]) -> list[str]:
    """Scores in percent, then fidelity; the mean and standard deviation of several seeds."""
    cells = [label]
    for task in COLUMNS:
        found = [row["result"][side] for one in several for row in one["tasks"] if row["settings"]["task"] == task]
        cells.append(_spread([100 * value for value in found], 2))
    near = [one["fidelity"] for one in several if one["fidelity"]]
    cells.append(_spread([one[f"{side}_perplexity"] for one in near], 2))
    if side == "baseline":
        return [*cells, "–", "–", "–"]
    flips = [sum(row["result"]["lost"] + row["result"]["gained"] for row in one["tasks"]) for one in several]
    return [
        *cells,
        _spread([one["kl"] for one in near], 4),
        _spread([100 * one["top1_agreement"] for one in near], 1),
        _spread(flips, 0),
    ]


def _headers() -> list[str]:
    return ["", *COLUMNS.values(), "WikiText-2 perplexity", "KL to BF16 (nats)", "top-1 agreement", "flips"]


def formats_table(comparisons: Sequence[dict[str, Any]], runs: Sequence[str]) -> str:
    """A row a format, benchmarks as columns: the layout of published Table 2."""
    rows = [_row("BF16", "baseline", comparisons[:1])]
    for form in FORMATS:
        found = [one for one, run in zip(comparisons, runs, strict=True) if run.endswith(f"135m-{form}")]
        if found:
            rows.append(_row(form.upper().replace("-KV-FP8", " + FP8 KV"), "candidate", found))
    return _markdown(_headers(), rows)


def methods_table(comparisons: Sequence[dict[str, Any]], runs: Sequence[str]) -> str:
    """Rows BF16, PTQ, QAT and QAD: the layout of published Table 3; below it what was asked of QAD."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for one, run in zip(comparisons, runs, strict=True):
        kind = next((name for name in ("qat", "qad") if f"-{name}-" in run), "ptq")
        kinds.setdefault(kind, []).append(one)
    rows = [_row("BF16", "baseline", comparisons[:1])]
    for kind in ("ptq", "qat", "qad"):
        if kind in kinds:
            count = len(kinds[kind])
            seeds = "" if kind == "ptq" else f", {count} seed{'s' if count > 1 else ''}"
            rows.append(_row(f"NVFP4 {kind.upper()}{seeds}", "candidate", kinds[kind]))
    return _markdown(_headers(), rows) + _bounds(kinds)


def _bounds(kinds: dict[str, list[dict[str, Any]]]) -> str:
    """QAT's and QAD's KL divergence and perplexity gap as shares of PTQ's, a seed each."""
    plain = next((one["fidelity"] for one in kinds.get("ptq", []) if one["fidelity"]), None)
    if plain is None:
        return ""
    lines = []
    for kind in ("qat", "qad"):
        near = [one["fidelity"] for one in kinds.get(kind, []) if one["fidelity"]]
        if not near:
            continue
        kl = [one["kl"] / plain["kl"] for one in near]
        gap = [_gap(one) / _gap(plain) for one in near]
        text = f"{kind.upper()} has {_spread(kl, 3)} of PTQ's KL divergence and {_spread(gap, 3)} of its perplexity gap"
        if kind == "qad":
            held = max(kl) <= KL_BOUND and max(gap) <= GAP_BOUND
            text += f" (bounds .500 and .333: {'held' if held else 'NOT held'} by all seeds)"
        lines.append(f"\n{text}.\n")
    return "".join(lines)


def _gap(fidelity: dict[str, Any]) -> float:
    return float(fidelity["candidate_perplexity"] - fidelity["baseline_perplexity"])


def _records(work: Path) -> Iterable[dict[str, Any]]:
    """Of each evaluation what was measured, without what each subtask and each question had."""
    paths = sorted(
        [*(work / "runs").glob("*/evaluations/*/*@*/record.json"), *(work / "baselines").glob("*/*/record.json")]
    )
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        fingerprint = record["fingerprint"]
        task = fingerprint["task"]
        yield {
            "run": path.relative_to(work).parts[1],
            "task": task,
            "model": record["model"],
            "metrics": [metric for metric in record["metrics"] if metric["subtask"] == task],
            "limit": fingerprint["limit"],
            "dtype": fingerprint["dtype"],
            "generation": next((one["generation"] for one in fingerprint["subtasks"].values()), None),
            **{
                key: record[key]
                for key in ("created", "key", "health", "seconds", "tokens", "packages", "hardware", "data")
            },
        }


def _jobs_table(times: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            row["name"],
            f"{row['seconds']:.0f}",
            "ended" if row["code"] is None else str(row["code"]),
            str(row["neighbours"]),
        ]
        for row in times
    ]
    return _markdown(["job", "seconds", "exit code", "neighbours on its GPU at its end"], rows)


def _keep_logs(work: Path, output: Path, times: Sequence[dict[str, Any]]) -> None:
    """The last lines of the in-house model's training, of the sweeps and of what did not end well."""
    wanted = {"inhouse", "texts", "continuations"} | {row["name"] for row in times if row["code"] not in (0, 1, 3, 4)}
    wanted |= {row["name"] for row in times if row["name"].startswith(sweep_name(""))}
    for name in sorted(wanted):
        path = work / "logs" / f"{name}.log"
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
            write_text(output / "logs" / f"{name}.txt", "\n".join(lines[-LOG_LINES:]) + "\n")
