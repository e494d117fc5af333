"""How long and in how much memory the gate decides on two records of full MMLU, five shots in every prompt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from halfbyte.records.digests import text_digest, value_digest
from halfbyte.records.record import EvaluationRecord, Fingerprint, Metric, ModelSummary, SubtaskFingerprint

pytestmark = pytest.mark.bench
QUESTIONS = 14_042
SUBTASKS = 57
PROMPT = 2800  # characters of a five-shot prompt, about 700 tokens
SECONDS = 2.0
MEGABYTES = 500


def write_mmlu(folder: Path, format: str, right: np.ndarray, prompt: int = PROMPT) -> None:
    """A record of MMLU in lm-eval's layout: each of the four choices is a request that holds the whole prompt."""
    folder.mkdir(parents=True)
    shots = ("The following are multiple choice questions (with answers). " + "a shot " * prompt)[:prompt]
    subtasks, files, metrics = {}, {}, []
    for number, places in enumerate(np.array_split(np.arange(QUESTIONS), SUBTASKS)):
        name = f"mmlu_subject_{number:02}"
        rows = []
        for doc_id, place in enumerate(places):
            question = f"Question {place} of {name}, as long as they are on average: " + "words of a question " * 6
            arguments = {
                f"gen_args_{i}": {"arg_0": f"{shots}\n\n{question}\nAnswer:", "arg_1": f" {letter}"}
                for i, letter in enumerate("ABCD")
            }
            best = 0 if right[place] else 1
            scores = [["-0.5" if i == best else "-3.5", "False"] for i in range(4)]
            rows.append(
                {
                    "doc_id": doc_id,
                    "doc": {"question": question, "choices": ["one", "two", "three", "four"], "answer": 0},
                    "target": "0",
                    "arguments": arguments,
                    "resps": [[score] for score in scores],
                    "filtered_resps": scores,
                    "filter": "none",
                    "metrics": ["acc"],
                    "doc_hash": text_digest(question),
                    "prompt_hash": text_digest(shots + question),
                    "target_hash": text_digest("0"),
                    "acc": float(right[place]),
                }
            )
        subtasks[name] = SubtaskFingerprint(
            version="1.0",
            num_fewshot=5,
            questions=len(rows),
            documents=value_digest([row["doc_hash"] for row in rows]),
            prompts=value_digest([row["prompt_hash"] for row in rows]),
            targets=value_digest([row["target_hash"] for row in rows]),
            output_type="multiple_choice",
            chance=0.25,
        )
        files[name] = f"samples_{name}.jsonl"
        metrics.append(
            Metric(
                subtask=name,
                metric="acc",
                filter="none",
                value=float(right[places].mean()),
                higher_is_better=True,
                questions=len(rows),
            )
        )
        (folder / files[name]).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    EvaluationRecord(
        created="2026-11-01T00:00:00+00:00",
        model=ModelSummary(
            name=f"models/{format}",
            digest=text_digest(format),
            format=format,
            bytes_on_disk=16_000_000_000,
            bits_per_weight=16,
        ),
        fingerprint=Fingerprint(task="mmlu", subtasks=subtasks, bos_per_prompt=[1]),
        primary=["acc", "none"],
        metrics=metrics,
        results_file="results.json",
        samples_files=files,
        packages={"torch": "2.13.0"},
        hardware={"machine": "x86_64"},
        seconds=1.0,
        tokens=1,
    ).save(folder)


def write_sides(folder: Path) -> tuple[Path, Path]:
    """Two records of which 3 % of the questions are lost and as many gained."""
    rng = np.random.default_rng(1)
    right = rng.random(QUESTIONS) < 0.7
    other = right ^ (rng.random(QUESTIONS) < np.where(right, 0.03, 0.07))
    write_mmlu(folder / "baseline", "bfloat16", right)
    write_mmlu(folder / "candidate", "NVFP4", other)
    return folder / "baseline", folder / "candidate"


def measured(command: list[str]) -> tuple[int, float, float]:
    """Exit code, seconds and the largest resident size in MB of a process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    return os.waitstatus_to_exitcode(status), time.perf_counter() - start, usage.ru_maxrss / 1000


def test_seconds_and_megabytes_of_a_gate_on_full_mmlu(tmp_path: Path) -> None:
    baseline, candidate = write_sides(tmp_path)
    size = sum(path.stat().st_size for path in candidate.iterdir()) / 1e6
    command = [sys.executable, "-m", "halfbyte", "gate", str(baseline), str(candidate), "--policy", "release"]
    runs = [measured(command) for _ in range(5)]
    assert {code for code, _, _ in runs} <= {0, 1, 3}
    seconds = sorted(seconds for _, seconds, _ in runs)
    memory = max(memory for _, _, memory in runs)
    print(
        f"\nhalfbyte gate, full MMLU, {size:.0f} MB a side: {seconds[0]:.2f} s at best, {seconds[2]:.2f} s median, "
        f"{memory:.0f} MB"
    )
    assert seconds[0] < SECONDS
    assert memory < MEGABYTES
