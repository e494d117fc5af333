"""Claims about the contact sheet: each image once, bounded in bytes, worst pairs first, for keyboards and printers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from image_records import noise, scores, write_images
from PIL import Image

from halfbyte.reports.compare import compare
from halfbyte.reports.comparison import Comparison
from halfbyte.reports.contact_sheet import FULL, OTHERS, WORST, chosen, contact_sheet, difference_map
from halfbyte.reports.html import render_html
from halfbyte.reports.policy import load_policy
from halfbyte.reports.tables import references_table
from halfbyte.reports.write import write_reports

Draw = Callable[[int], Image.Image]


@pytest.fixture(autouse=True)
def own_cache(cache: Path) -> None:
    """No clock of another test."""


def comparisons(root: Path, count: int = 6, size: int = 64, formats: tuple[str, ...] = ("NVFP4",)) -> list[Comparison]:
    ours = write_images(root, scores(count), files=lambda i: noise(i, 0, size))
    found = []
    for place, name in enumerate(formats, start=1):
        values = scores(count, 0.5, seed=place) | {"psnr": [30.0 - i / 10 for i in range(count)]}
        draw: Draw = lambda i, place=place: noise(i, place, size, amount=0.05 * place * (i % 3))  # noqa: E731
        theirs = write_images(root, values, format=name, files=draw, latents=[0.1, 0.2])
        found.append(compare(ours, theirs, policy=load_policy("image")))
    return found


def test_each_image_is_in_the_page_once_however_often_it_is_shown(tmp_path: Path) -> None:
    html = render_html(comparisons(tmp_path, formats=("FP8", "NVFP4")))
    uris = re.findall(r'href="(data:image/[^"]+)"', html)
    ids = re.findall(r'<image id="([^"]+)"', html)
    shown = re.findall(r'<use href="#([^"]+)"', html)
    assert len(ids) == len(set(ids)) == len(uris) == 6 + 2 * 6 * 2
    assert set(shown) == set(ids)
    assert len(shown) == 2 * 6 * 5


def test_the_page_needs_no_network_and_no_script_element_and_can_be_worked_by_keyboard(tmp_path: Path) -> None:
    html = render_html(comparisons(tmp_path))
    assert "<script" not in html
    assert not re.search(r'(?:src|href)="(?!data:|#)[^"]*"', html)
    sliders = re.findall(r"<input [^>]*>", html)
    assert len(sliders) == 6
    assert all('type="range"' in one and 'aria-label="Image ' in one for one in sliders)
    assert html.count('role="img"') >= 6 * 5


def test_prompts_are_escaped(tmp_path: Path) -> None:
    html = render_html(comparisons(tmp_path))
    assert "<b>bold" not in html
    assert "a &lt;b&gt;bold&lt;/b&gt; &amp; &#34;quoted&#34; &#39;prompt&#39; 5" in html
    assert "一个红色的圆 4" in html


def test_the_file_stays_small_with_large_noisy_images_and_several_candidates(tmp_path: Path) -> None:
    found = comparisons(tmp_path, count=30, size=400, formats=("FP8", "NVFP4"))
    written = {path.name: path for path in write_reports(found, tmp_path / "out")}
    assert written["report.html"].stat().st_size < 3_000_000
    page = contact_sheet(found, room=300_000)
    assert page.bytes <= 300_000
    assert all(0 < len(sheet.tiles) < 30 for sheet in page.sheets)
    assert page.sheets[0].counts == f"{len(page.sheets[0].tiles)} of 30 pairs"


def test_the_worst_pairs_are_shown_first_and_some_others_with_them_even_where_room_is_short(tmp_path: Path) -> None:
    (found,) = comparisons(tmp_path, count=40)
    pairs = found.pictures[0].pairs
    every = chosen(pairs)
    assert len(every) == WORST + OTHERS
    assert [pair for pair, worst in every if worst] == pairs[:WORST]
    assert len({pair.index for pair, _ in every}) == WORST + OTHERS
    assert sum(not worst for _, worst in every[:8]) == 2
    (sheet,) = contact_sheet([found]).sheets
    assert [tile.number for tile in sheet.tiles[:WORST]] == [pair.index for pair in pairs[:WORST]]
    assert [tile.worst for tile in sheet.tiles] == [True] * WORST + [False] * OTHERS
    assert (
        sheet.order == "The pairs that lost most CLIPScore come first, and among equal ones those whose PSNR is worst"
    )


def test_images_that_are_gone_are_said_to_be_gone(tmp_path: Path) -> None:
    ours = write_images(tmp_path, scores(4))
    theirs = write_images(tmp_path, scores(4, seed=1), format="NVFP4")
    html = render_html([compare(ours, theirs)])
    assert "NVFP4: no picture is shown, since its images are not where they were, or are others by now." in html


def test_a_file_that_vanishes_after_the_comparison_is_left_out(tmp_path: Path) -> None:
    (found,) = comparisons(tmp_path)
    file = found.pictures[0].pairs[0].candidate_file
    assert file is not None
    file.unlink()
    assert contact_sheet([found]).sheets[0].counts == "5 of 6 pairs"


def test_the_difference_map_is_black_for_equal_pixels_and_brightest_at_a_quarter_of_the_range() -> None:
    black = Image.new("RGB", (4, 2))
    part = black.copy()
    part.putpixel((0, 0), (FULL, FULL, FULL))
    part.putpixel((1, 0), (255, 255, 255))
    part.putpixel((2, 0), (FULL // 2, 0, 0))
    brightness = np.asarray(difference_map(black, part)).astype(int).sum(axis=2)
    assert brightness[1].max() == brightness.min() < 10
    assert brightness[0, 0] == brightness[0, 1] > 500
    assert brightness.min() < brightness[0, 2] < brightness[0, 0]


def test_images_of_other_sizes_have_no_difference_map(tmp_path: Path) -> None:
    ours = write_images(tmp_path, scores(3), files=lambda i: noise(i, 0, 32))
    theirs = write_images(tmp_path, scores(3, seed=1), format="NVFP4", files=lambda i: noise(i, 0, 48))
    (sheet,) = contact_sheet([compare(ours, theirs)]).sheets
    assert [tile.difference for tile in sheet.tiles] == [None] * 3
    assert ">difference</span>" not in render_html([compare(ours, theirs)])


def test_equal_images_are_said_to_be_equal(tmp_path: Path) -> None:
    (found,) = comparisons(tmp_path)
    assert found.pictures[0].equal == 2
    tiles = {tile.number: tile.values for tile in contact_sheet([found]).sheets[0].tiles}
    assert [number for number, text in sorted(tiles.items()) if "both images are equal" in text] == [0, 3]
    table = references_table([found])
    assert table is not None
    assert table.rows == [["NVFP4", "psnr", "6", "29.7500", "29.7500", "29.5000", "2"]]


def test_the_report_has_the_latents_curve_and_no_list_of_flipped_questions(tmp_path: Path) -> None:
    html = render_html(comparisons(tmp_path))
    assert "Distance of the latents" in html
    assert "Questions that flipped" not in html
    assert "drew the same prompts from the same noise" in html
