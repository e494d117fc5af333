"""What a model goes on from is text of the corpus, and what it writes is as long as asked and the same for a seed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import experiment_continuations as script
import pytest


def test_prompts_come_from_all_places_of_long_texts() -> None:
    texts = [list(range(500)), list(range(500, 500 + script.PROMPT - 1)), list(range(1000, 1000 + script.PROMPT))]
    found = script.prompts(texts, 400, random.Random(1))
    assert all(prompt == list(range(prompt[0], prompt[0] + script.PROMPT)) for prompt in found)
    starts = {prompt[0] for prompt in found}
    assert min(starts) < 20
    assert 400 < max(starts - {1000}) <= 500 - script.PROMPT
    assert 1000 in starts


def test_continuations_are_written_for_a_seed(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "PROMPT", 8)
    line = "The quick brown fox jumps over the lazy dog, again and again."
    found = []
    for _ in range(2):
        (tmp_path / "wikitext.jsonl").write_text(json.dumps({"text": line}) + "\n")
        script.main(
            [str(tiny_model_folder), str(tmp_path), "--texts", "5", "--length", "24", "--batch", "2", "--seed", "3"]
        )
        found.append((tmp_path / "continued.jsonl").read_text())
    assert found[0] == found[1]
    texts = [json.loads(row)["text"] for row in found[0].splitlines()]
    assert len(texts) == 5
    assert len(set(texts)) > 1
