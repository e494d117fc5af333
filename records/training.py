"""The training record: what QAT or QAD did to a model, in training.json, and its curves in curves.jsonl."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from halfbyte.records.errors import UserError
from halfbyte.records.files import read_as, write_json

TRAINING_FILE = "training.json"
CURVES_FILE = "curves.jsonl"
MEASURES = {"loss": "loss", "kl": "KL divergence"}
"""What a validation is judged by, as a recipe and as a reader calls it."""
FIDELITY = "fidelity:"
"""What the texts that fidelity is measured on are called by, where overlap counts them as a task."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Validation(_Strict):
    """One validation on texts that are not trained on."""

    step: int = Field(ge=0)
    """Optimizer steps done; 0 is the quantized model before training, which is PTQ's."""
    loss: float
    """Mean cross-entropy of the labels, nats a token; of velocities the mean squared error, which has no unit."""
    kl: float | None = None
    """Mean KL divergence from the teacher, nats a token; None where there is no teacher."""

    def value(self, metric: str) -> float | None:
        """What it is judged by: metric is loss or kl."""
        return self.kl if metric == "kl" else self.loss


class OverlapFound(_Strict):
    """Evaluation questions that share a run of words with the training texts (13-grams, normalised)."""

    questions: int = Field(ge=0)
    """Looked at."""
    found: int = Field(ge=0)
    """That overlap."""
    bound: float | None = None
    """Share of questions above which training is refused; None where nothing is."""


class TrainingRecord(_Strict):
    """training.json, written when training has ended and the best checkpoint is chosen."""

    schema_version: Literal[1] = 1
    created: str
    key: str = ""
    """Digest of everything that decides the training; a training of the same key is not done twice."""
    method: Literal["qat", "qad"]
    learned: Literal["tokens", "velocities"] = "tokens"
    """What the loss is of: tokens, or the velocities of a model that draws."""
    seed: int
    steps: int = Field(ge=0)
    """Optimizer steps done."""
    best_step: int = Field(ge=0)
    """The step whose weights are exported, the best of those that were validated, be it worse than before training; 0
    where none was saved before training diverged."""
    stopped: str
    """Why it ended: "max_steps", "patience", or "diverged: " with what happened."""
    start: Validation
    """Of the quantized model before training: PTQ."""
    best: Validation
    """At best_step."""
    tokens: int = Field(ge=0)
    """Trained on, padding left out; patches of latents where velocities are learned."""
    seconds: float = Field(ge=0)
    teacher: str | None = None
    """Name of the model whose distributions are learned; None for qat without one."""
    data: dict[str, str] = Field(default_factory=dict)
    """Digest of each source of texts, by name."""
    overlap: OverlapFound | None = None
    """None where no question was looked at."""
    packages: dict[str, str | None] = Field(default_factory=dict)
    hardware: dict[str, Any] = Field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes training.json atomically."""
        write_json(folder / TRAINING_FILE, self.model_dump(mode="json"))


def load_training(folder: Path) -> TrainingRecord:
    """Reads the training record in `folder`.

    Raises:
        UserError: when there is none, or it is of another version.
    """
    return read_as(folder / TRAINING_FILE, TrainingRecord, "a training record of this version of halfbyte")


class TrainingStep(_Strict):
    """A line of curves.jsonl: a logged step."""

    step: int
    tokens: int
    """Trained on so far."""
    loss: float | None
    """Training loss of the step, as the method defines it: cross-entropy for qat, the distillation loss for qad, the
    squared error of velocities; None where it was no number."""
    learning_rate: float
    grad_norm: float | None = None
    """Before clipping; None where it was no number."""
    seconds: float
    """Since training began, earlier processes of it included."""


class ValidationStep(_Strict):
    """A line of curves.jsonl: a validation."""

    step: int
    tokens: int
    validation_loss: float | None
    """None where it was no number."""
    validation_kl: float | None = None


@dataclass(frozen=True, slots=True)
class Curves:
    """curves.jsonl, each list in the order of its steps."""

    steps: list[TrainingStep] = field(default_factory=list)
    validations: list[ValidationStep] = field(default_factory=list)


def read_curves(folder: Path) -> Curves:
    """Reads curves.jsonl in `folder`; of a step that was done twice, since a kill undid it, the last line counts.

    Raises:
        UserError: when it is missing or a line is none of a curve.
    """
    path = folder / CURVES_FILE
    steps: dict[int, TrainingStep] = {}
    validations: dict[int, ValidationStep] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path} is missing", "train again") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}", "train again") from None
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
            if "validation_loss" in content:
                one = ValidationStep.model_validate(content)
                validations[one.step] = one
            else:
                row = TrainingStep.model_validate(content)
                steps[row.step] = row
        except (ValueError, TypeError, ValidationError) as error:
            what = " ".join(str(error).split())[:200]
            raise UserError(f"{path}:{number} is no line of a training curve: {what}", "train again") from None
    return Curves([steps[step] for step in sorted(steps)], [validations[step] for step in sorted(validations)])
