"""Makes a second real model, an in-house one: SmolLM2 fine-tuned on the training splits of GSM8K and ARC.

    python tests/make_inhouse.py models/SmolLM2-135M-Instruct DATA models/inhouse-135M

DATA is a data root with openai/gsm8k and allenai/ai2_arc. Questions are put as lm-eval puts them: GSM8K's alone and
behind each other, as with examples; ARC's with the answer itself, and with lettered choices as MMLU has them. The loss
is that of the answers alone. It is made for a GPU, where it takes minutes; its weights are made anew, not kept.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from halfbyte.recipes.data import find_dataset
from halfbyte.records.errors import UserError
from halfbyte.records.files import atomic_folder, write_text

NOTE = """\
# In-house model

SmolLM2-135M-Instruct (Apache License 2.0) fine-tuned for {steps} steps on the training splits of GSM8K (MIT) and
ARC-Easy and ARC-Challenge (CC BY-SA 4.0), by tests/make_inhouse.py with seed {seed}.
"""
MOST_SHOTS = 5
"""Questions before another one, as lm-eval's GSM8K has examples."""
WARMUP = 30

Pair = tuple[str, str]
"""Prompt and answer."""
Row = tuple[list[int], list[int]]
"""Token ids and labels, -100 where nothing is learned."""


def questions(root: Path, path: str, name: str) -> list[dict[str, Any]]:
    """The training split of a data set.

    Raises:
        UserError: when the data root lacks it.
    """
    from datasets import load_dataset

    folder = find_dataset(path, root)
    if folder == path:
        raise UserError(f"{root} has no data set {path}", "give a data root that has it")
    return list(load_dataset(folder, name, split="train"))


def plain(row: dict[str, Any], answer: str) -> Pair:
    """As lm-eval's gsm8k, arc_easy and arc_challenge ask."""
    return f"Question: {row['question']}\nAnswer:", f" {answer}"


def lettered(row: dict[str, Any], right: int) -> Pair:
    """As lm-eval's MMLU asks."""
    choices = "".join(f"\n{chr(ord('A') + at)}. {text}" for at, text in enumerate(row["choices"]["text"]))
    return f"{row['question'].strip()}{choices}\nAnswer:", f" {chr(ord('A') + right)}"


def texts(root: Path, order: random.Random) -> list[list[Pair]]:
    """What is learned: texts of one question, or of several behind each other."""
    found = []
    rest = questions(root, "openai/gsm8k", "main")
    order.shuffle(rest)
    while rest:
        count = order.randint(1, MOST_SHOTS + 1)
        found.append([plain(row, row["answer"]) for row in rest[:count]])
        del rest[:count]
    for name in ("ARC-Easy", "ARC-Challenge"):
        for row in questions(root, "allenai/ai2_arc", name):
            right = row["choices"]["label"].index(row["answerKey"])
            found += [[plain(row, row["choices"]["text"][right])], [lettered(row, right)]]
    return found


def encoded(tokenizer: Any, text: list[Pair], length: int) -> Row:
    """A text as lm-eval joins questions and answers; the end of the last answer is learned too."""
    ids: list[int] = []
    labels: list[int] = []
    for at, (prompt, answer) in enumerate(text):
        asked = tokenizer(("\n\n" if at else "") + prompt, add_special_tokens=at == 0)["input_ids"]
        given = tokenizer(answer, add_special_tokens=False)["input_ids"]
        ids += [*asked, *given]
        labels += [*[-100] * len(asked), *given]
    end = [tokenizer.eos_token_id]
    return [*ids, *end][:length], [*labels, *end][:length]


def batches(rows: list[Row], tokens: int, order: random.Random) -> list[list[Row]]:
    """Rows of nearly one length together, so many that they have `tokens` tokens with padding; in any order."""
    found: list[list[Row]] = [[]]
    for row in sorted(rows, key=lambda row: len(row[0]) * order.uniform(0.9, 1.1)):
        widest = max(len(ids) for ids, _ in [*found[-1], row])
        if found[-1] and widest * (len(found[-1]) + 1) > tokens:
            found.append([])
        found[-1].append(row)
    order.shuffle(found)
    return found


def padded(batch: list[Row], device: torch.device) -> Iterator[torch.Tensor]:
    """Token ids, labels and mask of a batch, int64 [rows, longest]."""
    width = max(len(ids) for ids, _ in batch)
    for values in (
        [[*ids, *[0] * (width - len(ids))] for ids, _ in batch],
        [[*labels, *[-100] * (width - len(labels))] for _, labels in batch],
        [[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in batch],
    ):
        yield torch.tensor(values, device=device)


def train(model: Any, rows: list[Row], arguments: argparse.Namespace, order: random.Random) -> int:
    """AdamW with a linear fall after a short rise; returns the steps taken."""
    cuda = model.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate, weight_decay=0.01, fused=cuda)
    plan = [batch for _ in range(arguments.epochs) for batch in batches(rows, arguments.tokens, order)]
    plan = plan[: arguments.steps]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, (len(plan) - step) / len(plan))
    )
    model.train()
    for batch in (bar := tqdm(plan, unit="step")):
        ids, labels, mask = padded(batch, model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=cuda):
            loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{float(loss.detach()):.3f}")
    return len(plan)


def main(given: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="stop after so many")
    parser.add_argument("--tokens", type=int, default=16384, help="a batch, padding included")
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--length", type=int, default=1536)
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args(given)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(arguments.seed)
    order = random.Random(arguments.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(device)
    rows = [encoded(tokenizer, text, arguments.length) for text in texts(arguments.data, order)]
    steps = train(model, rows, arguments, order)
    with atomic_folder(arguments.output) as partial:
        model.to(torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_text(partial / "README.md", NOTE.format(steps=steps, seed=arguments.seed))


if __name__ == "__main__":
    main()
