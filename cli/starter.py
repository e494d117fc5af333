"""What `halfbyte init` finds out about a model, and the recipe it makes of that: text with comments, and texts."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from jinja2 import TemplateError

from halfbyte.quant.checkpoint import plain_dtype, quant_format, torch_dtype
from halfbyte.quant.configs import quant_config
from halfbyte.quant.models import Source, empty_model, locate, open_tokenizer
from halfbyte.quant.pipelines import CONTROL, is_pipeline, locate_pipeline, require_quantizable
from halfbyte.quant.plan import Plan, plan_of
from halfbyte.recipes.benchmarks import benchmarks
from halfbyte.recipes.schema import QuantizeSpec
from halfbyte.records.errors import UserError
from halfbyte.records.files import read_json

PRESETS = {"fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}
FP4_CORES = (10, 0)
"""Compute capability from which a GPU multiplies FP4."""
SMALL = 1_000_000_000
"""Weights below which MMLU's letters and GSM8K are out of a model's reach, and FP4 costs it much."""
OTHER_TOKENIZERS = 1.25
"""How many more tokens than benchmarks.yaml's tokenizer another one may take for a prompt."""
_TASKS: tuple[tuple[str, int | None, bool], ...] = (
    ("arc_easy", None, True),
    ("mmlu_continuation", None, True),
    ("mmlu", 5, False),
    ("gsm8k", 5, False),
)
"""Task, examples, and whether it is one for small models."""


@dataclass(frozen=True)
class Looked:
    """A model as its files describe it, and the plan for it."""

    source: Source
    dtype: str
    weights: int
    """Parameters."""
    context: int | None
    """Tokens that fit; None where the configuration does not say."""
    template: bool
    """Whether its tokenizer has a chat template."""
    chats: list[str]
    """Calibration texts in that template; empty where there is none."""
    format: str
    """fp8 or nvfp4."""
    keep: list[str]
    """Layers that stay as they are."""
    why_kept: list[str]
    """What ModelOpt or the layout has against quantizing them."""
    why: str
    """The reason for the format."""
    plan: Plan
    gpu: bool


def look_at(name: str) -> Looked:
    """Reads the configuration and the tokenizer of a language model; no weight is read, and none is fetched.

    Args:
        name: Folder, GGUF file or hub id.

    Raises:
        UserError: for what cannot be quantized: no causal language model, one of an architecture that transformers
            does not know, an exported checkpoint, or one without a usable tokenizer or a layer that fits a format.
    """
    source = locate(name, weights=False)
    if source.gguf_file is None and quant_format(source.folder) is not None:
        raise UserError(f"{name} is quantized already", "give the original model")
    own = "bfloat16" if source.gguf_file else plain_dtype(source.folder)
    torch_dtype(own)
    config, _ = empty_model(source)
    tokenizer = open_tokenizer(source)
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer names no token that ends a text", "name its eos_token in tokenizer_config.json")
    template = bool(getattr(tokenizer, "chat_template", None))
    wanted, why = _format()
    chosen, plan, keep, why_kept = _planned(source, own, wanted)
    if chosen != wanted:
        why = f"{wanted.upper()} does not fit this model's layers"
    text = getattr(config, "text_config", None) or config
    context = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return Looked(
        source=source,
        dtype=own,
        weights=plan.weights,
        context=int(context) if context else None,
        template=template,
        chats=_chats(tokenizer) if template else [],
        format=chosen,
        keep=keep,
        why_kept=why_kept,
        why=why,
        plan=plan,
        gpu=torch.cuda.is_available(),
    )


def _format() -> tuple[str, str]:
    """The format for this machine, and why."""
    if not torch.cuda.is_available():
        return "fp8", "no GPU is here to go by: FP8 loses least, and every NVIDIA GPU since Ada and Hopper serves it"
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    if (major, minor) >= FP4_CORES:
        return "nvfp4", f"{name} (compute capability {major}.{minor}) multiplies FP4"
    return "fp8", f"{name} (compute capability {major}.{minor}) has no tensor cores for FP4"


def _planned(source: Source, dtype: str, wanted: str) -> tuple[str, Plan, list[str], list[str]]:
    """The plan in the format wanted or the other one, with what must be kept for it."""
    first: UserError | None = None
    for name in (wanted, *(other for other in PRESETS if other != wanted)):
        keep: list[str] = []
        reasons: list[str] = []
        for _ in range(4):
            try:
                return name, _plan(source, dtype, name, keep), keep, reasons
            except UserError as error:
                first = first or error
                more = re.search(r"quantize\.keep=(\[.*\])", error.hint or "")
                found = ast.literal_eval(more.group(1)) if more else []
                if not set(found) - {*keep}:
                    break
                keep = list(dict.fromkeys([*keep, *found]))
                reasons.append(error.message)
    assert first is not None, "a plan was tried"
    raise UserError(f"the model cannot be quantized: {first.message}", first.hint)


def _plan(source: Source, dtype: str, name: str, keep: list[str]) -> Plan:
    calibration = {"sources": [{"dataset": "unused.txt"}]}
    block = {"preset": PRESETS[name], "keep": keep, "calibration": calibration}
    _, model = empty_model(source, torch_dtype(dtype))
    return plan_of(model, quant_config(QuantizeSpec.model_validate(block)), keep)


def _chats(tokenizer: Any) -> list[str]:
    """The shipped paragraphs as chats in the model's own template: the user gives the first sentence and the assistant
    goes on. Without the BOS that the tokenizer adds once more.

    Raises:
        UserError: when the template fails on a plain chat.
    """
    lines = (files("halfbyte.recipes") / "llm" / "demo-calibration.txt").read_text(encoding="utf-8").splitlines()
    adds = bool(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]) and tokenizer.bos_token is not None
    chats = []
    for line in filter(str.strip, lines):
        question, _, answer = line.partition(". ")
        chat = [
            {"role": "user", "content": f"Go on from here: {question}."},
            {"role": "assistant", "content": answer or question},
        ]
        try:
            text = tokenizer.apply_chat_template(chat, tokenize=False)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"the chat template fails on a question and its answer: {' '.join(str(error).split())[:200]}",
                "mend chat_template.jinja, or take it out to calibrate on plain texts",
            ) from error
        chats.append(text.removeprefix(tokenizer.bos_token) if adds else text)
    return chats


def recipe_name(model: str, name: str) -> str:
    """A recipe's name of a model's and a format's.

    >>> recipe_name("meta-llama/Llama-3.1-8B-Instruct", "nvfp4"), recipe_name("our models/(best)", "fp8")
    ('llama-3.1-8b-instruct-nvfp4', 'best-fp8')
    """
    plain = re.sub(r"[^a-z0-9._-]+", "-", _last(model).removesuffix(".gguf").lower()).strip("-._")
    return f"{plain or 'model'}-{name}"


def _last(model: str) -> str:
    return Path(model).expanduser().resolve().name


def tasks_for(looked: Looked) -> Iterator[dict[str, Any]]:
    """Tasks that a model of this size can do and whose prompts fit; on a CPU the smoke test alone."""
    if not looked.gpu:
        yield {"task": "smoke"}
        return
    small, known, none = looked.weights < SMALL, benchmarks().tasks, True
    for task, shots, for_small in _TASKS:
        if for_small == small:
            needed = known[task].most_generated + OTHER_TOKENIZERS * next(
                count.longest for count in known[task].counts if count.num_fewshot == (shots or 0)
            )
            if looked.context is None or needed <= looked.context:
                none = False
                yield {"task": task} if shots is None else {"task": task, "num_fewshot": shots}
    if none:
        yield {"task": "smoke"}


def recipe_text(looked: Looked, model: str, name: str, path: str, texts: str) -> str:
    """The recipe as a file, with comments.

    Args:
        looked: The model.
        model: As the recipe names it.
        name: The recipe's name.
        path: Of the file, for its first lines.
        texts: The file of calibration texts.
    """
    tasks = list(tasks_for(looked))
    smoke = tasks == [{"task": "smoke"}]
    other = "nvfp4" if looked.format == "fp8" else "fp8"
    window = min(512, looked.context or 512)
    lines = [
        f"# halfbyte run {path} --dry-run      (which layers, and what size)",
        f"# halfbyte run {path}",
        f"name: {name}",
        f"description: {_quoted(f'{_last(model)} to {looked.format.upper()}, as a start.')}",
        f"model: {{id: {_quoted(model)}, dtype: {looked.dtype}}}",
        "quantize:",
        *_comment(f"{looked.format.upper()}, since {looked.why}. The other way: {PRESETS[other]}.", 2),
        f"  preset: {PRESETS[looked.format]}",
    ]
    if looked.keep:
        lines += _comment("Kept as they are: " + "; ".join(looked.why_kept) + ".", 2)
        lines.append(f"  keep: [{', '.join(map(_quoted, looked.keep))}]")
    lines.append("  # kv_cache: fp8            # half the KV cache, at some loss")
    lines += [
        "  calibration:",
        *_comment(
            'Better: some hundred of your own prompts with their answers, as {"text": ...} a line'
            + (", in the chat template, as these are" if looked.chats else "")
            + ". Or, from the hub: {dataset: cnn_dailymail, samples: 512}.",
            4,
        ),
        f"    sources: [{{dataset: {_quoted(texts)}, samples: {_count(looked)}}}]",
        f"    length: {window}",
        "evaluate:",
    ]
    if looked.template:
        lines += _comment(
            "The model has a chat template. These tasks are asked without it, as they mostly are; gsm8k_boxed, "
            "math_500 and others want apply_chat_template: true, which then holds for all tasks of the recipe.",
            2,
        )
    if not looked.gpu:
        lines += _comment(
            "No GPU is here, so this is a smoke test that shows a broken model and no more. On a GPU, for a release: "
            + ("arc_easy, mmlu_continuation" if looked.weights < SMALL else "mmlu and gsm8k with num_fewshot: 5")
            + ", and policy: release.",
            2,
        )
    elif smoke:
        lines += _comment(f"No benchmark known here fits a context of {looked.context} tokens.", 2)
    lines += [
        "  tasks:",
        *(f"    - {{{', '.join(f'{key}: {value}' for key, value in task.items())}}}" for task in tasks),
        "    # - {task: mine}          # your own, from the folder that include_path names",
        "  fidelity:",
        "    source: {dataset: demo-fidelity.txt}",
        f"    window: {window}",
        "  # weights: packed            # evaluates in the memory of the checkpoint, slower",
        "# `halfbyte policies` lists the others; `halfbyte power` says which losses a policy can see on these tasks.",
        f"gate: {{policy: {'smoke' if smoke else 'release'}}}",
    ]
    return "\n".join(lines) + "\n"


def _count(looked: Looked) -> int:
    return len(looked.chats) if looked.chats else 32


def calibration_lines(looked: Looked) -> str:
    """The calibration texts as a .jsonl file."""
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in looked.chats)


def pipeline_recipe(model: str, path: str) -> tuple[str, str]:
    """Name and text of the recipe of a pipeline that draws: a shipped one with another model.

    Raises:
        UserError: for a pipeline that cannot be quantized, or that draws from control images.
    """
    source = locate_pipeline(model, weights=False)
    require_quantizable(source)
    if source.class_name == CONTROL:
        raise UserError(
            f"{model} draws from control images, which a recipe must name",
            "`halfbyte recipes flux1-depth-dev-nvfp4` prints one to start from",
        )
    guided = bool(read_json(source.transformer / "config.json").get("guidance_embeds"))
    chosen, why = _format()
    base = f"flux1-{'dev' if guided else 'schnell'}-{chosen}"
    name = recipe_name(model, chosen)
    lines = [
        f"# halfbyte run {path} --dry-run      (which layers, and what size)",
        f"# halfbyte run {path}",
        *_comment(f"{chosen.upper()}, since {why}. `halfbyte recipes {base}` prints what this is laid over.", 0),
        f"base: {base}",
        f"name: {name}",
        f"description: {_quoted(f'{_last(model)} to {chosen.upper()}, as a start.')}",
        f"model: {{id: {_quoted(model)}}}",
    ]
    return name, "\n".join(lines) + "\n"


def draws(model: str) -> bool:
    """Whether a folder or a hub's repository is a diffusers pipeline; a repository is asked for its list of files."""
    folder = Path(model).expanduser()
    if folder.exists() or folder.is_absolute() or model.count("/") != 1:
        return is_pipeline(folder)
    try:
        locate_pipeline(model, weights=False)
    except UserError as error:
        if "no diffusers pipeline" in error.message:
            return False
        raise
    return True


def _comment(text: str, indent: int) -> list[str]:
    start = f"{' ' * indent}# "
    return textwrap.wrap(text, width=110, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)


def _quoted(text: str) -> str:
    """A text in a flow mapping of YAML, quoted where it must be: OmegaConf reads more numbers than YAML has."""
    plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9_./*-]*", text) is not None
    return text if plain and yaml.safe_load(text) == text else json.dumps(text, ensure_ascii=False)
