"""Every FP4 and FP8 preset and general PTQ recipe of ModelOpt on a CPU: quant/FORMATS.md says what is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from presets import CASES, Case, documented, general_recipes, measure


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.family}")
def test_the_table_says_what_a_preset_does(case: Case, tmp_path: Path, tiny_tokenizer: Any) -> None:
    assert measure(case, tiny_tokenizer, tmp_path) == documented()[CASES.index(case)]


def test_nothing_fails_without_a_reason_in_the_docs() -> None:
    good = ("kept", "finite", "planned size", "passes", "same bits")
    for row in documented():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if "input_scale1" in cells[0]:  # a scale of 1 is what this recipe is for
            cells[5] = cells[5].replace("fails: calibrated", "passes")
        assert cells[2] == "refused" or tuple(cells[2:7]) == good, row


def test_every_preset_and_general_recipe_of_modelopt_has_a_row() -> None:
    import modelopt.torch.quantization as mtq

    rows = {case.name for case in CASES}
    # Those for a KV cache alone are rows "preset + KV cache"; those for Mamba need its kernels.
    presets = {name for name in mtq.config.choices if "KV" not in name and not name.startswith("MAMBA")}
    assert presets <= rows
    assert set(general_recipes()) <= rows
    assert len(documented()) == len(CASES)
