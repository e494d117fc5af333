"""Fidelity is what the definitions give, window by window, and goes on where it was cut short."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.eval import fidelity
from halfbyte.eval.fidelity import compare_window, measure_fidelity, read_text, windows_of
from halfbyte.eval.kept import Kept, is_kept, keep
from halfbyte.recipes.schema import FidelitySpec, TextSource
from halfbyte.records.errors import UserError
from halfbyte.records.fidelity import FidelityRecord, load_fidelity
from halfbyte.records.record import ModelSummary

TEXTS = ["the cat sees the dog", "", "the sun is hot and the moon is not", "one two three four five red fish"] * 6


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    return path


@pytest.fixture
def measure(tiny_llama: Any, tiny_tokenizer: Any, summary: ModelSummary, text_file: Path, tmp_path: Path) -> Any:
    other = summary.model_copy(update={"digest": "1" * 64})

    def run(candidate: Any, folder: str = "fidelity", window: int = 32, **options: Any) -> FidelityRecord:
        spec = FidelitySpec(
            source=TextSource(dataset=str(text_file)), window=window, max_tokens=options.get("max_tokens")
        )
        tokenizer = options.get("tokenizer", tiny_tokenizer)
        return measure_fidelity(
            options.get("baseline", tiny_llama), candidate, tokenizer, spec, summary, other, read_text(spec),
            tmp_path / folder, replace=options.get("replace", False),
        )  # fmt: skip

    return run


def test_a_model_is_faithful_to_itself(measure: Any, tiny_llama: Any) -> None:
    record = measure(tiny_llama)
    assert record.kl == 0.0
    assert record.top1_agreement == 1.0
    assert record.baseline_perplexity == record.candidate_perplexity > 1.0


def test_the_figures_are_those_of_the_definitions(
    measure: Any, tiny_llama: Any, tiny_tokenizer: Any, llama_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "SLICE", 7)  # so that slices and windows do not end together
    other = llama_factory(seed=1)
    record = measure(other)
    ids = tiny_tokenizer("\n".join(TEXTS), add_special_tokens=False)["input_ids"]
    windows = [ids[at : at + 32] for at in range(0, len(ids), 32)]
    kl = agree = tokens = 0.0
    nll = [0.0, 0.0]
    for window in windows:
        inputs = torch.tensor([window])
        with torch.no_grad():
            p, q = (torch.log_softmax(model(inputs).logits[0, :-1].double(), -1) for model in (tiny_llama, other))
        kl += float((p.exp() * (p - q)).sum())
        agree += int((p.argmax(-1) == q.argmax(-1)).sum())
        tokens += len(window) - 1
        for side, log in enumerate((p, q)):
            nll[side] -= sum(float(log[at, window[at + 1]]) for at in range(len(window) - 1))
    assert record.tokens == tokens == len(ids) - len(windows)
    assert record.kl == pytest.approx(kl / tokens, rel=1e-5)
    assert record.kl > 0.1
    assert record.top1_agreement == agree / tokens
    assert record.baseline_perplexity == pytest.approx(math.exp(nll[0] / tokens), rel=1e-5)
    assert record.candidate_perplexity == pytest.approx(math.exp(nll[1] / tokens), rel=1e-5)


def test_each_window_starts_with_bos_where_the_tokenizer_adds_it(
    measure: Any, tiny_llama: Any, tokenizer_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def spy(baseline: Any, candidate: Any, ids: list[int]) -> Any:
        seen.append(ids)
        return compare_window(baseline, candidate, ids)

    monkeypatch.setattr(fidelity, "compare_window", spy)
    tokenizer = tokenizer_factory(add_bos=True)
    record = measure(tiny_llama, tokenizer=tokenizer)
    ids = tokenizer("\n".join(TEXTS), add_special_tokens=False)["input_ids"]
    assert all(window[0] == 0 and len(window) <= 32 for window in seen)
    assert [token for window in seen for token in window[1:]] == ids
    assert record.tokens == len(ids)  # the first token of each window is predicted, from BOS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_of_a_baseline_gives_the_figures_of_the_baseline_itself(
    measure: Any, llama_factory: Any, tiny_tokenizer: Any, text_file: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    baseline, candidate = (llama_factory(seed=seed).to(dtype) for seed in (0, 1))
    spec = FidelitySpec(source=TextSource(dataset=str(text_file)), window=32)
    windows = windows_of(tiny_tokenizer, read_text(spec), spec)
    folder = tmp_path / "kept"
    assert keep(baseline, windows[:2], 384, folder)
    assert not is_kept(folder, windows)
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != "head.safetensors"}
    assert len(written) == 2
    assert keep(baseline, windows, 384, folder)
    assert is_kept(folder, windows)
    assert all(path.stat().st_mtime_ns == time for path, time in written.items()), "windows are not computed twice"
    kept = Kept(folder, torch.device("cpu"))
    for ids in windows:
        with torch.inference_mode():
            assert torch.equal(kept(torch.tensor([ids])).logits, baseline(torch.tensor([ids])).logits)
    ours, theirs = (measure(candidate, name, baseline=one) for name, one in (("kept", kept), ("both", baseline)))
    assert ours.windows == theirs.windows
    assert (ours.key, ours.dtype) == (theirs.key, theirs.dtype)


def test_a_model_that_changes_its_logits_is_not_kept(tmp_path: Path) -> None:
    from tiny import make_model

    model = make_model("gemma3").float()
    assert keep(model, [[5, 6, 7]], 384, tmp_path / "plain")
    model.config.get_text_config().final_logit_softcapping = 5.0
    assert not keep(model, [[5, 6, 7]], 384, tmp_path / "capped")


def test_a_kept_baseline_of_another_vocabulary_is_refused(
    measure: Any, tiny_llama: Any, llama_factory: Any, tmp_path: Path
) -> None:
    assert keep(llama_factory(vocab_size=400), [[5, 6, 7]], 400, tmp_path / "kept")
    with pytest.raises(UserError, match="a vocabulary of 400 tokens and the candidate one of 384"):
        measure(tiny_llama, baseline=Kept(tmp_path / "kept", torch.device("cpu")))


def test_max_tokens_ends_at_the_next_whole_window(measure: Any, tiny_llama: Any) -> None:
    assert len(measure(tiny_llama, max_tokens=40).windows) == 2


def test_a_measurement_cut_short_goes_on_and_ends_the_same(
    measure: Any, llama_factory: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = llama_factory(seed=1)
    expected = measure(other, "undisturbed")
    seen: list[int] = []

    def fail(baseline: Any, candidate: Any, ids: list[int]) -> Any:
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(len(ids))
        return compare_window(baseline, candidate, ids)

    monkeypatch.setattr(fidelity, "compare_window", fail)
    with pytest.raises(KeyboardInterrupt):
        measure(other)
    with (tmp_path / "fidelity" / fidelity.JOURNAL_FILE).open("ab") as journal:
        journal.write(b'{"tokens": 3')
    rest: list[int] = []

    def count(baseline: Any, candidate: Any, ids: list[int]) -> Any:
        rest.append(len(ids))
        return compare_window(baseline, candidate, ids)

    monkeypatch.setattr(fidelity, "compare_window", count)
    record = measure(other)
    assert record.windows == expected.windows
    assert record.kl == expected.kl
    assert len(seen) + len(rest) == len(expected.windows)
    assert [path.name for path in (tmp_path / "fidelity").iterdir()] == ["fidelity.json"]


def test_the_same_measurement_is_not_done_twice(measure: Any, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = measure(tiny_llama)
    monkeypatch.setattr(fidelity, "compare_window", None)
    assert measure(tiny_llama) == record


def test_a_measurement_of_something_else_is_kept_unless_replaced(measure: Any, tiny_llama: Any, tmp_path: Path) -> None:
    record = measure(tiny_llama)
    with pytest.raises(UserError, match="is of other models, another text or other packages"):
        measure(tiny_llama, window=16)
    assert load_fidelity(tmp_path / "fidelity") == record
    assert measure(tiny_llama, window=16, replace=True).window == 16


def test_models_of_two_vocabularies_are_refused(measure: Any, llama_factory: Any) -> None:
    with pytest.raises(UserError, match="a vocabulary of 384 tokens and the candidate one of 400"):
        measure(llama_factory(vocab_size=400))


def test_a_window_longer_than_the_model_takes_is_refused(measure: Any, llama_factory: Any) -> None:
    with pytest.raises(UserError, match="a window of 32 tokens is longer than the 16 the model takes"):
        measure(llama_factory(max_length=16))


def test_a_text_of_one_token_is_too_short(measure: Any, tiny_llama: Any, text_file: Path) -> None:
    text_file.write_text("a", encoding="utf-8")
    with pytest.raises(UserError, match="too short: 1 token"):
        measure(tiny_llama)


def test_logits_that_are_no_numbers_are_an_error(measure: Any, llama_factory: Any) -> None:
    broken = llama_factory()
    with torch.no_grad():
        broken.lm_head.weight[5] = float("nan")
    with pytest.raises(UserError, match="logits that are no numbers"):
        measure(broken)


class Fixed:
    """A model whose logits do not depend on its input, and are all it has."""

    device = torch.device("cpu")

    def __init__(self, logits: list[float]) -> None:
        self.row = torch.tensor(logits)

    def __call__(self, ids: torch.Tensor) -> Any:
        class Output:
            logits = self.row.expand(*ids.shape, len(self.row))

        return Output


def test_a_token_both_models_rule_out_adds_nothing() -> None:
    never = -math.inf
    window = compare_window(Fixed([0.0, 0.0, never]), Fixed([math.log(3), 0.0, never]), [0, 1, 1])
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert window.kl == pytest.approx(2 * expected, rel=1e-6)
    assert window.baseline_nll == pytest.approx(2 * math.log(2), rel=1e-6)


def test_a_token_only_the_candidate_rules_out_is_an_error() -> None:
    with pytest.raises(UserError, match="rules out a token"):
        compare_window(Fixed([0.0, 0.0, 0.0]), Fixed([0.0, 0.0, -math.inf]), [0, 1, 1])
