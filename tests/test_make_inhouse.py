"""The in-house model learns questions as lm-eval puts them, from training splits alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import make_inhouse
import pytest

from halfbyte.eval.resolve import load_task, quiet_lm_eval


def test_answers_and_the_end_are_learned_and_questions_are_not(tiny_tokenizer: Any) -> None:
    text = [("Question: one\nAnswer:", " two"), ("Question: three\nAnswer:", " four")]
    ids, labels = make_inhouse.encoded(tiny_tokenizer, text, 500)
    assert tiny_tokenizer.decode(ids) == "Question: one\nAnswer: two\n\nQuestion: three\nAnswer: four<eos>"
    assert tiny_tokenizer.decode([label for label in labels if label != -100]) == " two four<eos>"
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))


def test_no_text_is_left_out_of_an_epoch_and_no_batch_is_too_large() -> None:
    rows = [([number] * (1 + number % 40), [number] * (1 + number % 40)) for number in range(300)]
    found = make_inhouse.batches(rows, 128, random.Random(1))
    assert sorted(ids for batch in found for ids, _ in batch) == sorted(ids for ids, _ in rows)
    assert max(len(batch) * max(len(ids) for ids, _ in batch) for batch in found) <= 128


@pytest.mark.real
def test_prompts_are_those_of_lm_eval(data_root: Path) -> None:
    def asked(task_name: str, shots: int) -> list[tuple[str, str]]:
        (task,) = load_task(task_name, data_root, 1234)
        task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(seed=1234)
        with quiet_lm_eval():
            task.build_all_requests(limit=3, rank=0, world_size=1, tokenizer_name="")
        return [(str(one.args[0]), str(one.args[1])) for one in task.instances]

    found = make_inhouse.texts(data_root, random.Random(1))
    pairs = {prompt: answer for text in found for prompt, answer in text}
    shots = asked("gsm8k", 5)[0][0].split("\n\nQuestion: ")
    examples = [shots[0], *(f"Question: {one}" for one in shots[1:-1])]
    assert len(examples) == 5
    for example in examples:
        prompt, _, answer = example.partition("\nAnswer:")
        assert pairs[f"{prompt}\nAnswer:"].rstrip() == answer.rstrip()
    assert {len(text) for text in found} == {1, 2, 3, 4, 5, 6}
    tests = [prompt for name in ("gsm8k", "arc_easy", "arc_challenge") for prompt, _ in asked(name, 0)]
    assert all(prompt.startswith("Question: ") and prompt.endswith("\nAnswer:") for prompt in tests)
    assert not pairs.keys() & set(tests), "no test question is learned"
    letters = asked("mmlu_anatomy", 0)[0]
    head = letters[0].partition("\n\n")[2]
    choices = [line[:3] for line in head.splitlines()[1:]]
    assert choices == ["A. ", "B. ", "C. ", "D. ", "Ans"]
    assert any([line[:3] for line in prompt.splitlines()[-5:]] == choices for prompt in pairs)
    assert letters[1] in {" A", " B", " C", " D"}
