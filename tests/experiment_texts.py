"""Makes the texts that tests/experiments/*.yaml train on, out of splits that nothing is evaluated on.

    python tests/experiment_texts.py DATA texts

DATA is a data root with Salesforce/wikitext, openai/gsm8k and allenai/ai2_arc. `texts/wikitext.jsonl` has WikiText-2's
validation split (fidelity is measured on its test split) in stretches of whole lines, joined as fidelity joins them, so
that positions as late as those of its windows are learned. `texts/answers.jsonl` has what tests/make_inhouse.py learns,
from the training splits of GSM8K and ARC: questions with their answers, alone and behind each other.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from datasets import load_dataset
from make_inhouse import texts

from halfbyte.recipes.data import find_dataset
from halfbyte.records.files import write_text

WORDS = 1500
"""Of a stretch, about: 1,900 of SmolLM2's tokens, of the 2,048 that a row has."""


def stretches(lines: Sequence[str], words: int) -> list[str]:
    """Lines joined as fidelity joins them, in texts of at most `words` words where no line alone has more."""
    found: list[list[str]] = [[]]
    count = 0
    for line in lines:
        length = len(line.split())
        if found[-1] and count + length > words:
            found.append([])
            count = 0
        found[-1].append(line)
        count += length
    return [text for text in ("\n".join(part) for part in found) if text.strip()]


def write(path: Path, rows: Iterable[str]) -> None:
    """One text a line, as JSON."""
    write_text(path, "".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows))


def main(given: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args(given)
    wikitext = load_dataset(find_dataset("Salesforce/wikitext", arguments.data), "wikitext-2-v1", split="validation")[
        "text"
    ]
    write(arguments.output / "wikitext.jsonl", stretches(list(wikitext), WORDS))
    learned = texts(arguments.data, random.Random(arguments.seed))
    joined = ("\n\n".join(prompt + answer for prompt, answer in text) for text in learned)
    write(arguments.output / "answers.jsonl", joined)


if __name__ == "__main__":
    main()
