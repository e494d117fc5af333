"""The commands and their options; what a recipe can say has no option of its own (--set reaches every field)."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from halfbyte import __version__
from halfbyte.arguments import (
    DTYPES,
    EXIT_CODES,
    FORMATS,
    Commands,
    add_data_root,
    add_repeat,
    add_set,
    add_work,
    command,
    days,
    natural,
    positive,
)


def build_parser() -> ArgumentParser:
    """The parser of the whole command line; `module` in its result names the module that has the command's `run`."""
    parser = ArgumentParser(
        prog="halfbyte",
        description="Quantize a language model to FP4 or FP8, see what it cost in accuracy, and decide on its release.",
        epilog=f"examples:\n  halfbyte recipes\n  halfbyte run demo-fp8 demo-nvfp4\n\n{EXIT_CODES}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"halfbyte {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands)
    _add_plan(commands)
    _add_quantize(commands)
    _add_train(commands)
    _add_verify(commands)
    _add_dequantize(commands)
    _add_memory(commands)
    _add_eval(commands)
    _add_compare(commands)
    _add_gate(commands)
    _add_report(commands)
    _add_power(commands)
    _add_table(commands)
    _add_recipes(commands)
    _add_policies(commands)
    _add_cache(commands)
    _add_doctor(commands)
    _add_init(commands)
    _add_completion(commands)
    return parser


def _add_run(commands: Commands) -> None:
    parser = command(
        commands,
        "run",
        "run",
        "do the whole line for each recipe: quantize, verify, evaluate both sides, compare, decide",
        "  halfbyte run demo-fp8 demo-nvfp4\n"
        "  halfbyte run smollm2-135m-nvfp4 --data-root DATA --limit 100\n"
        "  halfbyte run demo-fp8 --dry-run",
    )
    parser.add_argument("recipe", nargs="+", metavar="RECIPE", help="a shipped name or the path of a .yaml file")
    add_set(parser)
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), metavar="DIR", help="each recipe gets a folder in it (runs)"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N questions of every task")
    add_work(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument(
        "--force",
        action="store_true",
        help="make the checkpoint again and evaluate it, replacing what a run wrote in the output folder; what was "
        "evaluated of the baseline stays in the cache (`halfbyte cache`)",
    )
    add_repeat(parser)


def _add_plan(commands: Commands) -> None:
    parser = command(
        commands,
        "plan",
        "plan",
        "say before a machine is rented what a recipe takes: size, memory, tokens, hours, and what its gate will see",
        "  halfbyte plan smollm2-135m-nvfp4 --data-root DATA\n"
        "  halfbyte plan llama-3.3-70b-nvfp4 --device H200\n"
        "  halfbyte plan mine.yaml --set model.id=FOLDER --throughput scored=9600,generated=2700 --json",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped name or the path of a .yaml file")
    add_set(parser)
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N questions of every task")
    parser.add_argument(
        "--throughput",
        metavar="KIND=N",
        help="tokens a second you reckon with: scored, generated, calibrated, trained, drawn, separated by commas",
    )
    parser.add_argument(
        "--measure", action="store_true", help="measure the speeds here, by a few passes with random weights"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N of this machine, or one to plan for: H200, RTX-5090, ...")
    add_data_root(parser)


def _add_quantize(commands: Commands) -> None:
    parser = command(
        commands,
        "quantize",
        "quantize_command",
        "make a checkpoint from a model and a recipe",
        "  halfbyte quantize demo-nvfp4 --output out/nvfp4\n"
        "  halfbyte quantize demo-fp8 --model path/to/model --output out/fp8 --dry-run",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped name or the path of a .yaml file")
    parser.add_argument("--model", metavar="ID_OR_PATH", help="another model than the recipe's")
    add_set(parser)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder for the run: checkpoint/ and what made it"
    )
    add_work(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--force", action="store_true", help="replace what is in the output folder")


def _add_train(commands: Commands) -> None:
    parser = command(
        commands,
        "train",
        "train",
        "make a checkpoint by quantization-aware training or distillation, as the recipe's train block says",
        "  halfbyte train smollm2-135m-nvfp4-qad --data-root DATA\n"
        "  halfbyte train mine.yaml --set train.learning_rate=2e-5 --output out/qad\n"
        "  accelerate launch --num_processes 8 -m halfbyte train mine.yaml",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped name or the path of a .yaml file")
    add_set(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="folder for the run; by default runs/ and the recipe's name"
    )
    add_work(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--force", action="store_true", help="begin anew, replacing what is in the output folder")


def _add_verify(commands: Commands) -> None:
    parser = command(
        commands,
        "verify",
        "verify",
        "check the numbers of an exported checkpoint; exit 1 when one cannot be right",
        "  halfbyte verify runs/demo-nvfp4/checkpoint\n"
        "  halfbyte verify runs/demo-nvfp4/checkpoint --source models/SmolLM2-135M-Instruct",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of an exported checkpoint")
    parser.add_argument("--source", metavar="ID_OR_PATH", help="the original model, to compare the weights with")


def _add_dequantize(commands: Commands) -> None:
    parser = command(
        commands,
        "dequantize",
        "dequantize",
        "write an exported checkpoint as a plain one that any tool opens, for tools that cannot read it",
        "  halfbyte dequantize runs/demo-nvfp4/checkpoint --output out/plain",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of an exported checkpoint")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--dtype", choices=DTYPES[1:], default="bfloat16", help="type of the weights (bfloat16)")


def _add_memory(commands: Commands) -> None:
    parser = command(
        commands,
        "memory",
        "memory",
        "measure the peak memory of a pipeline that draws, unquantized and exported, in normal and low-VRAM mode",
        "  halfbyte memory flux.1-dev-fp8 flux.1-dev-nvfp4",
    )
    parser.add_argument("recipe", nargs="+", metavar="RECIPE", help="a shipped name or the path of a .yaml file")
    add_set(parser)
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), metavar="DIR", help="where the recipes' run folders are (runs)"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default cuda where there is one")


def _add_eval(commands: Commands) -> None:
    parser = command(
        commands,
        "eval",
        "evaluate_command",
        "evaluate a model or an exported checkpoint on lm-eval tasks, or the images a pipeline draws",
        "  halfbyte eval models/SmolLM2-135M-Instruct --tasks smoke --output out/bf16\n"
        "  halfbyte eval out/nvfp4 --tasks arc_easy,gsm8k --limit 100 --data-root DATA --output out/nvfp4-eval\n"
        "  halfbyte eval meta-llama/Llama-3.1-8B-Instruct --tasks mmlu,gsm8k --num-fewshot 5 --dry-run\n"
        "  halfbyte eval models/SmolLM2-135M-Instruct --tasks gsm8k --apply-chat-template --show 3\n"
        "  halfbyte eval out/nvfp4 --tasks gsm8k --output out/served --set evaluate.backend=server "
        "--set evaluate.server.base_url=http://localhost:8000/v1\n"
        "  halfbyte eval black-forest-labs/FLUX.1-dev --prompts prompts.txt --output out/bf16 "
        "--set evaluate.images.steps=30",
    )
    parser.add_argument("model", metavar="MODEL", help="hub id, model folder or exported checkpoint")
    parser.add_argument("--tasks", metavar="A,B", help="lm-eval tasks or groups, and halfbyte's: smoke, math_500, ...")
    parser.add_argument(
        "--prompts", metavar="FILE", help="for a pipeline that draws: a .txt file with a prompt a line, or .jsonl"
    )
    parser.add_argument(
        "--reference", type=Path, metavar="DIR", help="with --prompts: the baseline's --output, for PSNR, SSIM, LPIPS"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder for results and samples; not needed to look or to plan"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="build all prompts, print questions, tokens and time, and stop"
    )
    parser.add_argument(
        "--show", type=positive, metavar="N", help="print N prompts a task as the model sees them, with its answers"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N questions of every task")
    parser.add_argument(
        "--num-fewshot", type=natural, metavar="N", help="examples in the prompt; the task's own if absent"
    )
    parser.add_argument(
        "--samples", type=positive, metavar="K", help="texts drawn for each question; the task's own number if absent"
    )
    parser.add_argument(
        "--batch-size", type=positive, metavar="N", help="texts generated at once (what suits the device)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type to compute in (auto)")
    parser.add_argument(
        "--weights", choices=("folded", "packed"), default="folded", help="packed takes less memory and longer (folded)"
    )
    parser.add_argument("--apply-chat-template", action="store_true", help="put prompts into the model's chat template")
    parser.add_argument(
        "--max-length", type=positive, metavar="N", help="longest input in tokens; the model's own if absent"
    )
    parser.add_argument(
        "--allow-truncated",
        action="store_true",
        help="cut longer prompts from the left, and count them, in place of an error",
    )
    add_set(parser, of="a recipe's evaluate block (recipes/schema.py)")
    add_repeat(parser)
    add_work(parser)


def _add_sides(parser: ArgumentParser, several: bool) -> None:
    parser.add_argument("baseline", type=Path, metavar="BASELINE", help="evaluation folder of the original model")
    parser.add_argument(
        "candidate",
        type=Path,
        metavar="CANDIDATE",
        nargs="+" if several else None,
        help="evaluation folder of the quantized model",
    )


def _add_compare(commands: Commands) -> None:
    parser = command(
        commands,
        "compare",
        "compare_command",
        "compare evaluations question by question; never fails on a loss",
        "  halfbyte compare out/bf16 out/fp8 out/nvfp4\n"
        "  halfbyte compare out/bf16 out/nvfp4 --format html --output report",
    )
    _add_sides(parser, several=True)
    parser.add_argument("--policy", metavar="NAME_OR_FILE", help="also judge by this policy; not judged if absent")
    parser.add_argument("--format", choices=FORMATS, default="text", help="what is printed on stdout (text)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="also write comparison.json, report.md, report.html")


def _add_gate(commands: Commands) -> None:
    parser = command(
        commands,
        "gate",
        "gate_command",
        "compare and decide: exit 0 pass, 1 fail, 3 inconclusive, 4 anomaly",
        "  halfbyte gate out/bf16 out/nvfp4 --policy release --junit junit.xml",
    )
    _add_sides(parser, several=False)
    parser.add_argument(
        "--policy", required=True, metavar="NAME_OR_FILE", help="what may be lost: a shipped name or a file"
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write the verdict as JUnit XML")


def _add_report(commands: Commands) -> None:
    parser = command(
        commands,
        "report",
        "report",
        "write the reports of finished runs again from their records; nothing is evaluated",
        "  halfbyte report runs/demo-fp8\n"
        "  halfbyte report runs/demo-fp8 runs/demo-nvfp4 --policy release --output report",
    )
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN", help="a folder that `halfbyte run` wrote")
    parser.add_argument("--policy", metavar="NAME_OR_FILE", help="another policy than the recipe's")
    parser.add_argument("--published", metavar="TABLE", help="a published table to lay beside; see `halfbyte table`")
    parser.add_argument("--output", type=Path, metavar="DIR", help="one report on all runs; into each run if absent")


def _add_power(commands: Commands) -> None:
    parser = command(
        commands,
        "power",
        "power",
        "say which losses a policy can see on which tasks, before they are evaluated",
        "  halfbyte power --policy release --tasks mmlu,gsm8k,gpqa_diamond=198x16,mine=500\n"
        "  halfbyte power --policy release out/bf16 out/nvfp4",
    )
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORDS", help="two folders, for the rates they show")
    parser.add_argument(
        "--policy", required=True, metavar="NAME_OR_FILE", help="what may be lost: a shipped name or a file"
    )
    parser.add_argument(
        "--tasks", metavar="A,B", help="known tasks, or name[/metric]=questions, with xSAMPLES a question"
    )


def _add_table(commands: Commands) -> None:
    parser = command(
        commands,
        "table",
        "table",
        "list the published tables, or print one, with a run's figures beside it",
        "  halfbyte table\n  halfbyte table march-2025-table-1 --with runs/deepseek-r1-nvfp4",
    )
    parser.add_argument("table", nargs="?", metavar="TABLE", help="a published table, by id or name")
    parser.add_argument(
        "--with",
        dest="run",
        type=Path,
        metavar="RUN",
        help="a folder that holds comparison.json: of `run`, `report` or `compare --output`",
    )


def _add_recipes(commands: Commands) -> None:
    parser = command(
        commands,
        "recipes",
        "catalogue",  # cli/recipes.py would hide the room halfbyte.recipes
        "list the shipped recipes, or print one with what to know before it is run",
        "  halfbyte recipes\n  halfbyte recipes demo-fp8 > mine.yaml\n  halfbyte recipes demo-nvfp4 --resolved",
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a shipped name or the path of a .yaml file")
    parser.add_argument("--resolved", action="store_true", help="with base, overrides and defaults filled in")
    add_set(parser)


def _add_policies(commands: Commands) -> None:
    parser = command(
        commands,
        "policies",
        "policies",
        "list the shipped policies that a gate decides by, or print one",
        "  halfbyte policies\n  halfbyte policies release > mine.yaml\n  halfbyte policies mine.yaml --json",
    )
    parser.add_argument("policy", nargs="?", metavar="POLICY", help="a shipped name or the path of a .yaml file")


def _add_cache(commands: Commands) -> None:
    parser = command(
        commands,
        "cache",
        "cache",
        "list what is kept between runs, or delete some of it without asking",
        "  halfbyte cache\n"
        "  halfbyte cache prune --older-than 30\n"
        "  halfbyte cache prune evaluations/0123456789abcdef datasets\n"
        "  halfbyte cache prune --all",
    )
    parser.add_argument("action", nargs="?", choices=("list", "prune"), default="list", help="list (default) or prune")
    parser.add_argument("name", nargs="*", metavar="NAME", help="entries by name, its beginning, or a pattern with *")
    parser.add_argument("--older-than", type=days, metavar="DAYS", help="only what was not used for so many days")
    parser.add_argument("--all", action="store_true", help="everything")


def _add_doctor(commands: Commands) -> None:
    command(
        commands,
        "doctor",
        "doctor",
        "look at what is installed and how it runs on this machine; exit 2 when something does not, with its fix",
        "  halfbyte doctor\n  halfbyte doctor --json",
    )


def _add_init(commands: Commands) -> None:
    parser = command(
        commands,
        "init",
        "init",
        "write a starter recipe for a model, after a look at its configuration and tokenizer; no weight is read",
        "  halfbyte init models/SmolLM2-135M-Instruct\n"
        "  halfbyte init meta-llama/Llama-3.1-8B-Instruct --output mine.yaml",
    )
    parser.add_argument("model", metavar="MODEL", help="hub id, model folder, GGUF file, or folder of a Flux pipeline")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the recipe's file; by default of the model's name; not replaced"
    )


def _add_completion(commands: Commands) -> None:
    parser = command(
        commands,
        "completion",
        "completion",
        "print what makes a shell complete commands, options and the names of recipes, policies and tables",
        '  eval "$(halfbyte completion bash)"                                # in ~/.bashrc\n'
        '  eval "$(halfbyte completion zsh)"                                 # in ~/.zshrc, after compinit\n'
        "  halfbyte completion fish > ~/.config/fish/completions/halfbyte.fish",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
