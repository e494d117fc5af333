"""Our tasks ask as published, keep every sample's judgement, and give the same choices in the same order each time."""

from __future__ import annotations

import copy
import csv
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from halfbyte.eval import protocols
from halfbyte.eval.answers import NO_ANSWER
from halfbyte.eval.questions import Questions
from halfbyte.eval.resolve import TASKS, load_task, quiet_lm_eval, task_manager
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.errors import UserError

REASONING = {"aime_2024": 64, "aime_2025": 64, "math_500": 4, "gpqa_diamond": 16}
GPQA_README = "---\nconfigs:\n- config_name: gpqa_diamond\n  data_files: gpqa_diamond.csv\n---\n"


class Scripted(LM):
    """Says what `speak` makes of a prompt and the number of the sample."""

    def __init__(self, speak: Callable[[str, int], str]) -> None:
        super().__init__()
        self.speak = speak
        self.prompts: list[str] = []

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        seen: Counter[str] = Counter()
        texts = []
        for request in requests:
            prompt = request.args[0]
            texts.append(self.speak(prompt, seen[prompt]))
            seen[prompt] += 1
        self.prompts += seen
        return texts

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def _evaluate(task: Any, lm: LM, repeats: int, limit: int | None = None) -> dict[str, Any]:
    task.set_config("repeats", repeats)
    with quiet_lm_eval():
        results: dict[str, Any] = simple_evaluate(lm, tasks=[task], limit=limit, bootstrap_iters=0)
    return results


def _write_gpqa(root: Path, rows: Sequence[dict[str, str]]) -> Path:
    folder = root / "Idavidrein" / "gpqa"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(GPQA_README, encoding="utf-8")
    with (folder / "gpqa_diamond.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["Record ID", "Question", "Correct Answer", *protocols.WRONG_CHOICES])
        writer.writeheader()
        writer.writerows(rows)
    return root


def _question(number: int) -> dict[str, str]:
    """A question of GPQA's schema, written for this test."""
    wrong = {name: f" {number * 7 + at} apples\n" for at, name in enumerate(protocols.WRONG_CHOICES, start=1)}
    return {
        "Record ID": f"rec{number}",
        "Question": f"Seven children have {number} apples each. How many apples are there?\n",
        "Correct Answer": f"{number * 7} apples",
        **wrong,
    }


@pytest.fixture
def gpqa(tmp_path: Path) -> Path:
    return _write_gpqa(tmp_path / "root", [_question(number) for number in range(40)])


def _orders(root: Path, seed: int = 1234) -> dict[str, list[str]]:
    (task,) = load_task("gpqa_diamond", root, seed)
    return {doc["Question"]: doc["choices"] for doc in task.eval_docs}


def test_gpqas_choices_keep_their_order_whatever_the_seed_the_row_or_what_ran_before(gpqa: Path) -> None:
    first = _orders(gpqa)
    random.seed(99)
    load_task("smoke", None)
    assert _orders(gpqa, seed=7) == first
    reversed_root = _write_gpqa(gpqa.parent / "reversed", [_question(number) for number in reversed(range(40))])
    assert _orders(reversed_root) == first
    short = _write_gpqa(gpqa.parent / "short", [_question(11)])
    assert _orders(short).items() <= first.items()


def test_gpqas_right_answers_are_spread_over_the_letters_and_named(gpqa: Path) -> None:
    (task,) = load_task("gpqa_diamond", gpqa)
    for doc in task.eval_docs:
        assert doc["choices"]["ABCD".index(doc["answer"])] == doc["Correct Answer"]
        assert sorted(doc["choices"]) == sorted(choice.strip() for choice in doc["choices"])
        assert len(set(doc["choices"])) == 4
        assert "\\boxed{}" in task.doc_to_text(doc)
        assert f"\nD) {doc['choices'][3]}\n" in task.doc_to_text(doc)
    assert min(Counter(doc["answer"] for doc in task.eval_docs).values()) >= 3


def test_gpqa_without_access_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    def refuse(*_: Any, **__: Any) -> None:
        raise DatasetNotFoundError("Dataset 'Idavidrein/gpqa' is a gated dataset on the Hub.")

    monkeypatch.setattr("halfbyte.recipes.data.hub_is_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError) as caught:
        load_task("gpqa_diamond", tmp_path)
    text = str(caught.value)
    assert "gated: its owners grant access on https://huggingface.co/datasets/Idavidrein/gpqa" in text
    assert str(tmp_path / "Idavidrein" / "gpqa") in text
    assert "hf auth login" in text
    assert "\n" not in text


def test_every_sample_of_a_question_is_judged_and_kept(gpqa: Path) -> None:
    (task,) = load_task("gpqa_diamond", gpqa)
    letters = {doc["Question"].strip(): doc["answer"] for doc in task.eval_docs}

    def speak(prompt: str, sample: int) -> str:
        right = next(letter for question, letter in letters.items() if question in prompt)
        other = "ABCD"[("ABCD".index(right) + 1) % 4]
        # twice the same right text, one right in other words, one wrong, one without an answer, one empty
        said = [
            f"\\boxed{{{right}}}",
            f"\\boxed{{{right}}}",
            f"Die Antwort ist {right}.",
            f"\\boxed{{{other}}}",
            "Hm",
            "",
        ]
        return said[sample]

    results = _evaluate(task, Scripted(speak), repeats=6, limit=3)
    rows = results["samples"]["gpqa_diamond"]
    assert [row["doc_id"] for row in rows] == [0, 1, 2]
    for row in rows:
        right = row["target"]
        assert row["correct"] == [1, 1, 1, 0, 0, 0]
        assert row["filtered_resps"][0][:3] == [right] * 3
        assert row["filtered_resps"][0][4:] == [NO_ANSWER] * 2
        assert (row["pass@1"], row["maj@k"]) == (0.5, 1.0)
        assert len(row["resps"][0]) == 6
    values = results["results"]["gpqa_diamond"]
    assert values["pass@1,letter"] == values["correct,letter"] == 0.5
    assert values["maj@k,letter"] == 1.0


def _write_rows(folder: Path, split: str, rows: Sequence[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{split}.jsonl").write_text(content, encoding="utf-8")


@pytest.fixture
def maths(tmp_path: Path) -> Path:
    """A data root with questions of our own under the names of the reasoning tasks' data sets."""
    root = tmp_path / "maths"
    rows = [{"problem": "What is the half of one?", "answer": "\\frac{1}{2}"}, {"problem": "1 + 1?", "answer": "2"}]
    _write_rows(root / "HuggingFaceH4" / "MATH-500", "test", rows)
    _write_rows(root / "math-ai" / "aime25", "test", [{"problem": "4 + 3?", "answer": "7"}])
    _write_rows(root / "Maxwell-Jia" / "AIME_2024", "train", [{"Problem": "4 + 3?", "Answer": 7}])
    for split in ("train", "test"):
        _write_rows(root / "openai" / "gsm8k" / "main", split, [{"question": "4 + 3?", "answer": "4+3=7\n#### 7"}])
    return root


def test_maj_at_k_is_of_equal_answers_however_they_are_written(maths: Path) -> None:
    (task,) = load_task("math_500", maths)
    said = ["\\boxed{0.5}", "\\boxed{2}", "\\boxed{\\frac12}", "\\boxed{2}", "\\boxed{1/2}"]
    results = _evaluate(task, Scripted(lambda _, sample: said[sample]), repeats=5)
    first, second = results["samples"]["math_500"]
    assert (first["correct"], first["maj@k"]) == ([1, 0, 1, 0, 1], 1.0)
    assert (second["correct"], second["maj@k"]) == ([0, 1, 0, 1, 0], 0.0)
    assert results["results"]["math_500"]["pass@1,boxed"] == 0.5
    assert results["results"]["math_500"]["pass@1_stderr,boxed"] == "N/A"  # bootstrap_iters=0


@pytest.mark.parametrize("name", ["aime_2024", "aime_2025", "gsm8k_boxed"])
def test_one_question_with_one_sample(maths: Path, name: str) -> None:
    if name == "gsm8k_boxed":
        pytest.importorskip("datasets")
        (maths / "openai" / "gsm8k" / "README.md").write_text(
            "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train.jsonl}\n"
            "  - {split: test, path: main/test.jsonl}\n---\n",
            encoding="utf-8",
        )
    (task,) = load_task(name, maths)
    lm = Scripted(lambda *_: "It is \\boxed{7}.")
    results = _evaluate(task, lm, repeats=1)
    (row,) = results["samples"][name]
    assert (row["pass@1"], row["maj@k"], row["correct"]) == (1.0, 1.0, [1])
    assert lm.prompts == ["4 + 3?\n\nPlease reason step by step, and put your final answer within \\boxed{}."]


def test_no_question_is_an_error(tmp_path: Path) -> None:
    _write_rows(tmp_path / "math-ai" / "aime25", "test", [])
    with pytest.raises(UserError, match=r"math-ai/aime25.*no data"):
        load_task("aime_2025", tmp_path)


def test_no_answer_at_all_wins_no_vote() -> None:
    judged = protocols.judge_mathematical({"answer": "7"}, [[NO_ANSWER, NO_ANSWER]])
    assert judged == {"pass@1": 0.0, "correct": [0, 0], "maj@k": 0.0}
    tie = protocols.judge_letter({"answer": "A"}, [["B", "A", NO_ANSWER]])
    assert tie["maj@k"] == 0.0  # the first answer wins a tie
    assert protocols.judge_letter({"answer": "A"}, [["A", "B", NO_ANSWER]])["maj@k"] == 1.0


@pytest.mark.parametrize(
    ("judge", "doc", "said"),
    [
        (protocols.judge_gsm8k, {"question": "How many eggs?", "answer": None}, "its answer is None"),
        (protocols.judge_gsm8k, {"question": "How many eggs?", "answer": "Many."}, "has no answer behind ####"),
        (protocols.judge_mathematical, {"problem": "How many eggs?", "answer": " "}, "its answer is ' '"),
        (protocols.judge_mathematical, {"Problem": "How many eggs?", "Answer": None}, "its Answer is None"),
    ],
)
def test_a_question_without_a_reference_answer_is_named(judge: Any, doc: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=r"question 'How many eggs\?'") as caught:
        judge(doc, [["7"]])
    assert said in caught.value.message


def test_a_chat_task_warns_where_the_models_template_is_not_applied(
    maths: Path, tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain = copy.deepcopy(tiny_tokenizer)
    plain.chat_template = None
    for task, applied, tokenizer, warns in (
        ("math_500", False, tiny_tokenizer, True),
        ("math_500", True, tiny_tokenizer, False),
        ("math_500", False, plain, False),
        ("math_500", False, None, False),
        ("smoke", False, tiny_tokenizer, False),
    ):
        caplog.clear()
        spec = TaskSpec(task=task)
        Questions(spec, EvaluateSpec(tasks=[spec], apply_chat_template=applied), maths).warn_of_a_missing_template(
            tokenizer
        )
        assert ("chat template is not applied" in caplog.text) == warns


def test_the_tasks_that_ask_in_chat_say_so() -> None:
    from lm_eval.tasks._yaml_loader import load_yaml

    read = {name: load_yaml(TASKS / f"{name}.yaml", resolve_func=False) for name in _files()}
    found = {name for name, content in read.items() if content.get("metadata", {}).get("asks_in_chat")}
    assert found == {*REASONING, "gsm8k_boxed", "humaneval_chat", "mbpp_chat"}


def _files() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in TASKS.glob("*.yaml")}


def test_no_task_of_ours_has_the_name_of_one_of_lm_evals() -> None:
    from lm_eval.tasks import TaskManager

    ours = set(task_manager(ours_only=True).all_tasks)
    assert ours == set(_files())
    assert not ours & set(TaskManager().all_tasks)


def test_every_task_file_opens_with_its_source() -> None:
    for name, text in _files().items():
        head = " ".join(line for line in text.splitlines() if line.startswith("#"))
        assert "arXiv" in head or name in ("smoke", "aime_2025"), name
        assert text.startswith("#"), name


def test_reasoning_tasks_are_sampled_as_published(maths: Path, gpqa: Path) -> None:
    for name, repeats in REASONING.items():
        (task,) = load_task(name, gpqa if name == "gpqa_diamond" else maths)
        config = task.config
        assert config.repeats == repeats
        assert config.num_fewshot == 0
        assert config.generation_kwargs == {
            "until": [], "do_sample": True, "temperature": 0.6, "top_p": 0.95, "max_gen_toks": 32768,
        }  # fmt: skip
        assert "\\boxed{}" in task.doc_to_text(task.eval_docs[0])
        assert next(iter(task.aggregation())) == "pass@1"


def test_the_list_of_protocols_names_every_task_and_every_benchmark() -> None:
    text = (TASKS.parent / "PROTOCOLS.md").read_text(encoding="utf-8")
    for name in _files():
        assert f"`{name}`" in text, name
    for stock in ("mmlu", "mmlu_pro", "gsm8k", "wikitext"):
        assert f"`{stock}`" in text


def test_task_files_are_plain_yaml_but_for_functions_that_exist() -> None:
    class Loader(yaml.SafeLoader):
        pass

    found: list[str] = []
    Loader.add_constructor("!function", lambda loader, node: found.append(loader.construct_scalar(node)))
    for text in _files().values():
        yaml.load(text, Loader)
    assert found
    for name in found:
        module, _, function = name.rpartition(".")
        assert callable(getattr(__import__(module, fromlist=[function]), function))
