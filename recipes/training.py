"""The train block of a recipe: quantization-aware training or distillation after calibration, before export."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from halfbyte.recipes.drawn import DrawnTrajectories
from halfbyte.recipes.sources import ModelSpec, Strict, TextSource

MOST_ROWS = 2**27
"""Rows of a training with all its repetitions: their order is kept in memory."""


class TrainingSource(TextSource):
    """Texts to train on: plain ones (field), pairs of a prompt and its response, or chats."""

    samples: int = Field(default=1_000_000, ge=1)
    """The most texts to take, drawn by the seed; a source that holds fewer is taken whole."""
    prompt_field: str | None = None
    """Column of the prompt; beside response_field. The prompt is masked where `mask_prompts` says so."""
    response_field: str | None = None
    """Column of the response to it."""
    layout: str = "{prompt}\n{response}"
    """How a pair is written out, special tokens included: "Question: {prompt}\nAnswer: {response}" for a model that is
    asked so, or the turns of a chat."""
    messages_field: str | None = None
    """Column of chats, each a list of {role, content}; rendered with the model's own chat template."""

    @property
    def columns(self) -> dict[str, str]:
        """The columns of chats or pairs by the field that names each; empty for plain texts."""
        named = {name: getattr(self, name) for name in ("prompt_field", "response_field", "messages_field")}
        return {name: column for name, column in named.items() if column is not None}

    @model_validator(mode="after")
    def _one_shape(self) -> TrainingSource:
        if (self.prompt_field is None) != (self.response_field is None):
            raise ValueError("prompt_field and response_field belong together; give both or neither")
        if any(self.layout.count(part) != 1 for part in ("{prompt}", "{response}")) or (
            self.layout.index("{prompt}") > self.layout.index("{response}")
        ):
            raise ValueError(f"layout {self.layout!r} should hold {{prompt}} and after it {{response}}, once each")
        if self.layout != type(self).model_fields["layout"].default and self.prompt_field is None:
            raise ValueError("layout belongs to prompt_field and response_field")
        shapes = ("field", "prompt_field", "messages_field")
        given = [name for name in shapes if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of field, prompt_field with response_field, messages_field; given: {given}")
        return self


class SampledTexts(Strict):
    """Texts written by the teacher itself, where there is no data."""

    prompts: TextSource | None = None
    """What the texts go on from; None for the teacher's own beginning-of-text."""
    samples: int = Field(default=1024, ge=1)
    """Texts to write."""
    length: int = Field(default=512, ge=2)
    """Tokens of each, its prompt among them."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    seed: int = Field(default=1234, ge=0, lt=2**32)


class ValidationSpec(Strict):
    """What is held out of the training texts, and what is done with the loss on it."""

    share: float = Field(default=0.05, gt=0, lt=1)
    """Part of the texts that is held out, drawn by the training seed."""
    samples: int | None = Field(default=128, ge=1)
    """The most texts held out; None for no bound."""
    every: int = Field(default=50, ge=1)
    """Optimizer steps between validations; each saves a checkpoint."""
    metric: Literal["loss", "kl"] | None = None
    """What is best: the loss, or the KL divergence from the teacher; None for kl in qad and loss in qat."""
    patience: int | None = Field(default=None, ge=1)
    """Validations in a row without a better one after which training stops; None to go on to the last step."""
    keep: int = Field(default=2, ge=1)
    """Last checkpoints kept on disk, beside the best."""


class TeacherSpec(Strict):
    """The model whose distributions are learned, and to which the KL divergence is measured."""

    model: ModelSpec | None = None
    """None for the recipe's own model, unquantized."""
    device: str | None = None
    """Where it is: cuda:1, cpu; None beside the model that is trained."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Of both distributions in the distillation loss; the validation is at 1."""
    offline_top_k: int | None = Field(default=None, ge=1)
    """Compute the teacher's k largest logits of each token once, before training, and store them, for models of which
    two do not fit; None for the teacher beside the model."""


class LoraSpec(Strict):
    """Train low-rank factors beside the weights; they are merged into the weights before export."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    targets: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], min_length=1
    )
    """Names, or last parts of names, of the linears."""


class TrainSpec(Strict):
    """Training with quantizers in place, from the calibrated state: qat learns the texts, qad the teacher's answers."""

    method: Literal["qat", "qad"]
    sources: list[TrainingSource] = Field(default_factory=list)
    sampled: SampledTexts | None = None
    drawn: DrawnTrajectories | None = None
    """For a model that draws, in the place of texts."""
    length: int = Field(default=1024, ge=2)
    """Longest text in tokens, and length of a packed row; longer texts are cut."""
    packing: bool = True
    """Several texts in a row, none of which sees another."""
    mask_prompts: bool = True
    """Whether the tokens of prompts, and of all turns but the assistant's, count in no loss."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; or epochs."""
    epochs: float | None = Field(default=None, gt=0)
    batch_size: int = Field(default=8, ge=1)
    """Rows of one forward pass on each device."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Forward passes of an optimizer step."""
    learning_rate: float = Field(default=1e-5, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = Field(default=0.05, ge=0, lt=1)
    """Part of the steps over which the learning rate rises from 0; rounded up, but the last step has the whole rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    seed: int = Field(default=1234, ge=0, lt=2**32)
    """Of the split into training and validation, the order of the texts, and dropout."""
    gradient_checkpointing: bool = False
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type that matrices are multiplied in: auto is bfloat16 on CUDA and float32 on a CPU."""
    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that weights and optimizer states are kept in while training. In bfloat16, which takes half the memory, a
    step smaller than a 256th of a weight is lost."""
    lora: LoraSpec | None = None
    learned_scales: bool = False
    """Learn the weights' block scales too (LSQ); only for NVFP4 weights with static block scales."""
    validation: ValidationSpec = ValidationSpec()
    save_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints to resume from, beside those of the validations; None for these alone."""
    teacher: TeacherSpec | None = TeacherSpec()
    """In qat only for the KL divergence of the validations; None to do without."""
    max_overlap: float = Field(default=0.01, ge=0, le=1)
    """Largest part of the evaluation's questions that may share 13 words in a row with the training texts."""

    @model_validator(mode="after")
    def _belong_together(self) -> TrainSpec:
        if bool(self.sources) + (self.sampled is not None) + (self.drawn is not None) != 1:
            raise ValueError("give exactly one of sources, sampled and, for a model that draws, drawn")
        if self.drawn is not None:
            self._require_drawable()
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of max_steps and epochs")
        if self.teacher is None and (self.method == "qad" or self.sampled is not None):
            raise ValueError("qad and sampled texts need a teacher")
        if self.teacher is None and self.validation.metric == "kl":
            raise ValueError("validation by kl needs a teacher")
        if (self.max_steps or 1) * self.batch_size * self.gradient_accumulation > MOST_ROWS:
            raise ValueError(f"max_steps, batch_size and gradient_accumulation give more than {MOST_ROWS:,} rows")
        if self.lora is not None and self.learned_scales:
            raise ValueError("lora leaves the weights as they are, and learned_scales changes their scales; give one")
        return self

    def _require_drawable(self) -> None:
        """What a model that draws can be trained by: velocities of its unquantized self, which have no distribution."""
        if self.method != "qad":
            raise ValueError("a model that draws has no texts to learn: method must be qad")
        if self.validation.metric == "kl":
            raise ValueError("validation by kl is for language models; a model that draws has the loss alone")
        if self.teacher != TeacherSpec():
            raise ValueError("teacher: a model that draws is taught by its unquantized self, which draws before")

    @property
    def metric(self) -> Literal["loss", "kl"]:
        """What the best checkpoint is chosen by."""
        return self.validation.metric or ("kl" if self.method == "qad" and self.drawn is None else "loss")
