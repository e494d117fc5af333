"""Stored teacher logits: what is read back is what the teacher says, however often the work was cut short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.quant import teacher_logits
from halfbyte.quant.batches import Numbered, collate
from halfbyte.quant.teacher_logits import StoredLogits, store_logits
from halfbyte.quant.top_k import top_k, top_k_divergence
from halfbyte.quant.training_rows import IGNORED
from halfbyte.quant.training_texts import Examples, training_examples
from halfbyte.recipes.training import TrainSpec
from halfbyte.records.errors import UserError


@pytest.fixture(params=[True, False], ids=["packed", "alone"])
def examples(request: pytest.FixtureRequest, tmp_path: Path, tiny_tokenizer: Any) -> Examples:
    rows = [{"q": f"how many {i} birds", "a": " ".join(["fish"] * (i % 7)) + f" {i}"} for i in range(60)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"dataset": str(path), "prompt_field": "q", "response_field": "a"}
    block = {"method": "qad", "sources": [source], "max_steps": 1, "length": 48, "packing": request.param}
    return training_examples(TrainSpec.model_validate(block), tiny_tokenizer, 512)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_logits, "ROWS", 4)
    monkeypatch.setattr(teacher_logits, "_PASS", 100)
    monkeypatch.setattr(teacher_logits, "_CHUNK", 7)


def store(model: Any, examples: Examples, folder: Path, **more: Any) -> StoredLogits:
    options = {"k": 8, "key": "a", **more}
    return store_logits(model, [examples.train, examples.validation], folder, **options)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_rows_are_read_by_their_index_as_the_teacher_sees_them_alone(
    tmp_path: Path, llama_factory: Any, examples: Examples, temperature: float
) -> None:
    model = llama_factory()
    stored = store(model, examples, tmp_path / "teacher", temperature=temperature)
    rows = [*examples.train, *examples.validation]
    assert stored.facts.rows == len(rows)
    assert stored.facts.tokens == sum(label != IGNORED for row in rows for label in row.labels)
    for wanted in {1.0, temperature}:
        for index in (0, 5, len(rows) - 1):
            batch = collate([Numbered(rows[index], index)])
            counted = batch["labels"][:, 1:] != IGNORED
            with torch.no_grad():
                logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
            expected = top_k(logits[:, :-1][counted], 8, wanted)
            for got, want in zip(stored.read([index], wanted), expected, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    both = stored.read([3, 1])
    assert torch.equal(both.indices, torch.cat([stored.read([3]).indices, stored.read([1]).indices]))


def test_the_loss_of_a_batch_against_what_is_stored_is_the_loss_against_the_teacher(
    tmp_path: Path, llama_factory: Any, examples: Examples
) -> None:
    teacher, student = llama_factory(seed=1), llama_factory(seed=2)
    stored = store(teacher, examples, tmp_path / "teacher", k=384)
    batch = collate([Numbered(examples.train[at], at) for at in (2, 0, 4)])
    counted = batch["labels"][:, 1:] != IGNORED
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    with torch.no_grad():
        ours, theirs = (model(**inputs).logits[:, :-1][counted] for model in (student, teacher))
    full = (theirs.softmax(-1) * (theirs.log_softmax(-1) - ours.log_softmax(-1))).sum(-1)
    kept = top_k_divergence(ours, stored.read(batch["index"].tolist()))
    torch.testing.assert_close(kept, full, rtol=1e-3, atol=1e-4)


def test_work_that_was_cut_short_goes_on_and_gives_the_same_bytes(
    tmp_path: Path, llama_factory: Any, examples: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama_factory()
    whole = tmp_path / "whole"
    store(model, examples, whole)
    write, left = teacher_logits.write_bytes, [2]

    def killed(path: Path, content: bytes) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        write(path, content)

    monkeypatch.setattr(teacher_logits, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        store(model, examples, tmp_path / "cut")
    with pytest.raises(UserError, match=r"logits-00002.safetensors is missing"):
        StoredLogits(tmp_path / "cut")
    monkeypatch.setattr(teacher_logits, "write_bytes", write)
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cut").glob("*.safetensors")}
    store(model, examples, tmp_path / "cut")
    for path in whole.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "cut" / path.name).read_bytes()
    assert all((tmp_path / "cut" / name).stat().st_mtime_ns == when for name, when in kept.items())
    assert len(kept) == 2


def test_a_store_of_another_key_is_made_anew(tmp_path: Path, llama_factory: Any, examples: Examples) -> None:
    folder = tmp_path / "teacher"
    store(llama_factory(seed=1), examples, folder)
    before = (folder / "logits-00000.safetensors").read_bytes()
    assert store(llama_factory(seed=2), examples, folder).facts.key == "a"
    assert (folder / "logits-00000.safetensors").read_bytes() == before  # the key says that it is the same teacher
    store(llama_factory(seed=2), examples, folder, key="b")
    assert (folder / "logits-00000.safetensors").read_bytes() != before


def test_what_cannot_be_stored_or_read_is_an_error(
    tmp_path: Path, llama_factory: Any, examples: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama_factory()
    with pytest.raises(UserError, match="offline_top_k is 385, and the vocabulary has 384"):
        store(model, examples, tmp_path / "teacher", k=385)
    stored = store(model, examples, tmp_path / "teacher", vocabulary=380)
    assert int(stored.read(range(stored.facts.rows)).indices.max()) < 380
    with pytest.raises(IndexError):
        stored.read([stored.facts.rows])
    with pytest.raises(ValueError, match=r"stored for temperature 1.0 and 1, not 3.0"):
        stored.read([0], 3.0)
    free = type("Usage", (), {"free": 10})
    monkeypatch.setattr(teacher_logits.shutil, "disk_usage", lambda _: free)
    with pytest.raises(UserError, match="no space for the teacher's logits"):
        store(model, examples, tmp_path / "other")
