"""Lets SmolLM2 go on from stretches of WikiText-2's validation split: more texts of its kind to be distilled on.

    python tests/experiment_continuations.py models/SmolLM2-135M-Instruct texts

`texts/wikitext.jsonl` must be there (tests/experiment_texts.py); `texts/continued.jsonl` is written beside it. Of
WikiText-2 no more than 300,000 tokens are at hand to learn from, and a student that reads them a dozen times learns
them by heart. What the model writes itself has no end: a teacher answers any text. Made for a GPU, in two minutes:
a recipe's `train.sampled` would let texts end where the model ends them, and writes 32 at once.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from experiment_texts import write
from tqdm import tqdm

PROMPT = 64
"""Tokens of a stretch that are gone on from."""


def prompts(ids: Sequence[Sequence[int]], count: int, order: random.Random) -> list[list[int]]:
    """Token ids from anywhere in texts, the longer ones more often; texts with too few are left out."""
    long = [text for text in ids if len(text) >= PROMPT]
    chosen = order.choices(long, weights=[len(text) for text in long], k=count)
    starts = [order.randrange(len(text) - PROMPT + 1) for text in chosen]
    return [list(text[at : at + PROMPT]) for text, at in zip(chosen, starts, strict=True)]


@torch.no_grad()
def continued(model: Any, given: Sequence[list[int]], length: int, batch: int) -> Iterator[list[int]]:
    """Token ids of the prompts and what follows, drawn from the whole distribution but for an end of the text."""
    from transformers import GenerationConfig

    end = model.config.eos_token_id
    # In place of the model's own, from which transformers would fill what is not set.
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, min_new_tokens=length - PROMPT, max_new_tokens=length - PROMPT,
        eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    for first in tqdm(range(0, len(given), batch), unit="batch"):
        ids = torch.tensor(given[first : first + batch], device=model.device)
        yield from model.generate(ids, attention_mask=torch.ones_like(ids)).tolist()


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path, help="with wikitext.jsonl")
    parser.add_argument("--texts", type=int, default=3072)
    parser.add_argument("--length", type=int, default=1024, help="of a text, in tokens")
    parser.add_argument("--batch", type=int, default=1024, help="texts written at once")
    parser.add_argument("--seed", type=int, default=1234)
    given = parser.parse_args(arguments)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").to(device).eval()
    lines = (given.folder / "wikitext.jsonl").read_text(encoding="utf-8").splitlines()
    ids = tokenizer([json.loads(line)["text"] for line in lines])["input_ids"]
    torch.manual_seed(given.seed)
    begun = prompts(ids, given.texts, random.Random(given.seed))
    written = list(continued(model, begun, given.length, given.batch))
    write(given.folder / "continued.jsonl", tokenizer.batch_decode(written))


if __name__ == "__main__":
    main()
