"""Calibration rows: packed texts see what they would see alone, so the batch size decides nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import make_model, sequences, spec

from halfbyte.quant import calibration, configs, ptq
from halfbyte.records.errors import UserError


def test_rows_keep_order_and_size() -> None:
    texts = [[1] * 5, [2] * 4, [3] * 9, [4]]
    assert list(calibration.rows_of(texts, 9)) == [[[1] * 5, [2] * 4], [[3] * 9], [[4]]]


def test_texts_of_one_length_are_stacked_and_the_rest_is_packed() -> None:
    texts = [[at] * length for at, length in enumerate((4, 3, 4, 4, 9, 4, 4))]
    stacked = [([texts[0], texts[2]], True), ([texts[3], texts[5]], True)]
    assert list(calibration.batches_of(texts, 8, pack=True)) == [
        *stacked, ([texts[4]], True), ([texts[6], texts[1]], False),
    ]  # fmt: skip
    assert list(calibration.batches_of(texts, 8, pack=False)) == [
        *stacked, ([texts[6]], True), ([texts[1]], True), ([texts[4]], True),
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_packed_texts_give_the_logits_of_single_ones(family: str) -> None:
    model = make_model(family).float()
    assert calibration.packs_exactly(model)
    texts = sequences(4)
    with torch.no_grad():
        packed = model(**calibration.packed_inputs(texts, model.device), use_cache=False).logits[0]
        single = torch.cat([model(torch.tensor([ids]), use_cache=False).logits[0] for ids in texts])
    torch.testing.assert_close(packed, single, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("lengths", "shared"),
    [((4, 4, 4, 4), False), ((4, 4, 4), False), ((4, 4, 4, 2), True), ((9, 9), False), ((4, 4, 9), False)],
)
def test_texts_share_rows_unless_those_of_one_length_fill_batches(lengths: tuple[int, ...], shared: bool) -> None:
    assert calibration.shares_rows([[1] * length for length in lengths], 8) is shared


def test_a_model_that_mixes_packed_texts_is_found_out() -> None:
    class Mixing(torch.nn.Module):
        """Answers with the running mean of all tokens of the row, whatever position_ids say."""

        device = torch.device("cpu")

        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(384, 16)

        def get_input_embeddings(self) -> torch.nn.Embedding:
            return self.embedding

        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            hidden = self.embedding(input_ids).cumsum(1)
            return type("Output", (), {"logits": hidden})()

    assert not calibration.packs_exactly(Mixing())  # type: ignore[arg-type]


def test_cutting_texts_leaves_the_tokenizer_as_it_was(tiny_tokenizer: Any) -> None:
    """truncation=True would be saved with the tokenizer, into the checkpoint."""
    before = tiny_tokenizer.backend_tokenizer.to_str()
    rows = calibration.tokenize(["the cat sees the dog " * 20, "", "moon"], tiny_tokenizer, 7)
    assert len(rows[0]) == 7
    assert len(rows) == 2
    assert tiny_tokenizer.backend_tokenizer.to_str() == before


def test_texts_without_a_token_are_an_error(tiny_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="hold no token"):
        calibration.tokenize(["", ""], tiny_tokenizer, 8)


def _smoothing(texts: list[list[int]], tokens_per_row: int, *, pack: bool) -> tuple[dict[str, torch.Tensor], int]:
    """AWQ's scale for each layer, and how many forward passes it took to find them."""
    model = make_model("llama").float()
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    model.register_forward_hook(count)
    loop = calibration.forward_loop(texts, tokens_per_row=tokens_per_row, pack=pack)
    ptq.calibrate(model, configs.quant_config(spec("NVFP4_AWQ_LITE_CFG")), loop)
    return {name: value for name, value in model.named_buffers() if name.endswith("_pre_quant_scale")}, passes


def test_awq_finds_the_same_scales_for_stacked_texts_in_fewer_passes() -> None:
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(0, 384, (24,), generator=generator).tolist() for _ in range(16)]
    stacked, few = _smoothing(texts, 24 * 8, pack=True)
    single, many = _smoothing(texts, 24, pack=False)
    assert (few, many) == (4, 32)  # AWQ sees all texts twice
    assert len(stacked) == 14
    for name, scale in stacked.items():
        torch.testing.assert_close(scale, single[name], rtol=1e-5, atol=0)
