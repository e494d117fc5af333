"""Speeds are measured or stated, never made up; figures of benchmarks say whose tokens they count."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.recipes.benchmarks import benchmarks
from halfbyte.recipes.facts import MEMORY_GB
from halfbyte.recipes.throughput import Rate, Throughput, _profiles, drawing_on, measured_on, stated
from halfbyte.records.errors import UserError

MEASURED = Path(__file__).parents[2] / "reports" / "measured"


def test_each_measured_speed_names_a_report_that_is_there() -> None:
    assert _profiles().keys() <= MEMORY_GB.keys()
    for name, profile in _profiles().items():
        rows = [profile.scored, profile.generated, profile.calibrated, profile.trained, profile.slower]
        drawing = [] if profile.drawing is None else [profile.drawing.drawn, profile.drawing.slower]
        known = [row for row in (*rows, *drawing) if row is not None]
        assert known, name
        for row in known:
            assert (MEASURED / row.source.partition(",")[0]).is_dir(), row.source


def test_a_larger_model_is_slower_by_its_weights_and_a_smaller_one_no_slower() -> None:
    weights = _profiles()["H200"].weights
    same, large, small = (measured_on("H200", weights * factor).rates["scored"] for factor in (1, 10, 0.01))
    assert large.tokens_per_second == pytest.approx(same.tokens_per_second / 10)
    assert small.tokens_per_second == same.tokens_per_second
    assert (same.at_least, large.at_least, small.at_least) == (False, False, True)
    assert "scaled by 0.1" in large.source


def test_a_device_that_was_not_measured_has_no_speed() -> None:
    assert measured_on("B300", 1e9) == Throughput()


def test_an_image_of_flux_takes_what_was_measured() -> None:
    found = drawing_on("H200", 11_901_408_320)
    assert 30 * (4096 + 512) / found.rates["drawn"].tokens_per_second == pytest.approx(5.75)
    assert found.rates["drawn"].at_least  # a neighbour was on the GPU
    assert found.slower == {"folded": 1.85, "packed": 2.0}
    assert "scaled by 0.5" in drawing_on("H200", 2 * 11_901_408_320).rates["drawn"].source
    assert drawing_on("B300", 1e9) == Throughput()


def test_stated_speeds_stand_before_measured_ones() -> None:
    found = stated("scored=5, trained=2e3").over(measured_on("H200", 1e9))
    assert found.rates["scored"] == Rate(5.0, "stated by --throughput")
    assert found.rates["trained"].tokens_per_second == 2000
    assert found.rates["generated"].source.startswith("reports/measured/")
    assert found.prompts_included
    assert not stated("generated=5").over(measured_on("H200", 1e9)).prompts_included


def test_speeds_of_another_engine_are_not_ours() -> None:
    assert measured_on("H200", 1e9).without("scored", "generated").rates.keys() == {"calibrated"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("skored=5", "did you mean 'scored'"),
        ("scored=0", "names no tokens"),
        (" , ", "no speed"),
        ("scored=5,scored=6", "names scored twice"),
    ],
)
def test_what_is_no_speed_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        stated(text)
    assert said in f"{caught.value.message} {caught.value.hint}"


def test_the_figures_of_benchmarks_say_whose_tokens_they_are() -> None:
    found = benchmarks()
    assert "49,152 tokens" in found.tokenizer
    assert found.tasks["mmlu"].questions == 14_042
    assert all(count.longest <= count.distinct for one in found.tasks.values() for count in one.counts)
