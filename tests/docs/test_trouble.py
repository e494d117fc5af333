"""The messages that docs/trouble.md and others quote are ones that halfbyte prints."""

from __future__ import annotations

import re

import pytest
from documents import PAGES, Block, blocks
from messages import is_printed

from halfbyte.quant.verify import PIPELINE_RULES, RULES, SOURCE_RULES

QUOTES = [block for page in PAGES for block in blocks(page) if block.title == "halfbyte says"]
CHECKS = {rule.name for rule in (*RULES, *SOURCE_RULES, *PIPELINE_RULES)}
FAULT = re.compile(r"FAIL  (?P<check>[a-z ]+): (?P<fault>.+)")
TROUBLE = next(page for page in PAGES if page.name == "trouble.md")


def quoted(line: str) -> str:
    """A line without what stands before each message of its kind."""
    fault = FAULT.fullmatch(line)
    if fault is None:
        return line
    assert fault["check"] in CHECKS, f"there is no check '{fault['check']}'"
    return fault["fault"]


@pytest.mark.parametrize("block", QUOTES, ids=lambda block: block.where)
def test_what_is_quoted_is_what_is_printed(block: Block) -> None:
    lost = [line for line in block.text.splitlines() if line.strip() and not is_printed(quoted(line))]
    assert lost == [], block.where


def test_what_tables_quote_is_what_is_printed() -> None:
    found = re.findall(r"`(FAIL  [^`]+)`", TROUBLE.read_text(encoding="utf-8"))
    assert len(found) >= 10
    assert [line for line in found if not is_printed(quoted(line))] == []


def test_every_message_is_searched_for_with_enough_of_its_own() -> None:
    assert not is_printed("the moon is made of green cheese")
    assert not is_printed("out/bf16 is gated and blue")
    assert is_printed("mine is gated")


def test_the_pages_of_trouble_have_a_block_for_each_part_of_the_work() -> None:
    headings = re.findall(r"^## (.+)$", TROUBLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {"Making the checkpoint", "Evaluating", "Comparing and deciding", "Training"} <= set(headings)
    assert len(QUOTES) > 35
