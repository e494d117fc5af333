"""A candidate that is broken stops the run with an anomaly: exit code 4, nothing evaluated, and why."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from line import run_child, with_broken_logits, write_recipe

from halfbyte.records.canary import load_canary


def test_a_broken_candidate_is_an_anomaly_and_not_a_regression(
    tiny_llama: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    tiny_llama.save_pretrained(model)
    tiny_tokenizer.save_pretrained(model)
    recipe = write_recipe(tmp_path, model)
    command, cache, said = ["run", str(recipe)], tmp_path / "cache", tmp_path / "stderr"
    assert run_child(command, tmp_path, cache, partial(with_broken_logits, said)) == 4
    assert "is broken, not a bit worse: its logits are no numbers on 16 of 16 prompts" in said.read_text()
    run = tmp_path / "runs" / "tiny-nvfp4"
    (record,) = run.glob("canary/*/*/canary.json")
    assert load_canary(record.parent).failure is not None
    assert not (run / "verdict.json").exists()
    assert len(list(run.glob("evaluations/*"))) == 1  # the baseline's
    # A checkpoint found broken stays so, and costs nothing to find out again.
    assert run_child(command, tmp_path, cache) == 4
    # Whoever knows better can evaluate it all the same.
    assert run_child([*command, "--set", "evaluate.canary=null"], tmp_path, cache) in (0, 1, 3)
