"""The recipe: one YAML file that says what to quantize, how, on what to measure it, and what must hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, model_validator

from halfbyte.recipes.facts import FactsSpec
from halfbyte.recipes.images import DrawnSpec, ImagesSpec
from halfbyte.recipes.sources import ModelSpec, Strict, TextSource
from halfbyte.recipes.training import TrainSpec

__all__ = [
    "CalibrationSpec",
    "CanarySpec",
    "EvaluateSpec",
    "FactsSpec",
    "FidelitySpec",
    "GateSpec",
    "ImagesSpec",
    "ModelSpec",
    "QuantizeSpec",
    "Recipe",
    "ServerSpec",
    "TaskSpec",
    "TextSource",
    "TrainSpec",
]


class CalibrationSpec(Strict):
    """What the activations are measured on."""

    sources: list[TextSource] = Field(min_length=1)
    """Texts for a language model, prompts for one that draws."""
    length: int = Field(default=512, ge=2)
    """Longest text in tokens; longer ones are cut."""
    images: DrawnSpec | None = None
    """How a model that draws is called with each prompt; its transformer sees every step. The first image has `seed`,
    the next one that after it."""
    batch_size: int = Field(default=8, ge=1)
    seed: int = Field(default=1234, ge=0, lt=2**32)


class QuantizeSpec(Strict):
    """The quantization, in ModelOpt's own words: exactly one of recipe, preset, or quant_cfg."""

    recipe: str | None = None
    """A ModelOpt recipe by name, such as general/ptq/nvfp4_default-kv_fp8, or the path of one."""
    preset: str | None = None
    """A ModelOpt preset: NVFP4_DEFAULT_CFG or nvfp4_default, FP8_DEFAULT_CFG or fp8_default, ..."""
    quant_cfg: list[dict[str, Any]] | None = None
    """ModelOpt's ordered list of quantizer entries, inline."""
    algorithm: str | dict[str, Any] | None = None
    """ModelOpt's calibration algorithm; only beside an inline quant_cfg."""
    kv_cache: Literal["fp8", "fp8_cast", "fp8_affine", "nvfp4", "nvfp4_cast", "nvfp4_affine"] | None = None
    """KV-cache quantizers added to a preset or an inline quant_cfg."""
    keep: list[str] = Field(default_factory=list)
    """Layers that stay as they are whatever the recipe or preset says, by name or pattern: lm_head, '*.layers.0.*'.
    A KV cache stays quantized in all of them."""
    calibration: CalibrationSpec

    @model_validator(mode="after")
    def _one_of(self) -> QuantizeSpec:
        given = [key for key in ("recipe", "preset", "quant_cfg") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of recipe, preset, quant_cfg; given: {', '.join(given) or 'none'}")
        if self.algorithm is not None and self.quant_cfg is None:
            raise ValueError("algorithm belongs beside an inline quant_cfg; a recipe or preset brings its own")
        if self.kv_cache is not None and self.recipe is not None:
            raise ValueError("kv_cache belongs beside a preset or quant_cfg; a ModelOpt recipe says its own")
        return self


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_LONGEST: tuple[Callable[[Any], bool], str] = (lambda value: _whole(value, 1), "a whole number of at least 1")
_GENERATION: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"), _LONGEST),
    "max_length": (lambda _: False, "left out for max_gen_toks, which counts the text alone"),
    "temperature": (lambda value: _number(value) and value >= 0, "a number of at least 0"),
    "top_p": (lambda value: _number(value) and 0 < value <= 1, "a number above 0 and up to 1"),
    "top_k": (lambda value: _whole(value, 0), "a whole number, 0 for all tokens"),
    "repetition_penalty": (lambda value: _number(value) and value > 0, "a number above 0"),
    "do_sample": (lambda value: isinstance(value, bool), "true or false"),
    "until": (
        lambda value: all(isinstance(text, str) for text in (value if isinstance(value, list) else [value])),
        "a text or a list of texts",
    ),
}
"""What lm-eval and the backends take without a look, and then drop, replace or fail on."""


class TaskSpec(Strict):
    """One lm-eval task or group."""

    task: str = Field(pattern=r"^[^/.\s][^/\s]*$")  # it names a folder
    num_fewshot: int | None = Field(default=None, ge=0)
    """None for the task's own number."""
    limit: int | None = Field(default=None, ge=1)
    """First questions of each subtask only; None for all. Written into the record; the gate refuses a mismatch."""
    metric: str | None = None
    """The metric a verdict looks at, as metric or metric,filter; None for the task's first."""
    gen_kwargs: dict[str, Any] | None = None
    """Generation settings over the task's own: max_gen_toks, temperature, ..."""
    samples: int | None = Field(default=None, ge=1)
    """Texts drawn for each question (lm-eval's repeats), each with a seed of its own; None for the task's number."""

    @property
    def metric_name(self) -> str | None:
        """The metric without its filter."""
        return None if self.metric is None else self.metric.partition(",")[0]

    @model_validator(mode="after")
    def _can_be_generated_with(self) -> TaskSpec:
        for name, value in (self.gen_kwargs or {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"gen_kwargs.{name} is {value}, which is no number")
            allowed, what = _GENERATION.get(name, (lambda _: True, ""))
            if not allowed(value):
                raise ValueError(f"gen_kwargs.{name} is {value!r}: it should be {what}")
        return self


class FidelitySpec(Strict):
    """Distance of the candidate's token distributions from the baseline's on a text."""

    source: TextSource
    window: int = Field(default=2048, ge=2)
    """Tokens a window."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Stop after about so many tokens; None for the whole text."""
    join: str = "\n"
    """What is put between the texts of the source."""


class CanarySpec(Strict):
    """A few prompts through the checkpoint before hours are spent on it; what fails here is broken, not a bit worse.

    For it and for fidelity the models are loaded in this process whatever the backend, one after the other.
    """

    max_kl: float = Field(default=2.0, gt=0)
    """Largest mean KL divergence from the baseline, nats a token. FP4 on a model of 135 million weights has 0.4."""
    tokens: int = Field(default=16, ge=8)
    """Tokens of each greedy continuation."""


class ServerSpec(Strict):
    """An OpenAI-compatible endpoint that serves the model: vLLM, SGLang, TensorRT-LLM, llama.cpp, ..."""

    base_url: str = Field(pattern=r"^https?://\S+$")
    """What comes before /completions: http://localhost:8000/v1."""
    model: str | None = None
    """The name it serves the model under; None for the only one it has."""
    candidate_url: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """Where the candidate is served in a run, which asks two models; None for the same endpoint."""
    candidate_model: str | None = None
    """The candidate's name there; None for the only one."""
    api: Literal["completions", "chat"] = "completions"
    """completions: prompts are rendered and tokenized here, and sent as tokens. chat: messages are sent, and the server
    applies its own chat template; nothing can be scored."""
    api_key_env: str = Field(default="OPENAI_API_KEY", min_length=1)
    """The environment variable that holds the API key; none is sent where it is not set."""
    concurrency: int = Field(default=16, ge=1)
    """Requests under way at once."""
    timeout: float = Field(default=3600.0, gt=0)
    """Seconds to wait for one answer, which may be 32,768 tokens long; not tried again."""
    retries: int = Field(default=4, ge=0)
    """Further tries after a lost connection and the statuses 429 and 5xx, with growing pauses."""

    @model_validator(mode="before")
    @classmethod
    def _without_passwords(cls, given: Any) -> Any:
        """A recipe is copied into records: no address in it may hold a password. The message does not repeat it."""
        for name in ("base_url", "candidate_url"):
            address = given.get(name) if isinstance(given, dict) else None
            host = (address.partition("://")[2] or address).partition("/")[0] if isinstance(address, str) else ""
            if "@" in host:
                raise ValueError(
                    f"{name} holds a user or password; put the key into the variable that api_key_env names"
                )
        return given


class EvaluateSpec(Strict):
    """What both sides are measured on."""

    backend: Literal["hf", "vllm", "server"] = "hf"
    """hf: transformers, with a checkpoint's formats emulated; vllm: that engine in this process; server: see there."""
    server: ServerSpec | None = None
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Arguments of vllm.LLM: tensor_parallel_size, gpu_memory_utilization, kv_cache_dtype, ..."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type to compute in: auto is the model's own on CUDA, and float32 on a CPU."""
    weights: Literal["folded", "packed"] = "folded"
    """How a checkpoint's weights are held: dequantized once, or in 4 or 8 bits and dequantized layer by layer while
    they run, which is slower and takes a third of the memory. The answers are the same."""
    batch_size: int | None = Field(default=None, ge=1)
    """Texts generated at once; None for what suits the device."""
    batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens a forward pass when answers are scored; None for what suits the device."""
    max_length: int | None = Field(default=None, ge=2)
    """Longest input in tokens; None for the model's own."""
    allow_truncated: bool = False
    """Whether a prompt longer than that is cut from the left and counted in the record; else it is an error."""
    apply_chat_template: bool = False
    system_prompt: str | None = None
    seed: int = Field(default=1234, ge=0, lt=2**32)  # numpy takes no other
    tasks: list[TaskSpec] = Field(default_factory=list)
    """lm-eval's tasks, for language models."""
    include_path: str | None = None
    """A folder of your own tasks in lm-eval's format, as its --include_path: YAML files, what data files they name, and
    Python files with their functions. They come before all others of the same name."""
    images: ImagesSpec | None = None
    """For models that draw."""
    fidelity: FidelitySpec | None = None
    canary: CanarySpec | None = CanarySpec()
    """None for no canary."""

    @model_validator(mode="after")
    def _something(self) -> EvaluateSpec:
        if bool(self.tasks) == (self.images is not None):
            raise ValueError(
                "give tasks for a language model or images for one that draws"
                + (", not both" if self.tasks else "; there is nothing to evaluate")
            )
        return self

    @model_validator(mode="after")
    def _belong_together(self) -> EvaluateSpec:
        if (self.server is not None) != (self.backend == "server"):
            raise ValueError("backend server and a server block belong together; give both or neither")
        if self.vllm and self.backend != "vllm":
            raise ValueError("arguments of vllm belong to backend vllm")
        if self.server is not None and self.server.api == "chat" and not self.apply_chat_template:
            raise ValueError("api chat applies the server's chat template; set apply_chat_template too")
        return self


class GateSpec(Strict):
    """Which policy decides."""

    policy: str = "release"
    """A shipped policy by name, or the path of one."""


class Recipe(Strict):
    """A whole recipe. Unknown fields are errors."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = Field(min_length=1)
    model: ModelSpec
    quantize: QuantizeSpec
    train: TrainSpec | None = None
    """None for quantization after training alone."""
    evaluate: EvaluateSpec
    gate: GateSpec = GateSpec()
    published: str | None = None
    """A published table, by id or name, to lay beside the results; `halfbyte table` lists them."""
    facts: FactsSpec | None = None
    """What to know before it is run; changes nothing."""

    @model_validator(mode="after")
    def _of_one_kind(self) -> Recipe:
        """A model that draws is calibrated and evaluated by drawing, a language model by reading."""
        draws = self.model.kind != "causal-lm"
        if draws and self.quantize.kv_cache is not None:
            raise ValueError("quantize.kv_cache: a model that draws has no KV cache")
        blocks = {
            "quantize.calibration.images": self.quantize.calibration.images,
            "evaluate.images": self.evaluate.images,
        }
        for name, block in blocks.items():
            if draws and block is None:
                raise ValueError(f"{name} is missing: a model of kind {self.model.kind} draws")
            if not draws and block is not None:
                raise ValueError(f"{name} is for a model that draws; this one is of kind {self.model.kind}")
        if self.train is not None and draws != (self.train.drawn is not None):
            needed = "needs train.drawn" if draws else "cannot be trained with train.drawn"
            raise ValueError(f"train: a model of kind {self.model.kind} {needed}")
        return self
