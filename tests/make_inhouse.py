"""Makes a second real model, an in-house one: SmolLM2 fine-tuned on the training splits of GSM8K and ARC.

    python tests/make_inhouse.py models/SmolLM2-135M-Instruct DATA models/inhouse-135M

DATA is a data root with openai/gsm8k and allenai/ai2_arc. Questions are put as lm-eval puts them, and the loss is that
of the answers alone. It is made for a GPU, where it takes minutes; its weights are made anew, not kept.
"""

from __future__ import annotations

import argparse
import random
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


def pairs(root: Path) -> list[tuple[str, str]]:
    """Prompt and answer of each training question.

    Raises:
        UserError: when the data root lacks a data set.
    """
    from datasets import load_dataset

    found = []
    for path, name in (("openai/gsm8k", "main"), ("allenai/ai2_arc", "ARC-Easy"), ("allenai/ai2_arc", "ARC-Challenge")):
        folder = find_dataset(path, root)
        if folder == path:
            raise UserError(f"{root} has no data set {path}", "give a data root that has it")
        for row in load_dataset(folder, name, split="train"):
            if path == "openai/gsm8k":
                answer = row["answer"]
            else:
                answer = row["choices"]["text"][row["choices"]["label"].index(row["answerKey"])]
            found.append((f"Question: {row['question']}\nAnswer:", f" {answer}"))
    return found


def encoded(tokenizer: Any, found: list[tuple[str, str]], length: int) -> list[tuple[list[int], list[int]]]:
    """Token ids and labels; prompts are not learned, the end of a text is."""
    rows = []
    for prompt, answer in found:
        asked = tokenizer(prompt)["input_ids"]
        given = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append(([*asked, *given][:length], [*[-100] * len(asked), *given][:length]))
    return rows


def train(model: Any, rows: list[tuple[list[int], list[int]]], arguments: argparse.Namespace) -> int:
    """AdamW with a linear fall after a short rise; returns the steps taken."""
    order = random.Random(arguments.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate, weight_decay=0.01)
    per_epoch = len(rows) // arguments.batch
    steps = min(arguments.steps or per_epoch * arguments.epochs, per_epoch * arguments.epochs)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, max(0.0, (steps - step) / steps))
    )
    queue: list[int] = []
    for _ in (bar := tqdm(range(steps), unit="step")):
        if len(queue) < arguments.batch:
            queue = order.sample(range(len(rows)), len(rows))
        batch, queue = [rows[at] for at in queue[: arguments.batch]], queue[arguments.batch :]
        width = max(len(ids) for ids, _ in batch)
        ids, labels, mask = (
            torch.tensor(values, device=model.device)
            for values in (
                [[*row, *[0] * (width - len(row))] for row, _ in batch],
                [[*row, *[-100] * (width - len(row))] for _, row in batch],
                [[1] * len(row) + [0] * (width - len(row)) for row, _ in batch],
            )
        )
        with torch.autocast(model.device.type, torch.bfloat16):
            loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{float(loss):.3f}")
    return steps


def main(given: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="stop after so many")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args(given)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(arguments.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(device)
    steps = train(model, encoded(tokenizer, pairs(arguments.data), arguments.length), arguments)
    with atomic_folder(arguments.output) as partial:
        model.to(torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_text(partial / "README.md", NOTE.format(steps=steps, seed=arguments.seed))


if __name__ == "__main__":
    main()
