"""A task of a user's own as a test needs one: a folder with its file, its questions and the function that judges."""

from __future__ import annotations

import json
from pathlib import Path

ORDERS = 12

_TASK = """task: orders
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: q
doc_to_target: a
generation_kwargs: {{until: ["."], max_gen_toks: 2, do_sample: false}}
process_results: !function orders.judge
metric_list:
  - {{metric: worth, aggregation: mean, higher_is_better: true}}
  - {{metric: distinct, aggregation: !function orders.distinct, higher_is_better: true}}
"""
_JUDGE = """def judge(doc, results):
    return {"worth": 1.5 if doc["a"] == "4" else 1.0, "distinct": [results[0], doc["a"]]}


def distinct(items):
    return float(len({str(one) for one in items}))
"""


def write_orders(folder: Path) -> Path:
    """The task `orders`: each answer is worth 1, that of question 4 1.5; how many differ is of the whole set."""
    folder.mkdir(parents=True)
    lines = [json.dumps({"q": f"the cat sees {i} in the", "a": str(i)}) + "\n" for i in range(ORDERS)]
    (folder / "orders.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "orders.yaml").write_text(_TASK.format(data=folder / "orders.jsonl"), encoding="utf-8")
    (folder / "orders.py").write_text(_JUDGE, encoding="utf-8")
    return folder
